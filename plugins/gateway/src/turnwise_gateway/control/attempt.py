"""An attempt at a task, and the effects of the news of it."""

from __future__ import annotations

from enum import StrEnum

from attrs import frozen

from turnwise.errors import TurnwiseError


class ControlError(TurnwiseError):
    """A request or a number that a control port does not accept."""


class Verdict(StrEnum):
    """
    Effect of the news of an attempt.

    `ACCEPTED` changed the rollout, `REPEATED` had changed it before, `CONFLICT` contradicts earlier news of the same
    lease, `LATE` is of a lease that has ended, and `UNKNOWN` is of a lease that never was. Only `ACCEPTED` changes
    anything.
    """

    ACCEPTED = "accepted"
    REPEATED = "repeated"
    CONFLICT = "conflict"
    LATE = "late"
    UNKNOWN = "unknown"


@frozen(kw_only=True)
class Attempted:
    """
    A rollout that an agent attempts.

    Attributes:
        id: names the attempt in requests.
        attempt: number of this attempt among those of the rollout, from 1.
        worker: name that the agent gave itself; empty for none.
        uid: of the task.
        global_step: training step that asked for it.
        rollout_n: number of the rollout in its group.
    """

    id: str
    attempt: int = 1
    worker: str = ""
    uid: str
    global_step: int
    rollout_n: int
