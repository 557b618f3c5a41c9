"""What all tests have in common: no process outlives its test."""

import os
import signal
import sys

import pytest

for folder in ("torch", "support"):
    sys.path.insert(0, os.path.join(os.path.dirname(__file__), folder))

import harness  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def subreaper():
    harness.become_subreaper()


@pytest.fixture(scope="session", autouse=True)
def interrupts():
    """What tests start can be interrupted, also where a shell has put the tests in the background:
    then it has them ignore SIGINT, and what they start inherits that."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def traces(tmp_path_factory):
    """Ranks that fail leave no trace in the user's cache."""
    os.environ[harness.TRACE] = str(tmp_path_factory.mktemp("traces") / "rank_")


@pytest.fixture(autouse=True)
def no_leftovers(subreaper, request):
    """Every process that a test has started ends with it, also detached ones."""
    for name in ("rank_server", "store"):
        if name in request.fixturenames:
            request.getfixturevalue(name)
    known = set(harness.children())
    yield
    left = harness.collect_orphans(known)
    if left:
        pytest.fail(f"processes were left behind (and killed now): {left}")
