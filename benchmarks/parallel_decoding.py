"""
Compares decoding of four parallel paths with decoding of the longest path alone: forward passes and time.

Uses the embedded engine and the tiny model of turnwise-parallel-thinking. Both variants alternate; the result is the
median of the ratios of consecutive runs.
"""

import argparse
import asyncio
import statistics
import time
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import turnwise_parallel_thinking
from turnwise.record.trajectory import Path, Trajectory
from turnwise.types import GenerateRequest, SamplingParams
from turnwise_transformers_engine.layouts.decoder import LayoutDecoder


async def decode(model: Any, num_paths: int, num_tokens: int, num_prompt_tokens: int) -> tuple[int, float, float]:
    """Decode paths, the longest with `num_tokens`; return forward passes, CPU seconds and wall seconds."""
    decoder = LayoutDecoder(model, capacity=16384)
    trajectory = Trajectory(np.arange(num_prompt_tokens) % 250)
    paths = trajectory.fork(num_paths)
    lengths = [num_tokens * (8 - i) // 8 for i in range(num_paths)]
    started = time.process_time(), time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for path, length in zip(paths, lengths, strict=True):
            path.add_forced([1])
            group.create_task(decode_path(decoder, path, length))
    seconds = time.process_time() - started[0], time.perf_counter() - started[1]
    passes = decoder.num_passes
    await decoder.stop()
    return passes, *seconds


async def decode_path(decoder: LayoutDecoder, path: Path, max_tokens: int) -> None:
    ended = asyncio.get_running_loop().create_future()
    request = GenerateRequest(
        request_id=str(path.index), trajectory_id="t", token_ids=path.input_ids, sampling=SamplingParams(),
        layout=path.layout,
    )  # fmt: skip
    decoder.submit(str(path.index), request, max_tokens, lambda error: ended.set_result(error))
    assert await ended is None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of the longest path (default: 128)")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the prompt (default: 64)")
    parser.add_argument("--paths", type=int, default=4, help="parallel paths (default: 4)")
    parser.add_argument("--repeats", type=int, default=9, help="measurements of each variant (default: 9)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(turnwise_parallel_thinking.model_dir(), dtype=torch.float32).eval()
    sizes = options.tokens, options.prompt
    ratios, wall_ratios = [], []
    for _ in range(options.repeats):
        alone = asyncio.run(decode(model, 1, *sizes))
        together = asyncio.run(decode(model, options.paths, *sizes))
        ratios.append(together[1] / alone[1])
        wall_ratios.append(together[2] / alone[2])
    print(
        f"longest path alone: {alone[0]} passes; {options.paths} paths: {together[0]} passes; {options.tokens} tokens"
    )
    print(
        f"time of {options.paths} paths relative to the longest alone: CPU {statistics.median(ratios):.2f} (median),"
        f" {min(ratios):.2f} to {max(ratios):.2f}; wall {statistics.median(wall_ratios):.2f}"
    )


if __name__ == "__main__":
    main()
