"""
The files of a rollout: finished episodes, unfinished episodes, batches of tensors, and a summary.

Names are imported when they are asked for: a command's options need no file format.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from turnwise_result_files.batches import from_tensordict, load_batch, load_packed_batch, save_batch, to_tensordict
    from turnwise_result_files.row_file import find_rows
    from turnwise_result_files.running_episodes import RunningEpisodes, read_running
    from turnwise_result_files.summary import summarize, write_metrics
    from turnwise_result_files.trajectories import TrainedEpisode, TrajectoryWriter, read_results, read_training_step
    from turnwise_result_files.unfinished import load_unfinished, save_unfinished

__all__ = [
    "RunningEpisodes",
    "TrainedEpisode",
    "TrajectoryWriter",
    "find_rows",
    "from_tensordict",
    "load_batch",
    "load_packed_batch",
    "load_unfinished",
    "read_results",
    "read_running",
    "read_training_step",
    "save_batch",
    "save_unfinished",
    "summarize",
    "to_tensordict",
    "write_metrics",
]

_MODULES: Final = {
    "RunningEpisodes": "running_episodes",
    "TrainedEpisode": "trajectories",
    "TrajectoryWriter": "trajectories",
    "find_rows": "row_file",
    "from_tensordict": "batches",
    "load_batch": "batches",
    "load_packed_batch": "batches",
    "load_unfinished": "unfinished",
    "read_results": "trajectories",
    "read_running": "running_episodes",
    "read_training_step": "trajectories",
    "save_batch": "batches",
    "save_unfinished": "unfinished",
    "summarize": "summary",
    "to_tensordict": "batches",
    "write_metrics": "summary",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
