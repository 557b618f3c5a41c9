"""What a person wants to know about this process's session; nobody else is asked for it."""

import time

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from torch_resilient import _api, _errors, _names, _native, _worlds

_PHASES = ("aborted", "joined", "rebuilt", "running")


class Status(dict):
    """A dictionary that prints as a table."""

    def __str__(self):
        if self.get("backend") is None:
            return "resilient: no session in this process"
        return "\n".join(_lines(self))

    __repr__ = __str__


def status():
    """backend, version, job, store, server, membership, failure, accused (the rank that the failure
    names), incident, groups (name, asked, served, rank, size, last: its latest operation as in
    `op_log`) and threads (id, name, at: all that run Python code; told: where ranks that wait for
    this one are told that it is), as a dictionary that prints as a table; {"backend": None} without
    a session. No message is sent for it."""
    world = _worlds.registry.current()
    if world is None:
        return Status(backend=None)
    session = world.member_session()
    cause = session.failure()
    return Status(
        backend="resilient",
        version=_native.load().VERSION,
        job=world.job,
        store=list(world.addresses),
        server=getattr(world.store, "server_id", ""),
        membership=session.membership(),
        failure=None if cause is None else str(cause),
        accused=getattr(cause, "rank", None),
        incident=session.last_incident(),
        groups=[_group(world, group) for group in list(c10d._world.pg_map)],
        threads=_native.load().threads(),
    )


def _group(world, group):
    served = _short(str(c10d._world.pg_backend_config.get(group, "")))
    name = c10d._world.pg_names.get(group, "")
    last = None
    if _names.names_us(served):
        try:
            last = (_api.op_log(group) or [None])[-1]
        except (_errors.ResilientError, RuntimeError):
            pass  # Its part for the CPU is another backend's, or it is being destroyed.
    return {
        "name": "world" if group is c10d._world.default_pg else name,
        "asked": world.asked.get(name) or served,
        "served": served,
        "rank": dist.get_rank(group),
        "size": dist.get_world_size(group),
        "last": last,
    }


def _short(config):
    """ "cpu:resilient,cuda:resilient" is "resilient"."""
    names = {part.rpartition(":")[2] for part in config.split(",")}
    return names.pop() if len(names) == 1 else config


def _lines(status):
    membership = status["membership"]
    yield (
        f"resilient {status['version']}: job {status['job']}, store {','.join(status['store'])}"
        f" (server {status['server'] or 'unknown'})"
    )
    yield (
        f"rank {membership['rank']} is {membership['state']}: generation"
        f" {membership['generation']}, life {membership['life']}, round {membership['round']}"
    )
    yield ""
    yield from _table(("rank", "host", "pid", "state"), _members(status))
    yield ""
    yield f"failure: {status['failure'] or 'none'}"
    yield f"last incident: {_incident(status['incident'])}"
    yield ""
    yield from _table(("group", "backend", "rank", "last operation"), _groups(status))
    yield ""
    yield from _table(("thread", "tid", "at", ""), _threads(status))


def _members(status):
    membership = status["membership"]
    for member in membership["members"]:
        state = "member"
        if member["rank"] == status["accused"]:
            state = "named by the failure"
        elif member["rank"] == membership["rank"]:
            state = f"this process, {membership['state']}"
        yield member["rank"], member["host"], member["pid"], state


def _incident(incident):
    if incident is None:
        return "none"
    known = incident["known"]
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(known))
    phases = [
        f"{name} +{(incident[name] - known) * 1000:.0f} ms" for name in _PHASES if incident[name]
    ]
    text = f"{incident['code']} ended generation {incident['generation']}, known {when}"
    return ", ".join([text, *phases])


def _groups(status):
    for group in status["groups"]:
        backend = group["served"]
        if group["asked"] != backend:
            backend = f"{group['asked']} served by {backend}"
        yield group["name"], backend, f"{group['rank']} of {group['size']}", _last(group["last"])


def _threads(status):
    for thread in status["threads"]:
        told = "where this rank is" if thread["told"] else ""
        yield thread["name"] or "unnamed", thread["id"], thread["at"], told


def _last(entry):
    if entry is None:
        return "none"
    text = f"#{entry['seq']} {entry['name']}({entry['dtype']}[{entry['count']}])"
    if entry["name"] == "barrier":
        text = f"#{entry['seq']} barrier"
    place = f" at {entry['call_site']}" if entry["call_site"] else ""
    return f"{text} {entry['state']}{place}"


def _table(head, rows):
    rows = [head, *(tuple(str(cell) for cell in row) for row in rows)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
