"""An endless, seeded stream of tasks; two integers describe its position, so it can be resumed."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence

from attrs import define, field

from turnwise import Task
from turnwise.errors import DataError


@define(eq=False)
class TaskStream:
    """
    Repeated passes over tasks, each in a different random order.

    Attributes:
        tasks: at least one.
        seed: seed of the orders.
    """

    tasks: Sequence[Task]
    seed: int
    _epoch: int = field(default=0, init=False)
    _position: int = field(default=0, init=False)
    _order: list[int] = field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        if not self.tasks:
            raise DataError("the data set has no tasks to train on")
        self._start_epoch(0)

    def take(self, num: int, without: Collection[str] = ()) -> list[Task]:
        """
        Return the next tasks, all different; fewer than `num` if there are not enough.

        Args:
            num: number of tasks.
            without: uids to skip.
        """
        taken: dict[str, Task] = {}
        for _ in range(2 * len(self.tasks)):
            if len(taken) == num:
                break
            if self._position == len(self._order):
                self._start_epoch(self._epoch + 1)
            task = self.tasks[self._order[self._position]]
            self._position += 1
            if task.uid not in without:
                taken.setdefault(task.uid, task)
        return list(taken.values())

    def state_dict(self) -> dict[str, int]:
        """Return the position, and the number of tasks that it refers to."""
        return {"epoch": self._epoch, "position": self._position, "num_tasks": len(self.tasks)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore a position; `DataError` if it refers to another number of tasks."""
        if state["num_tasks"] != len(self.tasks):
            raise DataError(
                f"cannot resume: the data set has {len(self.tasks)} tasks, but the checkpoint was made with"
                f" {state['num_tasks']}"
            )
        self._start_epoch(state["epoch"])
        self._position = state["position"]

    def _start_epoch(self, epoch: int) -> None:
        self._epoch, self._position = epoch, 0
        self._order = list(range(len(self.tasks)))
        random.Random(f"{self.seed}-{epoch}").shuffle(self._order)
