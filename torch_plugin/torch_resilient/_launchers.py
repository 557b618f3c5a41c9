"""Ranks that mpirun or srun has started: RANK and its companions from the variables of those
launchers, where a program calls init_process_group with neither.

The usual variables are then set in this process too, so that code which reads LOCAL_RANK, a second
backend or a helper process finds them. A program that passes rank=, or has RANK, is left alone.
"""

import os
import re
import zlib
from dataclasses import dataclass
from urllib.parse import parse_qs, urlparse

from torch_resilient import _errors

# Below the ports that kernels hand out by themselves (Linux: from 32768).
_FIRST_PORT, _PORTS = 20000, 12000
_LOOPBACK = "127.0.0.1"


@dataclass
class Started:
    """What a launcher says of this process. `master` is empty where it does not tell the host of
    rank 0; `job` is unique among the launcher's jobs and the same on all ranks, or empty."""

    launcher: str
    rank: str
    size: str
    local_rank: str
    master: str
    job: str


def adopt(arguments, environment):
    """Completes the environment of a rank; does nothing for all others. ConfigError where the host
    of rank 0 is not known and nothing else leads to the store."""
    url = urlparse(arguments["init_method"] or "")
    if arguments["rank"] >= 0 or "rank" in parse_qs(url.query) or environment.get("RANK"):
        return None
    started = of_environment(environment)
    if started is None:
        return None
    environment["RANK"], environment["WORLD_SIZE"] = started.rank, started.size
    environment.setdefault("LOCAL_RANK", started.local_rank)
    if started.job and not environment.get("RESILIENT_JOB"):
        environment["RESILIENT_JOB"] = started.job
    by_address = url.scheme in ("", "env") and arguments["store"] is None
    if not environment.get("MASTER_ADDR"):
        if started.master:
            environment["MASTER_ADDR"] = started.master
        elif by_address and not environment.get("RESILIENT_STORE"):
            raise _errors.ConfigError(
                f"{started.launcher} started ranks on several hosts and does not tell them where"
                " rank 0 is: set RESILIENT_STORE=host:port (a running resilient-store), or"
                " MASTER_ADDR to the host of rank 0 (mpirun -x MASTER_ADDR=..., mpiexec -genv)"
            )
    environment.setdefault("MASTER_PORT", str(port_of(started.job)))
    return started


def of_environment(environment):
    """What mpirun (Open MPI; MPICH and its kin) or srun says; None: this process is of neither.

    mpirun comes first: in an allocation of Slurm it starts its daemons by srun, and the ranks
    inherit the variables of those.
    """
    get = environment.get
    if get("OMPI_COMM_WORLD_RANK") and get("OMPI_COMM_WORLD_SIZE"):
        size = get("OMPI_COMM_WORLD_SIZE")
        job = get("OMPI_MCA_ess_base_jobid") or get("PMIX_NAMESPACE") or str(os.getppid())
        alone = get("OMPI_COMM_WORLD_LOCAL_SIZE") == size
        return Started(
            "mpirun (Open MPI)",
            get("OMPI_COMM_WORLD_RANK"),
            size,
            get("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
            _LOOPBACK if alone else "",
            f"mpi-{job}",
        )
    if get("PMI_RANK") and get("PMI_SIZE") and get("MPI_LOCALNRANKS"):
        size = get("PMI_SIZE")
        alone = get("MPI_LOCALNRANKS") == size
        # It gives its job no name; the ranks of one host have one parent, its proxy.
        job = f"mpi-{os.getppid()}" if alone else ""
        return Started(
            "mpirun (MPICH)",
            get("PMI_RANK"),
            size,
            get("MPI_LOCALRANKID", "0"),
            _LOOPBACK if alone else "",
            job,
        )
    # Of a step: a script that sbatch runs is no rank, and has a SLURM_PROCID all the same.
    if get("SLURM_PROCID") and get("SLURM_STEP_NUM_TASKS"):
        nodes = get("SLURM_STEP_NODELIST") or get("SLURM_JOB_NODELIST") or ""
        alone = get("SLURM_STEP_NUM_NODES") == "1"
        return Started(
            "srun",
            get("SLURM_PROCID"),
            get("SLURM_STEP_NUM_TASKS"),
            get("SLURM_LOCALID", "0"),
            _LOOPBACK if alone else first_node(nodes),
            f"slurm-{get('SLURM_JOB_ID', '0')}.{get('SLURM_STEP_ID', '0')}",
        )
    return None


def first_node(nodes):
    """The first host of a list as Slurm writes it: n1 of "n[1-4,7],m2"."""
    parts = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)[0]
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", parts)


def port_of(job):
    """One port for all ranks of a job, and most likely another for each job of a host."""
    return _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS
