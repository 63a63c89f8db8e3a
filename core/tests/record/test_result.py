"""The result of an episode."""

import numpy as np
import pytest

from turnwise.record.result import EpisodeResult
from turnwise.types import Status, Task

TASK = Task(messages=(), uid="t")


@pytest.mark.parametrize("status", ["failed", np.str_("failed"), Status.FAILED])
def test_a_status_may_be_a_text(status):
    """Tables of numpy and files hold texts; a failed episode that is compared by identity would be trained."""
    result = EpisodeResult(task=TASK, status=status)
    assert result.status is Status.FAILED


def test_an_unknown_status_is_refused():
    """The error names it."""
    with pytest.raises(ValueError, match="'lost' is not a valid Status"):
        EpisodeResult(task=TASK, status="lost")
