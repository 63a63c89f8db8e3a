"""Runs on disk for the tests of the viewer."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq

from turnwise.record.lineage import RecordLineage
from turnwise.record.result import EpisodeResult
from turnwise.record.trajectory import Trajectory
from turnwise.types import EpisodeMetrics, Fault, Status, Task, TrajectoryScore, TurnScore
from turnwise_result_files import TrajectoryWriter

HOSTILE = (
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "\u202eright to left\u202c zero\u200bwidth \ud800 half \x1b[31mred\x1b[0m [link](javascript:alert(1))"
)


def build_record(answer: Sequence[int] = (5, 6), version: int = 3) -> Trajectory:
    """A prompt of three tokens, a turn, an observation of two tokens, and a second turn."""
    record = Trajectory([1, 2, 3])
    record.add_action(list(answer), [-0.5] * len(answer), weight_version=version)
    record.add_observation([7, 8])
    record.add_action([9], [-1.25], weight_version=version + 1)
    return record


def build_parallel_record() -> Trajectory:
    """A record with a block of two paths and a summary after it."""
    record = Trajectory([1, 2])
    record.add_action([3], [-0.1], weight_version=0)
    first, second = record.fork(2)
    first.add_action([10, 11, 12], [-0.2] * 3, weight_version=0)
    second.add_action([20], [-0.3], weight_version=0)
    record.join([first, second])
    record.add_action([4, 5], [-0.4] * 2, weight_version=0)
    return record


def build_episode(task: int = 0, n: int = 0, *, reward: float | None = 1.0, **values) -> EpisodeResult:
    """An episode with one record and a tool call; `values` replace attributes of the result."""
    text = values.pop("text", f"the answer of task {task}")
    records = values.pop("trajectories", (build_record(),))
    messages = (
        {"role": "user", "content": f"question {task}"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "calculator", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c", "name": "calculator", "content": text},
        {"role": "assistant", "content": text},
    )
    scores = () if reward is None else tuple(TrajectoryScore(value=reward / len(records)) for _ in records)
    return EpisodeResult(
        task=Task(messages=messages[:1], uid=f"task-{task:04d}", sample_index=task, ground_truth=str(task)),
        rollout_n=n,
        **{
            "agent_name": "tool_agent",
            "status": Status.COMPLETED,
            "messages": messages,
            "trajectories": records,
            "scores": scores,
            "metrics": EpisodeMetrics(
                num_turns=2,
                replicas=(task % 2, 3),
                num_tool_calls=task % 3,
                num_tool_errors=task % 2 if task % 3 else 0,
                total_s=1.0 + task,
                num_tokens={"prompt": 3, "action": 3, "observation": 2, "forced": 0},
            ),
        }
        | values,
    )


def several_records(task: int = 0) -> EpisodeResult:
    """An episode with a main record and a branch of it."""
    return build_episode(
        task,
        trajectories=(build_record(), build_record((5, 7))),
        scores=(
            TurnScore(values=(0.25, 0.5), extra={"format": 0.5, "speed": 0.125}),
            TrajectoryScore(value=1.0, extra={"format": 0.25}),
        ),
        lineage=(
            RecordLineage(kind="main"),
            RecordLineage(parent=0, num_shared_tokens=4, kind="subagent", label="history was rewritten"),
        ),
    )


def failed_episode(task: int = 0) -> EpisodeResult:
    """An episode that failed before its first token."""
    fault = Fault(owner="tool", kind="ValueError", message="no such file")
    return build_episode(task, status=Status.FAILED, trajectories=(), scores=(), fault=fault)


def write_run(folder: Path, episodes: Sequence[EpisodeResult], *, name: str = "trajectories.parquet") -> Path:
    """Write a complete run, in groups of four rows, and return its folder."""
    with TrajectoryWriter(folder / name, rows_per_group=4) as writer:
        for episode in episodes:
            writer.write(episode)
    if name.endswith(".parquet"):
        pq.write_table(pq.read_table(folder / name), folder / name, row_group_size=4)
    return folder


def mixed_run(folder: Path) -> Path:
    """A run with two groups, a parallel record, a failed, a truncated and a branched episode."""
    run = [build_episode(task, n, reward=float(n % 2)) for task in range(2) for n in range(4)]
    run += [build_episode(2, n, reward=1.0) for n in range(2)]
    run += [build_episode(3, trajectories=(build_parallel_record(),)), failed_episode(4), several_records(5)]
    run.append(build_episode(6, status=Status.TRUNCATED, reward=0.0))
    for number in (1, 5):
        run[number] = build_episode(number // 4, number % 4, reward=1.0, text="another answer")
    lines = [{"step": 0, "validation/reward/mean": 0.3, "validation/reward/low": 0.2, "validation/reward/high": 0.4}]
    lines += [{"step": step, "reward/mean": step / 10, "length/mean": 50 + step} for step in range(1, 6)]
    lines.append(
        {"step": 5, "validation/reward/mean": 0.6, "validation/reward/low": 0.5, "validation/reward/high": 0.7}
    )
    write_run(folder, run)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def write_step(folder: Path, step: int, episodes: Sequence[EpisodeResult], advantage: float) -> None:
    """Write the file of a training step; each sampled token gets the advantage."""
    with TrajectoryWriter(folder / f"episodes/step-{step:08d}.parquet", training_step=step) as writer:
        for episode in episodes:
            writer.write(episode, [advantage * record.response_mask.astype("f4") for record in episode.trajectories])


def write_trace(folder, *slices):
    """Write a trace with a worker; a slice is its category, start and length in seconds, and its arguments."""
    name = {"ph": "M", "name": "process_name", "pid": 1000, "tid": 0, "args": {"name": "worker 0"}}
    drawn = [
        {
            "ph": "X",
            "name": kind,
            "cat": kind,
            "ts": start * 1e6,
            "dur": length * 1e6,
            "pid": 1000,
            "tid": 1,
            "args": args,
        }
        for kind, start, length, args in slices
    ]
    (folder / "trace.json").write_text(json.dumps({"traceEvents": [name, *drawn]}))


GUARD_S = 300
"""Guard against a hang."""
PROGRAM = [sys.executable, "-c", "import sys; from turnwise.cli import main; sys.exit(main())"]
ROOT = Path(__file__).parents[3]
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


def run_command(*arguments: str) -> None:
    """Run a command of turnwise in the root of the repository."""
    subprocess.run([*PROGRAM, *arguments], cwd=ROOT, check=True, capture_output=True)


@contextmanager
def start_command(*arguments: str, **options) -> Iterator[subprocess.Popen]:
    """Start a command of turnwise in the root of the repository; it is killed at the end of the block."""
    with subprocess.Popen(
        [*PROGRAM, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def runs_inline_script(page) -> bool:
    """Put a script into a page of the browser, and return whether it ran before the content policy reported it."""
    return page.evaluate(
        """() => new Promise((resolve) => {
            document.addEventListener("securitypolicyviolation", () => resolve(window.ran === true));
            const script = document.createElement("script");
            script.textContent = "window.ran = true";
            document.body.append(script);
        })"""
    )
