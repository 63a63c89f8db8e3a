"""A container engine and an image for the tests, made of busybox without any registry."""

from __future__ import annotations

import io
import os
import shlex
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Final

import psutil

from turnwise_workspaces.ownership import LABEL, read_owner

IMAGE: Final = "localhost/turnwise-test:busybox"
_PODMAN: Final = "podman --runtime runc --cgroup-manager cgroupfs"
ENGINE: Final = tuple(shlex.split(os.environ.get("TURNWISE_TEST_ENGINE", _PODMAN)))
"""Another one is for example `docker --host unix:///run/docker.sock`."""
_TEST_LABEL: Final = f"turnwise-test={os.getpid()}"
"""Of the containers that this process and its children start, whoever owns them: other tests may run beside it."""
RUN_OPTIONS: Final = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024", "--label", _TEST_LABEL)
BUSYBOX: Final = Path("/bin/busybox")


@cache
def why_no_containers() -> str:
    """Return why the tests cannot run containers here; empty if they can, and then the image is there."""
    missing = [name for name in (ENGINE[0], "runc") if shutil.which(name) is None]
    if missing or not BUSYBOX.is_file():
        return f"needs {ENGINE[0]}, runc and busybox-static"
    done = subprocess.run([*ENGINE, "import", "-", IMAGE], input=image_tar(), capture_output=True, check=False)
    if done.returncode != 0:
        return done.stderr.decode(errors="replace").strip() or "the engine cannot import an image"
    command = [*ENGINE, "run", "--rm", "--network", "none", *RUN_OPTIONS, IMAGE, "/bin/true"]
    done = subprocess.run(command, capture_output=True, check=False)
    return (
        "" if done.returncode == 0 else done.stderr.decode(errors="replace").strip() or "the engine runs no container"
    )


def image_tar() -> bytes:
    """Return a root file system as a tar: busybox, a link to it for each of its programs, folders, and two users."""
    applets = subprocess.run([BUSYBOX, "--list"], capture_output=True, text=True, check=True).stdout.split()
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for folder in ("bin", "dev", "etc", "proc", "sys", "tmp", "workspace"):
            info = tarfile.TarInfo(folder)
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(info)
        tar.add(BUSYBOX, "bin/busybox")
        for applet in applets:
            if applet != "busybox":
                info = tarfile.TarInfo(f"bin/{applet}")
                info.type, info.linkname = tarfile.SYMTYPE, "busybox"
                tar.addfile(info)
        accounts = b"root:x:0:0::/:/bin/sh\nanswer:x:65534:65534::/:/bin/sh\n"
        info = tarfile.TarInfo("etc/passwd")
        info.size = len(accounts)
        tar.addfile(info, io.BytesIO(accounts))
    return made.getvalue()


def list_containers() -> list[str]:
    """Return the containers of workspaces that this process and its children have started with `RUN_OPTIONS`."""
    filters = ("--filter", f"label={LABEL}", "--filter", f"label={_TEST_LABEL}")
    command = [*ENGINE, "ps", "-a", *filters, "--format", "{{.Names}}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def list_snapshots(*, gone: bool = True) -> list[str]:
    """Return the images of containers' files, of this process or processes that are gone, if these count."""
    command = [*ENGINE, "images", "--filter", f"label={LABEL}", "--format", "{{.ID}}"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    style = f'{{{{index .Config.Labels "{LABEL}"}}}}'
    command = [*ENGINE, "inspect", "--type", "image", "--format", style]
    labels = [subprocess.run([*command, each], capture_output=True, text=True, check=False).stdout for each in found]
    return _without_others(((name, label.strip()) for name, label in zip(found, labels, strict=True) if label), gone)


def _without_others(pairs: Iterable[Sequence[str]], gone: bool) -> list[str]:
    """Return the names of what has no owner, one that is gone, or this process or a child of it as owner."""
    own = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    found = [(name, read_owner(label)) for name, label in pairs]
    return [name for name, owner in found if owner is None or (gone and owner.is_gone) or owner.pid in own]
