"""Runs in other processes that take a model from a hub on loopback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from turnwise_testing.inputs.model_hub import ModelHub
from turnwise_testing.whole_runs.scripted_run import PLUGIN, SITE, write_scripted_run

NAME = "acme/tiny-chat"
REAL_ENGINE = {"name": "transformers", "device": "cpu", "max_context": 256, "num_blocks": 64}
DUPLICATES = {
    "pytorch_model.bin": b"a pickle",
    "model.fp16.safetensors": b"half",
    "tiny.Q4_0.gguf": b"GGUF",
    "onnx/model.onnx": b"onnx",
    "onnx/config.json": b"{}",
    "README.md": b"# Tiny",
    "original/consolidated.00.pth": b"pickle",
}
"""Other forms of the weights, and texts, as repositories have them."""


def write_run(folder: Path, path: str = NAME, *, real: bool = False, **sections: object) -> Path:
    """Write `run.yaml` with a scripted engine or the real one of transformers, and return the folder."""
    parts: dict[str, object] = {"model": {"path": path}, **sections}
    if real:
        parts |= {"engine": REAL_ENGINE, "plugins": [PLUGIN, "transformers_engine", *sections.get("plugins", ())]}  # type: ignore[misc]
    write_scripted_run(folder, num_tasks=2, **parts)
    return folder


def turnwise(
    folder: Path, hub: ModelHub, *arguments: str, cache: str = "cache", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, with a cache of models there."""
    return subprocess.run(
        [sys.executable, "-m", "turnwise.cli", *arguments],
        cwd=folder,
        env=environment(folder, hub, cache, **variables),
        capture_output=True,
        text=True,
        check=False,
    )


def environment(folder: Path, hub: ModelHub, cache: str = "cache", **variables: str) -> dict[str, str]:
    """Return the variables of such a process."""
    found = hub.environment(folder / cache, **variables)
    found["PYTHONPATH"] = f"{folder / SITE}:{found.get('PYTHONPATH', '')}"
    return found


def snapshot(folder: Path, commit: str, name: str = NAME, cache: str = "cache") -> Path:
    """Return the folder of a commit in the cache."""
    return folder / cache / "hub" / f"models--{name.replace('/', '--')}" / "snapshots" / commit
