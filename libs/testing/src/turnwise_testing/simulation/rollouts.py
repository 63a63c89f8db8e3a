"""Simulated rollouts: concurrent calls, interrupts, resumes and weight updates at random moments."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from turnwise import EpisodeResult, RolloutManager, Status, Task
from turnwise.episode.driver import EpisodeProgram
from turnwise.errors import DataError, EngineError
from turnwise_testing.simulation.run_parts import (
    EpisodeOutcome,
    Ledger,
    RunContent,
    compare_outcomes,
    make_engine,
    make_manager,
    make_program,
    outcomes_of,
)


class Rollouts:
    """
    A manager runs some calls at once. Other threads interrupt them, resume interrupted episodes and update the weights.

    Every episode is returned once, its tokens fit their context and their weights, and it has the outcome of the
    undisturbed run.
    """

    def __init__(self, rng: random.Random) -> None:
        self._content = RunContent.draw(rng)
        # Each call has some of the tasks.
        self._num_calls = rng.randint(1, 3)

    def run(self, faults: random.Random | None) -> dict[str, EpisodeOutcome]:
        ledger = Ledger()
        engine = make_engine(self._content, faults, ledger)
        manager = make_manager(self._content, engine, self._make_program(faults))
        results: list[EpisodeResult] = []
        with manager:
            calls = [self._content.tasks[number :: self._num_calls] for number in range(self._num_calls)]
            run = _Run(manager, ledger, faults, results)
            threads = [threading.Thread(target=run.call, args=(tasks,)) for tasks in calls if tasks]
            if faults is not None:
                threads += [
                    threading.Thread(target=each) for each in (run.interrupt, run.update) if faults.random() < 0.6
                ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            run.finish()
        outcomes = outcomes_of(run.results, ledger.digests)
        if faults is None and (failed := [each.fault for each in outcomes.values() if each.status == Status.FAILED]):
            # Two runs in which everything fails would be equal.
            raise AssertionError(f"{len(failed)} of {len(outcomes)} episodes fail undisturbed: {failed[0]}")
        return outcomes

    def _make_program(self, faults: random.Random | None) -> EpisodeProgram:
        return make_program(faults)

    def compare(self, undisturbed: Any, disturbed: Any) -> None:
        compare_outcomes(undisturbed, disturbed)


class _Run:
    """The threads of a run."""

    def __init__(
        self, manager: RolloutManager, ledger: Ledger, faults: random.Random | None, results: list[EpisodeResult]
    ) -> None:
        self.manager, self.ledger, self.faults, self.results = manager, ledger, faults, results

    def call(self, tasks: Sequence[Task]) -> None:
        """Run tasks, perhaps as a partial rollout, and perhaps resume the unfinished episodes."""
        options: dict[str, Any] = {}
        if self.faults is not None and self.faults.random() < 0.4:
            options["min_fraction"] = self.faults.choice((0.25, 0.5, 0.75))
            options["grace_s"] = self.faults.choice((0.0, 0.1))
        for result in self.manager.iterate(tasks, **options):
            self._take(result)
        if self.faults is not None and self.faults.random() < 0.5 and self.manager.unfinished:
            self._resume()

    def interrupt(self) -> None:
        assert self.faults is not None
        for _ in range(self.faults.randint(1, 3)):
            time.sleep(self.faults.random() * self.faults.choice((0.01, 1.0)))
            self.manager.abort()

    def update(self) -> None:
        assert self.faults is not None
        for _ in range(self.faults.randint(1, 3)):
            time.sleep(self.faults.random() * self.faults.choice((0.01, 1.0)))
            version = self.manager.weight_version + 1
            with suppress(EngineError):
                self.manager.update_weights(self.ledger.next(version), version=version)

    def finish(self) -> None:
        """Resume until every episode has finished."""
        for _ in range(20):
            if not self.manager.unfinished:
                return
            self._resume()
        raise AssertionError(f"these episodes stay unfinished: {[each.uid for each in self.manager.unfinished]}")

    def _resume(self) -> None:
        # Another thread may have resumed them in the meantime; then there is nothing to run.
        with suppress(DataError):
            for result in self.manager.iterate([], resume=True):
                self._take(result)

    def _take(self, result: EpisodeResult) -> None:
        # The manager keeps an interrupted episode in `unfinished`, and returns it again after a resume.
        if result.unfinished is None:
            self.results.append(result)
