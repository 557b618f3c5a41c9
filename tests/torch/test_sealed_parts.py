"""What a rank reads as code out of the store has a member's seal.

Goal: whoever else writes a per-rank part of a State makes every rank raise, and nothing of what was
written runs. Method: a rank that puts something else in place of its part and dies, so that the one
that takes its seat reads that.
"""

import os
import pickle
import signal

import pytest
import torch.distributed as dist
from test_state_places import SIZE, lost_at, refusals

from torch_resilient import State, _api, _sealed, elastic

STEPS = 3


class Harmful:
    """Leaves a file when it is read by pickle."""

    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return os.mkdir, (self._path,)


def another_pickle(store, part_key, path):
    return b"mark\n" + pickle.dumps(Harmful(path))


def one_of_another_secret(store, part_key, path):
    return _sealed.seal(b"guessed", part_key, another_pickle(store, part_key, path))


def that_of_rank_0(store, part_key, path):
    return store.get(part_key.rpartition("/")[0] + "/0")


def one_byte_of_it(store, part_key, path):
    part = bytearray(store.get(part_key))
    part[-1] ^= 1
    return bytes(part)


def nothing(store, part_key, path):
    return b""


def trains(*forge):
    """`forge`: of the rank that dies at step 1, the name of what it leaves as its part, and a
    path."""
    dist.init_process_group("resilient")

    def run(state):
        while state.step < STEPS:
            if forge and state.step == 1:
                store = _api.current_world().store
                for part in state._parts:
                    part_key = state._part_key(*part)
                    store.set(part_key, globals()[forge[0]](store, part_key, forge[1]))
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()
            state.step += 1
            state.mine += dist.get_rank()
            state.commit()
        return state.mine

    return elastic(run)(State(step=0, per_rank={"mine": 0}))


@pytest.mark.parametrize(
    "forge", [another_pickle, one_of_another_secret, that_of_rank_0, one_byte_of_it, nothing]
)
def test_a_part_that_no_member_wrote_is_not_read(world, tmp_path, forge):
    path = tmp_path / "harmed"
    text = refusals(lost_at(world, trains, forge.__name__, str(path)))
    assert not path.exists()
    assert "on rank 1: the per-rank part state/" in text
    assert "was not put there by a member of this world" in text
    assert "RESILIENT_TOKEN_FILE" in text


def secrets():
    dist.init_process_group("resilient")
    secret = _api.current_world().session.world_secret()
    dist.destroy_process_group()
    dist.init_process_group("resilient")
    return secret, _api.current_world().session.world_secret()


def test_the_secret_is_the_same_on_all_ranks_and_another_one_in_the_next_world(world):
    first, second = zip(*world.run(secrets, SIZE), strict=True)
    assert len(set(first)) == len(set(second)) == 1
    assert first[0] != second[0] and all(len(one) >= 32 for one in (first[0], second[0]))


def test_a_seal_is_of_one_secret_key_and_content():
    sealed = _sealed.seal(b"secret", "key", b"content")
    assert _sealed.open_sealed(b"secret", "key", sealed) == b"content"
    assert len(sealed) == _sealed.SEAL_BYTES + len(b"content")
    wrong = [
        (b"other", "key", sealed),
        (b"secret", "other", sealed),
        (b"secret", "key", sealed + b"x"),
        (b"secret", "key", sealed[:-1]),
        (b"secret", "key", sealed[: _sealed.SEAL_BYTES - 1]),
        (b"secret", "key", b""),
    ]
    for secret, key, value in wrong:
        with pytest.raises(_sealed.ForgedError, match=key):
            _sealed.open_sealed(secret, key, value)
