"""The files of a rollout: finished episodes, unfinished episodes, and a summary."""

from __future__ import annotations

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
    "load_unfinished",
    "read_results",
    "read_running",
    "read_training_step",
    "save_unfinished",
    "summarize",
    "write_metrics",
]
