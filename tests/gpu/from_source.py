"""
Runs Python with the packages of this repository from their source folders: nothing is installed and no network is used.

    python3 tests/gpu/from_source.py -m pytest tests/gpu -m gpu

For a machine that has torch and little else. Packages of other projects must be there; the ones that are missing are
named, with the file that lists them. Where turnwise is installed, it is used as it is.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "requirements-gpu.txt"


def projects() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the folder and the metadata of each package of the repository."""
    for file in (
        ROOT / "core" / "pyproject.toml",
        *ROOT.glob("libs/*/pyproject.toml"),
        *ROOT.glob("plugins/*/pyproject.toml"),
    ):
        yield file.parent, tomllib.loads(file.read_text(encoding="utf-8"))["project"]


def missing_requirements() -> list[str]:
    """Return the requirements that are not installed, or too old."""
    missing = []
    for line in REQUIREMENTS.read_text(encoding="utf-8").splitlines():
        if found := re.match(r"([\w-]+)(?:>=([\d.]+))?", line):
            try:
                installed = version(found[1])
            except PackageNotFoundError:
                missing.append(line)
                continue
            if found[2] and _release(installed) < _release(found[2]):
                missing.append(f"{line} (there is {installed})")
    return missing


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def write_metadata(folder: Path) -> None:
    """Write the metadata by which turnwise finds its plugins, as an installation would."""
    for _, project in projects():
        info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        info.mkdir()
        text = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        (info / "METADATA").write_text(text, encoding="utf-8")
        lines = [f"{name} = {value}" for name, value in project.get("entry-points", {}).get("turnwise", {}).items()]
        (info / "entry_points.txt").write_text("\n".join(["[turnwise]", *lines, ""]), encoding="utf-8")


def main() -> None:
    """Replace this process by Python with the given arguments."""
    if missing := missing_requirements():
        sys.exit(
            f"{sys.executable} lacks {len(missing)} packages:\n  "
            + "\n  ".join(missing)
            + f"\ninstall them: {sys.executable} -m pip install -r {REQUIREMENTS.name}"
        )
    environment = dict(os.environ)
    if find_spec("turnwise") is None:
        folder = Path(tempfile.mkdtemp(prefix="turnwise-metadata-"))
        write_metadata(folder)
        paths = [str(folder), *(str(path / "src") for path, _ in projects())]
        known = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([*paths, *([known] if known else [])])
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], environment)


if __name__ == "__main__":
    main()
