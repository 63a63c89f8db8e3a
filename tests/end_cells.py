"""
The cells of the matrix of ends: each command and runtime, at each moment, with each fault.

A moment is an event: the start of a call of a function of the driver. `end_faults.py` waits for it in the process of
the command, and makes the fault there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from attrs import frozen

COMMANDS: Final = ("rollout", "eval", "train", "sft", "serve")
RUNTIMES: Final = ("local", "ray")
MOMENTS: Final = ("starting", "running", "writing", "first checkpoint", "later checkpoint", "closing")
"""`writing` is that of the batch, or of the model of a training."""
SIGNALS: Final = ("SIGINT", "SIGINT twice", "SIGTERM", "SIGHUP", "SIGKILL")
DISKS: Final = ("full disk", "folder gone")
RAYS: Final = ("raylet stopped", "raylet killed", "GCS stopped", "GCS killed", "replicas lost")
FAULTS: Final = ("none", *SIGNALS, *DISKS, *RAYS)


@frozen
class Moment:
    """
    The start of a call in the driver.

    Attributes:
        function: its module and name.
        count: the number of the call, from 1.
        ending: counts only calls with an argument whose text ends so.
    """

    function: str
    count: int = 1
    ending: str = ""


_WRITE: Final = "turnwise_result_files.trajectories:TrajectoryWriter.write"
_SAVE: Final = "turnwise_result_files.batch_file:write_batch_file"
_REPLACE: Final = "turnwise.files:replace"
_SCRIPTED: Final = "turnwise_testing.engines.scripted:ScriptedEngine"
_SEEDED: Final = "turnwise_seeded:SeededEngine"
_CHECKPOINT: Final = "turnwise_grpo_trainer.loop.checkpoints:replace_folder"
_ROLLOUTS: Final = {
    "starting": Moment(f"{_SCRIPTED}.start"),
    "running": Moment(_WRITE, 4),
    "writing": Moment(_REPLACE, ending="batch.safetensors"),
    "closing": Moment(f"{_SCRIPTED}.stop"),
}
_ON_RAY: Final = {
    "starting": Moment("turnwise.runtime.ray.runtime:wait_until_started"),
    "closing": Moment("turnwise.runtime.ray.cluster:Cluster._close"),
}
_TRAINING: Final = {
    "starting": Moment(f"{_SEEDED}.start"),
    "running": Moment("turnwise_result_files.running_episodes:RunningEpisodes.on_turn_finished", 6),
    "writing": Moment(_CHECKPOINT, ending="/model"),
    "first checkpoint": Moment(_CHECKPOINT, 1, "step-00000001"),
    "later checkpoint": Moment(_CHECKPOINT, 1, "step-00000002"),
    "closing": Moment(f"{_SEEDED}.stop"),
}
_PLACES: Final[Mapping[tuple[str, str], Mapping[str, Moment]]] = {
    ("rollout", "local"): _ROLLOUTS,
    ("rollout", "ray"): _ROLLOUTS | _ON_RAY,
    ("eval", "local"): _ROLLOUTS,
    ("eval", "ray"): _ROLLOUTS | _ON_RAY,
    ("train", "local"): _TRAINING,
    ("train", "ray"): _TRAINING | _ON_RAY,
    ("sft", "local"): {
        "starting": Moment("turnwise_trl_bridge.sft_command:_train"),
        "running": Moment("torch.optim:AdamW.step", 2),
        "writing": Moment("transformers:PreTrainedModel.save_pretrained"),
    },
    ("serve", "local"): {
        "starting": Moment(f"{_SCRIPTED}.start"),
        "running": Moment(f"{_SCRIPTED}.generate", 3),
        "writing": Moment(_REPLACE, ending="trajectories.parquet"),
        "closing": Moment(f"{_SCRIPTED}.stop"),
    },
}
KNOWN: Final[Mapping[str, str]] = {}
"""Cells that break a promise, with the reason."""
_BEFORE_THE_WRITE: Final = {
    ("rollout", "writing"): Moment(_SAVE),
    ("eval", "writing"): Moment(_SAVE),
    ("train", "writing"): Moment("turnwise_grpo_trainer.commands.training:export_model"),
    ("train", "first checkpoint"): Moment("turnwise_grpo_trainer.loop.checkpoints:CheckpointStore.save"),
    ("train", "later checkpoint"): Moment("turnwise_grpo_trainer.loop.checkpoints:CheckpointStore.save", 2),
    ("serve", "writing"): Moment("turnwise_result_files.trajectories:TrajectoryWriter.close"),
}
"""The moments of a full disk, which an earlier file system call would not notice."""


@frozen
class Cell:
    """A command on a runtime, a moment and a fault."""

    command: str
    runtime: str
    moment: str
    fault: str

    def __str__(self) -> str:
        return f"{self.command} {self.runtime}, {self.moment}, {self.fault}"

    @property
    def place(self) -> Moment:
        """The event of the moment; `KeyError` where the cell does not exist."""
        place = _PLACES[self.command, self.runtime][self.moment]
        if self.fault == "full disk":
            return _BEFORE_THE_WRITE.get((self.command, self.moment), place)
        return place

    def missing(self) -> str:
        """Return why the cell does not exist; empty if it does."""
        if (self.command, self.runtime) not in _PLACES:
            return "the command has no Ray" if self.command == "sft" else "the command refuses Ray"
        if self.moment not in _PLACES[self.command, self.runtime]:
            return "no such moment"
        if self.fault in RAYS and self.runtime == "local":
            return "no such process"
        return ""


def all_cells() -> Iterator[Cell]:
    """Yield every combination, those that do not exist too; the undisturbed runs first."""
    for command in COMMANDS:
        for runtime in RUNTIMES:
            if not Cell(command, runtime, "starting", "none").missing():
                yield Cell(command, runtime, "starting", "none")
    for runtime in RUNTIMES:
        for command in COMMANDS:
            for moment in MOMENTS:
                for fault in FAULTS[1:]:
                    yield Cell(command, runtime, moment, fault)
