"""
Measures workspaces: starts per second, latency of a command, memory and processor time, beside the bare engine's own.

    python benchmarks/workspaces.py [--backends bubblewrap podman] [--rounds 5] [--starts 20] [--commands 50]
        [--at-once 8] [--warm 2]

Needs bubblewrap, and for podman what the tests of containers need: root, podman, runc and busybox-static. The bare
variants run the same engine by `subprocess`, without an owner, slots, a supervisor or limits of output:

- bare bubblewrap: a box of the same namespaces that runs `true`; it has no command in a running box;
- bare podman: `run -d`, `exec` and `rm -f` of the same image.

All variants alternate within a round, so that other load on the machine affects all of them. The table has median,
minimum and maximum over the rounds:

- starts/s, one after the other and `--at-once` together: start and end of a workspace;
- ms/command: `true` in a running workspace, one after the other;
- MiB: proportional memory of all processes of an idle workspace, the engine's monitor included;
- ms/episode start: until an episode has its workspace with one file. In the variants with `warm` there is a pause until
  the warm workspaces are there, so that this is the best that they can do; starts/s has no pauses;
- CPU ms/start: of this process and the processes that it has waited for; a monitor in the background does not count.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import psutil
from attrs import define, frozen
from measurement import describe_machine, format_spread

from turnwise import Resources
from turnwise_workspaces import Command, Workspace, WorkspaceBackend, WorkspaceSpec
from turnwise_workspaces.bubblewrap import BubblewrapBackend
from turnwise_workspaces.config import BubblewrapConfig, ContainersConfig
from turnwise_workspaces.containers import ContainersBackend
from turnwise_workspaces.owner import WorkspaceOwner
from turnwise_workspaces.slots import Slots

sys.path.insert(0, str(Path(__file__).parents[1] / "plugins/workspaces/tests"))
from images import ENGINE, IMAGE, RUN_OPTIONS, why_no_containers

FILES: Final = {"task.txt": b"Add the numbers.\n"}
TRUE: Final = Command(argv=("true",), timeout_s=60.0)
OPTIONS: Final = ("--network", "none", "--memory", "1024m", "--pids-limit", "128", "--stop-signal", "KILL")
BOX: Final = (
    *("bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL"),
    *("--ro-bind", "/usr", "/usr", "--ro-bind-try", "/lib", "/lib", "--ro-bind-try", "/lib64", "/lib64"),
    *("--ro-bind-try", "/bin", "/bin", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "true"),
)


@define
class Figures:
    """The figures of a variant in one round; None where it has none."""

    starts: float
    starts_at_once: float
    cpu_ms: float
    command_ms: float | None = None
    memory_mib: float | None = None
    episode_ms: float | None = None


@frozen
class Sizes:
    """How much a round does."""

    starts: int
    commands: int
    at_once: int
    warm: int


async def measure_backend(backend: WorkspaceBackend, spec: WorkspaceSpec, sizes: Sizes) -> Figures:
    """Return the figures of a backend of turnwise."""

    async def use() -> None:
        workspace = await backend.start(spec)
        await workspace.close()

    figures = await measure_starts(use, sizes)
    workspace = await backend.start(spec)
    try:
        await workspace.exec(TRUE)
        started = time.perf_counter()
        for _ in range(sizes.commands):
            await workspace.exec(TRUE)
        figures.command_ms = (time.perf_counter() - started) / sizes.commands * 1e3
        figures.memory_mib = memory_of(workspace)
    finally:
        await workspace.close()
    return figures


async def measure_episodes(backend: WorkspaceBackend, spec: WorkspaceSpec, sizes: Sizes, num_warm: int) -> Figures:
    """Return the figures of the starts of episodes by the owner of workspaces, with so many warm ones."""
    with tempfile.TemporaryDirectory() as folder:
        slots = Slots(Path(folder), 64, 60.0)
        owner = WorkspaceOwner(backend, slots, num_warm=num_warm)
        seconds = 0.0
        try:
            for number in range(num_warm + sizes.starts):
                while owner.warm.num_ready < min(number, num_warm):  # noqa: ASYNC110 - it sets no event
                    await asyncio.sleep(0.001)
                started = time.perf_counter()
                workspace = await owner.open(spec)
                # The first episodes tell how many are to be warm.
                seconds += time.perf_counter() - started if number >= num_warm else 0.0
                await owner.close(workspace)
            await owner.warm.close()

            async def use() -> None:
                await owner.close(await owner.open(spec))

            figures = await measure_starts(use, sizes)
        finally:
            await owner.warm.close()
    figures.episode_ms = seconds / sizes.starts * 1e3
    return figures


async def measure_starts(use: Callable[[], Awaitable[object]], sizes: Sizes) -> Figures:
    """Return the starts per second of something that starts and ends a workspace."""
    await use()
    cpu, started = cpu_s(), time.perf_counter()
    for _ in range(sizes.starts):
        await use()
    alone = sizes.starts / (time.perf_counter() - started)
    cpu_ms = (cpu_s() - cpu) / sizes.starts * 1e3
    left = iter(range(sizes.starts))

    async def work() -> None:
        for _ in left:
            await use()

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(sizes.at_once):
            group.create_task(work())
    return Figures(alone, sizes.starts / (time.perf_counter() - started), cpu_ms)


async def run(*command: str) -> None:
    """Run a program without its output; an exit code but 0 is an error."""
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    _, errors = await process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"{command[0]} has exit code {process.returncode}: {errors.decode(errors='replace')}")


async def measure_bare_boxes(sizes: Sizes) -> Figures:
    """Return the figures of bubblewrap itself."""
    return await measure_starts(lambda: run(*BOX), sizes)


async def measure_bare_podman(sizes: Sizes) -> Figures:
    """Return the figures of podman itself."""

    async def start(name: str) -> None:
        await run(*ENGINE, "run", "-d", "--name", name, *OPTIONS, *RUN_OPTIONS, IMAGE, "sleep", "999")

    async def use() -> None:
        name = f"bare-{uuid.uuid4().hex}"
        await start(name)
        await run(*ENGINE, "rm", "-f", name)

    figures = await measure_starts(use, sizes)
    name = f"bare-{uuid.uuid4().hex}"
    await start(name)
    try:
        started = time.perf_counter()
        for _ in range(sizes.commands):
            await run(*ENGINE, "exec", name, "true")
        figures.command_ms = (time.perf_counter() - started) / sizes.commands * 1e3
        figures.memory_mib = memory_of_name(name)
    finally:
        await run(*ENGINE, "rm", "-f", name)
    return figures


def cpu_s() -> float:
    """Return the processor seconds of this process and of the ones that it has waited for."""
    return sum(os.times()[:4])


def memory_of(workspace: Workspace | Any) -> float:
    """Return the memory in MiB of all processes of a workspace."""
    if name := getattr(workspace, "name", ""):
        return memory_of_name(name)
    return _memory([psutil.Process(workspace._channel._process.pid)])  # noqa: SLF001 - no user needs it


def memory_of_name(name: str) -> float:
    """Return the memory in MiB of the processes of a container: of its monitor, and of what runs below it."""
    return _memory([each for each in psutil.process_iter(["cmdline"]) if name in (each.info["cmdline"] or ())])


def _memory(roots: Sequence[psutil.Process]) -> float:
    found = {each.pid: each for root in roots for each in (root, *root.children(recursive=True))}
    return sum(each.memory_full_info().pss for each in found.values()) / 2**20


def variants(backends: Sequence[str], sizes: Sizes) -> Mapping[str, Callable[[], Awaitable[Figures]]]:
    """Return the variants to measure, by name; `SystemExit` for a backend that this machine cannot run."""
    found: dict[str, Callable[[], Awaitable[Figures]]] = {}
    if "bubblewrap" in backends:
        boxes = BubblewrapBackend(BubblewrapConfig(), Resources())
        found["bare bubblewrap"] = lambda: measure_bare_boxes(sizes)
        found["bubblewrap"] = lambda: measure_backend(boxes, WorkspaceSpec(), sizes)
        add_episodes(found, "bubblewrap", boxes, WorkspaceSpec(files=FILES), sizes)
    if "podman" in backends:
        if reason := why_no_containers():
            raise SystemExit(f"podman: {reason}")
        config = ContainersConfig(command=ENGINE, run_options=RUN_OPTIONS)
        containers = ContainersBackend(config, Resources())
        found["bare podman"] = lambda: measure_bare_podman(sizes)
        found["podman"] = lambda: measure_backend(containers, WorkspaceSpec(image=IMAGE), sizes)
        add_episodes(found, "podman", containers, WorkspaceSpec(image=IMAGE, files=FILES), sizes)
    return found


def add_episodes(
    found: dict[str, Callable[[], Awaitable[Figures]]],
    name: str,
    backend: WorkspaceBackend,
    spec: WorkspaceSpec,
    sizes: Sizes,
) -> None:
    """Add the variants of a backend whose workspaces have an owner: without warm ones, and with some."""
    for number in (0, sizes.warm):
        found[f"{name}, warm: {number}"] = partial(measure_episodes, backend, spec, sizes, number)


async def measure(options: argparse.Namespace) -> dict[str, list[Figures]]:
    """Return the figures of each variant in each round."""
    sizes = Sizes(options.starts, options.commands, options.at_once, options.warm)
    chosen = variants(options.backends, sizes)
    found: dict[str, list[Figures]] = {name: [] for name in chosen}
    for _ in range(options.rounds):
        for name, take in chosen.items():
            found[name].append(await take())
    return found


def show(found: Mapping[str, Sequence[Figures]], at_once: int) -> None:
    """Print the table."""
    print(f"{describe_machine()}; median (minimum-maximum)")
    columns = {
        "starts": "starts/s",
        "starts_at_once": f"starts/s, {at_once} at once",
        "episode_ms": "ms/episode start",
        "cpu_ms": "CPU ms/start",
        "command_ms": "ms/command",
        "memory_mib": "MiB",
    }
    print("variant".ljust(20), *(label.rjust(26) for label in columns.values()))
    for name, figures in found.items():
        cells = []
        for column in columns:
            values = [value for each in figures if (value := getattr(each, column)) is not None]
            cells.append(format_spread(values, 1) if values else "-")
        print(name.ljust(20), *(cell.rjust(26) for cell in cells))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", choices=("bubblewrap", "podman"), default=["bubblewrap", "podman"])
    for name, default in (("rounds", 5), ("starts", 20), ("commands", 50), ("at-once", 8), ("warm", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    show(asyncio.run(measure(options)), options.at_once)


if __name__ == "__main__":
    main()
