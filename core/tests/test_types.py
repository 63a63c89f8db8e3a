"""Values that no type of the framework accepts."""

import pytest

from turnwise.types import Task

USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("messages", "uid", "expected"),
    [("hi", "a", "'messages' must be"), (USER, "a", "'messages' must be"), ((USER,), "", "uid"), ((USER,), 3, "'uid'")],
)
def test_a_malformed_task_is_refused(messages, uid, expected):
    """A text in place of messages would be read as a list of letters, and an empty uid joins groups."""
    with pytest.raises((TypeError, ValueError), match=expected):
        Task(messages=messages, uid=uid)
