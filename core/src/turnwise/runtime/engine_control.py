"""The weights, the memory and the number of the engines of a run, which its manager changes for a trainer."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager

from turnwise.events.dispatch import Observers
from turnwise.protocols.weights import TAGS, UpdateReport
from turnwise.runtime.interface import Runtime
from turnwise.runtime.loop_thread import LoopThread
from turnwise.weights.memory import report_stage, report_update
from turnwise.weights.sources import Weights


class EngineControl(ABC):
    """The part of `turnwise.RolloutManager` that changes the engines of a run; the manager has its fields."""

    runtime: Runtime
    observers: Observers
    weight_version: int
    # Held during an update, sleep or wake-up, because each depends on the state that another changes.
    _switching: threading.RLock

    @abstractmethod
    def waiting_for(self, part: str) -> AbstractContextManager[None]:
        """Say in the log that the run waits for a part, if that takes long."""

    @abstractmethod
    def _running_thread(self) -> LoopThread: ...

    def update_weights(self, weights: Weights, *, version: int | None = None) -> UpdateReport:
        """
        Update the weights of every replica, also while episodes run in other threads, and wait for all replicas.

        Args:
            weights: weights with the names of the Hugging Face state dict: (name, array) pairs, a torch module, a
                mapping or a folder of safetensors; see `turnwise.weights.sources.source_of`.
            version: of these weights; None adds one to the last version.

        Raises:
            EngineError: every replica failed, and serves its earlier weights.
            KeyboardInterrupt: when nothing reads the weights any more; a second one at once.
            ValueError: the version is not above the last one.
        """
        with self._switching:
            number = self.weight_version + 1 if version is None else version
            if number <= self.weight_version:
                raise ValueError(f"weight version {number} is not above the last one, {self.weight_version}")
            thread = self._running_thread()
            # Before the update: after a failure some replicas may serve this version, so no other weights may have it.
            self.weight_version = number
            started = time.perf_counter()
            with self.waiting_for("the update of the weights"):
                report = thread.call_to_end(self.runtime.update_weights(weights, number))
        report_update(self.observers, report, started)
        return report

    def resize(self, num_replicas: int) -> None:
        """
        Change the number of the policy's replicas on Ray, also while episodes run in other threads, and wait for it.

        New replicas get the current weights before they serve; without `weights.keep_last`, they wait for an update.
        Removed ones finish their requests. If a new one does not start, `EngineError`, and the number is as before.
        """
        if num_replicas < 1:
            raise ValueError(f"a run needs at least 1 replica, not {num_replicas}")
        with self._switching:
            self._running_thread().call(self.runtime.resize(num_replicas))

    def sleep(self, level: int = 1) -> None:
        """Free the memory of every replica. Requests in flight end as by `abort`, later ones raise `EngineError`."""
        reported = report_stage(self.observers, "sleep", self.memory_bytes)
        with self._switching, self.waiting_for("the sleep of the engines"), reported:
            self._running_thread().call_to_end(self.runtime.sleep(level))

    def wake_up(self, tags: Sequence[str] = TAGS) -> None:
        """Restore the memory of these tags on every replica."""
        reported = report_stage(self.observers, "_".join(("wake_up", *tags)), self.memory_bytes)
        with self._switching, self.waiting_for("the wake-up of the engines"), reported:
            self._running_thread().call_to_end(self.runtime.wake_up(tags))

    def memory_bytes(self) -> int:
        """Return the device memory of all replicas in bytes; 0 when it is unknown."""
        return self._running_thread().call(self.runtime.memory_bytes())
