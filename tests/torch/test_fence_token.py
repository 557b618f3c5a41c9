"""The fence token of a membership: what a store of checkpoints can refuse older writers by."""

import torch
import torch.distributed as dist
from losses import outlive
from store_access import serving

import torch_resilient
from torch_resilient import _api

WAIT = {"RESILIENT_SEAT_WAIT": "30s"}
SIZE = 3


def token():
    return torch_resilient.membership()["fence_token"]


def tokens_of_a_recovery():
    dist.init_process_group("resilient")
    first = token()
    outlive(2)
    # The next generation comes by itself; nobody has acknowledged it.
    events = _api.current_world().session
    after, event = 0, ""
    while event != "rebuilt":
        said = events.await_event(after, 20)
        assert said is not None, "no rebuild within 20 s"
        after, event = said["number"], said["event"]
    unacknowledged = token()
    membership = torch_resilient.rebuild()
    assert membership["fence_token"] == token()
    agreed = [None] * SIZE
    dist.all_gather_object(agreed, token())
    dist.destroy_process_group()
    return first, unacknowledged, agreed


def newcomer():
    dist.init_process_group("resilient")
    agreed = [None] * SIZE
    dist.all_gather_object(agreed, token())
    dist.destroy_process_group()
    return agreed


def test_a_rebuild_brings_a_higher_token_once_it_is_acknowledged(world):
    ranks = world.start(tokens_of_a_recovery, SIZE, env=WAIT)
    for rank in ranks:
        assert rank.told() == "ready"
    ranks[2].signal()
    late = world.start_rank(newcomer, 2, SIZE, env=WAIT)
    agreed = late.value(30)
    for rank in ranks[:2]:
        first, unacknowledged, now = rank.value(30)
        assert unacknowledged == first
        assert now == agreed
        assert first < agreed[0] < 2**63
    assert len(set(agreed)) == 1


def tokens_of_inits():
    tokens = []
    for _ in range(3):
        dist.init_process_group("resilient")
        tokens.append(token())
        dist.destroy_process_group()
    return tokens


def test_inits_and_lives_bring_higher_tokens(world):
    first = world.run(tokens_of_inits, 2)
    assert first[0] == first[1]
    second = world.run(tokens_of_inits, 2)  # Everybody has left: another life of the same job.
    tokens = first[0] + second[0]
    assert tokens == sorted(set(tokens))


def generation_and_token():
    dist.init_process_group("resilient")
    dist.all_reduce(torch.ones(1))
    membership = torch_resilient.membership()
    dist.destroy_process_group()
    return membership["generation"], membership["fence_token"]


def run_at_a_new_server(world, *options):
    with serving(*options) as address:
        env = {"RESILIENT_STORE": address, "RESILIENT_JOB": "fenced"}
        (outcome,) = world.run(generation_and_token, 1, env=env)
        return outcome


def test_a_store_in_memory_that_begins_anew_brings_a_higher_token(world):
    generation, old = run_at_a_new_server(world)
    again, new = run_at_a_new_server(world)
    assert again == generation == 1
    assert old < new


def test_a_store_that_is_kept_brings_a_higher_token(world, tmp_path):
    data = ("--data", str(tmp_path / "store"))
    generation, old = run_at_a_new_server(world, *data)
    again, new = run_at_a_new_server(world, *data)
    assert again > generation
    assert new - old == again - generation  # It began when it was started first.
