"""Diagnosis of workspaces on this machine: whether a box starts, and whether an engine of containers answers."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Iterator
from typing import Final

from turnwise import Finding, Resources
from turnwise.errors import TurnwiseError, first_line
from turnwise_workspaces.bubblewrap import BubblewrapBackend
from turnwise_workspaces.config import BubblewrapConfig
from turnwise_workspaces.workspace import Command, WorkspaceSpec

_ENGINES: Final = ("podman", "docker")
_START_S: Final = 20.0
_ASK_S: Final = 20.0


def diagnose() -> Iterator[Finding]:
    """Start a box, which takes less than a second, and ask the engines of containers that are installed."""
    yield _diagnose_boxes()
    yield from map(_diagnose_engine, _ENGINES)


def _diagnose_boxes() -> Finding:
    item, effect = "workspaces in boxes", "the backend `bubblewrap`"
    if shutil.which("bwrap") is None:
        hint = "apt-get install bubblewrap, or use the backend `containers`"
        return Finding(item, "limited", f"bubblewrap is not installed; {effect} needs it", hint)
    try:
        code = asyncio.run(asyncio.wait_for(_try_box(), _START_S))
    except TimeoutError:
        return Finding(item, "broken", f"{effect}: no box has started within {_START_S:g} s")
    except (TurnwiseError, OSError) as error:
        hint = "allow namespaces of users: sysctl kernel.unprivileged_userns_clone, kernel.apparmor_restrict_*"
        return Finding(item, "broken", f"{effect}: no box starts: {first_line(error)}", hint)
    if code != 0:
        return Finding(item, "broken", f"{effect}: a command in a box has exit code {code}")
    return Finding(item, "ok", f"{effect} starts boxes")


async def _try_box() -> int | None:
    workspace = await BubblewrapBackend(BubblewrapConfig(), Resources()).start(WorkspaceSpec())
    try:
        return (await workspace.exec(Command(argv=("true",), timeout_s=_START_S))).exit_code
    finally:
        await workspace.close()


def _diagnose_engine(name: str) -> Finding:
    item, effect = f"workspaces with {name}", f"the backend `containers` with `command: [{name}]`"
    program = shutil.which(name)
    if program is None:
        return Finding(item, "limited", f"{name} is not installed; {effect} needs it", f"install {name}, if you use it")
    try:
        # `info` asks the server, too, where there is one.
        done = subprocess.run([program, "info"], capture_output=True, text=True, timeout=_ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(item, "broken", f"{effect}: {name} does not answer: {first_line(error)}")
    if done.returncode != 0:
        reason = " ".join((done.stderr.strip().splitlines() or ["no reason given"])[-1].split())
        return Finding(item, "broken", f"{effect}: `{name} info` fails: {reason}", f"run `{name} info` as this user")
    return Finding(item, "ok", f"{effect}: {program} answers; an image must be there, because nothing is pulled")
