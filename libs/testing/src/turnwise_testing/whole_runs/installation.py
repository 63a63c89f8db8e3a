"""Installs throw-away plugins and distributions into a folder, as `pip install` would leave them."""

from __future__ import annotations

from pathlib import Path


def install_plugin(folder: Path, module: str, code: str, *, entry: str = "", version: str = "1.0") -> Path:
    """
    Install a plugin of one module into a folder, which is made if it is missing. Return the module's file.

    turnwise finds the plugin while the folder is on `sys.path`, or in `PYTHONPATH` for other processes.

    Args:
        folder: of the module and its metadata.
        module: name of the module; the distribution has this name with hyphens.
        code: source of the module.
        entry: name of the entry point; empty for the module's name.
        version: of the distribution.
    """
    info = write_distribution(folder, module.replace("_", "-"), version)
    (info / "entry_points.txt").write_text(f"[turnwise]\n{entry or module} = {module}\n", encoding="utf-8")
    file = folder / f"{module}.py"
    file.write_text(code, encoding="utf-8")
    return file


def write_distribution(folder: Path, name: str, version: str) -> Path:
    """Write the metadata of a distribution, which then looks installed to code with the folder on `sys.path`."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    return info
