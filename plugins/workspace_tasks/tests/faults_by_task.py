"""A plugin with the backend `faults_by_task`: real workspaces, each with the fault that its file `fault` names."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

import psutil
from attrs import define, field, frozen

from turnwise import Registry, Resources, hookimpl
from turnwise.config.parts import Choice
from turnwise.errors import InfrastructureError
from turnwise_testing.probes.faulty_workspaces import PassingBackend, PassingWorkspace, hang_with
from turnwise_workspaces import (
    Command,
    ExecResult,
    Workspace,
    WorkspaceBackend,
    WorkspaceSpec,
)
from turnwise_workspaces.backends import build_backend
from turnwise_workspaces.workspace import OnOutput

READY = b"ready"
"""A command that is killed says this first."""


@frozen(kw_only=True)
class FaultsConfig:
    """
    Options of the backend.

    Attributes:
        inner: name of the backend that starts the workspaces.
        options: of that backend.
        warm_faults: workspaces that start before an episode asks have faults in turns.
    """

    inner: str = "bubblewrap"
    options: Mapping[str, Any] = field(factory=dict)
    warm_faults: bool = False


@define(eq=False)
class FaultsByTask(PassingBackend):
    """Starts workspaces with faults."""

    tries: Counter[str] = field(factory=Counter)
    warm_faults: Iterator[str] = field(factory=lambda: itertools.repeat("none"))

    async def start(self, spec: WorkspaceSpec) -> Workspace:
        if not spec.files:
            return await self._start_warm(spec, next(self.warm_faults))
        fault, name = (spec.files.get(path, b"").decode() for path in ("fault", "name"))
        self.tries[name] += 1
        is_over = fault.endswith("_once") and self.tries[name] > 1
        if fault.startswith("boot_fails") and not is_over:
            raise InfrastructureError("no machine is free")
        workspace = await self.inner.start(spec)
        if fault.startswith("boot_hangs") and not is_over:
            await hang_with(workspace)
        return FaultyWorkspace(workspace, "none" if is_over else fault.removesuffix("_once"))

    async def _start_warm(self, spec: WorkspaceSpec, fault: str) -> Workspace:
        if fault == "fails":
            raise InfrastructureError("no machine is free")
        workspace = await self.inner.start(spec)
        if fault == "hangs":
            await hang_with(workspace)
        if fault == "dies":
            kill_first_process(workspace)
        return FaultyWorkspace(workspace, fault)


@define(eq=False)
class FaultyWorkspace(PassingWorkspace):
    """A workspace with one fault."""

    fault: str

    async def exec(self, command: Command, on_output: OnOutput | None = None) -> ExecResult:
        place = "grading" if any("/tests/" in each for each in command.argv) else "agent"
        if self.fault == f"exec_hangs_in_{place}":
            await asyncio.Event().wait()
        lose = LOSSES.get(self.fault.removesuffix(f"_in_{place}"))
        if lose is None:
            return await self.inner.exec(command, on_output)
        return await self.inner.exec(command, lambda data: lose(self.inner) if READY in data else None)

    async def end_processes(self) -> None:
        if self.fault == "mute":
            await asyncio.Event().wait()
        await self.inner.end_processes()

    async def close(self) -> None:
        if self.fault == "close_hangs":
            await asyncio.Event().wait()
        if self.fault == "close_fails":
            raise OSError("the machine does not answer")
        await self.inner.close()


def kill_first_process(workspace: Any) -> None:
    """Kill the box or the container from outside, as the system may."""
    pid = getattr(workspace, "_init", 0) or workspace._channel._process.pid
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def kill_monitors(container: Any) -> None:
    """Kill the processes by which podman knows of a container and its commands, as the system does without memory."""
    for process in psutil.process_iter(["name", "cmdline"]):
        if process.info["name"] == "conmon" and container.name in (process.info["cmdline"] or ()):
            process.kill()


def remove_container(container: Any) -> None:
    """Remove a container underneath, as an engine does whose storage is reset."""
    subprocess.run([*container.command, "rm", "-f", container.name], check=True, stdout=subprocess.DEVNULL)


LOSSES: Final = {"killed": kill_first_process, "monitors_die": kill_monitors, "removed": remove_container}


def _make(config: FaultsConfig, resources: Resources) -> WorkspaceBackend:
    made = FaultsByTask(build_backend(Choice(config.inner, config.options), resources))
    if config.warm_faults:
        made.warm_faults = itertools.cycle(("dies", "none", "fails", "mute", "none", "hangs", "none"))
    return made


@hookimpl
def register_workspaces(registry: Registry[WorkspaceBackend]) -> None:
    """Register the backend."""
    registry.add("faults_by_task", _make, config=FaultsConfig)
