"""Benchmarks run: a change of the code that they measure may not leave them broken."""

import subprocess
import sys
from pathlib import Path

import pytest

from turnwise import Trajectory
from turnwise_result_files import TrajectoryWriter
from turnwise_testing.inputs.small_episodes import episode

FOLDER = Path(__file__).parents[1] / "benchmarks"

SMALL_RUNS = {
    "decode_speed.py": ("--requests", "1", "--tokens", "4", "--rounds", "1"),
    "gateway_callers.py": ("--programs", "2", "--sockets", "2"),
    "gateway_cost.py": ("--runs", "1", "--turns", "2"),
    "gateway_streams.py": ("--token-ms", "1", "--arguments", "20"),
    "gateway_hostile.py": ("--only", "chat: 1 MiB of text"),
    "gateway_sessions.py": ("--idle", "4", "--at-once", "2", "--rounds", "1", "--rate", "500"),
    "parallel_decoding.py": ("--tokens", "8", "--repeats", "1"),
    "picture_cost.py": ("--episodes", "4"),
    "record_cost.py": ("--runs", "1"),
    "router_replay.py": ("--requests", "2", "--tokens", "8", "--noise", "0"),
    "shared_prefixes.py": ("--case", "prompts", "--layers", "1", "--length", "16", "--groups", "1", "--repeat", "1"),
    "start_cost.py": ("--repeat", "1"),
    "turn_cost.py": ("--runs", "1", "--episodes", "8", "--wrappers"),
    "weight_copies.py": ("--mib", "8", "--tensors", "8"),
    "viewer_speed.py": ("--episodes", "200", "--tokens", "20", "--repeats", "1"),
    "wire_cost.py": ("--episodes", "2"),
    "workspace_snapshots.py": ("--variants", "bubblewrap", "--rounds", "1"),
    "workspaces.py": ("--backends", "bubblewrap", "--rounds", "1", "--starts", "2", "--commands", "2"),
}
"""Arguments of the quickest possible runs. The others need minutes, Ray, or a folder of a run."""


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL_RUNS)
def test_a_benchmark_measures(name):
    """A small run ends without an error and prints figures."""
    command = [sys.executable, FOLDER / name, *SMALL_RUNS[name]]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)

    assert 0 == done.returncode, done.stderr[-2000:]
    assert any(character.isdigit() for character in done.stdout)


@pytest.mark.parametrize("options", [("--llama", "python"), ("--llama-model", "a.gguf"), ("--llama-unified",)])
def test_options_of_llama_need_each_other(options):
    """A comparison with llama.cpp without its model file, or without its interpreter, ends before a process starts."""
    command = [sys.executable, FOLDER / "decode_speed.py", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)

    assert 2 == done.returncode
    assert "--llama" in done.stderr.splitlines()[-1]
    assert not done.stdout


def test_tokens_of_episodes_are_counted(tmp_path):
    """Eight samples of a prompt share it, and a branch shares its turn; a file without a trained row has no tokens."""
    prompt = Trajectory(range(10))
    branch = Trajectory(range(10))
    branch.add_action([20, 21], [-0.5] * 2)
    records = [branch.branched(branch.mark()), *(prompt.branched(prompt.mark()) for _ in range(7))]
    for number, record in enumerate(records):
        record.add_action([30 + number, 40], [-0.5] * 2)
    files = [tmp_path / "shared.parquet", tmp_path / "none.parquet"]
    for file, found in zip(files, ([branch, *records], [prompt]), strict=True):
        with TrajectoryWriter(file) as writer:
            for number, record in enumerate(found):
                writer.write(episode(record, uid=f"t{number}"))
    command = [sys.executable, FOLDER / "shared_prefixes.py", "--episodes", *files]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)

    separate, shared = 12 + 14 + 7 * 12, 10 + 2 + 8 * 2
    lines = [f"| {files[0]} | 9 | {separate} | {shared} | {separate / shared:.2f} |", f"| {files[1]} | 0 | 0 | 0 | - |"]
    assert lines == done.stdout.splitlines()[2:]


@pytest.mark.slow
def test_every_benchmark_can_be_imported():
    """The names that a benchmark imports from turnwise exist, also in benchmarks that take long."""
    names = sorted(file.stem for file in FOLDER.glob("*.py"))
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
    command = [sys.executable, "-c", code, *names]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False, timeout=900)

    assert names
    assert 0 == done.returncode, done.stderr[-2000:]
