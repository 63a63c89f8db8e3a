"""
Measures the embedded engine, attention, weight updates and sleep on one device, and writes a JSON file and a table.

    make bench-gpu                              # on a GPU, in under 10 minutes
    make bench-gpu TURNWISE_TEST_DEVICE=cpu     # on a CPU, with smaller sizes

Each figure is the median of `--rounds` rounds with the least and the largest, after one round that does not count.
Weights are random: only their shapes matter here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measurement import describe_machine
from torch.nn.attention.flex_attention import flex_attention

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "gpu"))

from gpu_support import (
    VOCABULARY,
    Target,
    attention_inputs,
    describe,
    layout_columns,
    load_policy,
    make_engine,
    save_qwen3,
)

import turnwise_segment_attention as segments
from turnwise.types import GenerateRequest, SamplingParams
from turnwise.weights.sources import source_of

Row = dict[str, Any]
MIB = 2**20


def spread(values: list[float]) -> Row:
    """Return median, least and largest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


async def decode(engine: Any, number: int, num_tokens: int) -> float:
    """Return the seconds that requests with new random contexts of 64 tokens take together."""
    random, names = np.random.default_rng(), os.urandom(6).hex()
    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for index in range(number):
            request = GenerateRequest(
                request_id=f"{names}-{index}",
                trajectory_id=f"{names}-{index}",
                token_ids=random.integers(0, VOCABULARY, 64).astype(np.int32),
                sampling=SamplingParams(max_tokens=num_tokens),
            )
            group.create_task(engine.generate(request))
    return time.perf_counter() - started


async def measure_engine(target: Target, model: Path, rounds: int) -> list[Row]:
    """Measure decoding at 1, 8, 64 and 256 requests, then weight updates, and sleep at both levels."""
    dtype = "bfloat16" if target.is_cuda else "float32"
    num_tokens = target.pick(small=8, cpu=16, cuda=64)
    counts = target.pick(small=(1,), cpu=(1, 8, 64, 256), cuda=(1, 8, 64, 256))
    engine = make_engine(target, model, dtype=dtype, num_blocks=4096)
    await engine.start()
    rows: list[Row] = []
    try:
        for count in counts:
            seconds = [await decode(engine, count, num_tokens) for _ in range(rounds + 1)][1:]
            rates = spread([count * num_tokens / each for each in seconds])
            rows.append(
                {"measured": f"embedded engine, requests at once: {count}, {dtype}", "unit": "tokens/s", **rates}
            )
        rows += await measure_weights(target, engine, load_policy(target, model, dtype), rounds)
    finally:
        await engine.stop()
    return rows


async def measure_weights(target: Target, engine: Any, policy: Any, rounds: int) -> list[Row]:
    """Measure updates from tensors on the device, and sleep and wake-up with the driver's free bytes."""
    num_bytes = sum(each.nbytes for each in policy.parameters())
    seconds: list[float] = []
    for version in range(1, rounds + 2):
        with target.freed() as update:
            await engine.update_weights(source_of(policy), version)
        seconds.append(update.seconds)
    rows = [{"measured": f"weight update, {num_bytes / MIB:.0f} MiB", "unit": "s", **spread(seconds[1:])}]
    for level in (1, 2):
        found: dict[str, list[Any]] = {"sleep": [], "wake up": []}
        for _ in range(rounds + 1):
            with target.freed() as asleep:
                await engine.sleep(level)
            with target.freed() as awake:
                await engine.wake_up()
                if level == 2:
                    await engine.update_weights(source_of(policy), 1)
            found["sleep"].append(asleep)
            found["wake up"].append(awake)
        for name, each in found.items():
            rows.append(
                {"measured": f"{name}, level {level}", "unit": "s", **spread([one.seconds for one in each[1:]])}
            )
            if target.is_cuda:
                freed = spread([one.num_bytes / MIB for one in each[1:]])
                rows.append({"measured": f"{name}, level {level}, memory that becomes free", "unit": "MiB", **freed})
    return rows


def attention_of(kind: str, columns: Any) -> Callable[..., torch.Tensor]:
    """Return a function of query, key and value; masks and plans are made by each call, as in a training step."""
    if kind == "segment":
        return lambda *inputs: segments.segment_attention(*inputs, segments.plan(*columns))
    if kind == "flex":
        compiled = torch.compile(flex_attention, dynamic=False)
        return lambda *inputs: compiled(*inputs, block_mask=segments.block_mask(*columns))
    token = torch.arange(columns[0].shape[1], device=columns[0].device)

    def dense(*inputs: torch.Tensor) -> torch.Tensor:
        seen = segments.mask_mod(*columns)(torch.zeros_like(token)[:1, None], token[:1], token[:, None], token[None])
        return torch.nn.functional.scaled_dot_product_attention(*inputs, attn_mask=seen)

    return dense


def measure_attention(target: Target, rounds: int) -> list[Row]:
    """Measure a forward and backward pass of 8 heads of 64, and on a GPU the largest extra memory."""
    rows: list[Row] = []
    dtype = torch.bfloat16 if target.is_cuda else torch.float32
    kinds = ("dense", "segment", "flex") if target.is_cuda else ("dense", "segment")
    for length in target.pick(small=(256,), cpu=(512, 2048), cuda=(1024, 4096, 8192, 16384, 32768)):
        for kind in kinds:
            if kind == "dense" and length > 16384:
                continue  # its mask and scores would take most of the time of this benchmark
            columns, inputs = layout_columns(length, target.name), attention_inputs(length, target.name, dtype)
            attend, seconds, extra = attention_of(kind, columns), [], 0
            for number in range(rounds + 1):
                for each in inputs:
                    each.grad = None
                if target.is_cuda:
                    torch.cuda.reset_peak_memory_stats(target.name)
                    before = torch.cuda.memory_allocated(target.name)
                with target.freed() as took:
                    attend(*inputs).square().sum().backward()
                if number:  # the first compiles
                    seconds.append(1000 * took.seconds)
                    extra = torch.cuda.max_memory_allocated(target.name) - before if target.is_cuda else 0
            name = f"{kind} attention, {length} tokens, {str(dtype).removeprefix('torch.')}"
            rows.append({"measured": name, "unit": "ms", **spread(seconds)})
            if target.is_cuda:
                rows.append({"measured": f"{name}, extra memory", "unit": "MiB", **spread([extra / MIB])})
    return rows


def as_markdown(report: dict[str, Any]) -> str:
    """Return the machine and a table."""
    lines = [f"Device: {report['device']}; {report['machine']}.", ""]
    lines += ["| measured | median | least | largest | unit |", "| --- | --- | --- | --- | --- |"]
    for row in report["rows"]:
        figures = " | ".join(f"{row[name]:.4g}" for name in ("median", "min", "max"))
        lines.append(f"| {row['measured']} | {figures} | {row['unit']} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Measure, and write both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of the files (default: %(default)s)")
    parser.add_argument("--small", action="store_true", help="the smallest sizes on a CPU, to check this program")
    arguments = parser.parse_args()
    name = "cpu" if arguments.small else os.environ.get("TURNWISE_TEST_DEVICE", "cuda")
    target = Target(name, small=arguments.small)
    if target.is_cuda and not torch.cuda.is_available():
        sys.exit(f"torch finds no device {name}: set TURNWISE_TEST_DEVICE=cpu to measure on a CPU")
    with tempfile.TemporaryDirectory() as folder:
        width, layers = target.pick(small=(32, 2), cpu=(128, 4), cuda=(1024, 8))
        model = save_qwen3(Path(folder), hidden_size=width, num_layers=layers)
        rows = asyncio.run(measure_engine(target, model, arguments.rounds))
    rows += measure_attention(target, arguments.rounds)
    report = {"device": target.name, "packages": describe(), "machine": describe_machine(), "rows": rows}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f"{target.name}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (arguments.out / f"{target.name}.md").write_text(as_markdown(report), encoding="utf-8")
    print(as_markdown(report))


if __name__ == "__main__":
    main()
