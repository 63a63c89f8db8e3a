"""The processes of a program are its descendants and those of its session, in whatever order a list has them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from turnwise_gateway.programs.processes import Process, find_tree

FIRST = 10**7
"""Larger than any id of a process, so that no environment is found for them."""
IDS = st.integers(FIRST, FIRST + 12)


@given(st.dictionaries(IDS, st.tuples(IDS | st.sampled_from([0, 1]), IDS)), IDS)
def test_a_tree_is_that_of_each_parent(drawn: dict[int, tuple[int, int]], leader: int) -> None:
    """A process is found if one of its parents is the leader or in its session; circles of ids end the way."""
    processes = {pid: Process(parent, session, 0, is_zombie=False) for pid, (parent, session) in drawn.items()}

    def is_inside(pid: int) -> bool:
        seen: set[int] = set()
        while pid not in seen:
            if pid == leader or (pid in processes and processes[pid].session == leader):
                return True
            seen.add(pid)
            if pid not in processes:
                return False
            pid = processes[pid].parent
        return False

    assert [pid for pid in processes if is_inside(pid)] == list(find_tree(processes, leader, "w.mark"))
