"""Runs through the command line whose agents are programs inside workspaces, with an engine of one reply."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from gateway_rollouts import start_rollout, write_rollout

from turnwise_result_files import read_results

sys.path.append(str(Path(__file__).parents[2] / "workspaces/tests"))  # for `images`

PROGRAM = Path(__file__).parent / "programs/work_inside.py"


@cache
def why_no_boxes() -> str:
    """Return why this machine cannot make boxes; empty if it can."""
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed"
    command = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "true"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr.strip()


def container_options() -> dict[str, Any]:
    """Return options of containers with nothing but busybox and this machine's programs; skip without an engine."""
    import images
    import pytest

    if reason := images.why_no_containers():
        pytest.skip(reason)
    backend = {"name": "containers", "command": list(images.ENGINE), "run_options": list(images.RUN_OPTIONS)}
    return {"backend": backend, "image": images.IMAGE, "mounts": {"/usr": "/usr", "/lib": "/lib", "/lib64": "/lib64"}}


def write_inside(
    folder: Path, *arguments: str, num_tasks: int = 1, agent: dict[str, Any] | None = None, **sections: Any
) -> None:
    """
    Write a run whose program has its file in its workspace.

    Args:
        folder: of the run.
        arguments: of the program.
        num_tasks: of the run.
        agent: options of the agent; those of its workspace go to the key `workspace`.
        sections: of the config, in place of the usual ones.
    """
    options = dict(agent or {})
    workspace = {"files": {"agent.py": PROGRAM.read_text()}, "state": str(folder / "state")}
    if "tools" in sections:
        sections["tools"] = [{"name": "workspace", **workspace, **sections["tools"]}]
        workspace = {}
    options.setdefault("command", ["python3", "agent.py", *arguments])
    options["workspace"] = {**workspace, **options.get("workspace", {})}
    write_rollout(folder, num_tasks, options, max_in_flight=10)
    config = yaml.safe_load((folder / "run.yaml").read_text())
    config["rollout"] |= {"prompt_length": 16384, "response_length": 16384, **sections.pop("rollout", {})}
    config["plugins"] += ["workspaces", "hermes_parser", "routers"]
    config |= sections
    (folder / "run.yaml").write_text(yaml.safe_dump(config))


def roll_out(folder: Path) -> tuple[int, str]:
    """Run the config of a folder; return the exit code and the log."""
    code = start_rollout(folder, "run.yaml", "--out", "out").wait(300)
    return code, (folder / "log").read_text()


def read_episodes(folder: Path) -> list[Any]:
    """Return the results of a run."""
    return list(read_results(folder / "out"))


def list_marked(mark: str) -> list[int]:
    """Return the processes of this machine that have a text on their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found
