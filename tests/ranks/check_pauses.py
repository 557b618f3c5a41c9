"""Goal: processes that are stopped, and wall clocks that jump, harm only who was stopped for longer
than a lease; a name is looked up anew. Method: SIGSTOP and SIGCONT to the real server and clients;
a preloaded library that shifts the wall clock of all of them while they run (clock_shift.cc); a
hosts file that changes under a client, in a mount namespace.

    python3 tests/ranks/check_pauses.py STORE CLIENT_SHELL CLOCK_SHIFT
"""

import datetime
import os
import pathlib
import re
import select
import signal
import socket
import subprocess
import sys
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))

from store_shell import PATIENCE, StoreCase, until

TTL = 1.5
LEASE = ("--lease-ttl", f"{int(TTL * 1000)}ms")
BEAT = TTL / 5
CLOCK_SHIFT = ""
PRIVATE_MOUNTS = ["unshare", "--user", "--map-root-user", "--mount"]


def stand_still(seconds):
    """Time is what is tested where all who could do something are stopped."""
    select.select([], [], [], seconds)


class Stopped(StoreCase):
    def setUp(self):
        super().setUp()
        self.server = self.store(*LEASE)
        self.clients = [self.client(self.server.address).connected() for _ in range(3)]
        self.run_world(self.clients)

    def nobody_lost(self):
        for client in self.clients:
            self.assertFalse(client.told("fence") or client.told("lost"), client.log())

    def test_a_client_for_less_than_its_lease(self):
        stopped, other, _ = self.clients
        stopped.signal(signal.SIGSTOP)
        stopped.tell("add", "n", 1)
        other.busy(0.4 * TTL)
        stopped.signal(signal.SIGCONT)
        self.assertEqual(stopped.answer(), ("done", "1"))
        other.busy(1.2 * TTL)
        self.nobody_lost()

    def test_a_client_for_longer_is_lost_and_learns_of_it_and_others_go_on(self):
        stopped, other, third = self.clients
        stopped.signal(signal.SIGSTOP)
        began = time.monotonic()
        until(lambda: other.told("fence") or not other.add("n"), "the loss of rank 0")
        took = time.monotonic() - began
        self.assertGreater(took, TTL - BEAT - 0.2)
        self.assertLess(took, TTL + 1.5)
        for client in (other, third):
            cause = client.event("fence")
            self.assertIn("RANK_LOST", cause)
            self.assertIn("rank 0", cause)
        self.assertFalse(stopped.told("lost"))
        stopped.signal(signal.SIGCONT)
        self.assertIn("STALE_GENERATION", stopped.event("lost"))
        count = other.add("n")
        self.assertEqual(third.add("n"), count + 1)

    def test_the_server_for_less_than_a_lease(self):
        self.server.signal(signal.SIGSTOP)
        self.clients[0].tell("add", "n", 1)
        stand_still(0.4 * TTL)
        self.server.signal(signal.SIGCONT)
        self.assertEqual(self.clients[0].answer(), ("done", "1"))
        self.clients[1].busy(1.2 * TTL)
        self.nobody_lost()

    def test_the_server_for_longer_ends_no_lease(self):
        self.server.signal(signal.SIGSTOP)
        self.clients[0].tell("add", "n", 1)
        stand_still(2 * TTL)
        self.server.signal(signal.SIGCONT)
        self.assertEqual(self.clients[0].answer(), ("done", "1"))
        self.clients[1].busy(1.2 * TTL)
        self.nobody_lost()

    def test_a_pause_of_the_server_does_not_count_for_a_client_that_is_stopped_too(self):
        stopped, other, _ = self.clients
        stopped.signal(signal.SIGSTOP)
        self.server.signal(signal.SIGSTOP)
        stand_still(1.5 * TTL)
        self.server.signal(signal.SIGCONT)
        began = time.monotonic()
        until(lambda: other.told("fence") or not other.add("n"), "the loss of rank 0")
        self.assertGreater(time.monotonic() - began, TTL - BEAT - 0.4, "a lease of server time")
        self.assertIn("rank 0", other.event("fence"))
        stopped.signal(signal.SIGCONT)
        self.assertIn("STALE_GENERATION", stopped.event("lost"))


class Restoring(StoreCase):
    LOTS, LOT = 30, 10_000  # Of keys.
    # What is slowly written under a sanitizer is slowly read; with delayed threads it is not.
    FILL_SECONDS, LEAST_LOTS = 5.0, 3
    TRIES = 15  # To stop the server in the midst of it.

    def http_port(self, server):
        serves = re.compile(r"serves metrics on http://127\.0\.0\.1:(\d+)/")
        until(lambda: serves.search(server.log()), "the metrics are served")
        return int(serves.search(server.log())[1])

    def ask_ready(self, port):
        sock = socket.create_connection(("127.0.0.1", port), PATIENCE)
        self.addCleanup(sock.close)
        sock.sendall(b"GET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        return sock

    def listens(self, port):
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    def test_a_server_that_restores_is_not_ready_and_answers_nobody(self):
        flags = ("--data", f"{self.folder.name}/data", "--metrics", "127.0.0.1:0")
        server = self.store(*flags)
        port = server.port
        client = self.client(server.address).connected()
        began = time.monotonic()
        for lot in range(self.LOTS):
            client.do("fill", f"{lot}/", self.LOT)
            enough = lot + 1 >= self.LEAST_LOTS
            if enough and time.monotonic() - began > self.FILL_SECONDS:
                break
        client.do("set", "last", "kept")
        for _ in range(self.TRIES):
            server.signal(signal.SIGKILL)
            server.process.wait(PATIENCE)
            client.tell("get", "last")
            server = self.starting_store(*flags, port=port)
            http_port = self.http_port(server)
            server.signal(signal.SIGSTOP)
            restores = not self.listens(port)
            asked = self.ask_ready(http_port)
            if restores:
                stand_still(0.5)
                self.assertFalse(server.said("") or client.said("done") or client.said("failed"))
            server.signal(signal.SIGCONT)
            answer = asked.recv(4096)
            server.listening()
            self.assertEqual(client.answer(), ("done", "kept"))
            self.assertTrue(self.ask_ready(http_port).recv(4096).startswith(b"HTTP/1.1 200 "))
            if restores and not answer.startswith(b"HTTP/1.1 200 "):
                break
        else:
            self.fail(f"{lot + 1} times {self.LOT} keys are restored too fast for this test")
        self.assertTrue(answer.startswith(b"HTTP/1.1 503 "), answer)
        self.assertIn(b"the server starts", answer)


class WallClock(StoreCase):
    HOURS = (2, -3, 26, 0)

    def setUp(self):
        super().setUp()
        if os.environ.get("RESILIENT_TEST_SANITIZED"):
            self.skipTest("a sanitizer's runtime has to be loaded first")
        self.shift = pathlib.Path(self.folder.name) / "shift"
        self.shift.write_text("0")
        self.environment = os.environ | {
            "LD_PRELOAD": CLOCK_SHIFT,
            "CLOCK_SHIFT_FILE": str(self.shift),
        }

    def seen_by(self, process, what, count):
        """What its wall clock showed at line `count` of that, less what it is here, in hours."""
        logged = process.logged(what, count)
        hour, minute = map(int, re.search(r"(\d\d):(\d\d):\d\d\.\d\d\d", logged).groups())
        now = datetime.datetime.now(datetime.timezone.utc)
        return round((60 * (hour - now.hour) + minute - now.minute) / 60) % 24

    def test_jumps_by_hours_change_nothing(self):
        server = self.store(*LEASE, "--data", f"{self.folder.name}/data", env=self.environment)
        clients = [self.client(server.address, env=self.environment).connected() for _ in range(2)]
        self.run_world(clients)
        total = 0
        for jump, hours in enumerate(self.HOURS, 1):
            clients[1].tell("await", f"after {hours}".replace(" ", "-"))
            self.shift.write_text(str(3600 * hours))
            clients[0].busy(1.2 * TTL)
            clients[0].do("set", f"after-{hours}", "v")
            self.assertEqual(clients[1].answer(), ("done", "v"))
            for client in clients:
                total += 1
                self.assertEqual(client.add("n"), total)
                self.assertFalse(client.told("fence") or client.told("lost"), client.log())
            # They do live in another time.
            late = self.client(server.address, env=self.environment, job="late").connected()
            late.do("join", 0, 1)
            late.event("running")
            self.assertEqual(self.seen_by(server, "event=join job=late", jump), hours % 24)
            late.do("leave")
        # A deadline that runs is none of the wall clock's either.
        hasty = self.client(server.address, env=self.environment, seconds=1).connected()
        hasty.tell("await", "never")
        self.shift.write_text("-7200")
        self.assertEqual(hasty.answer(5)[0], "TIMEOUT")


class Names(StoreCase):
    def test_a_name_is_resolved_anew_for_each_connection(self):
        probe = subprocess.run([*PRIVATE_MOUNTS, "true"], capture_output=True, text=True)
        if probe.returncode != 0:
            self.skipTest(f"namespaces are refused here: {probe.stderr.strip()}")
        hosts = pathlib.Path(self.folder.name) / "hosts"
        hosts.write_text("127.0.0.2 the-store.test\n")
        flags = ("--data", f"{self.folder.name}/data")
        server = self.store(*flags, host="127.0.0.2")
        script = f'mount --bind "{hosts}" /etc/hosts && exec "$0" "$@"'
        client = self.client(
            f"the-store.test:{server.port}", prefix=[*PRIVATE_MOUNTS, "sh", "-c", script]
        ).connected()
        self.assertEqual(client.add("n"), 1)
        # The pod comes up again elsewhere; somebody else has its old address.
        server.end()
        with socket.create_server(("127.0.0.2", server.port)) as other:
            hosts.write_text("127.0.0.3 the-store.test\n")
            client.tell("add", "n", 1)
            moved = self.store(*flags, host="127.0.0.3", port=server.port)
            self.assertEqual(client.answer(), ("done", "2"))
            other.close()
        self.assertEqual(client.do("get", "n"), "2")
        self.assertFalse(moved.said("failed"))


def main():
    global CLOCK_SHIFT
    signal.alarm(int(8 * PATIENCE))  # Whatever hangs.
    CLOCK_SHIFT = os.path.abspath(sys.argv.pop(3))
    StoreCase.client_binary = os.path.abspath(sys.argv.pop(2))
    StoreCase.store_binary = os.path.abspath(sys.argv.pop(1))
    unittest.main(verbosity=2)


if __name__ == "__main__":
    main()
