"""
Measures how fast the embedded engine decodes: tokens per second with 1, 8, 64 and 256 requests at once.

Each variant runs in its own process with one torch thread, and the variants take turns within every round, so that
other load on the machine affects all of them. On a busy machine read the ratios of tokens per CPU second:

    python benchmarks/decode_speed.py
    git worktree add ../before d3cf534
    python benchmarks/decode_speed.py --baseline ../before --generate
    python benchmarks/decode_speed.py --vllm .venv-vllm/bin/python
    python benchmarks/decode_speed.py --model DIRECTORY --decoders --bfloat16
    python benchmarks/decode_speed.py --model DIRECTORY --bfloat16 --generate --vllm .venv-vllm/bin/python
    python benchmarks/decode_speed.py --model DIRECTORY --llama .venv-llama/bin/python --llama-model FILE.gguf
    python benchmarks/decode_speed.py --profile --requests 64

Every round uses new random contexts, so a prefix cache has no effect.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import psutil
from measurement import describe_machine, format_spread

Decode = Callable[[list[list[int]], int], Awaitable[int]]
"""Samples a number of tokens after each context, all at once; returns the number of sampled tokens."""

_ENGINE_OPTIONS: dict[str, dict[str, Any]] = {
    "engine": {},
    "unpacked": {"pack_weights": False},
    "bfloat16": {"product_dtype": "bfloat16"},
    "generic": {"decoder": "generic"},
}
"""Options of the embedded engine for each kind of worker."""

_VLLM_DTYPES: dict[str, Literal["float32", "bfloat16"]] = {"vllm": "float32", "vllm-bfloat16": "bfloat16"}
"""The dtype of vLLM's weights and cache for each kind of worker."""

_LLAMA_UNIFIED = {"llama.cpp": False, "llama.cpp-unified": True}
"""Whether all rows share one buffer of llama.cpp's cache, for each kind of worker."""


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None, help="model folder (default: the calculator demo's model)")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64, 256], help="requests at once")
    parser.add_argument("--context", type=int, default=64, help="tokens per context (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="sampled tokens per request (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds (default: %(default)s)")
    parser.add_argument("--baseline", type=Path, default=None, help="another checkout to compare with")
    parser.add_argument(
        "--decoders",
        action="store_true",
        help="compare with the fused decoder without its parts, and with the generic one",
    )
    parser.add_argument(
        "--bfloat16", action="store_true", help="compare with products in bfloat16, and --vllm in bfloat16 too"
    )
    parser.add_argument("--generate", action="store_true", help="compare with `generate` on one padded batch")
    parser.add_argument("--static", action="store_true", help="as --generate, with a static cache")
    parser.add_argument(
        "--vllm", type=Path, metavar="PYTHON", help="compare with vLLM, with the Python of an environment that has it"
    )
    parser.add_argument(
        "--llama",
        type=Path,
        metavar="PYTHON",
        help="compare with llama.cpp, with the Python of an environment that has llama_cpp, numpy and psutil",
    )
    parser.add_argument(
        "--llama-model", type=Path, nargs="+", metavar="FILE.gguf", help="the files of --llama, compared one by one"
    )
    parser.add_argument(
        "--llama-unified", action="store_true", help="compare --llama with one cache for all rows (kv_unified) too"
    )
    parser.add_argument("--profile", action="store_true", help="print the operators that take most of the time")
    parser.add_argument(
        "--worker",
        choices=[*_ENGINE_OPTIONS, "generate", "static", *_VLLM_DTYPES, *_LLAMA_UNIFIED],
        default=None,
        help=argparse.SUPPRESS,
    )
    arguments = parser.parse_args()
    if (arguments.llama is None) != (arguments.llama_model is None):
        parser.error("--llama and --llama-model need each other")
    if arguments.llama_unified and arguments.llama is None:
        parser.error("--llama-unified needs --llama")
    if arguments.model is None:
        from turnwise_calculator_demo import model_dir

        arguments.model = model_dir()
    return arguments


async def make_engine_decode(model: Path, max_context: int, **options: Any) -> tuple[Decode, float]:
    """Start the embedded engine; returns its sampler and the seconds of the start."""
    from turnwise.protocols import Resources
    from turnwise_transformers_engine import TransformersConfig, TransformersEngine

    config = TransformersConfig(
        model=model, device="cpu", max_context=max_context, num_blocks=2048, num_threads=1, **options
    )
    return await start_engine(TransformersEngine(config, Resources()))


async def make_vllm_decode(
    model: Path, max_context: int, dtype: Literal["float32", "bfloat16"]
) -> tuple[Decode, float]:
    """Start vLLM on one core; returns its sampler and the seconds of the start."""
    from turnwise.protocols import Resources
    from turnwise_vllm_engine import VllmConfig, VllmEngine

    config = VllmConfig(
        model=model,
        max_context=max_context,
        dtype=dtype,
        kv_cache_bytes=2 << 30,
        num_threads=1,
        max_num_seqs=256,
        engine_args={"block_size": 32},
    )
    return await start_engine(VllmEngine(config, Resources()))


async def start_engine(engine: Any) -> tuple[Decode, float]:
    """Start an engine; returns its sampler and the seconds of the start."""
    import numpy as np

    from turnwise.types import GenerateRequest, SamplingParams

    started = time.perf_counter()
    await engine.start()
    start_s = time.perf_counter() - started

    async def decode(contexts: list[list[int]], num_tokens: int) -> int:
        async with asyncio.TaskGroup() as group:
            tasks = []
            for context in contexts:
                name = os.urandom(8).hex()
                request = GenerateRequest(
                    request_id=name,
                    trajectory_id=name,
                    token_ids=np.array(context, np.int32),
                    sampling=SamplingParams(max_tokens=num_tokens, temperature=1.0),
                )
                tasks.append(group.create_task(engine.generate(request)))
        return sum(len(task.result().token_ids) for task in tasks)

    return decode, start_s


async def make_generate_decode(model_folder: Path, *, static: bool) -> tuple[Decode, float]:
    """Load a model of transformers; returns a sampler that calls `generate`, and the seconds of the start."""
    import torch
    import transformers

    started = time.perf_counter()
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    start_s = time.perf_counter() - started

    async def decode(contexts: list[list[int]], num_tokens: int) -> int:
        ids = torch.tensor(contexts)
        options = {"cache_implementation": "static", "disable_compile": True} if static else {}
        with torch.inference_mode():
            result = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                **options,
            )
        return int((result.shape[1] - ids.shape[1]) * len(ids))

    return decode, start_s


def make_llama_decode(file: Path, max_context: int, *, unified: bool) -> tuple[Decode, float]:
    """Load a model with llama.cpp; returns its sampler and the seconds of the start."""
    from llama_decoding import LlamaDecoder

    started = time.perf_counter()
    decoder = LlamaDecoder(file, max_context, unified=unified)
    start_s = time.perf_counter() - started

    async def decode(contexts: list[list[int]], num_tokens: int) -> int:
        return decoder.decode(contexts, num_tokens)

    return decode, start_s


async def make_decode(arguments: argparse.Namespace) -> tuple[Decode, float]:
    """Start the worker's kind of variant; returns its sampler and the seconds of the start."""
    kind, length = arguments.worker, arguments.context + arguments.tokens
    if kind in _LLAMA_UNIFIED:
        return make_llama_decode(arguments.model, length, unified=_LLAMA_UNIFIED[kind])
    import structlog
    import torch

    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    torch.set_num_threads(1)
    if kind in _ENGINE_OPTIONS:
        return await make_engine_decode(arguments.model, 2 * length, **_ENGINE_OPTIONS[kind])
    if kind in _VLLM_DTYPES:
        return await make_vllm_decode(arguments.model, 2 * length, _VLLM_DTYPES[kind])
    return await make_generate_decode(arguments.model, static=kind == "static")


async def serve_rounds(arguments: argparse.Namespace) -> None:
    """Measure rounds that are requested on standard input, one JSON line each, until it ends."""
    import numpy as np

    decode, start_s = await make_decode(arguments)
    print(json.dumps({"start_s": start_s}), flush=True)
    for line in iter(sys.stdin.readline, ""):
        order = json.loads(line)
        generator = np.random.default_rng(order["seed"])
        contexts = generator.integers(3, 300, (order["requests"], arguments.context)).tolist()
        cpu_before, before = measure_cpu(), time.perf_counter()
        num_tokens = await decode(contexts, arguments.tokens)
        seconds, cpu_s = time.perf_counter() - before, measure_cpu() - cpu_before
        print(json.dumps({"rate": num_tokens / seconds, "cpu_rate": num_tokens / cpu_s}), flush=True)


def measure_cpu() -> float:
    """Return the CPU seconds of this process and, in ticks of 10 ms, of its children: vLLM decodes in one."""
    times = [each.cpu_times() for each in psutil.Process().children(recursive=True)]
    return time.process_time() + sum(each.user + each.system for each in times)


class Variant:
    """A process that measures one variant, and its results."""

    def __init__(
        self,
        name: str,
        kind: str,
        arguments: argparse.Namespace,
        sources: Path | None = None,
        python: Path = Path(sys.executable),
        variables: dict[str, str] | None = None,
    ) -> None:
        self.name = name
        self.rates: dict[int, list[dict[str, float]]] = {}
        environment = {**os.environ, **(variables or {})}
        if sources is not None:
            folders = [*sources.glob("core/src"), *sources.glob("libs/*/src"), *sources.glob("plugins/*/src")]
            if not folders:
                raise SystemExit(f"{sources} has no core/src: give the root of a checkout")
            environment["PYTHONPATH"] = os.pathsep.join(map(str, folders))
        command = [str(python), __file__, "--worker", kind, "--model", str(arguments.model)]
        command += ["--context", str(arguments.context), "--tokens", str(arguments.tokens)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.start_s = self._read()["start_s"]

    def measure(self, requests: int, seed: int) -> dict[str, float]:
        """Run one round."""
        assert self._process.stdin is not None
        print(json.dumps({"requests": requests, "seed": seed}), file=self._process.stdin, flush=True)
        return self._read()

    def stop(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the process of {self.name!r} ended; its error is above")
        result: dict[str, float] = json.loads(line)
        return result


def start_variants(arguments: argparse.Namespace) -> list[Variant]:
    """Start the process of each variant, this checkout first."""
    variants = [Variant("engine", "engine", arguments)]
    if arguments.baseline is not None:
        variants.append(Variant("baseline", "engine", arguments, arguments.baseline.resolve()))
    if arguments.decoders:
        # Without a compiler, the fused decoder uses operators of torch.
        variants.append(Variant("no C operators", "engine", arguments, variables={"CC": "/nonexistent"}))
        variants.append(Variant("no packing", "unpacked", arguments))
        variants.append(Variant("generic", "generic", arguments))
    if arguments.bfloat16:
        variants.append(Variant("bfloat16", "bfloat16", arguments))
    if arguments.generate:
        variants.append(Variant("generate", "generate", arguments))
    if arguments.static:
        variants.append(Variant("static generate", "static", arguments))
    if arguments.vllm is not None:
        kinds = [*_VLLM_DTYPES] if arguments.bfloat16 else ["vllm"]
        variants += [Variant(each, each, arguments, python=arguments.vllm) for each in kinds]
    if arguments.llama is not None:
        kinds = [*_LLAMA_UNIFIED] if arguments.llama_unified else ["llama.cpp"]
        for file in arguments.llama_model:
            own = argparse.Namespace(**{**vars(arguments), "model": file})
            variants += [Variant(f"{each} {file.stem}", each, own, python=arguments.llama) for each in kinds]
    return variants


def compare(arguments: argparse.Namespace) -> None:
    """Print tokens per second of each variant, and the ratio of this checkout to it."""
    print(describe_machine())
    variants = start_variants(arguments)
    print("start:", ", ".join(f"{each.name} {each.start_s:.2f} s" for each in variants))
    print("median (min-max) of tokens/s, of tokens per CPU second, and of the ratio of the latter to the engine's")
    for requests in arguments.requests:
        for number in range(arguments.rounds + 1):
            for each in variants if number % 2 else variants[::-1]:
                each.rates.setdefault(requests, []).append(each.measure(requests, number))
        print_rates(variants, requests)
    for each in variants:
        each.stop()


def print_rates(variants: list[Variant], requests: int) -> None:
    """Print the rates with one number of requests; the first round warms up."""
    own = variants[0].rates[requests][1:]
    width = max(len(each.name) for each in variants)
    for each in variants:
        rates = each.rates[requests][1:]
        columns = [format_spread([rate[name] for rate in rates], 0) for name in ("rate", "cpu_rate")]
        line = f"{requests:4d} requests  {each.name:{width}s} {columns[0]:26s} {columns[1]:26s}"
        if each is not variants[0]:
            ratios = [mine["cpu_rate"] / its["cpu_rate"] for mine, its in zip(own, rates, strict=True)]
            wall = statistics.median(mine["rate"] / its["rate"] for mine, its in zip(own, rates, strict=True))
            line += f" engine is {format_spread(ratios, 2)} times as fast; by the clock {wall:.2f}"
        print(line, flush=True)


async def profile(arguments: argparse.Namespace) -> None:
    """Print the operators that take most of the time."""
    import numpy as np
    import torch

    torch.set_num_threads(1)
    decode, _start_s = await make_engine_decode(arguments.model, 2 * (arguments.context + arguments.tokens))
    for requests in arguments.requests:
        contexts = np.random.default_rng(0).integers(3, 300, (requests, arguments.context)).tolist()
        await decode(contexts, arguments.tokens)
        print(f"\n{requests} requests", flush=True)
        # The decoder has its own thread, and no public option includes it.
        threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)  # noqa: SLF001 - the only way
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=threads
        ) as operators:
            await decode(contexts, arguments.tokens)
        print(operators.key_averages().table(sort_by="self_cpu_time_total", row_limit=16, max_name_column_width=40))


def main() -> None:
    """Run the benchmark, or one of its processes."""
    arguments = parse_arguments()
    if arguments.worker is not None:
        asyncio.run(serve_rounds(arguments))
    elif arguments.profile:
        asyncio.run(profile(arguments))
    else:
        compare(arguments)


if __name__ == "__main__":
    main()
