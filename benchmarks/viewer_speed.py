"""
Times the server of `turnwise view` on a large run, over HTTP, and reports its memory.

    python benchmarks/viewer_speed.py                        100,000 episodes of 1,000 tokens, in a temporary folder
    python benchmarks/viewer_speed.py --episodes 10000 --keep runs/large
    python benchmarks/viewer_speed.py --beside ../other/plugins/viewer/src      in turns with another version

Each line has the median of all repeats, the least and the most. The run has the groups of rows that `turnwise rollout`
writes. The texts of 1,024 episodes repeat; ids, rewards, statuses and counts do not. A search has the time until its
first page is settled, and the time until its hits are counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from turnwise_result_files.row_file import join_batches
from turnwise_result_files.row_schema import JSON, SCHEMA

GROUP = 64
PATTERNS = 16
NEEDLE = "a needle in the haystack"
"""Prompt of each 5,120th episode."""


def lists(values: np.ndarray, kind: pa.DataType) -> pa.Array:
    """Return the rows of a matrix as lists."""
    rows, size = values.shape
    return pa.ListArray.from_arrays(
        pa.array(np.arange(0, (rows + 1) * size, size, dtype=np.int32)), values.ravel()
    ).cast(pa.list_(kind))


def token_columns(rng: np.random.Generator, num_tokens: int) -> dict[str, pa.Array]:
    """Return the tokens and texts of a group of episodes."""
    prompt, response = num_tokens // 10, num_tokens - num_tokens // 10
    ids = rng.zipf(1.3, (GROUP, num_tokens)) % 50_000
    words = np.array([f"word{each}" for each in range(5000)])
    texts = [" ".join(words[rng.zipf(1.3, response) % 5000]) for _ in range(GROUP)]
    messages = [
        json.dumps([{"role": "user", "content": "a task"}, {"role": "assistant", "content": each}]) for each in texts
    ]
    segment = {"origin": "action", "start": prompt, "stop": num_tokens, "block": -1, "path": -1}
    positions, zeros = np.tile(np.arange(num_tokens), (GROUP, 1)), np.zeros((GROUP, num_tokens), int)
    return {
        "prompt_ids": lists(ids[:, :prompt], pa.int32()),
        "response_ids": lists(ids[:, prompt:], pa.int32()),
        "response_mask": lists(np.ones((GROUP, response), np.uint8), pa.uint8()),
        "logprobs": lists(-rng.exponential(size=(GROUP, response)), pa.float32()),
        "weight_versions": lists(zeros[:, prompt:], pa.int32()),
        "position_ids": lists(positions, pa.int32()),
        "block_start": lists(zeros, pa.int32()),
        "path_start": lists(zeros, pa.int32()),
        "segments": pa.array([[segment]] * GROUP, SCHEMA.field("segments").type),
        "prompt_text": pa.array(["a task"] * GROUP),
        "response_text": pa.array(texts),
        "messages": pa.array(messages),
        "task_messages": pa.array(['[{"role": "user", "content": "a task"}]'] * GROUP),
        **{
            name: pa.array(['{"prompt": 100, "action": 900}'] * GROUP)
            for name in JSON
            if name not in ("messages", "task_messages")
        },
    }


def number_columns(rng: np.random.Generator, start: int) -> dict[str, pa.Array]:
    """Return the other columns of a group of episodes."""
    numbers = np.arange(start, start + GROUP)
    columns = {
        "uid": [f"{each // 8:016x}" for each in numbers],
        "key": [f"{each:016x}" for each in numbers],
        "worker": ["worker 0"] * GROUP,
        "mask_ratio": rng.random(GROUP),
        "tool_reward": np.zeros(GROUP),
        "sample_index": numbers // 8,
        "rollout_n": numbers % 8,
        "status": np.where(rng.random(GROUP) < 0.9, "completed", "truncated"),
        "reward": rng.random(GROUP),
    }
    columns |= {name: [name] * GROUP for name in ("agent_name", "data_source", "task_agent_name")}
    columns |= {name: np.zeros(GROUP, int) for name in ("global_step", "trajectory_index")}
    columns |= {"validation": [False] * GROUP, "objective": ["exact"] * GROUP}
    columns |= {
        name: rng.integers(0, 5, GROUP) for name in SCHEMA.names if name.startswith("num_") and name not in JSON
    }
    columns |= {name: rng.random(GROUP) for name in SCHEMA.names if name.endswith("_s")}
    return {name: pa.array(values, SCHEMA.field(name).type) for name, values in columns.items()}


def write_run(folder: Path, num_episodes: int, num_tokens: int) -> None:
    """Write the episodes of a run."""
    rng = np.random.default_rng(0)
    patterns = [token_columns(rng, num_tokens) for _ in range(PATTERNS)]
    folder.mkdir(parents=True, exist_ok=True)
    with pq.ParquetWriter(folder / "trajectories.parquet", SCHEMA, compression="zstd") as writer:
        for group in join_batches(batches(rng, patterns, num_episodes)):
            writer.write_table(group, row_group_size=group.num_rows)


def batches(
    rng: np.random.Generator, patterns: list[dict[str, pa.Array]], num_episodes: int
) -> Iterator[pa.RecordBatch]:
    """Yield the episodes, 64 at a time, as a writer of a rollout does."""
    for start in range(0, num_episodes, GROUP):
        columns = patterns[start // GROUP % PATTERNS] | number_columns(rng, start)
        if start // GROUP % 80 == 40:
            columns["prompt_text"] = pa.array([NEEDLE] + ["a task"] * (GROUP - 1))
        rows = [columns.get(field.name, pa.nulls(GROUP, field.type)) for field in SCHEMA]
        yield pa.record_batch(rows, SCHEMA).slice(0, num_episodes - start)


def ask(url: str, path: str, **parameters: object) -> tuple[float, dict]:
    """Return the seconds of a request, and its answer."""
    start = time.perf_counter()
    with urllib.request.urlopen(f"{url}api/v1/{path}?{urllib.parse.urlencode(parameters)}") as response:
        answer = json.load(response)
    return time.perf_counter() - start, answer


def search(url: str, text: str, **conditions: object) -> tuple[float, float]:
    """Return the seconds until the first page has its hits, and until they are counted; asks as often as the page."""
    start = time.perf_counter()
    settled = 0.0
    while True:
        answer = ask(url, "runs/0/episodes", q=text, **conditions)[1]
        settled = settled or (time.perf_counter() - start if answer["settled"] else 0.0)
        if answer["searched"] == 1:
            return settled, time.perf_counter() - start
        time.sleep(0.5 if settled else 0.15)


def anonymous_mib(process: int) -> float:
    """Return the memory of a process without pages of files, which the system takes back whenever it needs them."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


def processor_s(process: int) -> float:
    """Return the seconds that a process has used on all processors."""
    times = psutil.Process(process).cpu_times()
    return float(times.user + times.system)


def measure(folder: Path, source: str) -> dict[str, float]:
    """Start a server, and return the times of requests in seconds and its memory in MiB."""
    program = "import sys; from turnwise.cli import main; sys.exit(main())"
    environment = os.environ | ({"PYTHONPATH": source} if source else {})
    found = {}
    start = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-c", program, "view", str(folder)], stdout=subprocess.PIPE, text=True, env=environment
    ) as server:
        try:
            url = server.stdout.readline().strip()
            found["start, with the index"] = time.perf_counter() - start
            episode = {"key": "0000000000000010/3"}
            for name, path, parameters in (
                ("first page", "runs/0/episodes", {}),
                ("sort by reward", "runs/0/episodes", {"sort": "reward", "order": "desc"}),
                ("filter by reward and tools", "runs/0/episodes", {"min_reward": 0.9, "tools": "used"}),
                ("groups by difference", "runs/0/groups", {"sort": "spread", "limit": 25}),
                ("an episode", "runs/0/episode", episode),
                ("its tokens", "runs/0/tokens", episode),
            ):
                found[name] = ask(url, path, **parameters)[0]
            best = {"sort": "reward", "order": "desc"}
            searches: list[tuple[str, str, dict[str, object]]] = [
                ("in every text", "word17", {}),
                ("in every text, by reward", "word18", best),
                ("in every text, with filters", "word19", {**best, "max_reward": 0.5, "tools": "used"}),
                ("with 19 hits", NEEDLE.upper(), {}),
                ("without a hit", "in no episode", {}),
            ]
            for name, text, conditions in searches:
                first, count = search(url, text, **conditions)
                found[f"a search {name}: first page"], found[f"a search {name}: count"] = first, count
            found["processor, start to end"] = processor_s(server.pid)
            found["memory (MiB)"] = anonymous_mib(server.pid)
            found["with pages of files (MiB)"] = psutil.Process(server.pid).memory_full_info().uss / 2**20
        finally:
            server.terminate()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the server of turnwise view on a large run.")
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="write the run there, or use the one that is there")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--beside", nargs="*", default=[], metavar="SRC", help="sources of other versions of the viewer"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        if not (folder / "trajectories.parquet").exists():
            write_run(folder, options.episodes, options.tokens)
        size = (folder / "trajectories.parquet").stat().st_size
        print(f"{options.episodes} episodes of {options.tokens} tokens, {size / 2**20:.0f} MiB")
        sources = ["", *options.beside]
        runs: list[list[dict[str, float]]] = [[] for _ in sources]
        for _ in range(options.repeats):
            for results, source in zip(runs, sources, strict=True):
                results.append(measure(folder, source))
        report(runs)


def report(runs: list[list[dict[str, float]]]) -> None:
    """Print a line for each measure: median, least and most, of each version, and the ratio of the medians."""
    for name in runs[0][0]:
        values = [[each[name] for each in results] for results in runs]
        texts = [f"{median(each):8.2f} ({min(each):.2f} to {max(each):.2f})" for each in values]
        ratios = [f"  ratio {median(values[0]) / median(each):.3f}" for each in values[1:]]
        print(f"{name:44}{'   '.join(texts)}{''.join(ratios)}", flush=True)


if __name__ == "__main__":
    main()
