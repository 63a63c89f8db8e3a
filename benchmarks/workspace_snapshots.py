"""
Measures snapshots of workspaces: seconds of `snapshot` and of `restore`.

    python benchmarks/workspace_snapshots.py [--variants bubblewrap tmpfs none] [--rounds 3]

Needs bubblewrap, and for the other variants what the tests of containers need: root, podman, runc and busybox-static.
`tmpfs` and `none` are values of `disk` of the backend `containers`: the first keeps an archive, the second an image.
All variants alternate within a round, so that other load on the machine affects all of them. The table has median,
minimum and maximum over the rounds, for a workspace without files, with 64 MiB in one file, and with 2000 files.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import Final

from measurement import describe_machine, format_spread

from turnwise import Resources
from turnwise_workspaces import Command, Limits, Snapshots, Workspace, WorkspaceBackend, WorkspaceSpec
from turnwise_workspaces.bubblewrap import BubblewrapBackend
from turnwise_workspaces.config import BubblewrapConfig, ContainersConfig
from turnwise_workspaces.containers import ContainersBackend

sys.path.insert(0, str(Path(__file__).parents[1] / "plugins/workspaces/tests"))
from images import ENGINE, IMAGE, RUN_OPTIONS, why_no_containers

VARIANTS: Final = ("bubblewrap", "tmpfs", "none")
FILES: Final = {
    "nothing": "true",
    "64 MiB": "head -c 67108864 /dev/urandom > big",
    "2000 files": "n=0; while [ $n -lt 2000 ]; do echo $n > $n; n=$((n+1)); done",
}


def make_backend(variant: str) -> tuple[WorkspaceBackend, WorkspaceSpec]:
    """Return the backend of a variant, and the specification of its workspaces."""
    limits = Limits(disk_mb=256)
    if variant == "bubblewrap":
        return BubblewrapBackend(BubblewrapConfig(), Resources()), WorkspaceSpec(limits=limits)
    config = ContainersConfig(command=ENGINE, run_options=RUN_OPTIONS, disk="tmpfs" if variant == "tmpfs" else "none")
    return ContainersBackend(config, Resources()), WorkspaceSpec(image=IMAGE, limits=limits)


async def measure(workspace: Workspace, text: str) -> tuple[float, float]:
    """Return the seconds of a snapshot and of a restoration of files that a shell's text makes."""
    assert isinstance(workspace, Snapshots)
    done = await workspace.exec(Command(argv=("/bin/sh", "-c", text), timeout_s=60.0))
    if done.exit_code != 0:
        raise RuntimeError(f"the files could not be made: {done}")
    started = time.perf_counter()
    kept = await workspace.snapshot()
    taken = time.perf_counter()
    await workspace.restore(kept)
    return taken - started, time.perf_counter() - taken


async def measure_all(variants: list[str], rounds: int) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Return the seconds of each variant and its files in each round."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for name, text in FILES.items():
            for variant in variants:
                backend, spec = make_backend(variant)
                workspace = await backend.start(spec)
                try:
                    found.setdefault((variant, name), []).append(await measure(workspace, text))
                finally:
                    await workspace.close()
    return found


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if set(arguments.variants) - {"bubblewrap"} and (reason := why_no_containers()):
        raise SystemExit(reason)
    found = asyncio.run(measure_all(arguments.variants, arguments.rounds))
    print(describe_machine())
    print("| variant | files | s/snapshot | s/restoration |\n| --- | --- | --- | --- |")
    for (variant, name), seconds in found.items():
        columns = [format_spread([each[place] for each in seconds]) for place in range(2)]
        print(f"| {variant} | {name} | {columns[0]} | {columns[1]} |")


if __name__ == "__main__":
    main()
