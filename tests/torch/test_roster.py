"""Goal: the rules by which launchers of several nodes start, go on and end, without processes.
Method: rosters that hear each other's entries, in any order."""

from dataclasses import replace

import pytest

from torch_resilient._launch.roster import Entry, Roster


def entry(node, *, nodes=2, nproc=2, start=0, **more):
    return Entry(
        id=f"{node}.{start}",
        nodes=nodes,
        nproc=nproc,
        host=f"h{node}",
        pid=100 + node,
        address=f"10.0.0.{node}",
        port=29500 + node,
        **more,
    )


def rosters(*nprocs, **more):
    return [
        Roster(node, entry(node, nodes=len(nprocs), nproc=nproc, **more))
        for node, nproc in enumerate(nprocs)
    ]


def tell_all(nodes):
    """Everybody hears everybody, until nobody has anything new to say."""
    for _ in range(3):
        for speaker in nodes:
            for listener in nodes:
                listener.hear(speaker.node, speaker.mine)
        for node in nodes:
            node.change(sees=node.seen() or node.mine.sees)


def test_all_start_with_the_same_numbers():
    nodes = rosters(2, 3, 1)
    assert [node.missing() for node in nodes] == [[1, 2], [0, 2], [0, 1]]
    assert not any(node.meet() for node in nodes)
    tell_all(nodes)
    assert all(node.meet() for node in nodes)
    assert [node.numbers() for node in nodes] == [[0, 1], [2, 3, 4], [5]]
    assert {node.ranks() for node in nodes} == {6}
    assert {node.first().address for node in nodes} == {"10.0.0.0"}


def test_entries_of_an_earlier_run_do_not_count():
    nodes = rosters(2, 2)
    old = [Roster(node, entry(node, start=9)) for node in range(2)]
    tell_all(old)
    nodes[0].hear(1, old[1].mine)  # Its key is there still, and says that it saw the old node 0.
    nodes[0].change(sees=nodes[0].seen())
    assert not nodes[0].meet()
    tell_all([nodes[0], Roster(1, entry(1, start=1))])
    assert nodes[0].meet()


def test_another_number_of_nodes_takes_no_part():
    first, _ = rosters(2, 2)
    first.hear(1, entry(1, nodes=3))
    assert first.refused == {1: "was started with --nnodes 3, this one with 2"}
    assert first.missing() == [1]


def test_nodes_of_an_earlier_run_on_more_are_no_part_of_it():
    nodes = rosters(2, 2)
    for node in nodes:
        node.hear(2, entry(2, nodes=3, lost=1, loss=7, ended=0))
    tell_all(nodes)
    assert all(node.meet() for node in nodes)
    assert (nodes[0].left(), nodes[0].loss(), nodes[0].over()) == (4, 0, [])


@pytest.mark.parametrize("nproc", [2, 3])
def test_who_comes_back_has_its_ranks_again(nproc):
    nodes = rosters(2, 2)
    tell_all(nodes)
    assert nodes[0].meet() and nodes[1].meet()
    again = Roster(1, entry(1, nproc=nproc, start=1))
    tell_all([nodes[0], again])
    assert again.meet() == (nproc == 2)
    assert (1 in nodes[0].refused) == (nproc == 3)


def test_one_that_gives_up_ends_the_job_and_one_that_was_killed_does_not():
    nodes = rosters(2, 3)
    tell_all(nodes)
    assert nodes[0].meet() and nodes[0].left() == 5
    nodes[1].change(lost=1, loss=137)
    nodes[0].hear(1, nodes[1].mine)
    assert (nodes[0].left(), nodes[0].loss(), nodes[0].end()) == (4, 137, None)
    killed = replace(nodes[1].mine, ended=137, killed=True)
    nodes[0].hear(1, killed)
    assert nodes[0].end() is None and nodes[0].killed() == [(1, killed)]
    assert nodes[0].left() == 2
    given_up = replace(nodes[1].mine, ended=7, why="all restarts are used")
    nodes[0].hear(1, given_up)
    assert nodes[0].end() == (1, given_up)


def test_an_end_that_was_there_before_is_of_another_run():
    first, _ = rosters(2, 2)
    first.hear(1, replace(entry(1), ended=7))
    assert first.end() is None and first.missing() == [1]


def test_a_newer_launcher_of_the_same_node_keeps_the_place():
    first, _ = rosters(2, 2)
    newer = entry(0, start=1)
    assert first.hear(0, newer) is False and first.usurper == newer
    first, _ = rosters(2, 2)
    # One that has ended is written over again.
    assert first.hear(0, replace(newer, ended=0)) is True and first.usurper is None


def test_spares_are_behind_the_ranks_of_all():
    nodes = rosters(2, 1)
    nodes[0].change(spares=1)
    nodes[1].change(spares=2)
    tell_all(nodes)
    assert all(node.meet() for node in nodes)
    assert [node.numbers() for node in nodes] == [[0, 1, 3], [2, 4, 5]]
    assert {(node.ranks(), node.spares(), node.left()) for node in nodes} == {(3, 3, 6)}
    nodes[0].hear(1, replace(nodes[1].mine, ended=137, killed=True))
    assert nodes[0].left() == 3


def test_all_start_anew_once_no_node_has_ranks_of_the_earlier_attempt():
    nodes = rosters(2, 2, renews=True)
    tell_all(nodes)
    assert all(node.meet() for node in nodes)
    assert nodes[0].newest() == (0, 0) and nodes[0].not_ready(0) == []
    nodes[0].change(finished=2)
    nodes[1].change(attempt=1, why="rank 2 has ended")  # Both at once would tell the same.
    tell_all(nodes)
    assert nodes[0].newest() == (1, 1) and nodes[1].newest() == (1, 1)
    assert nodes[1].finished() == 0  # What finished in the earlier attempt does not count.
    nodes[0].change(attempt=1, finished=0, ready=1, port=29999)
    tell_all(nodes)
    assert nodes[0].not_ready(1) == [1] and nodes[1].not_ready(1) == [1]
    nodes[1].change(ready=1)
    tell_all(nodes)
    assert nodes[0].not_ready(1) == [] and nodes[1].not_ready(1) == []
    assert nodes[1].first().port == 29999
    nodes[0].change(finished=2)
    nodes[1].change(finished=1)
    tell_all(nodes)
    assert [node.finished() for node in nodes] == [3, 3]


def test_who_comes_late_to_a_later_attempt_learns_of_it():
    nodes = rosters(2, 2, renews=True)
    tell_all(nodes)
    assert all(node.meet() for node in nodes)
    nodes[0].change(attempt=2, ready=2)
    late = Roster(1, entry(1, start=1, renews=True))
    tell_all([nodes[0], late])
    assert late.meet() and late.newest() == (2, 0)
    assert nodes[0].newest() == (2, 0) and nodes[0].not_ready(2) == [1]


def test_a_node_of_another_policy_takes_no_part():
    first, _ = rosters(2, 2, renews=True)
    first.hear(1, entry(1))
    assert first.refused == {1: "must have the same --restart-policy: only this one has all"}


def test_a_node_that_has_finished_is_told():
    nodes = rosters(2, 2)
    tell_all(nodes)
    nodes[1].change(finished=2, ended=0)
    tell_all(nodes)
    assert nodes[0].over() == [1] and nodes[0].end() is None
    assert nodes[0].finished() == 2
