"""
Measures programs per second: plain subprocesses, isolation started for each run, and the warm sandbox.

The table shows median, minimum and maximum over `--rounds` rounds. The variants alternate within a round, so other load
on the machine affects all of them.
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

from measurement import describe_machine

from turnwise_python_sandbox import Sandbox, SandboxConfig, SandboxUnavailableError, Status, Tier
from turnwise_python_sandbox.job import Job
from turnwise_python_sandbox.limits import Limits
from turnwise_python_sandbox.selftest import build_server_spec
from turnwise_python_sandbox.server_command import build_bubblewrap_command, build_environment
from turnwise_python_sandbox.supervisor import Supervisor

TRIVIAL = "print(1)"
SYMPY = "import sympy\nx = sympy.symbols('x')\nprint(sympy.solve(x**2 - 2, x))"
EXPECTED = {TRIVIAL: "1\n", SYMPY: "[-sqrt(2), sqrt(2)]\n"}
COLD = ("bubblewrap per run", "tier 1 cold", "tier 2 cold")

Run = Callable[[str], str]
"""Runs a program and returns its output."""


def plain_subprocess(code: str) -> str:
    """Run in a new interpreter, as `python -c` does."""
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=60)
    return done.stdout


def make_bubblewrap_runner() -> Run:
    """Return a runner that starts bubblewrap and an interpreter for each run, with tier 1's namespaces only."""
    spec = build_server_spec(SandboxConfig(), Tier.NAMESPACES)
    paths = f"import sys; sys.path += {spec.interpreter.packages!r}\n"

    def run(code: str) -> str:
        command = build_bubblewrap_command(spec, ["-c", paths + code])
        environment = build_environment(spec)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, cwd="/")
        return done.stdout

    return run


def make_cold_runner(tier: int) -> Run:
    """Return a runner that starts a fork server for each run: full isolation without warm processes."""
    spec = build_server_spec(SandboxConfig(), Tier(tier))
    limits = Limits(timeout_s=60.0, memory_mb=512, max_output_bytes=2**20, cpu_s=60, disk_mb=64, max_files=1024)

    def run(code: str) -> str:
        supervisor = Supervisor(spec, 1, 1, 1)
        try:
            job = Job(code=code.encode(), stdin=b"", limits=limits, tier=spec.tier)
            supervisor.submit(job)
            return job.future.result().stdout
        finally:
            supervisor.close()

    return run


def make_warm_runner(sandbox: Sandbox) -> Run:
    """Return a runner on a started sandbox."""
    return lambda code: sandbox.run(code, timeout_s=60.0).stdout


def measure_rate(run: Run, code: str, num_runs: int, width: int) -> float:
    """Return runs per second; exit on a wrong output."""
    with ThreadPoolExecutor(width) as pool:
        started = time.perf_counter()
        outputs = list(pool.map(run, [code] * num_runs))
        wall_s = time.perf_counter() - started
    wrong = [output for output in outputs if output != EXPECTED[code]]
    if wrong:
        raise SystemExit(f"{len(wrong)} of {num_runs} outputs are wrong, for example {wrong[0]!r}")
    return num_runs / wall_s


def build_variants(tiers: list[int], sandboxes: dict[str, Sandbox]) -> dict[str, tuple[Run, int, int]]:
    """Return the variants by name: runner, and runs of the trivial and of the sympy program per round."""
    variants: dict[str, tuple[Run, int, int]] = {"plain subprocess": (plain_subprocess, 60, 8)}
    if Tier.NAMESPACES in tiers:
        variants["bubblewrap per run"] = (make_bubblewrap_runner(), 40, 8)
    for tier in tiers:
        variants[f"tier {tier} cold"] = (make_cold_runner(tier), 20, 8)
        variants[f"tier {tier} warm"] = (make_warm_runner(sandboxes[f"{tier}"]), 300, 0)
        variants[f"tier {tier} warm, sympy preloaded"] = (make_warm_runner(sandboxes[f"{tier} sympy"]), 200, 60)
    return variants


def find_usable_tiers(tiers: list[int]) -> list[int]:
    """Return the tiers that work on this machine; print the reason for each other tier."""
    usable = []
    for tier in tiers:
        try:
            with Sandbox(tier=tier, servers=1) as sandbox:
                assert sandbox.run(TRIVIAL).status is Status.OK
            usable.append(tier)
        except SandboxUnavailableError as error:
            print(f"tier {tier} is skipped: {error}")
    return usable


def measure(tiers: list[int], rounds: int, width: int) -> dict[str, dict[str, list[float]]]:
    """Return the rates by program and variant, one per round."""
    sandboxes = {f"{tier}": Sandbox(tier=tier).start() for tier in tiers}
    sandboxes |= {f"{tier} sympy": Sandbox(tier=tier, preload=("numpy", "sympy")).start() for tier in tiers}
    rates: dict[str, dict[str, list[float]]] = {"trivial": {}, "sympy": {}}
    try:
        for number in range(rounds + 1):
            for name, (run, num_trivial, num_sympy) in build_variants(tiers, sandboxes).items():
                for program, code, num_runs in (("trivial", TRIVIAL, num_trivial), ("sympy", SYMPY, num_sympy)):
                    # The first round is a warm-up and does not count.
                    num_runs = num_runs if number else min(num_runs, 8)
                    if num_runs:
                        value = measure_rate(run, code, num_runs, width)
                        rates[program].setdefault(name, []).extend([value] if number else [])
    finally:
        for sandbox in sandboxes.values():
            sandbox.close()
    return rates


def format_table(rates: dict[str, dict[str, list[float]]]) -> list[str]:
    """Return the lines of the table."""
    lines = [f"{'program':8} {'variant':32} {'median':>8} {'min':>8} {'max':>8} {'x plain':>8}"]
    for program, by_variant in rates.items():
        reference = statistics.median(by_variant["plain subprocess"])
        for variant, values in by_variant.items():
            median = statistics.median(values)
            numbers = (median, min(values), max(values), median / reference)
            lines.append(f"{program:8} {variant:32} " + " ".join(f"{number:8.1f}" for number in numbers))
    return lines


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default: %(default)s)")
    parser.add_argument("--width", type=int, default=8, help="concurrent callers (default: %(default)s)")
    parser.add_argument("--tiers", type=int, nargs="+", default=[1, 2], help="tiers to measure (default: 1 2)")
    parser.add_argument("--json", action="store_true", help="also print every round as JSON")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    tiers = find_usable_tiers(options.tiers)
    rates = measure(tiers, options.rounds, options.width)
    print(f"{describe_machine()}; Linux {platform.release()}")
    print(f"load average {load:.1f} before, {os.getloadavg()[0]:.1f} after; runs per second, {options.rounds} rounds")
    print("\n".join(format_table(rates)))
    for tier in tiers:
        warm_rate = statistics.median(rates["sympy"][f"tier {tier} warm, sympy preloaded"])
        cold = [statistics.median(values) for variant, values in rates["sympy"].items() if variant in COLD]
        print(
            f"tier {tier}, programs that import sympy: warm is {warm_rate / max(cold):.1f} x the fastest cold isolation"
        )
    if options.json:
        print(json.dumps(rates))


if __name__ == "__main__":
    main()
