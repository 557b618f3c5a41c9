"""Situations of launchers and schedulers: who starts the ranks, and what they are told."""

from situations import situation
from situations.situation import Place, Situation, alone, command

TORCHRUN = ("{python}", "-m", "torch.distributed.run")
TRAIN = ("{program}", "train")


def two_agents(*options: str):
    """torchrun on two nodes of one host, each with one worker."""

    def start(one: Situation, place: Place) -> list:
        commands = []
        for node in range(2):
            words = [*TORCHRUN, "--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1"]
            commands += command(*words, *options, "{program}", one.program)(one, place)
        return commands

    return start


def numbered(rank: str, size: str, local: str, **more: str) -> dict:
    """Variables of a scheduler alone: the program hands rank and size in."""
    each = tuple({rank: str(number), local: str(number)} for number in range(2))
    common = {size: "2", "RANK": None, "WORLD_SIZE": None, "LOCAL_RANK": None}
    common |= {"RANK_FROM": rank, "SIZE_FROM": size, "LOCAL_WORLD_SIZE": None}
    return {"environment": common | more, "each": each, "program": "by_scheduler"}


def yaml_file(place: Place) -> None:
    """accelerate starts ranks itself only for GPUs; the program asks for the CPU."""
    lines = ["compute_environment: LOCAL_MACHINE", "distributed_type: MULTI_GPU", "use_cpu: false"]
    lines += ["machine_rank: 0", "num_machines: 1", "num_processes: 2", "mixed_precision: 'no'"]
    lines += ["main_training_function: main", f"main_process_port: {place.port}"]
    (place.folder / "accelerate.yaml").write_text("\n".join(lines) + "\n")


def script(place: Place) -> None:
    (place.folder / "run.sh").write_text('exec python "$1" train\n')


def plain_module(one: Situation, place: Place) -> list:
    words = ["{python}", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    [started] = command(*words, "-m", "programs", "train")(one, place)
    path = {"PYTHONPATH": str(situation.PROGRAM.parent)}
    return [situation.Command(started.arguments, started.environment | path)]


SLURM = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "{host}", "SLURM_NNODES": "1"}
STANDALONE = (*TORCHRUN, "--standalone", "--nproc-per-node=2")
TORCHRUNS = [
    Situation("torchrun static", "--master-addr, --master-port",
              start=command(*TORCHRUN, "--nproc-per-node=2", "--master-addr=127.0.0.1",
                            "--master-port={port}", *TRAIN)),
    Situation("torchrun --standalone", "", start=command(*STANDALONE, *TRAIN), quick=True),
    Situation("torchrun c10d", "one node, --rdzv-backend=c10d",
              start=command(*TORCHRUN, "--nproc-per-node=2", "--rdzv-backend=c10d",
                            "--rdzv-endpoint=localhost:{port}", *TRAIN)),
    Situation("torchrun, two nodes static", "two agents on one host",
              start=two_agents("--master-addr=127.0.0.1", "--master-port={port}")),
    Situation("torchrun, two nodes c10d", "two agents on one host",
              start=two_agents("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:{port}",
                               "--rdzv-id=job")),
    Situation("torchrun -m", "the program is a module", start=plain_module),
    Situation("torchrun --no-python", "a shell script starts the program", prepare=script,
              start=command(*STANDALONE, "--no-python", "bash", "{folder}/run.sh", "{program}")),
    Situation("torchrun --tee", "logs of ranks in a folder and on the console",
              start=command(*STANDALONE, "--tee=3", "--log-dir={folder}", *TRAIN)),
    Situation("torchrun, two worlds", "the program inits, destroys and inits again",
              start=command(*STANDALONE, "{program}", "twice"), worlds=4),
    Situation("torchrun PET_*", "its options by variables", environment={"PET_NPROC_PER_NODE": "2"},
              start=command(*TORCHRUN, "--standalone", *TRAIN)),
    Situation("torch.distributed.launch", "the old launcher",
              start=command("{python}", "-m", "torch.distributed.launch", "--use-env",
                            "--nproc-per-node=2", "--master-port={port}", *TRAIN)),
    Situation("elastic_launch", "torchrun's function, called by a program",
              program="elastic_launch", start=alone),
    Situation("resilient-run", "our launcher, with either backend",
              start=command("resilient-run", "--nproc", "2", "{program}", "train")),
]  # fmt: skip

MULTIPROCESSING = [
    Situation("mp.spawn", "", program="spawned", start=alone, quick=True),
    Situation("mp fork", "torch is imported before the fork", program="forked", start=alone),
    Situation("mp forkserver", "", program="forkserver", start=alone),
    Situation("daemon processes", "multiprocessing's daemon=True", program="daemons", start=alone),
    Situation("ProcessPoolExecutor", "", program="pool", start=alone),
    Situation("multiprocessing.Pool", "its workers are ended by SIGTERM",
              program="multiprocessing_pool", start=alone),
    Situation("joblib's loky", "workers that are used again", program="loky", start=alone),
    Situation("parent is rank 0", "the program forks rank 1 and is rank 0 itself",
              program="parent_is_rank_0", start=alone),
    Situation("actors", "as Ray's: forkserver processes that init, destroy and init again",
              program="actors", start=alone, worlds=6),
    Situation("fork after a world", "a world of one, destroyed; then ranks are forked",
              program="after_a_world_of_one", start=alone, worlds=3, quick=True),
    Situation("subprocess in a subprocess", "", program="own_subprocess"),
    Situation("exec before init", "a rank replaces its program", program="by_exec"),
    Situation("exec after a world", "a rank replaces its program and inits again",
              program="by_exec_after_a_world", worlds=4),
    Situation("double fork", "a rank makes itself a daemon", program="daemonized"),
]  # fmt: skip

SCHEDULERS = [
    Situation("Slurm by hand", "rank=SLURM_PROCID, world_size=SLURM_NTASKS",
              **numbered("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", **SLURM)),
    Situation("an srun per node", "each rank is a step of its own",
              each=tuple(SLURM | {"SLURM_STEP_ID": str(n), "SLURM_PROCID": "0",
                                  "SLURM_NTASKS": "1"} for n in range(2)), quick=True),
    Situation("in a salloc shell", "Slurm's variables of the shell, the same on all ranks",
              environment=SLURM | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1",
                                   "SLURM_LOCALID": "0", "SLURM_STEP_ID": "4294967290"}),
    Situation("torchrun under Slurm", "sbatch starts one torchrun",
              environment=SLURM | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
              start=command(*STANDALONE, *TRAIN)),
    Situation("Open MPI by hand", "rank=OMPI_COMM_WORLD_RANK",
              **numbered("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                         "OMPI_COMM_WORLD_LOCAL_RANK", OMPI_COMM_WORLD_LOCAL_SIZE="2")),
    Situation("MPICH by hand", "rank=PMI_RANK",
              **numbered("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", MPI_LOCALNRANKS="2")),
    Situation("PyTorchJob", "pods: KUBERNETES_SERVICE_HOST, no LOCAL_RANK",
              environment={"KUBERNETES_SERVICE_HOST": "10.0.0.1", "LOCAL_RANK": None,
                           "LOCAL_WORLD_SIZE": None},
              each=({"MASTER_ADDR": "localhost"}, {"MASTER_ADDR": "127.0.0.1"})),
    Situation("RANK and WORLD_SIZE alone", "no LOCAL_RANK, no LOCAL_WORLD_SIZE",
              environment={"LOCAL_RANK": None, "LOCAL_WORLD_SIZE": None}),
]  # fmt: skip

NO_MASTER = {"MASTER_ADDR": None, "MASTER_PORT": None}
FRAMEWORKS = [
    Situation("accelerate launch", "by a YAML file", prepare=yaml_file,
              start=command("accelerate", "launch", "--config_file", "{folder}/accelerate.yaml",
                            "{program}", "accelerated"), taken_over=True),
    Situation("accelerate, plain variables", "the backend is named to accelerate",
              program="accelerated"),
    Situation("notebook_launcher", "accelerate's, with fork", program="notebook_launcher",
              start=alone, environment={"ACCELERATE_USE_CPU": "true"} | NO_MASTER),
    Situation("debug_launcher", "accelerate's, over a FileStore", program="debug_launcher",
              start=alone, taken_over=True),
    Situation("Lightning Fabric", "starts its ranks itself", program="fabric", start=alone,
              environment=NO_MASTER),
    Situation("deepspeed launcher", "`deepspeed --num_accelerators 2`",
              start=command("deepspeed", "--no_local_rank", "--num_accelerators=2",
                            "--master_port={port}", "{program}", "deepspeed"),
              environment={"DS_ACCELERATOR": "cpu"}),
    Situation("DeepSpeed, plain variables", "", program="deepspeed",
              environment={"DS_ACCELERATOR": "cpu"}),
]  # fmt: skip
