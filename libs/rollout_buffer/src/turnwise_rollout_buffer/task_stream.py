"""An endless, seeded stream of tasks from one source or several; a few integers describe its position."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from attrs import define, field, frozen

from turnwise import Task
from turnwise.errors import DataError

_REMEDY = "restore the data set, or train anew with --overwrite"


@frozen
class Share:
    """
    A source of tasks in a mixture.

    Attributes:
        num_tasks: its number of tasks.
        weight: of its tasks in the stream, relative to the other sources; above 0.
    """

    num_tasks: int
    weight: float = 1.0


def hash_tasks(tasks: Sequence[Task]) -> str:
    """Return a text that other tasks, or the same ones in another order, do not have; it is the same in any process."""
    digest = hashlib.sha256()
    for task in tasks:
        values = [task.uid, task.agent_name, task.data_source, task.messages, task.ground_truth, task.extra]
        # Tasks of a program may hold values that JSON does not have.
        digest.update(json.dumps(values, sort_keys=True, default=repr, skipkeys=True).encode() + b"\n")
    return digest.hexdigest()


@define(eq=False)
class TaskStream:
    """
    Repeated passes over tasks, each in a different random order.

    With several sources, each has its own passes. The next task comes from the source that is furthest behind its
    weight, so every part of the stream has the sources in proportion, up to one task.

    Attributes:
        tasks: at least one.
        seed: seed of the orders.
        shares: the sources that `tasks` consists of, in order; empty for a single one.
    """

    tasks: Sequence[Task]
    seed: int
    shares: Sequence[Share] = ()
    _passes: list[_Passes] = field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        shares = self.shares or [Share(len(self.tasks))]
        if not self.tasks or not all(share.num_tasks for share in shares):
            raise DataError("the data set has no tasks to train on")
        start = 0
        for number, share in enumerate(shares):
            label = f"{self.seed}-{number}" if number else str(self.seed)
            self._passes.append(_Passes(self.tasks[start : start + share.num_tasks], label, share.weight))
            start += share.num_tasks

    def take(self, num: int, without: Collection[str] = ()) -> list[Task]:
        """
        Return the next tasks, all different; fewer than `num` if there are not enough.

        A source without another task for this call leaves its place to the others, and catches up later.

        Args:
            num: number of tasks.
            without: uids to skip.
        """
        taken: dict[str, Task] = {}
        left = list(self._passes)
        while len(taken) < num and left:
            total = sum(source.num_taken for source in self._passes) + 1
            weight = sum(source.weight for source in self._passes)
            source = max(left, key=lambda each: each.weight / weight * total - each.num_taken)
            task = source.draw({*without, *taken})
            if task is None:
                left.remove(source)
            else:
                taken[task.uid] = task
        return list(taken.values())

    def state_dict(self) -> dict[str, Any]:
        """Return the position in each source, and the number of tasks that it refers to; JSON values."""
        return {"sources": [source.state_dict() for source in self._passes]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position; `DataError` if it refers to other sources or other tasks."""
        sources = state["sources"]
        if len(sources) != len(self._passes):
            raise DataError(
                f"cannot resume: the data set has {len(self._passes)} sources, but the checkpoint was made with"
                f" {len(sources)}"
            )
        for source, saved in zip(self._passes, sources, strict=True):
            source.load_state_dict(saved)


@define(eq=False)
class _Passes:
    """The passes over one source; `num_taken` counts the tasks that were returned."""

    tasks: Sequence[Task]
    label: str
    weight: float
    num_taken: int = field(default=0, init=False)
    _epoch: int = field(default=0, init=False)
    _position: int = field(default=0, init=False)
    _order: list[int] = field(factory=list, init=False)
    _digest: str = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._digest = hash_tasks(self.tasks)
        self._start_epoch(0)

    def draw(self, without: Collection[str]) -> Task | None:
        """Return the next task that is not excluded, which the pass skips; None if all are."""
        for _ in range(2 * len(self.tasks)):
            if self._position == len(self._order):
                self._start_epoch(self._epoch + 1)
            task = self.tasks[self._order[self._position]]
            self._position += 1
            if task.uid not in without:
                self.num_taken += 1
                return task
        return None

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "position": self._position,
            "num_taken": self.num_taken,
            "num_tasks": len(self.tasks),
            "digest": self._digest,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["num_tasks"] != len(self.tasks):
            raise DataError(
                f"cannot resume: the data set has {len(self.tasks)} tasks, but the checkpoint was made with"
                f" {state['num_tasks']}"
            )
        # A checkpoint of an earlier version has no digest.
        if state.get("digest", self._digest) != self._digest:
            raise DataError(f"cannot resume: rows of the data set have changed since the checkpoint; {_REMEDY}")
        self._start_epoch(state["epoch"])
        self._position, self.num_taken = state["position"], state["num_taken"]

    def _start_epoch(self, epoch: int) -> None:
        self._epoch, self._position = epoch, 0
        self._order = list(range(len(self.tasks)))
        random.Random(f"{self.label}-{epoch}").shuffle(self._order)
