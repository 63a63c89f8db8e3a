"""
Tokens per second through an engine plugin, over those of the same engine's own async API, in one run.

Both sides are started alike and stay up, or are one engine; they get the same requests in turns, so that what else the
machine does hits both. Where it does much else, `cpu_ratio` says more: tokens per second of computing, in all processes
of a side. Run it with the interpreter of the engine's own virtual environment:

    .venv-sglang/bin/python benchmarks/engine_overhead.py --engine sglang
    .venv-vllm/bin/python benchmarks/engine_overhead.py --engine vllm
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import platform
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from turnwise.protocols import Resources
from turnwise.types import GenerateRequest, SamplingParams

Side = Callable[[list[int], int], Awaitable[int]]
"""Samples so many tokens behind a context, and returns how many came."""

if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    # Also in the processes that SGLang starts, which import this file again.
    importlib.import_module("turnwise_sglang_engine.stand_ins").install()


async def sglang_sides(model: Path, max_context: int, stack: AsyncExitStack) -> tuple[Side, Side]:
    """Start SGLang twice: under the plugin, and bare with the same arguments."""
    from turnwise_sglang_engine import SglangConfig, SglangEngine, arguments

    config = SglangConfig(model=model, max_context=max_context, num_threads=1)
    os.environ |= arguments.server_environment(config)
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        importlib.import_module("turnwise_sglang_engine.stand_ins").install()
    sglang = importlib.import_module("sglang")
    bare_engine = sglang.Engine(**arguments.server_arguments(config, arguments.model_spec(config, Resources())))
    # Left last: it ends every child of this process.
    stack.callback(bare_engine.shutdown)
    engine = SglangEngine(config, Resources())
    await engine.start()
    stack.push_async_callback(engine.stop)

    async def bare(context: list[int], num_tokens: int) -> int:
        options = {"max_new_tokens": num_tokens, "temperature": 1.0, "ignore_eos": True}
        answer = await bare_engine.async_generate(input_ids=context, sampling_params=options, return_logprob=True)
        return len(answer["output_ids"])

    return through(engine), bare


async def vllm_sides(model: Path, max_context: int, stack: AsyncExitStack) -> tuple[Side, Side]:
    """Start vLLM once, under the plugin, and use its `AsyncLLM` with and without it: requests of both are the same."""
    from turnwise_vllm_engine import VllmConfig, VllmEngine

    config = VllmConfig(model=model, max_context=max_context, kv_cache_bytes=256 << 20, num_threads=1)
    engine = VllmEngine(config, Resources())
    await engine.start()
    stack.push_async_callback(engine.stop)
    vllm, params = importlib.import_module("vllm"), importlib.import_module("vllm.sampling_params")
    llm = vars(engine)["_running"].llm

    async def bare(context: list[int], num_tokens: int) -> int:
        options = vllm.SamplingParams(
            max_tokens=num_tokens,
            temperature=1.0,
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=params.RequestOutputKind.FINAL_ONLY,
        )
        prompt = {"type": "token", "prompt_token_ids": context}
        outputs = [each async for each in llm.generate(prompt, options, os.urandom(8).hex())]
        return len(outputs[-1].outputs[0].token_ids)

    return through(engine), bare


ENGINES = {"sglang": sglang_sides, "vllm": vllm_sides}


def through(engine: Any) -> Side:
    """Return the side of a plugin's engine."""

    async def generate(context: list[int], num_tokens: int) -> int:
        name = os.urandom(8).hex()
        sampling = SamplingParams(max_tokens=num_tokens, temperature=1.0)
        request = GenerateRequest(
            request_id=name, trajectory_id=name, token_ids=np.array(context, np.int32), sampling=sampling
        )
        return len((await engine.generate(request)).token_ids)

    return generate


def cpu_seconds() -> float:
    """Return what this process and all below it have computed; the side that waits adds next to nothing."""
    me = psutil.Process()
    times = [each.cpu_times() for each in (me, *me.children(recursive=True))]
    return sum(each.user + each.system for each in times)


async def rate(side: Side, contexts: list[list[int]], num_tokens: int) -> tuple[float, float]:
    """Return tokens per second of requests sent at once, and tokens per second of computing, in all processes."""
    began, computed = time.perf_counter(), cpu_seconds()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(side(context, num_tokens)) for context in contexts]
    num = sum(task.result() for task in tasks)
    return num / (time.perf_counter() - began), num / max(cpu_seconds() - computed, 0.01)


async def compare(sides: tuple[Side, Side], concurrency: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Measure both sides in turns; each round has its own contexts, so that no cache helps either."""
    rates: list[list[tuple[float, float]]] = [[], []]
    generator = np.random.default_rng(concurrency)
    for number in range(arguments.rounds + 1):
        contexts = generator.integers(3, 300, (concurrency, arguments.context)).tolist()
        for which in (0, 1) if number % 2 else (1, 0):
            rates[which].append(await rate(sides[which], contexts, arguments.tokens))
    # The first round warms up.
    plugin, bare = (each[1:] for each in rates)
    ratios = [a / b for (a, _), (b, _) in zip(plugin, bare, strict=True)]
    cpu_ratios = [a / b for (_, a), (_, b) in zip(plugin, bare, strict=True)]
    return {
        "concurrency": concurrency,
        "plugin_tokens_per_s": round(statistics.median(each for each, _ in plugin), 1),
        "bare_tokens_per_s": round(statistics.median(each for each, _ in bare), 1),
        "ratio": round(statistics.median(ratios), 3),
        "lowest_ratio": round(min(ratios), 3),
        "highest_ratio": round(max(ratios), 3),
        "cpu_ratio": round(statistics.median(cpu_ratios), 3),
    }


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Start both sides and compare them."""
    async with AsyncExitStack() as stack:
        sides = await ENGINES[arguments.engine](arguments.model, arguments.max_context, stack)
        rows = []
        for concurrency in arguments.concurrency:
            rows.append(await compare(sides, concurrency, arguments))
            print(json.dumps(rows[-1]), flush=True)
        return {
            "engine": f"{arguments.engine} {importlib.import_module(arguments.engine).__version__}",
            "torch": version("torch"),
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "load": [round(each, 1) for each in os.getloadavg()],
            "rows": rows,
        }


def parsed() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=sorted(ENGINES), required=True)
    parser.add_argument("--model", type=Path, default=None, help="a model directory; the calculator demo's by default")
    parser.add_argument("--max-context", type=int, default=1024)
    parser.add_argument("--context", type=int, default=64, help="tokens of each context")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to sample for each request")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    if arguments.model is None:
        arguments.model = importlib.import_module("turnwise_calculator_demo").model_dir()
    return arguments


def main() -> None:
    """Print the comparison as JSON."""
    print(json.dumps(asyncio.run(measure(parsed())), indent=2))


if __name__ == "__main__":
    main()
