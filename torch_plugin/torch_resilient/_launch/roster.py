"""What the launchers of a job on several nodes know of each other."""

import hashlib
from dataclasses import asdict, dataclass, replace


@dataclass(frozen=True)
class Entry:
    """What a launcher says of itself, as a whole each time. `id` is new for each start of it."""

    id: str
    nodes: int
    nproc: int
    host: str
    pid: int
    address: str  # Where other nodes reach this one, and a port that was free:
    port: int  # MASTER_ADDR and MASTER_PORT of all, when it is the first node.
    spares: int = 0
    renews: bool = False  # Whether all ranks are started anew when one dies:
    attempt: int = 0  # how often they were, or are about to be,
    ready: int = 0  # and the attempt before which none of its ranks is left.
    sees: str = ""  # `Roster.seen`, as far as this launcher has got.
    lost: int = 0  # Ranks of it that died and are not started again;
    loss: int = 0  # how the last of them ended.
    finished: int = 0  # Ranks that have ended with 0, in this attempt.
    ended: int | None = None  # The exit code, once it is decided.
    why: str = ""
    killed: bool = False  # Said by its guard: it has ended without a word.

    @staticmethod
    def parse(fields):
        """TypeError, for what another version says."""
        return Entry(**fields)

    def fields(self):
        return asdict(self)


class Roster:
    """The entries of all nodes, and what follows from them. Owner: Nodes. Pure.

    Entries of earlier runs of the job may be there still. So the ranks start once every launcher
    has said that it sees the very starts of the launchers that this one sees: no earlier start can
    have said that, as ids are new each time. A launcher that is started anew later gets in by the
    same, and its ranks take the seats of those that were lost with it.
    """

    def __init__(self, node, mine):
        self.node = node
        self.mine = mine
        self.refused = {}  # node -> why its newcomer is left out.
        self.usurper = None  # Entry of a launcher that came later and has this one's place.
        self._entries = {node: mine}
        self._began = None  # (nproc, spares) of all nodes, once they have met.
        self._living = set()  # Ids that were heard of before their end, or end in this very run.

    def change(self, **fields):
        self.mine = self._entries[self.node] = replace(self.mine, **fields)

    def hear(self, node, entry):
        """Another's entry, or what stands in this one's place. Returns whether this launcher has to
        say its own again: somebody has written over it who has ended."""
        if node == self.node:
            if entry.id == self.mine.id:
                return False
            if entry.ended is None:
                self.usurper = entry
            return entry.ended is not None
        if node >= self.mine.nodes:
            return False  # Of an earlier run of the job, on more nodes.
        self.refused.pop(node, None)
        if entry.ended is None:
            self._living.add(entry.id)
            if entry.nodes != self.mine.nodes:
                self.refused[node] = (
                    f"was started with --nnodes {entry.nodes}, this one with {self.mine.nodes}"
                )
            elif entry.renews != self.mine.renews:
                who = "it" if entry.renews else "this one"
                self.refused[node] = f"must have the same --restart-policy: only {who} has all"
            elif self._began and self._began[node] != (entry.nproc, entry.spares):
                nproc, spares = self._began[node]
                self.refused[node] = (
                    f"comes back with --nproc {entry.nproc} --spares {entry.spares} and began with"
                    f" --nproc {nproc} --spares {spares}"
                )
        elif entry.sees and entry.sees == self.mine.sees:
            self._living.add(entry.id)  # All that it said before has come with its end.
        self._entries[node] = entry
        return False

    def seen(self):
        """Name of the starts of all nodes, as this launcher sees them; "" until all are there."""
        return "" if self.missing() else self._name()

    def _name(self):
        """REQUIRES: there is an entry of each node."""
        ids = [self._entries[node].id for node in range(self.mine.nodes)]
        return hashlib.sha256(" ".join(ids).encode()).hexdigest()[:32]

    def missing(self):
        """Nodes without a launcher that could take part."""
        return [
            node
            for node in range(self.mine.nodes)
            if node not in self._entries
            or self._entries[node].ended is not None
            or node in self.refused
        ]

    def meet(self):
        """Whether all have met, now or before. One that has ended since says so all the same."""
        nodes, entries = range(self.mine.nodes), self._entries
        if self._began is None and len(entries) == len(nodes) and not self.refused:
            seen = self._name()
            if all(entry.sees == seen for entry in entries.values()):
                self._began = [(entries[node].nproc, entries[node].spares) for node in nodes]
        return self._began is not None

    def first(self):
        """REQUIRES: they have met. The first node's entry."""
        return self._entries[0]

    def numbers(self):
        """REQUIRES: they have met. RANK of each process of this node: its ranks, then its spares,
        which are behind the ranks of all."""
        nproc, spares = self._began[self.node]
        first = sum(before for before, _ in self._began[: self.node])
        first_spare = self.ranks() + sum(before for _, before in self._began[: self.node])
        return [*range(first, first + nproc), *range(first_spare, first_spare + spares)]

    def ranks(self):
        """REQUIRES: they have met. Ranks of all nodes."""
        return sum(nproc for nproc, _ in self._began)

    def spares(self):
        """REQUIRES: they have met. Spares of all nodes."""
        return sum(spares for _, spares in self._began)

    def newest(self):
        """REQUIRES: they have met. (attempt, node) of the newest attempt that a launcher tells of;
        its ranks start once all launchers are ready for it."""
        told = [(e.attempt, -node) for node, e in self._entries.items() if node not in self.refused]
        attempt, node = max(told)
        return attempt, -node

    def entry(self, node):
        return self._entries[node]

    def not_ready(self, attempt):
        """REQUIRES: they have met. Nodes that may still have ranks of an earlier attempt."""
        return [node for node, entry in sorted(self._entries.items()) if entry.ready < attempt]

    def over(self):
        """Nodes whose launchers have ended with 0."""
        return [node for node, entry in sorted(self._entries.items()) if entry.ended == 0]

    def finished(self):
        """Ranks of all nodes that have ended with 0 in the attempt of this launcher."""
        return sum(
            entry.finished
            for entry in self._entries.values()
            if entry.attempt == self.mine.attempt
            and (entry is self.mine or entry.id in self._living)
        )

    def end(self):
        """(node, entry) of one that gave up while this one knew it, which ends the job; or None."""
        for node, entry in sorted(self._entries.items()):
            over = entry.ended is not None and entry.id in self._living
            if over and entry.ended != 0 and not entry.killed:
                return node, entry
        return None

    def killed(self):
        """(node, entry) of the launchers that were killed, and their ranks with them."""
        return [
            (node, entry)
            for node, entry in sorted(self._entries.items())
            if entry.killed and entry.id in self._living
        ]

    def left(self):
        """REQUIRES: they have met. Ranks and spares that run, are to be started, or have
        finished."""
        gone = sum(entry.nproc + entry.spares - entry.lost for _, entry in self.killed())
        all_of_them = self.ranks() + self.spares()
        return all_of_them - gone - sum(entry.lost for entry in self._entries.values())

    def loss(self):
        """How the last rank of the last node that lost one ended: the same on all nodes."""
        losses = [entry.loss for _, entry in sorted(self._entries.items()) if entry.loss]
        return losses[-1] if losses else 0

    def others_finished(self):
        """Whether ranks of other nodes have ended with 0."""
        return any(
            entry.finished and entry.id in self._living
            for node, entry in self._entries.items()
            if node != self.node
        )
