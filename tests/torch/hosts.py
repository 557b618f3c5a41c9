"""Hosts for ranks, made of namespaces: nothing is shared but the network between them.

Each has two interfaces. `ctl` leads to a router, behind which the store is: 10.1.<n>.2/24 and
fd01:<n>::2/64. `data` is on one switch with those of the others: 10.2.0.<n + 1>/24 and
fd02::<n + 1>/64. No namespace has a name: they end with their processes, however the test ends.
"""

import contextlib
import shutil
import subprocess

import harness
from store_shell import Store

from torch_resilient import _server

PATIENCE = 30.0
STORE = {4: "10.1.100.1", 6: "fd01:100::1"}
UNSHARE = ["unshare", "--user", "--map-root-user", "--net"]


def refusal():
    """Why there can be no hosts here; None: there can."""
    for tool in (UNSHARE[0], "ip", "nsenter"):
        if shutil.which(tool) is None:
            return f"{tool} is missing"
    script = "echo 1 >/proc/sys/net/ipv4/ip_forward && ip link add left type veth peer name right"
    script += (
        " && ip link add switch type bridge && unshare --net --uts --pid --fork --mount-proc true"
    )
    probe = subprocess.run([*UNSHARE, "sh", "-c", script], capture_output=True, text=True)
    return None if probe.returncode == 0 else probe.stderr.strip()


def inside(pid):
    """Prefix of a command that runs in the network of that process."""
    return ["nsenter", f"--target={pid}", "--user", "--net", "--preserve-credentials"]


def _end(host):
    """Like a power failure; returns the time before."""
    if not host.alive():
        return None
    ended = host.signal()
    host.wait(PATIENCE)
    return ended


class Network:
    """The router with its store, and the hosts; `names` are theirs. Owner: the test."""

    def __init__(self, server, names, families=(4, 6), lease="3s"):
        self.names = names
        self._families = families
        self._ended = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._start_router()
            self._hosts = [self._start_host(server, n, name) for n, name in enumerate(names)]
            self._start_store(lease)
            undo.pop_all()

    def _start_router(self):
        command = [*UNSHARE, "sh", "-c", "echo made; exec cat"]
        pipe = subprocess.PIPE
        self._router = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self._ended.callback(self._router.wait, PATIENCE)
        self._ended.callback(self._router.stdin.close)
        self._ended.callback(self._router.stdout.close)
        assert self._router.stdout.readline() == "made\n"
        commands = ["link add data type bridge", "link set data up", "link set lo up"]
        if 4 in self._families:
            commands.append(f"addr add {STORE[4]}/32 dev lo")
        if 6 in self._families:
            commands.append(f"addr add {STORE[6]}/128 dev lo nodad")
        self._ip(self._router.pid, commands)
        self.route_between_hosts(True)

    def _start_host(self, server, number, name):
        process, ranks = server.start_host(self._router.pid, name)
        self._ended.callback(process.close)
        self._ended.callback(ranks.close)
        self._ended.callback(_end, process)
        router, host = [], ["link set lo up"]
        for link in ("ctl", "data"):
            port = f"{link}{number}"
            peer = f"peer name {link} netns {process.pid}"
            router += [f"link add {port} type veth {peer}", f"link set {port} up"]
            host += self._interface(link, number)
        router += [f"link set data{number} master data", *self._gateways(number)]
        self._ip(self._router.pid, router)
        self._ip(process.pid, host)
        return process, ranks

    def _interface(self, link, number):
        """Commands inside a host."""
        commands = [f"link set {link} up"]
        addresses = {"ctl": f"10.1.{number}.2/24", "data": f"10.2.0.{number + 1}/24"}
        if 4 in self._families:
            commands.append(f"addr add {addresses[link]} dev {link}")
            if link == "ctl":
                commands.append(f"route add default via 10.1.{number}.1")
        addresses = {"ctl": f"fd01:{number}::2/64", "data": f"fd02::{number + 1}/64"}
        if 6 in self._families:
            commands.append(f"addr add {addresses[link]} dev {link} nodad")
            if link == "ctl":
                commands.append(f"route add default via fd01:{number}::1")
        return commands

    def _gateways(self, number):
        """The router's side of `ctl`; what IPv6 loses with the link is put back."""
        device = f"dev ctl{number}"
        four, six = f"10.1.{number}.1/24 {device}", f"fd01:{number}::1/64 {device} nodad"
        commands = [f"addr replace {four}"] if 4 in self._families else []
        return commands + ([f"addr replace {six}"] if 6 in self._families else [])

    def _start_store(self, lease):
        family = min(self._families)
        command = (_server.binary(), "--lease-ttl", lease)
        self.store = Store(*command, host=STORE[family], prefix=inside(self._router.pid))
        self._ended.callback(self.store.end)
        self.store.listening()

    def route_between_hosts(self, wanted):
        """Whether one host's `ctl` is reached from another's; the store always is."""
        paths = ("ipv4/ip_forward", "ipv6/conf/all/forwarding")
        script = "; ".join(f"echo {int(wanted)} > /proc/sys/net/{path}" for path in paths)
        self._run(self._router.pid, ["sh", "-ec", script])

    def down(self, link, number):
        """Silence in both directions."""
        self._ip(self._router.pid, [f"link set {link}{number} down"])

    def up(self, link, number):
        commands = [f"link set {link}{number} up"]
        self._ip(self._router.pid, commands + (self._gateways(number) if link == "ctl" else []))

    def deafen(self, number, other):
        """What host `number` sends on `data` reaches `other` no more; the way back is as it was."""
        entry = f"10.2.0.{other + 1} lladdr 02:00:00:00:00:01 dev data nud permanent"
        self._ip(self._hosts[number][0].pid, [f"neigh replace {entry}"])

    def undeafen(self, number, other):
        self._ip(self._hosts[number][0].pid, [f"neigh del 10.2.0.{other + 1} dev data"])

    def moved(self, link, number):
        """Bytes that the host has sent there until now."""
        with open(f"/proc/{self._router.pid}/net/dev") as table:
            row = next(row for row in table if row.strip().startswith(f"{link}{number}:"))
        return int(row.partition(":")[2].split()[0])

    def server(self, number):
        return self._hosts[number][1]

    def pid(self, number):
        """Of the first process of that host, which makes it."""
        return self._hosts[number][0].pid

    def on(self, number):
        """Prefix of a command that runs on that host, with its name and network."""
        return [*inside(self._hosts[number][0].pid), "--uts"]

    def kill(self, number):
        """The host goes at once, with all that runs on it; returns the time before."""
        process, ranks = self._hosts[number]
        killed = _end(process)
        ranks.killed()
        return killed

    @staticmethod
    def _run(pid, command, text=None):
        command = [*inside(pid), *command]
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, f"{command} {text!r}: {done.stderr}"

    def _ip(self, pid, commands):
        self._run(pid, ["ip", "-batch", "-"], "\n".join(commands) + "\n")

    def close(self):
        self._ended.close()


class World(harness.World):
    """Ranks spread over the hosts of a network, as many on each: neighbours share one."""

    def __init__(self, network):
        super().__init__(None, network.store.address)
        self._network = network

    def host_of(self, rank, size):
        return rank * len(self._network.names) // size

    def server_of(self, rank, size):
        return self._network.server(self.host_of(rank, size))

    def environment(self, rank, size, extra=None):
        local = size // len(self._network.names)
        own = {"LOCAL_RANK": str(rank % local), "LOCAL_WORLD_SIZE": str(local)}
        return super().environment(rank, size, {**own, **(extra or {})})
