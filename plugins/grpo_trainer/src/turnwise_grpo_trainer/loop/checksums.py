"""
Checksums of the files of a checkpoint, so that a file that a disk, a copy or a hand changed is refused, not loaded.

CRC-32 finds any change within four neighbouring bytes, and all but one in four billion of the others. It reads several
GB/s on one core, four times as many as SHA-256, and files are read in parallel; disks write fewer. It stops no forger,
who can write the checksums too: a forged checkpoint runs no code, because `model_state` reads no pickles.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from turnwise.errors import ConfigError, first_line

CHECKSUMS_FILE: Final = "checksums.json"
_CHUNK: Final = 1 << 22
_NUM_THREADS: Final = min(8, os.cpu_count() or 1)
_REMEDY: Final = "restore it from a copy, or remove the folder of the checkpoint to continue from an earlier one"


def write_checksums(folder: Path) -> None:
    """Write the checksums of all files of a checkpoint, which is complete but for them."""
    names = sorted(set(_list_files(folder)) - {CHECKSUMS_FILE})
    (folder / CHECKSUMS_FILE).write_text(_dump(_read_all(folder, names)), encoding="utf-8")


def check_files(folder: Path, only: str | None = None) -> bool:
    """
    Compare the files of a checkpoint with its checksums.

    Args:
        folder: of the checkpoint.
        only: the only file to compare; None compares all, and refuses files that were added.

    Returns:
        Whether the folder has checksums.

    Raises:
        ConfigError: a file was changed, added or removed, or cannot be read; the line names it.
    """
    if not (folder / CHECKSUMS_FILE).exists():
        return False
    expected = _read_checksums(folder / CHECKSUMS_FILE)
    names = sorted(expected) if only is None else [only]
    present = set(_list_files(folder))
    for name in names:
        if name not in expected or name not in present:
            missing = name if name not in present else f"the checksum of {name}"
            raise ConfigError(f"{folder}: {missing} is missing; {_REMEDY}")
    added = sorted(name for name in present - {*expected, CHECKSUMS_FILE} if not Path(name).name.startswith("."))
    if only is None and added:
        raise ConfigError(f"{folder}: {added[0]} is not a file of this checkpoint; remove it")
    for name, found in _read_all(folder, names).items():
        if found != expected[name]:
            raise ConfigError(f"{folder / name}: was changed after it was written: {_differ(found, expected[name])}")
    return True


_Sum = tuple[int, str]
"""The size of a file in bytes, and its CRC-32 in hexadecimal digits."""


def _differ(found: _Sum, expected: _Sum) -> str:
    what = "bytes" if found[0] != expected[0] else "as its CRC-32"
    has, had = (found[0], expected[0]) if found[0] != expected[0] else (found[1], expected[1])
    return f"it has {has} {what}, not {had}; {_REMEDY}"


def _list_files(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()]


def _read_all(folder: Path, names: Sequence[str]) -> dict[str, _Sum]:
    with ThreadPoolExecutor(_NUM_THREADS) as pool:  # zlib and the system's reads leave the interpreter to others
        return dict(zip(names, pool.map(lambda name: _read(folder / name), names), strict=True))


def _read(file: Path) -> _Sum:
    size, value, buffer = 0, 0, memoryview(bytearray(_CHUNK))
    try:
        with file.open("rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                size, value = size + count, zlib.crc32(buffer[:count], value)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {first_line(error)}") from error
    return size, f"{value:08x}"


def _dump(files: Mapping[str, _Sum]) -> str:
    content: dict[str, object] = {name: list(each) for name, each in sorted(files.items())}
    text = json.dumps(content)
    return json.dumps({"crc32": f"{zlib.crc32(text.encode()):08x}", "files": content}, indent=1) + "\n"


def _read_checksums(file: Path) -> dict[str, _Sum]:
    try:
        text = file.read_text(encoding="utf-8")
        files: dict[str, _Sum] = {name: (size, value) for name, (size, value) in json.loads(text)["files"].items()}
        is_whole = text == _dump(files)  # compares the whole text, so that no change of it is overlooked
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {first_line(error)}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        is_whole = False
    if not is_whole:
        raise ConfigError(f"{file}: was changed after it was written; {_REMEDY}")
    return files
