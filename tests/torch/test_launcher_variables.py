"""Ranks that mpirun or srun started: RANK and its companions from their variables."""

import os
import shutil
import subprocess
import sys

import pytest
import store_access

from torch_resilient import _launchers
from torch_resilient._errors import ConfigError

NOTHING = {"init_method": None, "store": None, "rank": -1, "world_size": -1}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_MCA_ess_base_jobid": "966721537",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08,12]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_JOB_ID": "42",
    "SLURM_STEP_ID": "0",
}


def adopted(environment, **arguments):
    environment = dict(environment)
    _launchers.adopt({**NOTHING, **arguments}, environment)
    return environment


def test_what_open_mpi_says():
    environment = adopted(OPEN_MPI)
    assert environment["RANK"] == "3" and environment["WORLD_SIZE"] == "4"
    assert environment["LOCAL_RANK"] == "3" and environment["MASTER_ADDR"] == "127.0.0.1"
    assert environment["RESILIENT_JOB"] == "mpi-966721537"
    assert 20000 <= int(environment["MASTER_PORT"]) < 32000


def test_what_mpich_says():
    environment = adopted(MPICH)
    assert environment["RANK"] == "1" and environment["WORLD_SIZE"] == "2"
    assert environment["LOCAL_RANK"] == "1" and environment["MASTER_ADDR"] == "127.0.0.1"


def test_what_srun_says():
    environment = adopted(SLURM)
    assert environment["RANK"] == "5" and environment["WORLD_SIZE"] == "8"
    assert environment["LOCAL_RANK"] == "1" and environment["MASTER_ADDR"] == "gpu07"
    assert environment["RESILIENT_JOB"] == "slurm-42.0"
    # mpirun in an allocation starts its daemons by srun: its ranks have both.
    assert adopted({**SLURM, **OPEN_MPI})["RANK"] == "3"
    # The batch script itself is no rank.
    batch = {k: v for k, v in SLURM.items() if "STEP" not in k}
    assert adopted(batch) == batch


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n1,n2", "n1"), ("n[3,5-9],m1", "n3"), ("r[1-2]-n[04-06]", "r1-n04")],
)
def test_the_first_node_of_a_list(nodes, first):
    assert _launchers.first_node(nodes) == first


def test_who_says_its_rank_is_left_alone():
    for environment in ({**SLURM, "RANK": "0"}, {}):
        assert adopted(environment) == environment
    assert adopted(SLURM, rank=0) == SLURM
    assert adopted(SLURM, init_method="tcp://h:1?rank=0&world_size=2") == SLURM


def test_what_the_user_has_set_stays():
    own = {"MASTER_ADDR": "h", "MASTER_PORT": "1", "LOCAL_RANK": "7", "RESILIENT_JOB": "j"}
    environment = adopted({**OPEN_MPI, **own})
    assert own.items() <= environment.items()


def test_several_hosts_without_an_address_are_told_so():
    several = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(ConfigError, match="MASTER_ADDR to the host of rank 0"):
        adopted(several)
    assert adopted({**several, "RESILIENT_STORE": "h:1"})["RANK"] == "3"
    assert adopted({**several, "MASTER_ADDR": "h"})["RANK"] == "3"


PROGRAM = """
import os, torch, torch.distributed as dist
dist.init_process_group("resilient")
total = torch.ones(1)
dist.all_reduce(total)
where = f"rank {dist.get_rank()} local {os.environ['LOCAL_RANK']}"
os.write(1, f"{where} total {int(total)}\\n".encode())
dist.destroy_process_group()
"""


def clean(**extra):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RESILIENT_", "MASTER_"))}
    return {**kept, "OMP_NUM_THREADS": "1", "RESILIENT_LINGER": "2s", **extra}


def lines(text):
    return sorted(line for line in text.splitlines() if line.startswith("rank"))


def test_ranks_of_a_step_meet_without_further_variables():
    with store_access.serving() as address:
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM],
                env=clean(RESILIENT_STORE=address)
                | SLURM
                | {"SLURM_STEP_NUM_TASKS": "2"}
                | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert lines("".join(outputs)) == ["rank 0 local 0 total 2", "rank 1 local 1 total 2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe"], ["mpirun.mpich"]],
    ids=lambda command: command[0],
)
def test_mpirun_starts_the_ordinary_script(command):
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed (Debian: openmpi-bin, mpich)")
    done = subprocess.run(
        [*command, "-n", "2", sys.executable, "-c", PROGRAM],
        env=clean(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert lines(done.stdout) == ["rank 0 local 0 total 2", "rank 1 local 1 total 2"]
