"""A stage meter adds up the seconds of each stage, and notes its peak of memory, for nested stages too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from turnwise_grpo_trainer.report import stage_meter
from turnwise_grpo_trainer.report.stage_meter import StageMeter

MIB = 1 << 20


def use(num_bytes):
    """Make memory resident, and free it."""
    block = bytearray(num_bytes)
    block[:: 1 << 12] = b"x" * len(block[:: 1 << 12])


def test_a_meter_adds_up_stages():
    """The costs of a stage are the sum over its uses, also if one of them raises."""
    meter = StageMeter()
    with meter.stage("a"):
        pass
    first = meter.seconds("a")
    with pytest.raises(ValueError, match="no"), meter.stage("a"):
        raise ValueError("no")

    assert meter.seconds("a") >= first >= 0 == meter.seconds("b")
    assert meter.wall_s >= meter.seconds("a")
    assert {"seconds/a", "cpu/a", "memory/a"} == meter.metrics().keys()


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux sets a peak back")
def test_memory_is_that_of_the_stage():
    """A stage has the peak of its own body and of the stages in it; stages before and after it change nothing."""
    meter = StageMeter()
    with meter.stage("large"):
        use(512 * MIB)
    with meter.stage("outer"):
        with meter.stage("inner"):
            use(256 * MIB)
        with meter.stage("small"):
            pass
    peaks = {name: cost.peak_bytes for name, cost in meter.costs.items()}

    assert peaks["large"] - peaks["inner"] > 200 * MIB
    assert peaks["outer"] >= peaks["inner"] > peaks["small"] + 200 * MIB


def test_stages_with_equal_peaks_are_told_apart(monkeypatch):
    """A stage inside of another ends alone, although both have the same costs so far."""
    peaks = iter([1, 5, 5, 7])
    monkeypatch.setattr(stage_meter, "_read_peak", lambda: next(peaks))
    meter = StageMeter()
    with meter.stage("outer"), meter.stage("inner"):
        pass

    assert {"outer": 7, "inner": 5} == {name: cost.peak_bytes for name, cost in meter.costs.items()}


def test_another_system_has_the_peak_since_the_start(monkeypatch):
    """Without a file of the kernel, the memory is the peak of the process, in bytes."""

    def refuse(*_arguments, **_options):
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", refuse)
    meter = StageMeter()
    with meter.stage("a"):
        pass

    assert 10 * MIB < meter.costs["a"].peak_bytes < 1 << 40
    assert sys.platform != "linux" or meter.metrics()["memory/a"] == pytest.approx(meter.costs["a"].peak_bytes / 1e9)
