"""Goal: a resolver or a file system that hangs delays nobody: calls end by their own deadlines,
leases live, the store answers the others. Method: the real server and clients, with a preloaded
library whose lookups and reads hang for as long as the test says (stuck_calls.cc); a proxy that
cuts connections.

    python3 tests/ranks/check_names.py STORE CLIENT_SHELL STUCK_CALLS
"""

import os
import pathlib
import signal
import sys
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))

from fault_proxy import FaultProxy
from store_shell import PATIENCE, StoreCase, until

TTL = 1.5
LEASE = ("--lease-ttl", f"{int(TTL * 1000)}ms")
TIMEOUT = 2  # Of calls that cannot succeed.
TOKEN = "token-of-16-or-more-0"
OTHER_TOKEN = "token-of-16-or-more-1"
STUCK_CALLS = ""


class Stuck(StoreCase):
    def setUp(self):
        super().setUp()
        if os.environ.get("RESILIENT_TEST_SANITIZED"):
            self.skipTest("a sanitizer's runtime has to be loaded first")
        self.path = pathlib.Path(self.folder.name)
        self.stuck = self.path / "stuck"
        self.hit = self.path / "stuck.hit"
        self.addCleanup(self.stuck.unlink, missing_ok=True)

    def environment(self, files=None, **more):
        environment = os.environ | {"LD_PRELOAD": STUCK_CALLS, "STUCK_WHILE": str(self.stuck)}
        return environment | ({"STUCK_FILES": str(files)} if files else {}) | more

    def proxied(self, address):
        host, _, port = address.rpartition(":")
        proxy = FaultProxy((host, int(port)))
        self.addCleanup(proxy.close)
        return proxy

    def await_hit(self):
        until(self.hit.exists, "a call hangs")

    def ends_in_time(self, client):
        """(outcome, text) of a command that is under way, and had TIMEOUT."""
        began = time.monotonic()
        answer = client.answer(PATIENCE)
        self.assertLess(time.monotonic() - began, TIMEOUT + 1.5)
        return answer

    def nobody_lost(self, clients, seconds):
        end = time.monotonic() + seconds
        until(lambda: clients[-1].add("n") and time.monotonic() > end, "time passes")
        for client in clients:
            self.assertFalse(client.told("fence") or client.told("lost"), client.log())


class Names(Stuck):
    def client_of(self, port, **options):
        return self.client(f"localhost:{port}", env=self.environment(), **options)

    def test_a_first_connection_ends_at_its_deadline_and_says_why(self):
        server = self.store()
        self.stuck.touch()
        client = self.client_of(server.port, seconds=TIMEOUT)
        code, text = self.ends_in_time(client)
        self.assertEqual(code, "RESOLVE")
        self.assertIn(
            "the name 'localhost' is not resolved: the resolver of this host has not", text
        )
        self.assertRegex(text, r"not answered for (1\.9|2).*\(tried for (1\.9|2)")
        client.process.wait(PATIENCE)  # The lookup that hangs does not keep it.

    def test_a_call_ends_at_its_deadline_while_the_store_is_away(self):
        server = self.store()
        client = self.client_of(server.port, seconds=TIMEOUT).connected()
        client.do("set", "k", "v")
        self.stuck.touch()
        server.end()
        client.tell("set", "k", "w")
        code, _ = self.ends_in_time(client)
        self.assertIn(code, ("STORE_LOST", "OUTCOME_UNKNOWN"))
        self.assertTrue(self.hit.exists())

    def test_connections_that_are_made_again_keep_their_lease(self):
        server = self.store(*LEASE)
        proxy = self.proxied(server.address)
        named = [self.client_of(proxy.port).connected() for _ in range(2)]
        other = self.client(server.address).connected()
        clients = [*named, other]
        self.run_world(clients)
        self.stuck.touch()
        for _ in range(2):
            self.assertGreaterEqual(proxy.cut(), 2)
            until(lambda: proxy.connections == 2, "the lines of both are there again", TTL)
            self.assertTrue(self.hit.exists())
            self.nobody_lost(clients, 1.2 * TTL)
        count = other.add("n")
        self.assertEqual(named[0].add("n"), count + 1)

    def test_a_number_needs_no_resolver(self):
        server = self.store()
        self.stuck.touch()
        client = self.client(server.address, env=self.environment()).connected()
        self.assertEqual(client.add("n"), 1)
        self.assertFalse(self.hit.exists())


class Files(Stuck):
    def tokens(self, name, token=TOKEN):
        path = self.path / name
        path.write_text(token + "\n")
        return path

    def test_a_client_goes_on_with_the_token_that_it_read(self):
        server = self.store(*LEASE, "--token-file", str(self.tokens("tokens")))
        proxy = self.proxied(server.address)
        mine = self.tokens("mine")
        environment = self.environment(mine, CLIENT_TOKEN_FILE=str(mine))
        clients = [self.client(proxy.address, env=environment).connected() for _ in range(2)]
        self.run_world(clients)
        self.stuck.touch()
        self.assertGreaterEqual(proxy.cut(), 2)
        until(lambda: proxy.connections == 2, "the lines of both are there again", TTL)
        self.assertTrue(self.hit.exists())
        self.nobody_lost(clients, 1.2 * TTL)
        for client in clients:
            client.logged(f"the file system of {mine} has not answered for 0.")
        self.stuck.unlink()

    def test_a_client_whose_token_cannot_be_read_ends_at_its_deadline(self):
        server = self.store()
        mine = self.tokens("mine")
        self.stuck.touch()
        environment = self.environment(mine, CLIENT_TOKEN_FILE=str(mine))
        client = self.client(server.address, seconds=TIMEOUT, env=environment)
        code, text = self.ends_in_time(client)
        self.assertEqual(code, "SETTING")
        self.assertIn(f"the file system of {mine} has not answered for ", text)

    def test_the_store_answers_all_and_reads_the_file_when_it_can(self):
        tokens = self.tokens("tokens")
        server = self.store(*LEASE, "--token-file", str(tokens), env=self.environment(files=tokens))
        mine = {"env": os.environ | {"CLIENT_TOKEN_FILE": str(self.tokens("mine"))}}
        clients = [self.client(server.address, **mine).connected() for _ in range(2)]
        self.run_world(clients)
        self.stuck.touch()
        self.await_hit()
        self.nobody_lost(clients, 1.2 * TTL)
        # Fences arrive, and who comes is admitted.
        clients[0].signal(signal.SIGKILL)
        self.assertIn("rank 0", clients[1].event("fence", 2 * TTL))
        late = self.client(server.address, job="late", **mine).connected()
        self.assertEqual(late.add("n"), 1)
        silent = f"file={tokens}: its file system has not answered for "
        server.logged(silent)
        self.tokens("tokens", OTHER_TOKEN)
        self.stuck.unlink()
        server.logged("its file system answers again")
        until(lambda: "event=tokens" in server.log() and "read anew" in server.log(), "it is read")
        other = os.environ | {"CLIENT_TOKEN_FILE": str(self.tokens("other", OTHER_TOKEN))}
        self.assertEqual(self.client(server.address, env=other).connected().add("m"), 1)


def main():
    global STUCK_CALLS
    signal.alarm(int(8 * PATIENCE))  # Whatever hangs.
    STUCK_CALLS = os.path.abspath(sys.argv.pop(3))
    StoreCase.client_binary = os.path.abspath(sys.argv.pop(2))
    StoreCase.store_binary = os.path.abspath(sys.argv.pop(1))
    unittest.main(verbosity=2)


if __name__ == "__main__":
    main()
