"""The files of a rollout: finished episodes, unfinished episodes, and a summary."""

from __future__ import annotations

from turnwise_result_files.row_file import find_rows
from turnwise_result_files.summary import summarize, write_metrics
from turnwise_result_files.trajectories import TrajectoryWriter, read_results
from turnwise_result_files.unfinished import load_unfinished, save_unfinished

__all__ = [
    "TrajectoryWriter",
    "find_rows",
    "load_unfinished",
    "read_results",
    "save_unfinished",
    "summarize",
    "write_metrics",
]
