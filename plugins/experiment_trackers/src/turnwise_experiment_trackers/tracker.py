"""What both trackers share: the library must be there, a resumed training goes on in its run, settings become text."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from turnwise.errors import ConfigError
from turnwise.observer import TrainingStarted


def require(library: str) -> None:
    """Raise `ConfigError` when a library is not installed; nothing is imported."""
    if importlib.util.find_spec(library) is None:
        raise ConfigError(
            f"observer {library}: the library is not installed: pip install 'turnwise-experiment-trackers[{library}]'"
        )


def kept_run_id(event: TrainingStarted, name: str) -> str | None:
    """Return the id of the run that an earlier part of the training had; None when there was none."""
    path = _id_file(event.folder, name)
    return path.read_text(encoding="utf-8").strip() or None if event.resumed and path.is_file() else None


def keep_run_id(event: TrainingStarted, name: str, run_id: str) -> None:
    """Write the id of the run beside what the training writes."""
    _id_file(event.folder, name).write_text(f"{run_id}\n", encoding="utf-8")


def _id_file(folder: Path, name: str) -> Path:
    return folder / f"{name}_run_id.txt"


def flattened(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the leaves of nested settings as texts, under names such as `train.optimizer.lr`."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)
