"""The loop of each mode, and that of `hybrid`, where engine and trainer take turns with the memory of devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import define, field

from turnwise import EpisodeResult, MemorySwitch, RolloutManager
from turnwise_grpo_trainer.live_view import TrainView
from turnwise_grpo_trainer.loop import Stages, TrainLoop
from turnwise_grpo_trainer.metric_log import MetricLog
from turnwise_grpo_trainer.setup import Setup
from turnwise_grpo_trainer.trainers import Trainer


def loop_of(setup: Setup, manager: RolloutManager, trainer: Trainer, log: MetricLog, view: TrainView) -> TrainLoop:
    """Return the loop of the configured mode, before its first step."""
    from turnwise_grpo_trainer.async_loop import AsyncLoop

    kind = {"sync": TrainLoop, "hybrid": HybridLoop, "async": AsyncLoop}[setup.train.mode]
    return kind.of(setup, manager, trainer, log, view)


@define(eq=False)
class HybridLoop(TrainLoop):
    """Rolls out and trains in turns on the same devices: who is idle gives the memory back."""

    _switch: Any = field(default=None, init=False)

    def run(self) -> None:
        """Train until the last step; the trainer's memory is off the device while the engine rolls out."""
        self.trainer.offload_optimizer()
        self.trainer.offload_parameters()
        level, observers = self.setup.run.memory.level, self.manager.observers
        self._switch = MemorySwitch(self.manager, self.trainer, level=level, observers=observers)
        super().run()
        # What is exported is read on the device, where there is room once the engine sleeps.
        self._switch.to_training()

    def update(self, episodes: Sequence[EpisodeResult], stages: Stages) -> dict[str, float]:
        """Put the engine to sleep, and learn."""
        moved = self._moved(self._switch.to_training())
        return super().update(episodes, stages) | moved

    def bring_weights(self) -> dict[str, float]:
        """Hand the memory and the policy's weights to the engine."""
        if self._switch is None:
            return super().bring_weights()
        report = self._switch.to_rollout(self.trainer.weights())
        if report.version != self.version:
            raise RuntimeError(f"the engine serves version {report.version}, the policy has {self.version}")
        return self._moved(report)

    @staticmethod
    def _moved(report: Any) -> dict[str, float]:
        """Return the seconds of each stage, and the bytes that it brought to the device or, below 0, took off."""
        numbers: dict[str, float] = {}
        for stage in report.stages:
            engines = stage.stage in ("sleep", "wake_up_weights", "wake_up_kv_cache")
            before, after = stage.engine_bytes if engines else stage.trainer_bytes
            numbers[f"switch/{stage.stage}_s"] = stage.seconds
            numbers[f"switch/{stage.stage}_bytes"] = float(after - before)
        if report.update is not None:
            numbers["sync/bytes"] = float(report.update.num_bytes)
        return numbers
