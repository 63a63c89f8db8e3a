"""
For a supervisor that runs as root: shows the interpreter to an unprivileged user, becomes that user, runs a command.

bubblewrap must never run as root, because a box of root's can write to kernel settings. But no other user can read an
interpreter in root's home directory. So this module enters a mount namespace and covers each directory that blocks
the way with an empty one that shows only the paths that are needed.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from turnwise_python_sandbox.box import kernel


def main(settings_text: str) -> None:
    """
    Become the user and run the command.

    Args:
        settings_text: JSON with the keys ``uid``, ``covers`` (blocking directory to the paths to show inside it) and
            ``command``.
    """
    settings = json.loads(settings_text)
    if settings["covers"]:
        kernel.unshare(kernel.CLONE_NEWNS)
        kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    for directory, paths in settings["covers"].items():
        _cover_directory(directory, paths)
    kernel.prefer_for_oom_kill()
    os.setgroups([])
    os.setresgid(settings["uid"], settings["uid"], settings["uid"])
    os.setresuid(settings["uid"], settings["uid"], settings["uid"])
    os.execvpe(settings["command"][0], settings["command"], os.environ)


def _cover_directory(directory: str, paths: list[str]) -> None:
    # Opened before the mount hides them.
    shown = {path: os.open(path, os.O_PATH) for path in paths}
    kernel.mount("tmpfs", directory, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=0755,size=1m")
    for path, fd in shown.items():
        target = Path(path)
        target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            target.mkdir(exist_ok=True)
        else:
            target.touch()
        kernel.mount(f"/proc/self/fd/{fd}", path, None, kernel.MS_BIND | kernel.MS_REC)
        os.close(fd)
