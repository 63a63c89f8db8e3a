"""
GGUF files as model folders: weights, config, tokenizer and chat template come from the file, by transformers' reader.

A file is converted once, into a cache; all engines and trainers then load the same folder. Its weights are float32,
which holds every quantized value exactly.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Final

from turnwise.errors import ConfigError
from turnwise.files import PARTIAL, expanded, replace
from turnwise.terminal import write_error

_MAGIC: Final = b"GGUF"
_FORM: Final = 2
"""Of the written folders; a higher number makes all of them anew."""
_HEAD_BYTES: Final = 1 << 20
_UNSUPPORTED: Final = ("not supported", "Unknown gguf model_type", "Unrecognized")
SILENT: Final = {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
"""Variables that keep progress bars out of a log."""
_PACKAGES: Final = ("transformers", "torch", "gguf", "accelerate")


def convert(file: Path, key: str = "model.path") -> Path:
    """
    Return the folder of a GGUF file in the cache; the first call converts the file.

    A second process waits for the first one. A folder appears whole or not at all.

    Args:
        file: it exists.
        key: name of the path in error texts.

    Raises:
        ConfigError: the file is damaged, lacks weights or has something that transformers does not read, a package is
            missing, or the cache cannot be written.
    """
    try:
        folder = cache_folder(file)
        if folder.is_dir():
            return folder
        _check_start(file, key)
        _check_packages(file, key)
        with _locked(folder):
            if not folder.is_dir():  # another process has converted it meanwhile
                _write(file, folder, key)
    except OSError as error:
        where = error.filename or file
        raise ConfigError(f"{key}: converting {str(file)!r}: {where}: {error.strerror or error}") from error
    return folder


def cache_folder(file: Path) -> Path:
    """Return the folder that a file is converted to: its size, its time of change and its start decide the name."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    state = file.stat()
    with file.open("rb") as stream:
        head = stream.read(_HEAD_BYTES)
    digest = hashlib.sha256(f"{_FORM} {state.st_size} {state.st_mtime_ns}".encode() + head).hexdigest()
    return expanded(home) / "turnwise" / "gguf" / f"{file.stem}-{digest[:16]}"


def _check_start(file: Path, key: str) -> None:
    with file.open("rb") as stream:
        if stream.read(len(_MAGIC)) != _MAGIC:
            raise ConfigError(f"{key}: {str(file)!r} is no GGUF file: it does not start with 'GGUF'")


def _check_packages(file: Path, key: str) -> None:
    if missing := [name for name in _PACKAGES if find_spec(name) is None]:
        text = f"{str(file)!r} needs {', '.join(missing)} to be converted"
        raise ConfigError(f"{key}: {text}: pip install 'turnwise[gguf]'")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    from filelock import FileLock

    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f"{folder.name}.lock")):
        yield


def _write(file: Path, folder: Path, key: str) -> None:
    size = file.stat().st_size / 1e6
    write_error(f"turnwise: converting {file} ({size:.3g} MB) to {folder}; this is done once and can take minutes\n")
    for left in folder.parent.glob(f"{glob.escape(folder.name)}.*{PARTIAL}"):  # of a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    partial = Path(mkdtemp(prefix=f"{folder.name}.", suffix=PARTIAL, dir=folder.parent))
    try:
        _run_converter(file, partial, key)
        partial.chmod(0o755)  # as any other folder: a group may share the cache
        replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _run_converter(file: Path, folder: Path, key: str) -> None:
    """Convert in another process: this one keeps its memory and random state, and does not import torch."""
    command = [sys.executable, "-m", "turnwise.models.gguf_converter", str(file.absolute()), str(folder.absolute())]
    if sys.stderr.isatty():
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    else:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | SILENT)
    if done.returncode == 0:
        return
    try:
        failure = json.loads(done.stdout)
        kind, text, number = failure["kind"], failure["text"], failure["errno"]
    except (ValueError, KeyError, TypeError):
        last = next(reversed((done.stderr or "").strip().splitlines()), "it printed nothing")
        reason = f"its process ended with the code {done.returncode}: {last}"
        raise ConfigError(f"{key}: {str(file)!r} cannot be converted: {reason}") from None
    if number is not None:
        raise OSError(number, os.strerror(number), str(folder.parent))
    raise ConfigError(f"{key}: {str(file)!r} {_describe(kind, text)}")


def _describe(kind: str, text: str) -> str:
    if kind in ("MemoryError", "ImportError", "ConfigError") or any(each in text for each in _UNSUPPORTED):
        return f"cannot be converted: {text or kind}"
    return f"is cut off or damaged: {kind}: {text}; download it again"
