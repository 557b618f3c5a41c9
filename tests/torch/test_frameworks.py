"""What users build on torch.distributed, each run by us and by Gloo; see frameworks.py."""

import os
import signal

import framework_ddp
import framework_fsdp
import framework_mesh
import framework_pipeline
import pytest
from frameworks import GlooCrashedWarning, same_as_gloo
from harness import RankFailed

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("always::frameworks.GlooCrashedWarning"),
]

slow = pytest.mark.slow

KNOWN_SECONDS = 0.5
RAISED_SECONDS = 2  # Through the framework, on a busy machine.


@pytest.mark.parametrize("program", ["options", "unused", "accumulation", "uneven", "zero"])
def test_ddp(world, tmp_path, program):
    same_as_gloo(world, tmp_path, getattr(framework_ddp, program), 2, exact=True)


@slow
@pytest.mark.parametrize("program", ["options", "unused", "accumulation", "uneven", "zero"])
def test_ddp_of_four(world, tmp_path, program):
    same_as_gloo(world, tmp_path, getattr(framework_ddp, program), 4, exact=False)


@pytest.mark.parametrize(
    "compiler, mode",
    [
        ("aot_eager", "ddp_optimizer"),
        pytest.param("inductor", "ddp_optimizer", marks=slow),
        pytest.param("inductor", "python_reducer", marks=slow),
    ],
)
def test_ddp_compiled(world, tmp_path, compiler, mode):
    same_as_gloo(
        world, tmp_path, framework_ddp.compiled, 2, compiler, mode, exact=True, seconds=200
    )


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=slow)])
@pytest.mark.parametrize("program", ["fsdp2", "fsdp1"])
def test_fsdp(world, tmp_path, program, size):
    same_as_gloo(world, tmp_path, getattr(framework_fsdp, program), size, exact=size == 2)


@pytest.mark.parametrize("program", ["hybrid", "two_dimensions"])
def test_fsdp_in_a_mesh(world, tmp_path, program):
    same_as_gloo(world, tmp_path, getattr(framework_fsdp, program), 4, exact=False)


def test_checkpoints(world, tmp_path):
    program = framework_fsdp.checkpoint
    same_as_gloo(world, tmp_path, program, 4, str(tmp_path), exact=False)


@pytest.mark.parametrize("size", [2, 4])
def test_functional_collectives(world, tmp_path, size):
    compiler = "aot_eager" if size == 2 else None
    same_as_gloo(world, tmp_path, framework_mesh.functional, size, compiler, exact=True)


@slow
def test_functional_collectives_with_inductor(world, tmp_path):
    program = framework_mesh.functional
    same_as_gloo(world, tmp_path, program, 2, "inductor", exact=True, seconds=200)


@pytest.mark.parametrize("program", ["meshes", "redistributions", "objects"])
def test_mesh(world, tmp_path, program):
    same_as_gloo(world, tmp_path, getattr(framework_mesh, program), 4, exact=True)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=slow)])
def test_tensor_parallel(world, tmp_path, size):
    same_as_gloo(world, tmp_path, framework_mesh.tensor_parallel, size, exact=size == 2)


@pytest.mark.parametrize("size", [2, 4])
def test_pipeline(world, tmp_path, size):
    names = list(framework_pipeline.SCHEDULES) if size == 2 else ["GPipe", "1F1B"]
    same_as_gloo(world, tmp_path, framework_pipeline.schedules, size, names, exact=True)


@pytest.mark.parametrize("program, size", [("traced", 2), ("ring", 4)])
def test_point_to_point(world, tmp_path, program, size):
    same_as_gloo(world, tmp_path, getattr(framework_pipeline, program), size, exact=True)


def crashes(backend, _, whose, times, counter):
    """Rank 0 of that backend crashes in its first runs."""
    if backend == whose and os.environ["RANK"] == "0":
        with open(counter, "a+") as file:
            file.write("x")
            file.seek(0)
            if len(file.read()) <= times:
                os.abort()
    return {"value": 1}


def test_a_crash_of_gloo_is_no_result(world, tmp_path):
    counter = tmp_path / "runs"
    with pytest.warns(GlooCrashedWarning, match="-6"):
        same_as_gloo(world, tmp_path, crashes, 2, "gloo", 2, str(counter), exact=True)
    assert counter.read_text() == "xxx"


def test_gloo_that_always_crashes_is_a_failure(world, tmp_path):
    with pytest.raises(RankFailed, match="Gloo crashed 3 times"):
        same_as_gloo(world, tmp_path, crashes, 2, "gloo", 3, str(tmp_path / "runs"), exact=True)


def test_a_crash_of_ours_is_a_failure(world, tmp_path):
    counter = tmp_path / "runs"
    with pytest.raises(RankFailed, match="exit code -6"):
        same_as_gloo(world, tmp_path, crashes, 2, "resilient", 1, str(counter), exact=True)
    assert counter.read_text() == "x"
    for rank in world.ranks:
        rank.wait()


def lose(world, program, size, victim, *args):
    """The victim ends by itself; the others are told in time which one it was."""
    ranks = world.start(program, size, victim, *args)
    for rank in ranks:
        assert rank.told() == "ready"
    ranks[victim].say("go")
    died = ranks[victim].told()
    for number, rank in enumerate(ranks):
        if number != victim:
            known, raised = rank.value(20)
            assert known - died < KNOWN_SECONDS
            assert raised - died < RAISED_SECONDS
    assert ranks[victim].wait() == -signal.SIGKILL


def test_a_rank_lost_in_the_backward_of_fsdp(world):
    lose(world, framework_fsdp.loses_a_rank, 3, 1)


def test_a_rank_lost_while_a_checkpoint_is_saved(world, tmp_path):
    lose(world, framework_fsdp.loses_a_rank_saving, 3, 1, str(tmp_path))


@pytest.mark.parametrize("how", ["eager", "compiled", "DTensor"])
def test_a_rank_lost_in_functional_collectives(world, how):
    lose(world, framework_mesh.loses_a_rank, 2, 1, how)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_a_rank_lost_in_a_pipeline(world, schedule):
    lose(world, framework_pipeline.loses_a_rank, 3, 1, schedule)
