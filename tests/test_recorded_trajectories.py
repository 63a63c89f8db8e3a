"""Trajectories of a scripted engine are bit-identical to those recorded before the last large refactoring."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from turnwise_testing.whole_runs.installation import install_plugin

PLUGIN = Path(__file__).with_name("turnwise_recorded.py")
END = "<|im_end|>"
TIMES = frozenset({"total_s", "llm_s", "tool_s", "reward_s", "metrics_extra"})
"""Columns that hold seconds: those of a tool are in `metrics_extra`."""
RUNS: dict[str, dict[str, Any]] = {
    "tool": {
        "model": {"path": "package:turnwise_calculator_demo"},
        "agent": {"name": "tool_agent", "max_assistant_turns": 5},
        "parser": "hermes",
        "tools": ["calculator"],
        "reward": "exact_match",
        "prompts": ["Work out 12 * 7.", "Work out 47 * (95 - 68).", "Work out 3 + 4."],
        "texts": [
            f'<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "12 * 7"}}}}\n</tool_call>{END}',
            '<tool_call>\n{"name": "calculator", "arguments": {"expression": "95 - 68"}}\n</tool_call>\n'
            f'<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "3 + 4"}}}}\n</tool_call>{END}',
            f'<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "1 / 0"}}}}\n</tool_call>{END}',
            f'<tool_call>\n{{"name": "search", "arguments": }}\n</tool_call>{END}',
            f"The answer is 84.{END}",
        ],
    },
    "torl": {
        "model": {"path": "package:turnwise_torl_python"},
        "agent": {"name": "torl_python", "max_tool_calls": 3},
        "tools": [{"name": "python", "sandbox": {"timeout_s": 20}}],
        "reward": "torl_math",
        "prompts": ["Work out 17 * 3.", "Work out 20 - 6.", "Work out 5 * 5."],
        "texts": [
            "```python\nprint(17 * 3)\n```\n```output",
            "```python\nprint(undefined)\n```\n```output",
            f"The answer is \\boxed{{51}}.{END}",
            f"\\boxed{{14}}{END}",
        ],
    },
    "parallel": {
        "model": {"path": "package:turnwise_parallel_thinking"},
        "agent": {"name": "parallel_thinking", "num_paths": 3, "max_blocks": 2, "max_path_tokens": 24},
        "reward": {"name": "parallel_r1", "scheme": "accuracy"},
        "prompts": ["Work out 1 + 2.", "Work out 3 + 4 + 5.", "Work out 6 + 7."],
        "texts": [
            "<Parallel>",
            "Try it. <Parallel>",
            "<Parallel>",
            "1 + 2 = 3</Path>",
            "3 + 4 + 5 = 12</Path>",
            "<Summary>both agree</Summary>",
            f"The answer is 3.{END}",
        ],
    },
}
RECORDED = {
    "tool": "fce273139f75f7ba499af835c6b6d275388b82393e86c3bd965888bc2bad98e6",
    "torl": "1dc60d8e4d643991ce557e5fa7f87c5fd10eeb4c88bb44cf57948fe02168392b",
    "parallel": "b21b368c61406cfd47e9d76e1049dc896c471397acea8fe5cc08d672095d7e4d",
}
"""
The digest of each run, recorded at commit 6bee82c. In `tool`, calls without a readable name have become calls of
`malformed_call` in the messages since; its ids, masks and scores have not changed.
"""


def write_run(folder: Path, kind: str) -> None:
    """Write a config, its tasks and the plugin, as `pip install` would leave it, into a folder."""
    run = dict(RUNS[kind])
    prompts, texts = run.pop("prompts"), run.pop("texts")
    rows = [
        {"uid": f"task{i}", "messages": [{"role": "user", "content": p}], "ground_truth": "84"}
        for i, p in enumerate(prompts)
    ]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = {
        **run,
        "data": {"path": "tasks.jsonl"},
        "engine": {"name": "recorded", "texts": texts},
        "rollout": {"n": 8, "seed": 3, "prompt_length": 128, "response_length": 256, "sampling": {"temperature": 1.0}},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    install_plugin(folder, "turnwise_recorded", PLUGIN.read_text(encoding="utf-8"), entry="recorded")


def digest(file: Path) -> str:
    """Return the SHA-256 of all columns of a file of trajectories but the times."""
    rows = pq.read_table(file).to_pylist()
    # Some columns came later: `lineage` and the next two are empty in these runs, and the others differ in every run or
    # runtime. `limit` says why an episode was truncated.
    later = {"lineage": None, "outside_calls": [], "reports": [], "open_columns": None}
    limit = ("limit_name", "limit_value", "limit_reason")
    chance = {*TIMES, *limit, "key", "worker", "replicas"}
    kept = [{k: v for k, v in row.items() if k not in chance and (k, v) not in later.items()} for row in rows]
    kept.sort(key=lambda row: (row["uid"], row["rollout_n"]))
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["local", pytest.param("ray", marks=pytest.mark.ray)])
@pytest.mark.parametrize("kind", RUNS)
def test_trajectories_are_as_recorded(kind: str, runtime: str, tmp_path: Path) -> None:
    """Ids, masks, log-probabilities, layout, messages, scores and counters depend on neither version nor runtime."""
    write_run(tmp_path, kind)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    command = [sys.executable, "-m", "turnwise.cli", "rollout", "run.yaml", f"runtime={runtime}", "--out", "out"]

    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert RECORDED[kind] == digest(tmp_path / "out/trajectories.parquet")
