"""The cost of each stage of a training: seconds, seconds of processor, and the most resident memory of the process."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from attrs import define, field

_GB: Final = 1e9


@define(eq=False)
class StageCost:
    """
    The cost of a stage.

    Attributes:
        seconds: on the clock.
        cpu_s: of processor, of all threads of this process.
        peak_bytes: most resident memory of this process while the stage ran; where the system cannot say it, since the
            process started.
    """

    seconds: float = 0.0
    cpu_s: float = 0.0
    peak_bytes: int = 0


@define(eq=False)
class StageMeter:
    """
    Measures stages, which may contain others.

    Attributes:
        costs: of each stage, by name: the sums and the largest peak of all its uses.
    """

    costs: dict[str, StageCost] = field(factory=dict)
    _started: float = field(factory=time.perf_counter, init=False)
    _cpu_started: float = field(factory=time.process_time, init=False)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the cost of the body to a stage, also if it raises."""
        started, cpu_started = time.perf_counter(), time.process_time()
        cost = StageCost()
        _enter(cost)
        try:
            yield
        finally:
            _leave(cost)
            whole = self.costs.setdefault(name, StageCost())
            whole.seconds += time.perf_counter() - started
            whole.cpu_s += time.process_time() - cpu_started
            whole.peak_bytes = max(whole.peak_bytes, cost.peak_bytes)

    def seconds(self, name: str) -> float:
        """Return the seconds of a stage; 0 if it did not run."""
        return self.costs[name].seconds if name in self.costs else 0.0

    def metrics(self) -> dict[str, float]:
        """Return the costs as metrics: `seconds/NAME`, `cpu/NAME`, and `memory/NAME` in GB."""
        found: dict[str, float] = {}
        for name, cost in self.costs.items():
            found |= {f"seconds/{name}": cost.seconds, f"cpu/{name}": cost.cpu_s}
            found[f"memory/{name}"] = cost.peak_bytes / _GB
        return found

    @property
    def wall_s(self) -> float:
        """Seconds since this meter was made."""
        return time.perf_counter() - self._started

    @property
    def cpu_s(self) -> float:
        """Seconds of processor of this process since this meter was made."""
        return time.process_time() - self._cpu_started


_open: list[StageCost] = []
"""The stages that run in this process, of any meter. The system has one peak, and every stage sets it back."""


def _enter(cost: StageCost) -> None:
    _note_peak()
    _open.append(cost)


def _leave(cost: StageCost) -> None:
    _note_peak()
    _open.remove(cost)


def _note_peak() -> None:
    """Give the peak since the last call to all open stages, and set it back."""
    peak = _read_peak()
    for cost in _open:
        cost.peak_bytes = max(cost.peak_bytes, peak)


def _read_peak() -> int:
    """Return the most resident bytes of this process since the last call, or since its start, and set the peak back."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # 5 sets the peak back, and nothing else
        return int(status.partition("VmHWM:")[2].split()[0]) << 10
    except (OSError, IndexError, ValueError):  # another system, or a container without this file
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak << 10
