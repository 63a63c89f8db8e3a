"""
Runs a second of model-written code: plain subprocesses, isolation started for each run, and the warm sandbox.

Each figure is the median of `--rounds` rounds, with the lowest and the highest; the ways take turns within a round,
so that a busy machine is unfair to all of them alike. ``python benchmarks/sandbox_throughput.py --help``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from turnwise_python_sandbox import Sandbox, SandboxConfig, SandboxUnavailableError, Status, Tier
from turnwise_python_sandbox.job import Job, Limits
from turnwise_python_sandbox.launching import boxed, environment
from turnwise_python_sandbox.selftest import make_recipe
from turnwise_python_sandbox.supervisor import Supervisor

TRIVIAL = "print(1)"
SYMPY = "import sympy\nx = sympy.symbols('x')\nprint(sympy.solve(x**2 - 2, x))"
EXPECTED = {TRIVIAL: "1\n", SYMPY: "[-sqrt(2), sqrt(2)]\n"}
COLD = ("bubblewrap for each run", "tier 1 cold", "tier 2 cold")

Run = Callable[[str], str]
"""Runs a program and returns what it printed."""


def plain_subprocess(code: str) -> str:
    """Run in a new interpreter, as `python -c` does."""
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=60)
    return done.stdout


def bubblewrap_each() -> Run:
    """Return what starts bubblewrap and an interpreter for each run: the box of tier 1 without the rest."""
    recipe = make_recipe(SandboxConfig(), Tier.NAMESPACES)
    paths = f"import sys; sys.path += {recipe.interpreter.packages!r}\n"

    def run(code: str) -> str:
        command = boxed(recipe, ["-c", paths + code])
        done = subprocess.run(command, env=environment(recipe), capture_output=True, text=True, timeout=60, cwd="/")
        return done.stdout

    return run


def isolated_cold(tier: int) -> Run:
    """Return what starts a fork server for one run and ends it: the full isolation, with nothing warm."""
    recipe = make_recipe(SandboxConfig(), Tier(tier))
    limits = Limits(timeout_s=60.0, memory_mb=512, max_output_bytes=2**20, cpu_s=60, disk_mb=64, max_files=1024)

    def run(code: str) -> str:
        supervisor = Supervisor(recipe, 1, 1, 1)
        try:
            job = Job(number=1, code=code.encode(), stdin=b"", limits=limits, tier=recipe.tier)
            supervisor.submit(job)
            return job.answer.result().stdout
        finally:
            supervisor.close()

    return run


def warm(sandbox: Sandbox) -> Run:
    """Return what runs in a sandbox whose servers are up."""
    return lambda code: sandbox.run(code, timeout_s=60.0).stdout


def rate(run: Run, code: str, num_runs: int, width: int) -> float:
    """Return runs a second; a wrong output ends the benchmark."""
    with ThreadPoolExecutor(width) as pool:
        began_at = time.perf_counter()
        outputs = list(pool.map(run, [code] * num_runs))
        taken_s = time.perf_counter() - began_at
    wrong = [output for output in outputs if output != EXPECTED[code]]
    if wrong:
        raise SystemExit(f"{len(wrong)} of {num_runs} outputs are wrong, such as {wrong[0]!r}")
    return num_runs / taken_s


def ways(tiers: list[int], sandboxes: dict[str, Sandbox]) -> dict[str, tuple[Run, int, int]]:
    """Return each way with how many runs of the trivial and of the sympy program one round takes."""
    found: dict[str, tuple[Run, int, int]] = {"plain subprocess": (plain_subprocess, 60, 8)}
    if Tier.NAMESPACES in tiers:
        found["bubblewrap for each run"] = (bubblewrap_each(), 40, 8)
    for tier in tiers:
        found[f"tier {tier} cold"] = (isolated_cold(tier), 20, 8)
        found[f"tier {tier} warm"] = (warm(sandboxes[f"{tier}"]), 300, 0)
        found[f"tier {tier} warm, sympy preloaded"] = (warm(sandboxes[f"{tier} sympy"]), 200, 60)
    return found


def usable(tiers: list[int]) -> list[int]:
    """Return the tiers that work here; say why the others do not."""
    found = []
    for tier in tiers:
        try:
            with Sandbox(tier=tier, servers=1) as sandbox:
                assert sandbox.run(TRIVIAL).status is Status.OK
            found.append(tier)
        except SandboxUnavailableError as error:
            print(f"tier {tier} is left out: {error}")
    return found


def measure(tiers: list[int], rounds: int, width: int) -> dict[str, dict[str, list[float]]]:
    """Return the rates by program and way, one per round."""
    sandboxes = {f"{tier}": Sandbox(tier=tier).start() for tier in tiers}
    sandboxes |= {f"{tier} sympy": Sandbox(tier=tier, preload=("numpy", "sympy")).start() for tier in tiers}
    rates: dict[str, dict[str, list[float]]] = {"trivial": {}, "sympy": {}}
    try:
        for number in range(rounds + 1):
            for name, (run, num_trivial, num_sympy) in ways(tiers, sandboxes).items():
                for program, code, num_runs in (("trivial", TRIVIAL, num_trivial), ("sympy", SYMPY, num_sympy)):
                    # The first round warms everything up and is not counted.
                    num_runs = num_runs if number else min(num_runs, 8)
                    if num_runs:
                        value = rate(run, code, num_runs, width)
                        rates[program].setdefault(name, []).extend([value] if number else [])
    finally:
        for sandbox in sandboxes.values():
            sandbox.close()
    return rates


def table(rates: dict[str, dict[str, list[float]]]) -> list[str]:
    """Return the lines of the table."""
    lines = [f"{'program':8} {'way':32} {'median':>8} {'min':>8} {'max':>8} {'x plain':>8}"]
    for program, by_way in rates.items():
        reference = statistics.median(by_way["plain subprocess"])
        for way, values in by_way.items():
            middle = statistics.median(values)
            numbers = (middle, min(values), max(values), middle / reference)
            lines.append(f"{program:8} {way:32} " + " ".join(f"{number:8.1f}" for number in numbers))
    return lines


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=8, help="callers at the same time")
    parser.add_argument("--tiers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", action="store_true", help="print every round as JSON too")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    tiers = usable(options.tiers)
    rates = measure(tiers, options.rounds, options.width)
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, Linux {platform.release()}")
    print(f"load average {load:.1f} before, {os.getloadavg()[0]:.1f} after; runs a second, {options.rounds} rounds")
    print("\n".join(table(rates)))
    for tier in tiers:
        warm_rate = statistics.median(rates["sympy"][f"tier {tier} warm, sympy preloaded"])
        cold = [statistics.median(values) for way, values in rates["sympy"].items() if way in COLD]
        print(
            f"tier {tier}, programs that import sympy: warm is {warm_rate / max(cold):.1f} x the fastest isolated cold"
        )
    if options.json:
        print(json.dumps(rates))


if __name__ == "__main__":
    main()
