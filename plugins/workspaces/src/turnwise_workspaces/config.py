"""Options of workspaces, of the tools `workspace`, and of the backends."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

from attrs import field, frozen, validators

from turnwise.config.parts import Choice
from turnwise_workspaces.workspace import Limits, Network

USUAL_TOOLS: Final = ("shell", "read_file", "write_file", "edit_file")
TOOLS: Final = (*USUAL_TOOLS, "python", "submit")
_positive = validators.gt(0.0)
_at_least_one = validators.ge(1)


@frozen(kw_only=True)
class WorkspaceConfig:
    """
    Options of the workspaces of a run.

    Attributes:
        backend: starts the workspaces; a name, or a section with `name` and its options.
        image: of the root file system, for backends with images.
        folder: absolute path of the working folder.
        files: texts by path that each workspace has at the start.
        files_column: column of the tasks with more files, a mapping of texts by path; a task need not have it.
        mounts: files and folders of this machine that the workspaces show, read-only, by absolute path in them.
        environment: variables of the commands.
        limits: of all processes of a workspace together.
        network: `none` has a loopback and nothing else. `host` is this machine's: commands reach the internet, and
            every server that listens on this machine for its own programs alone.
        boot_s: seconds that a start may take.
        boot_tries: times that a start is tried.
        max_workspaces: at once on a machine, of all processes with the same `state`; further episodes wait.
        wait_s: seconds that an episode may wait for its workspace.
        warm: workspaces that each worker starts before an episode asks for one, of the kinds that episodes asked for
            last; they count among `max_workspaces`, and no workspace serves two episodes.
        close_s: seconds that the end of a workspace may take until it is killed without waiting.
        state: folder of the locks that count the workspaces of this machine; empty for one of this user's in the folder
            of temporary files.
    """

    backend: Choice = field(factory=lambda: Choice("bubblewrap"))
    image: str = ""
    folder: str = "/workspace"
    files: Mapping[str, str] = field(factory=dict)
    files_column: str = "files"
    mounts: Mapping[str, Path] = field(factory=dict)
    environment: Mapping[str, str] = field(factory=dict)
    limits: Limits = field(factory=Limits)
    network: Network = "none"
    boot_s: float = field(default=20.0, validator=_positive)
    boot_tries: int = field(default=2, validator=_at_least_one)
    max_workspaces: int = field(default=64, validator=_at_least_one)
    wait_s: float = field(default=600.0, validator=_positive)
    warm: int = field(default=0, validator=validators.ge(0))
    close_s: float = field(default=10.0, validator=_positive)
    state: str = ""

    @property
    def state_folder(self) -> Path:
        """The folder of the locks, with the default filled in."""
        return Path(self.state or f"{tempfile.gettempdir()}/turnwise-workspaces-{os.geteuid()}")


@frozen(kw_only=True)
class WorkspaceToolsConfig(WorkspaceConfig):
    """
    Options of the tools, all of which work in one workspace in an episode.

    Attributes:
        tools: that the model gets. Two are not among the usual ones: `python`, which runs a program, as the agent
            `torl_python` needs it, and `submit`, which ends the episode.
        shell: program that runs the texts of `shell`, with `-c`.
        python: program that runs the code of `python`, which is its standard input, with `-`.
        command_s: seconds that a command may take; it must be less than `rollout.deadlines.tool_call_s` of the run.
        max_output_bytes: of a command's output that the tool keeps.
        max_read_bytes: of a file that `read_file` returns.
    """

    tools: tuple[str, ...] = field(default=USUAL_TOOLS, validator=validators.deep_iterable(validators.in_(TOOLS)))
    shell: str = "/bin/sh"
    python: str = "python3"
    command_s: float = field(default=30.0, validator=_positive)
    max_output_bytes: int = field(default=2**18, validator=_at_least_one)
    max_read_bytes: int = field(default=2**18, validator=_at_least_one)


@frozen(kw_only=True)
class BubblewrapConfig:
    """
    Options of the backend `bubblewrap`.

    Attributes:
        readable: more files and folders of this machine that boxes show, read-only, at the same place.
        python: of the boxes' supervisor, at least 3.8, under /usr or `readable`; empty looks for one.
    """

    readable: tuple[str, ...] = ()
    python: str = ""


@frozen(kw_only=True)
class ContainersConfig:
    """
    Options of the backend `containers`.

    Attributes:
        command: of the engine, with its global options, such as `[podman, --runtime, runc]` or `[docker]`.
        run_options: more options of `run`, such as `[--userns, auto]`.
        disk: `tmpfs` puts the working folder and /tmp into memory, which bounds them, and makes the rest of the image
            read-only: what the image has in these folders is hidden. `quota` uses the engine's `--storage-opt size=`,
            which few file systems support. `none` sets no limit.
    """

    command: tuple[str, ...] = field(default=("podman",), validator=validators.min_len(1))
    run_options: tuple[str, ...] = ()
    disk: Literal["tmpfs", "quota", "none"] = field(
        default="tmpfs", validator=validators.in_(("tmpfs", "quota", "none"))
    )
