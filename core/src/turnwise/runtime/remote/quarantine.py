"""Quarantine: finds the episodes that kill workers, by group testing."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from attrs import define, field


@define(eq=False)
class Quarantine:
    """
    Gives groups of suspects to workers that run nothing else.

    If the worker dies, the four quarters of its group are tested next (Dorfman, "The detection of defective members of
    large populations", 1943). So one episode that kills workers is found among n suspects with log4(n) more deaths
    (halves would cost twice as many), and every group without such an episode runs only once. All workers test at once.
    """

    _groups: deque[list[int]] = field(factory=deque, init=False)
    _testing: set[int] = field(factory=set, init=False)
    _draining: set[int] = field(factory=set, init=False)

    @property
    def keys(self) -> list[int]:
        """Suspects that wait for a worker."""
        return [key for group in self._groups for key in group]

    def add(self, suspects: Sequence[int]) -> None:
        """Test suspects in four groups, before all other groups."""
        starts = range(0, len(suspects), max(1, -(-len(suspects) // 4)))
        self._groups.extendleft(list(suspects[start : start + starts.step]) for start in reversed(starts))

    def remove(self, keys: Collection[int]) -> None:
        """Forget waiting suspects."""
        groups = ([key for key in group if key not in keys] for group in self._groups)
        self._groups = deque(group for group in groups if group)

    def acquire(self, worker: int, *, busy: bool) -> list[int] | None:
        """
        Return the episodes that a worker runs next, or None if it should run ordinary ones.

        A worker is `busy` if it holds episodes; a suspect must not run beside other episodes.
        """
        if busy and worker in self._testing:
            return []
        self._testing.discard(worker)
        self._draining.discard(worker)
        if self._groups and not busy:
            self._testing.add(worker)
            return self._groups.popleft()
        # As many workers as there are groups finish their episodes first; the others continue with ordinary ones.
        if len(self._draining) < len(self._groups):
            self._draining.add(worker)
            return []
        return None

    def release(self, worker: int) -> bool:
        """Forget a dead worker; return whether it tested a group."""
        tested = worker in self._testing
        self._testing.discard(worker)
        self._draining.discard(worker)
        return tested

    def clear(self) -> None:
        """Forget all suspects."""
        self._groups.clear()
