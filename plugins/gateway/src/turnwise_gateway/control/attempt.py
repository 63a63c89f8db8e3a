"""An attempt at a task."""

from __future__ import annotations

from attrs import frozen


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
