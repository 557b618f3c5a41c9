"""Goal: what ends again and again is held back, more and more, and nothing else is.
Method: lives of given lengths; no process, no clock."""

from torch_resilient._launch.backoff import Backoff


def test_pauses_grow_to_a_limit():
    backoff = Backoff(at_once=2)
    pauses = [backoff.ended(0, 5.0) for _ in range(12)]
    assert pauses == [0, 0, 0.5, 1, 2, 4, 8, 16, 30, 30, 30, 30]
    assert backoff.ends(0) == 12


def test_a_long_life_begins_anew():
    backoff = Backoff(at_once=2, steady=60.0)
    assert [backoff.ended(0, 59.9) for _ in range(4)] == [0, 0, 0.5, 1]
    assert backoff.ended(0, 60.0) == 0
    assert backoff.ends(0) == 0
    assert [backoff.ended(0, 1.0) for _ in range(3)] == [0, 0, 0.5]


def test_each_counts_for_itself():
    backoff = Backoff(at_once=1)
    assert [backoff.ended(0, 1.0) for _ in range(3)] == [0, 0.5, 1]
    assert [backoff.ended(1, 1.0) for _ in range(2)] == [0, 0.5]
    assert (backoff.ends(0), backoff.ends(1), backoff.ends(2)) == (3, 2, 0)


def test_a_day_of_it_is_no_larger_number():
    backoff = Backoff(at_once=0)
    assert [backoff.ended(None, 0.0) for _ in range(5000)][-1] == 30.0


def test_every_life_is_long_enough_where_none_is_asked_for():
    backoff = Backoff(at_once=1, steady=0)
    assert {backoff.ended(0, 0.0) for _ in range(5)} == {0}
