"""Updates the engine's weights after each training step, on separate devices or on shared ones."""

from __future__ import annotations

from typing import Final, Literal, Protocol

from attrs import define, field

from turnwise import MemorySwitch, RolloutManager
from turnwise.weights.memory import SwitchReport
from turnwise_grpo_trainer.processes.trainers import Trainer

_ENGINE_STAGES: Final = ("sleep", "wake_up_weights", "wake_up_kv_cache")


class WeightSync(Protocol):
    """Updates the engine's weights, and moves device memory between engine and trainer if they share it."""

    def start(self) -> None:
        """Prepare for the first rollout."""

    def before_update(self) -> dict[str, float]:
        """Prepare for an update of the policy; return metrics."""

    def update_weights(self, version: int) -> dict[str, float]:
        """Update the engine to the policy's weights, with this version, and prepare for a rollout; return metrics."""

    def finish(self) -> None:
        """Prepare for the export of the policy."""


@define(eq=False)
class DirectSync:
    """
    A `WeightSync` for engine and trainer on separate devices.

    Attributes:
        manager: started.
        trainer: holds the policy.
        adapters: send its adapters in place of its weights.
    """

    manager: RolloutManager
    trainer: Trainer
    adapters: bool = False

    def start(self) -> None:
        """Do nothing: engine and trainer keep their memory."""

    def before_update(self) -> dict[str, float]:
        return {}

    def update_weights(self, version: int) -> dict[str, float]:
        report = self.manager.update_weights(self.trainer.weights(adapters=self.adapters), version=version)
        return {"sync/bytes": float(report.num_bytes)}

    def finish(self) -> None:
        """Do nothing: the policy is on its device."""


@define(eq=False)
class HybridSync:
    """
    A `WeightSync` for shared devices: the engine sleeps during updates, and the trainer is offloaded during rollouts.

    Attributes:
        manager: started.
        trainer: holds the policy, on the device.
        level: sleep level of the engine, see `turnwise.weights.memory`.
        adapters: send its adapters in place of its weights.
        asleep: the engine sleeps, because the trainer was loaded after it.
    """

    manager: RolloutManager
    trainer: Trainer
    level: Literal[1, 2]
    adapters: bool = False
    asleep: bool = False
    _switch: MemorySwitch | None = field(default=None, init=False)

    def start(self) -> None:
        """Offload the trainer, before the engine's memory is first used."""
        self.trainer.offload_optimizer()
        self.trainer.offload_parameters()
        if self.asleep:
            self.manager.wake_up()
        observers = self.manager.observers
        self._switch = MemorySwitch(self.manager, self.trainer, level=self.level, observers=observers)

    def before_update(self) -> dict[str, float]:
        return _switch_metrics(self._started().to_training())

    def update_weights(self, version: int) -> dict[str, float]:
        """As in `WeightSync`; before `start`, while the policy is still on the device, only the weights are updated."""
        if self._switch is None:
            if self.asleep:
                self.manager.wake_up(["weights"])
            return DirectSync(self.manager, self.trainer, self.adapters).update_weights(version)
        report = self._switch.to_rollout(self.trainer.weights(adapters=self.adapters))
        if report.version != version:
            raise RuntimeError(f"the engine has weight version {report.version}, the policy {version}")
        return _switch_metrics(report)

    def finish(self) -> None:
        """Bring the policy back to the device, where `export` reads it; the engine sleeps, so there is room."""
        self._started().to_training()

    def _started(self) -> MemorySwitch:
        if self._switch is None:
            raise RuntimeError("call start first")
        return self._switch


def _switch_metrics(report: SwitchReport) -> dict[str, float]:
    """Return the seconds of each stage, and the bytes that it added to the device (negative: freed)."""
    metrics: dict[str, float] = {}
    for stage in report.stages:
        before, after = stage.engine_bytes if stage.stage in _ENGINE_STAGES else stage.trainer_bytes
        metrics[f"switch/{stage.stage}_s"] = stage.seconds
        metrics[f"switch/{stage.stage}_bytes"] = float(after - before)
    if report.update is not None:
        metrics["sync/bytes"] = float(report.update.num_bytes)
    return metrics
