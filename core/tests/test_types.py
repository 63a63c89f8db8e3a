"""Values that the types of the framework refuse."""

import pytest

from turnwise.types import Placement, Task, TrajectoryScore

USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("messages", "uid", "expected"),
    [("hi", "a", "'messages' must be"), (USER, "a", "'messages' must be"), ((USER,), "", "uid"), ((USER,), 3, "'uid'")],
)
def test_a_malformed_task_is_refused(messages, uid, expected):
    """A text in place of messages would be read as a list of letters, and an empty uid joins groups."""
    with pytest.raises((TypeError, ValueError), match=expected):
        Task(messages=messages, uid=uid)


@pytest.mark.parametrize("at", ["middle", None, 0])
def test_a_score_in_an_unknown_place_is_refused(at):
    """When it is made: written to a file, it would make the file unreadable."""
    with pytest.raises(ValueError, match="not a valid Placement"):
        TrajectoryScore(value=1.0, at=at)
    assert TrajectoryScore(value=1.0, at=str(Placement.LAST_TOKEN)).at is Placement.LAST_TOKEN
