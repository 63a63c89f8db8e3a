"""
Started as root: shows the interpreter to an unprivileged user, becomes that user, and runs a command.

bubblewrap must never be started as root (a box of root's can write to kernel settings), but an interpreter that lives
in root's home is out of everyone else's reach. So, in a mount namespace of its own, each directory in the way is
covered by an empty one that shows only what is needed.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from turnwise_python_sandbox.box import kernel


def main(settings_text: str) -> None:
    """
    Do it, with settings as JSON.

    Keys: ``uid``, ``covers`` (directory in the way to what to show of it), ``command``.
    """
    settings = json.loads(settings_text)
    if settings["covers"]:
        kernel.unshare(kernel.CLONE_NEWNS)
        kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    for directory, paths in settings["covers"].items():
        _cover(directory, paths)
    kernel.be_first_to_die()
    os.setgroups([])
    os.setresgid(settings["uid"], settings["uid"], settings["uid"])
    os.setresuid(settings["uid"], settings["uid"], settings["uid"])
    os.execvpe(settings["command"][0], settings["command"], os.environ)


def _cover(directory: str, paths: list[str]) -> None:
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
