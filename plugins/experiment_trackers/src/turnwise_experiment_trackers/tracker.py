"""Shared by the trackers: the check that a library is installed, run ids across resumes, flattened settings."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path

from turnwise.errors import ConfigError
from turnwise.events.observer import TrainingStarted


def check_installed(library: str) -> None:
    """Raise `ConfigError` if a library is not installed, without importing it."""
    if importlib.util.find_spec(library) is None:
        raise ConfigError(
            f"observer {library}: the library is not installed: pip install 'turnwise-experiment-trackers[{library}]'"
        )


def load_run_id(event: TrainingStarted, name: str) -> str | None:
    """Return the run id that a resumed training saved; None for a new training."""
    path = _id_file(event.folder, name)
    return path.read_text(encoding="utf-8").strip() or None if event.resumed and path.is_file() else None


def save_run_id(event: TrainingStarted, name: str, run_id: str) -> None:
    """Write the run id to the training's folder."""
    _id_file(event.folder, name).write_text(f"{run_id}\n", encoding="utf-8")


def _id_file(folder: Path, name: str) -> Path:
    return folder / f"{name}_run_id.txt"


def flatten(settings: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the leaves of nested settings as strings under dotted names such as `train.optimizer.lr`."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)
