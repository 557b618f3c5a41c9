"""The one place that rewrites our and torch's tables when the world has been resized.

Where torch has rank and size of a group constant the world's default group is another object then
(docs/decisions/0019), and the one of before, and what torch knows of it, raises.
"""

import functools

from torch.distributed import distributed_c10d as c10d

from torch_resilient import _errors, _native, _worlds
from torch_resilient._wrapping import WRAPPED, replace

_FORMER_MAX = 16  # Groups of before that torch's table remembers.


def follow(world):
    """Behind a rebuild: takes the rank and the size that the world has by now."""
    now = world.session.membership()
    rank, size = now["rank"], len(now["members"])
    if (rank, size) == (world.rank, world.world_size):
        return
    world.rank, world.world_size = rank, size
    _worlds.tell_of_seat(size)
    native = _native.load()
    before = world.process_group
    present = native.follow_world(before, native.can_follow)
    renumber(present)
    if present is not before:
        _put_in_place(before, present)
        world.process_group = present  # Next to it: by this one the default group's world is found.
    c10d._update_default_pg(present)


def renumber(group):
    """Torch's table of the ranks of a world that has another size now."""
    c10d._world.pg_group_ranks[group] = {member: member for member in range(group.size())}


def _put_in_place(before, present):
    """In torch's tables, those by name included."""
    tables = c10d._world
    for table in (tables.pg_map, tables.pg_backend_config, tables.pg_to_tag):
        if before in table:
            table[present] = table.pop(before)
    for groups in tables.tags_to_pg.values():
        groups[:] = [present if group is before else group for group in groups]
    tables.pg_coalesce_state.pop(before, None)
    name = tables.pg_names.pop(before)
    tables.pg_names[present] = name
    c10d._unregister_process_group(name)
    c10d._register_process_group(name, present)
    _remember(before)


def _remember(before):
    """Torch looks a group up before it asks it for an operation, and when that has raised: it would
    say that the group was never made."""
    ranks = c10d._world.pg_group_ranks
    former = [group for group in ranks if _is_former(group)]
    for group in former[: 1 - _FORMER_MAX]:
        del ranks[group]
    ranks[before] = _FormerRanks()
    if not hasattr(c10d.get_backend, WRAPPED):
        replace("get_backend", _wrap_get_backend(c10d.get_backend))


def _is_former(group):
    return isinstance(c10d._world.pg_group_ranks.get(group), _FormerRanks)


def refuse_former(group):
    """ConfigError for a group that was the world's before it was resized."""
    if _is_former(group):
        _refuse()


def _refuse(*_):
    raise _errors.ConfigError(
        "this process group was made before the world was resized; use the world's present group,"
        " torch.distributed.group.WORLD, which is the default where no group is named"
    )


class _FormerRanks(dict):
    """Of a group that was the world's; its own refusal of operations says the same."""

    __contains__ = __getitem__ = __iter__ = __len__ = get = items = keys = values = _refuse


def _wrap_get_backend(original):
    @functools.wraps(original)
    def get_backend(group=None):
        refuse_former(group)
        return original(group)

    setattr(get_backend, WRAPPED, True)
    return get_backend
