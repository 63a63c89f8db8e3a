"""The start of the command line with all plugins: what it imports, reads and holds in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Final

import pytest

from turnwise.cli.plugins_command import plugin_rows
from turnwise.plugin.host import load
from turnwise.types import PluginRecipe
from turnwise_testing.whole_runs.scripted_run import SITE, write_scripted_run

HEAVY: Final = (
    "aiohttp",
    "asyncio",
    "cattrs",
    "datasets",
    "hypothesis",
    "jinja2",
    "jsonschema_rs",
    "math_verify",
    "matplotlib",
    "mcp",
    "opentelemetry",
    "pandas",
    "psutil",
    "pyarrow",
    "pydantic",
    "pygments",
    "pytest",
    "ray",
    "reasoning_gym",
    "rich",
    "safetensors",
    "sglang",
    "starlette",
    "structlog",
    "sympy",
    "tokenizers",
    "torch",
    "transformers",
    "trl",
    "uvicorn",
    "verl",
    "vllm",
    "yaml",
)
PROGRAM: Final = """
import json, sys
from turnwise.cli import main

try:
    main({words!r})
except SystemExit:
    pass
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps([sorted(sys.modules), int(peak.split()[1])]), file=sys.stderr)
"""
MAX_KIB: Final = 60 * 1024


def start(*words: str) -> tuple[set[str], int]:
    """Run a command in a process of its own; return its modules, and its peak of resident memory in KiB."""
    command = [sys.executable, "-c", PROGRAM.format(words=list(words))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    modules, peak = json.loads(done.stderr.splitlines()[-1])
    return set(modules), peak


def test_the_list_of_commands_imports_nothing_heavy() -> None:
    """`turnwise --help` imports no implementation of a command, no engine and no library that they need."""
    modules, peak = start("--help")

    assert [name for name in HEAVY if name in modules] == []
    assert peak <= MAX_KIB, f"{peak / 1024:.0f} MiB"


@pytest.mark.many_cases(3)
@pytest.mark.parametrize("command", ["config", "convert", "doctor", "gateway", "plan", "train", "view"])
def test_a_command_imports_no_engine_before_it_runs(command: str) -> None:
    """`turnwise COMMAND --help` loads neither a tensor library nor Ray."""
    modules, _ = start(command, "--help")

    assert [name for name in ("ray", "sglang", "tokenizers", "torch", "transformers", "vllm") if name in modules] == []


def test_a_rollout_without_tensors_imports_no_tensor_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes seconds, and a rollout whose engine is elsewhere needs none, also for its batch."""
    write_scripted_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / SITE))

    modules, _ = start("rollout", "run.yaml", "--out", "out")

    assert (tmp_path / "out/batch.safetensors").is_file()
    assert [name for name in ("ray", "torch", "vllm") if name in modules] == []


def test_the_metadata_of_a_distribution_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading all plugins parses each METADATA once, and so does the list of what plugins need."""
    # A backport of importlib.metadata, which libraries import, finds distributions of a class of its own.
    kind = type(next(distributions(name="turnwise")))
    read = kind.read_text
    reads: Counter[str] = Counter()

    def count(distribution: Any, filename: str) -> str | None:
        if filename == "METADATA":
            reads[str(distribution._path)] += 1
        return read(distribution, filename)

    monkeypatch.setattr(kind, "read_text", count)
    host = load(PluginRecipe())
    assert len(reads) > 20
    assert set(reads.values()) == {1}
    reads.clear()
    plugin_rows(host)
    assert set(reads.values()) == {1}
