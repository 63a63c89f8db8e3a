"""An endless, seeded stream of tasks whose place is two integers, so that a restart goes on where it was."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence

from attrs import define, field

from turnwise import Task
from turnwise.errors import DataError


@define(eq=False)
class TaskStream:
    """
    Passes over tasks, each in an order of its own.

    Attributes:
        tasks: at least one.
        seed: of the orders.
    """

    tasks: Sequence[Task]
    seed: int
    _epoch: int = field(default=0, init=False)
    _place: int = field(default=0, init=False)
    _order: list[int] = field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        """Begin with the first pass."""
        if not self.tasks:
            raise DataError("there are no tasks to train on")
        self._begin(0)

    def take(self, num: int, without: Collection[str] = ()) -> list[Task]:
        """
        Return the next tasks, all different: fewer than `num` when there are no more.

        Args:
            num: how many.
            without: uids that are passed over.
        """
        taken: dict[str, Task] = {}
        for _ in range(2 * len(self.tasks)):
            if len(taken) == num:
                break
            if self._place == len(self._order):
                self._begin(self._epoch + 1)
            task = self.tasks[self._order[self._place]]
            self._place += 1
            if task.uid not in without:
                taken.setdefault(task.uid, task)
        return list(taken.values())

    def state_dict(self) -> dict[str, int]:
        """Return the place, and among how many tasks."""
        return {"epoch": self._epoch, "place": self._place, "num_tasks": len(self.tasks)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go to a place; `DataError` when it is one among other tasks."""
        if state["num_tasks"] != len(self.tasks):
            raise DataError(
                f"there are {len(self.tasks)} tasks, and the training to go on with has {state['num_tasks']}: the order"
                " in which they come would be another"
            )
        self._begin(state["epoch"])
        self._place = state["place"]

    def _begin(self, epoch: int) -> None:
        self._epoch, self._place = epoch, 0
        self._order = list(range(len(self.tasks)))
        random.Random(f"{self.seed}-{epoch}").shuffle(self._order)
