"""Is a history of concurrent operations one that a correct object could have shown?

Wing & Gong's search over the order of operations, depth first with backtracking, with Lowe's
improvement: a state of the search (which operations have taken effect, and the object's value) that
was visited before is not visited again. Operations on different keys do not influence each other,
so every key is searched by itself.

An operation that was called and not answered (a timeout, a lost client) may have taken effect at
any time after its call, or never: its interval is open to the end, and it need not be placed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass

UNKNOWN = "unknown"  # The result of an operation whose outcome nobody knows.
STEPS_MAX = 2_000_000


@dataclass(frozen=True)
class Operation:
    """One call: who, on which key, what, between which times, with which result."""

    client: Hashable
    key: str
    name: str
    args: tuple
    called: float
    returned: float = math.inf
    result: object = UNKNOWN

    def __str__(self) -> str:
        end = "?" if math.isinf(self.returned) else f"{self.returned:.6f}"
        call = f"{self.name}({', '.join(map(repr, (self.key, *self.args)))})"
        return f"[{self.called:.6f} .. {end}] client {self.client}: {call} -> {self.result!r}"


# A model: (value, operation) -> (new value, result) where the operation applied alone would return
# that result. Values are hashable.
Step = Callable[[Hashable, Operation], tuple[Hashable, object]]
MISSING = None


def register(value: Hashable, operation: Operation) -> tuple[Hashable, object]:
    """A key of the store with set, get (None: missing), compare_set, delete, append, check."""
    match operation.name, operation.args:
        case "set", (new,):
            return new, None
        case "get", ():
            return value, value
        case "check", ():
            return value, value is not MISSING
        case "compare_set", (expected, desired):
            if value is MISSING:
                return (desired, desired) if expected == b"" else (MISSING, expected)
            return (desired, desired) if value == expected else (value, value)
        case "delete", ():
            return MISSING, value is not MISSING
        case "append", (more,):
            return (value or b"") + more, None
    raise ValueError(f"a register has no {operation.name}{operation.args}")


def counter(value: Hashable, operation: Operation) -> tuple[Hashable, object]:
    """A number under a key: add returns the new sum; get its decimal text (None: missing)."""
    match operation.name, operation.args:
        case "add", (amount,):
            return (value or 0) + amount, (value or 0) + amount
        case "get", ():
            return value, MISSING if value is MISSING else b"%d" % value
    raise ValueError(f"a counter has no {operation.name}{operation.args}")


def queue(value: Hashable, operation: Operation) -> tuple[Hashable, object]:
    """First in, first out. pop of an empty one returns None; the value is a tuple of the items."""
    items = value or ()
    match operation.name, operation.args:
        case "push", (item,):
            return (*items, item), None
        case "pop", ():
            return (items[1:], items[0]) if items else (items, None)
        case "length", ():
            return items, len(items)
    raise ValueError(f"a queue has no {operation.name}{operation.args}")


def _queue_order(operations: list[Operation]) -> dict[int, int]:
    """Which pushes have to come after which others: {index of a push: bits of those before it}.

    An item whose pop ended before another's was called was pushed before that one. Without this
    the search would find out about a wrong order of two pushes only when the items come out.
    """
    pushes = {o.args: i for i, o in enumerate(operations) if o.name == "push"}
    pops = {(o.result,): o for o in operations if o.name == "pop" and o.result is not UNKNOWN}
    if len(pushes) < sum(o.name == "push" for o in operations):
        return {}  # Equal items: which is which is not known.
    after = {}
    for item, index in pushes.items():
        pop = pops.get(item)
        # An item that never came out may have been taken by a pop without an answer.
        begins = -math.inf if pop is None else pop.called
        after[index] = sum(
            1 << pushes[other]
            for other, earlier in pops.items()
            if other in pushes and earlier.returned < begins
        )
    return after


# What of the order is known before the search, by model.
_ORDERS = {queue: _queue_order}


class NotLinearizable(AssertionError):
    """No order of the operations explains the history of this key."""


class TooHard(Exception):
    """The search was ended after STEPS_MAX steps."""


def check(history: Iterable[Operation], model_of: Callable[[str], Step]) -> int:
    """Checks every key with its model. Returns the number of operations; raises NotLinearizable."""
    by_key = defaultdict(list)
    for operation in history:
        by_key[operation.key].append(operation)
    for key, operations in by_key.items():
        search(operations, model_of(key))
    return sum(map(len, by_key.values()))


class _Entry:
    """A call or a return in the list of events that the search takes operations out of."""

    __slots__ = ("index", "match", "next", "operation", "previous")

    def __init__(self, operation: Operation | None = None, index: int = -1):
        self.operation = operation
        self.index = index
        self.match: _Entry | None = None  # Of a call: its return. None for a return.
        self.previous: _Entry | None = None
        self.next: _Entry | None = None


def _events(operations: list[Operation]) -> _Entry:
    """The doubly linked list of calls and returns in time; its head is a sentinel."""
    events = []
    for index, operation in enumerate(operations):
        call, back = _Entry(operation, index), _Entry(operation, index)
        call.match = back
        # At equal times calls come first: such operations are concurrent.
        events.append((operation.called, 0, index, call))
        events.append((operation.returned, 1, index, back))
    events.sort(key=lambda event: event[:3])
    head = last = _Entry()
    for *_, entry in events:
        last.next, entry.previous = entry, last
        last = entry
    return head


def _take(call: _Entry) -> None:
    """Takes a call and its return out of the list."""
    for entry in (call, call.match):
        entry.previous.next = entry.next
        if entry.next is not None:
            entry.next.previous = entry.previous


def _put_back(call: _Entry) -> None:
    for entry in (call.match, call):
        entry.previous.next = entry
        if entry.next is not None:
            entry.next.previous = entry


def _candidates(head: _Entry) -> Iterator[_Entry]:
    """The calls that may be placed next: those before the first return. Ones without a result last,
    since most histories are explained with few of them."""
    known, unknown = [], []
    entry = head.next
    while entry is not None and entry.match is not None:
        (unknown if entry.operation.result is UNKNOWN else known).append(entry)
        entry = entry.next
    return iter(known + unknown)


def search(operations: list[Operation], step: Step) -> list[Operation]:
    """An order of the operations of one key that explains them, or NotLinearizable."""
    head = _events(operations)
    known_left = sum(operation.result is not UNKNOWN for operation in operations)
    value: Hashable = MISSING
    placed = 0  # Bit i: operation i has taken effect.
    after = _ORDERS.get(step, lambda _: {})(operations)
    visited = {(0, value)}
    # Per level: the call placed there, the value before it, and what else could be placed.
    order: list[tuple[_Entry, Hashable, Iterator[_Entry]]] = []
    longest: list[Operation] = []
    candidates = _candidates(head)
    steps = 0
    while known_left > 0:
        steps += 1
        if steps > STEPS_MAX:
            raise TooHard(f"{len(operations)} operations on {operations[0].key!r}")
        call = next(candidates, None)
        if call is None:  # What was placed last was wrong.
            if not order:
                raise NotLinearizable(_explain(operations, longest))
            call, value, candidates = order.pop()
            placed &= ~(1 << call.index)
            known_left += call.operation.result is not UNKNOWN
            _put_back(call)
            continue
        if after.get(call.index, 0) & ~placed:
            continue
        operation = call.operation
        unknown = operation.result is UNKNOWN
        new_value, result = step(value, operation)
        state = (placed | 1 << call.index, new_value)
        if (new_value == value if unknown else result != operation.result) or state in visited:
            continue
        visited.add(state)
        order.append((call, value, candidates))
        if len(order) > len(longest):
            longest = [placed_call.operation for placed_call, *_ in order]
        placed, value = state
        known_left -= not unknown
        _take(call)
        candidates = _candidates(head)
    return [call.operation for call, *_ in order]


def _explain(operations: list[Operation], longest: list[Operation]) -> str:
    rest = [operation for operation in operations if operation not in longest]
    rest.sort(key=lambda operation: operation.called)
    return "\n".join(
        [
            f"the history of {operations[0].key!r} is not linearizable",
            f"the longest order that works has {len(longest)} of {len(operations)}, its end:",
            *map(str, longest[-8:]),
            "and cannot be continued with any of:",
            *map(str, rest[:12]),
        ]
    )
