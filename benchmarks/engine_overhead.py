"""
Measures throughput through an engine plugin relative to the engine's own async API.

Both variants use equally configured engines, or the same engine, and process the same requests in alternating rounds,
so other load on the machine affects both. On a busy machine read `cpu_ratio`: tokens per CPU second of all processes.
Run the script in the engine's virtual environment:

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
from measurement import cpu_seconds

from turnwise.protocols import Resources
from turnwise.types import GenerateRequest, SamplingParams

Sampler = Callable[[list[int], int], Awaitable[int]]
"""Samples a number of tokens after a context; returns the number of sampled tokens."""

if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    # At module level, because the processes that SGLang starts import this file again.
    from turnwise_sglang_engine import stub_packages

    stub_packages.install()


async def start_sglang(model: Path, max_context: int, stack: AsyncExitStack) -> tuple[Sampler, Sampler]:
    """Start SGLang twice with the same arguments: through the plugin and directly."""
    from turnwise_sglang_engine import SglangConfig, SglangEngine, arguments

    config = SglangConfig(model=model, max_context=max_context, num_threads=1)
    os.environ |= arguments.server_environment(config)
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        from turnwise_sglang_engine import stub_packages

        stub_packages.install()
    import sglang

    bare_engine = sglang.Engine(**arguments.server_arguments(config, arguments.model_spec(config, Resources())))
    # Registered first and so run last: `shutdown` kills every child of this process.
    stack.callback(bare_engine.shutdown)
    engine = SglangEngine(config, Resources())
    await engine.start()
    stack.push_async_callback(engine.stop)

    async def bare(context: list[int], num_tokens: int) -> int:
        options = {"max_new_tokens": num_tokens, "temperature": 1.0, "ignore_eos": True}
        answer = await bare_engine.async_generate(input_ids=context, sampling_params=options, return_logprob=True)
        return len(answer["output_ids"])

    return build_sampler(engine), bare


async def start_vllm(model: Path, max_context: int, stack: AsyncExitStack) -> tuple[Sampler, Sampler]:
    """Start vLLM once, and use its `AsyncLLM` through the plugin and directly."""
    import vllm
    from vllm.sampling_params import RequestOutputKind

    from turnwise_vllm_engine import VllmConfig, VllmEngine

    config = VllmConfig(model=model, max_context=max_context, kv_cache_bytes=256 << 20, num_threads=1)
    engine = VllmEngine(config, Resources())
    await engine.start()
    stack.push_async_callback(engine.stop)
    llm = engine._running.llm  # noqa: SLF001 - the same AsyncLLM, without the plugin

    async def bare(context: list[int], num_tokens: int) -> int:
        options = vllm.SamplingParams(
            max_tokens=num_tokens,
            temperature=1.0,
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = {"type": "token", "prompt_token_ids": context}
        outputs = [each async for each in llm.generate(prompt, options, os.urandom(8).hex())]
        return len(outputs[-1].outputs[0].token_ids)

    return build_sampler(engine), bare


ENGINES = {"sglang": start_sglang, "vllm": start_vllm}


def build_sampler(engine: Any) -> Sampler:
    """Return a sampler that uses a plugin's engine."""

    async def generate(context: list[int], num_tokens: int) -> int:
        name = os.urandom(8).hex()
        sampling = SamplingParams(max_tokens=num_tokens, temperature=1.0)
        request = GenerateRequest(
            request_id=name, trajectory_id=name, token_ids=np.array(context, np.int32), sampling=sampling
        )
        return len((await engine.generate(request)).token_ids)

    return generate


async def measure_rate(sampler: Sampler, contexts: list[list[int]], num_tokens: int) -> tuple[float, float]:
    """Return tokens per second of concurrent requests, and tokens per CPU second of all processes."""
    started, cpu_before = time.perf_counter(), cpu_seconds()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(sampler(context, num_tokens)) for context in contexts]
    num = sum(task.result() for task in tasks)
    return num / (time.perf_counter() - started), num / max(cpu_seconds() - cpu_before, 0.01)


async def compare(
    samplers: tuple[Sampler, Sampler], concurrency: int, arguments: argparse.Namespace
) -> dict[str, float]:
    """Measure both samplers in alternating order; every round uses new contexts, so prefix caches have no effect."""
    rates: list[list[tuple[float, float]]] = [[], []]
    generator = np.random.default_rng(concurrency)
    for number in range(arguments.rounds + 1):
        contexts = generator.integers(3, 300, (concurrency, arguments.context)).tolist()
        for which in (0, 1) if number % 2 else (1, 0):
            rates[which].append(await measure_rate(samplers[which], contexts, arguments.tokens))
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
    """Start both variants and compare them."""
    async with AsyncExitStack() as stack:
        samplers = await ENGINES[arguments.engine](arguments.model, arguments.max_context, stack)
        rows = []
        for concurrency in arguments.concurrency:
            rows.append(await compare(samplers, concurrency, arguments))
            print(json.dumps(rows[-1]), flush=True)
        return {
            "engine": f"{arguments.engine} {importlib.import_module(arguments.engine).__version__}",
            "torch": version("torch"),
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "load": [round(each, 1) for each in os.getloadavg()],
            "rows": rows,
        }


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=sorted(ENGINES), required=True)
    parser.add_argument("--model", type=Path, default=None, help="model folder (default: the calculator demo's model)")
    parser.add_argument("--max-context", type=int, default=1024, help="context length (default: %(default)s)")
    parser.add_argument("--context", type=int, default=64, help="tokens per context (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="sampled tokens per request (default: %(default)s)")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 64], help="concurrent requests")
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.model is None:
        from turnwise_calculator_demo import model_dir

        arguments.model = model_dir()
    return arguments


def main() -> None:
    """Print the comparison as JSON."""
    print(json.dumps(asyncio.run(measure(parse_arguments())), indent=2))


if __name__ == "__main__":
    main()
