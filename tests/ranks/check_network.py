"""Goal: a network that fails silently, for less or more than a lease, loses and repeats nothing,
and who is cut off is named. Method: the real server and the real client as processes in network
namespaces of their own, joined by a router that drops what the test says; no connection is reset.
All of it is inside namespaces of users, mounts and pids, and ends with them.

    python3 tests/ranks/check_network.py STORE CLIENT_SHELL [--proxy]

--proxy: the twin for where namespaces are refused (exit code 77 there): a proxy that stalls.
"""

import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))

from fault_proxy import FaultProxy
from store_shell import PATIENCE, StoreCase, until

INSIDE = "RESILIENT_TEST_INSIDE_NAMESPACES"
SKIPPED = 77
UNSHARE = ["unshare", "--user", "--map-root-user", "--mount", "--net", "--pid", "--fork"]
UNSHARE += ["--mount-proc", "--kill-child"]
CONNECT_SECONDS = 5.0  # What the client gives one address.
UNACKNOWLEDGED_SECONDS = 20.0  # After that its TCP gives a silent connection up.


# ---- Networks: a store and clients, each client behind a link that can be taken down ----


def ip(*words):
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=PATIENCE)
    if done.returncode != 0:
        raise AssertionError(f"ip {' '.join(words)}: {done.stderr.strip()}")


class Namespaces:
    """A router between "store" and "c0", "c1", ...; each has its own network of both families:
    10.0.<n>.0/24 and fd00:<n>::/64, the router is 1, the host 2; the store's n is 100."""

    def __init__(self, clients, families):
        self._families = families
        self._names = ["router", "store", *(f"c{i}" for i in range(clients))]
        for name in self._names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        for path in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
            self._in_router(f"echo 1 > /proc/sys/net/{path}")
        self._link("store", 100)
        for i in range(clients):
            self._link(f"c{i}", i)
        self.store_host = "10.0.100.2" if 4 in families else "fd00:100::2"

    def _in_router(self, script):
        subprocess.run([*self.inside("router"), "sh", "-c", script], check=True, timeout=PATIENCE)

    def _link(self, name, number):
        ip(
            "-n",
            "router",
            "link",
            "add",
            name,
            "type",
            "veth",
            "peer",
            "name",
            "eth",
            "netns",
            name,
        )
        for space, device, host in (("router", name, 1), (name, "eth", 2)):
            if 4 in self._families:
                ip("-n", space, "addr", "add", f"10.0.{number}.{host}/24", "dev", device)
            if 6 in self._families:
                address = f"fd00:{number}::{host}/64"
                ip("-n", space, "addr", "add", address, "dev", device, "nodad")
            ip("-n", space, "link", "set", device, "up")
        if 4 in self._families:
            ip("-n", name, "route", "add", "default", "via", f"10.0.{number}.1")
        if 6 in self._families:
            ip("-n", name, "-6", "route", "add", "default", "via", f"fd00:{number}::1")

    @staticmethod
    def inside(name):
        return ["nsenter", f"--net=/run/netns/{name}"]

    def store_prefix(self):
        return self.inside("store")

    def client_prefix(self, i):
        return self.inside(f"c{i}")

    def address(self, _, store):
        return store.address

    def down(self, i):
        """Silence in both directions."""
        ip("-n", "router", "link", "set", f"c{i}", "down")

    def up(self, i):
        ip("-n", "router", "link", "set", f"c{i}", "up")
        if 6 in self._families:  # Its address went with the link.
            ip("-n", "router", "addr", "replace", f"fd00:{i}::1/64", "dev", f"c{i}", "nodad")

    def lose_host(self, address):
        """The router drops what is for it."""
        ip("-n", "router", "route", "add", "blackhole", f"{address}/32")

    def find_host(self, address):
        ip("-n", "router", "route", "del", "blackhole", f"{address}/32")

    def host_down(self, _):
        self.lose_host(self.store_host)

    def host_up(self, _):
        self.find_host(self.store_host)

    def silent_address(self, port):
        """Of a host that takes no packet."""
        self.lose_host("10.0.100.99")
        return f"10.0.100.99:{port}"

    def close(self):
        for name in self._names:
            ip("netns", "del", name)


class Proxies:
    """A proxy before each client instead."""

    store_host = "127.0.0.1"

    def __init__(self, clients, _):
        self._proxies = [None] * clients
        self._silent = None

    def store_prefix(self):
        return []

    def client_prefix(self, _):
        return []

    def address(self, i, store):
        if self._proxies[i] is None:
            self._proxies[i] = FaultProxy(("127.0.0.1", store.port))
        return self._proxies[i].address

    def down(self, i):
        self._proxies[i].stall()

    def up(self, i):
        self._proxies[i].resume()

    def host_down(self, clients):
        for i in range(clients):
            self.down(i)

    def host_up(self, clients):
        for i in range(clients):
            self._proxies[i].cut()
            self.up(i)

    def silent_address(self, _):
        """Connections come to be, and nobody says anything on them."""
        self._silent = socket.create_server(("127.0.0.1", 0))
        return f"127.0.0.1:{self._silent.getsockname()[1]}"

    def close(self):
        for proxy in filter(None, self._proxies):
            proxy.close()
        if self._silent is not None:
            self._silent.close()


# ---- What holds on both ----


class NetworkCase(StoreCase):
    network_kind = Namespaces
    families = (4, 6)

    def setUp(self):
        super().setUp()
        self.network = self.network_kind(2, self.families)
        self.addCleanup(self.network.close)

    def serve(self, *flags, port=0):
        host, prefix = self.network.store_host, self.network.store_prefix()
        return self.store(*flags, host=host, port=port, prefix=prefix)

    def join_store(self, i, store, before=(), **options):
        addresses = ",".join([*before, self.network.address(i, store)])
        return self.client(addresses, prefix=self.network.client_prefix(i), **options)


class Outages:
    def test_a_link_down_for_less_than_the_lease_is_not_noticed(self):
        store = self.serve("--lease-ttl", "4s")
        far, near = (self.join_store(i, store).connected() for i in range(2))
        self.run_world([far, near])
        self.assertEqual(far.add("n"), 1)
        self.network.down(0)
        for _ in range(3):
            far.tell("add", "n", 1)
        near.busy(1.2)
        self.assertFalse(far.said("done"), "nothing passes")
        self.network.up(0)
        self.assertEqual([far.answer() for _ in range(3)], [("done", str(n)) for n in (2, 3, 4)])
        self.assertEqual(near.do("get", "n"), "4")
        near.busy(1.0)
        for client in (far, near):
            self.assertFalse(client.told("fence") or client.told("lost"), client.log())

    def test_who_is_cut_off_for_longer_is_named_to_the_others_and_learns_of_it(self):
        ttl = 1.5
        store = self.serve("--lease-ttl", "1500ms")
        far, near = (self.join_store(i, store).connected() for i in range(2))
        self.run_world([far, near])
        began = time.monotonic()
        self.network.down(0)
        until(lambda: near.told("fence") or not near.add("n"), "the loss of rank 0")
        took = time.monotonic() - began
        cause = near.event("fence")
        self.assertIn("RANK_LOST", cause)
        self.assertIn("rank 0", cause)
        self.assertIn("sent no heartbeat", cause)
        # The last beat was sent up to a fifth of the lease before.
        self.assertGreater(took, 0.75 * ttl)
        self.assertLess(took, ttl + 1.5)
        self.assertFalse(far.told("lost"))
        self.network.up(0)
        self.assertIn("STALE_GENERATION", far.event("lost"))
        # The job's own keys are for everybody.
        self.assertEqual(far.add("n"), near.add("n") - 1)

    def test_an_address_that_takes_no_packet_is_passed_over(self):
        store = self.serve()
        silent = self.network.silent_address(store.port)
        began = time.monotonic()
        client = self.join_store(0, store, before=[silent]).connected()
        self.assertGreater(time.monotonic() - began, 0.9 * CONNECT_SECONDS, "it came first")
        self.assertEqual(client.add("n"), 1)
        # And the list's order is the order: what comes behind a good address is not tried.
        began = time.monotonic()
        last = f"{self.network.address(1, store)},{silent}"
        self.client(last, prefix=self.network.client_prefix(1)).connected()
        self.assertLess(time.monotonic() - began, 0.9 * CONNECT_SECONDS)

    def test_the_host_of_the_store_vanishes_and_comes_back_with_its_data(self):
        flags = ("--data", f"{self.folder.name}/data")
        store = self.serve(*flags)
        waiting, asking = (self.join_store(i, store, seconds=60).connected() for i in range(2))
        hasty = self.join_store(1, store, seconds=2).connected()
        self.assertEqual(asking.add("n"), 1)
        self.network.host_down(2)
        asking.tell("add", "n", 1)
        waiting.tell("await", "k")
        # The outcome is known not to be known, in time.
        hasty.tell("add", "m", 1)
        self.assertEqual(hasty.answer(4 + 2)[0], "OUTCOME_UNKNOWN")
        hasty.tell("get", "n")
        self.assertEqual(hasty.answer(4 + 2)[0], "STORE_LOST")
        store.end()
        self.serve(*flags, port=store.port)
        self.network.host_up(2)
        self.assertEqual(asking.answer(2 * UNACKNOWLEDGED_SECONDS), ("done", "2"))
        asking.do("set", "k", "v")
        self.assertEqual(waiting.answer(2 * UNACKNOWLEDGED_SECONDS), ("done", "v"))
        self.assertEqual(asking.do("get", "n"), "2")


class OutagesOfNamespaces(Outages, NetworkCase):
    def test_a_client_that_moves_to_another_address_is_answered_once(self):
        store = self.serve()
        moving, near = (self.join_store(i, store, seconds=60).connected() for i in range(2))
        self.assertEqual(moving.add("n"), 1)
        # Requests arrive, answers do not.
        self.network.lose_host("10.0.0.2")
        moving.tell("add", "n", 1)
        until(lambda: near.do("get", "n") == "2", "the add arrives")
        ip("-n", "c0", "addr", "del", "10.0.0.2/24", "dev", "eth")
        ip("-n", "c0", "addr", "add", "10.0.0.3/24", "dev", "eth")
        ip("-n", "c0", "route", "replace", "default", "via", "10.0.0.1")
        # What a system does with the connections of an address that is gone; where it does not, TCP
        # gives them up in time.
        kill = [*self.network.inside("c0"), "ss", "-K", "src", "10.0.0.2"]
        subprocess.run(kill, check=False, capture_output=True, timeout=PATIENCE)
        self.assertEqual(moving.answer(2 * UNACKNOWLEDGED_SECONDS), ("done", "2"))
        self.assertEqual(near.do("get", "n"), "2")


class OnlyIpv6(NetworkCase):
    families = (6,)

    def test_ranks_meet_survive_an_outage_and_name_the_lost(self):
        store = self.serve("--lease-ttl", "2s")
        self.assertTrue(store.address.startswith("[fd00:100::2]:"), store.address)
        far, near = (self.join_store(i, store).connected() for i in range(2))
        self.run_world([far, near])
        self.network.down(0)
        far.tell("add", "n", 1)
        near.busy(0.5)
        self.network.up(0)
        self.assertEqual(far.answer(), ("done", "1"))
        self.assertFalse(near.told("fence"))
        far.signal(signal.SIGKILL)
        self.assertIn("rank 0", near.event("fence"))


class OutagesOfProxies(Outages, NetworkCase):
    network_kind = Proxies


def refusal():
    """Why there can be no namespaces here; None: there can."""
    for tool in (UNSHARE[0], "ip", "nsenter"):
        if shutil.which(tool) is None:
            return f"{tool} is missing"
    # As the tests will do: mounts, and a link between two networks.
    script = "mount -t tmpfs tmpfs /run && ip netns add x"
    script += " && ip link add left type veth peer name right netns x"
    probe = subprocess.run([*UNSHARE, "sh", "-c", script], capture_output=True, text=True)
    return None if probe.returncode == 0 else probe.stderr.strip()


def main():
    signal.alarm(240)  # Whatever hangs.
    proxy = "--proxy" in sys.argv
    StoreCase.store_binary, StoreCase.client_binary = map(os.path.abspath, sys.argv[1:3])
    if not proxy and INSIDE not in os.environ:
        if why := refusal():
            print(
                f"no network namespaces here ({why}): the network of this run is the fault proxy "
                "(store_network_proxy_test)"
            )
            sys.exit(SKIPPED)
        os.environ[INSIDE] = "1"
        os.execvp(UNSHARE[0], [*UNSHARE, sys.executable, *sys.argv])
    if not proxy:
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)
    cases = [OutagesOfProxies] if proxy else [OutagesOfNamespaces, OnlyIpv6]
    wanted = unittest.TestSuite(map(unittest.defaultTestLoader.loadTestsFromTestCase, cases))
    sys.exit(not unittest.TextTestRunner(verbosity=2).run(wanted).wasSuccessful())


if __name__ == "__main__":
    main()
