"""The suite of containers as a normal user, whose podman has no rights of root."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

USER = os.environ.get("TURNWISE_ROOTLESS_USER", "")
PYTHON = "/usr/bin/python3"
VERSION = "import sys; print(sys.version_info[:2])"


def why_not() -> str:
    """Return why the tests cannot run as a normal user; empty if they can."""
    if not USER or os.geteuid() != 0 or shutil.which("runuser") is None:
        return "needs root, and a user with ranges in /etc/subuid and /etc/subgid in TURNWISE_ROOTLESS_USER"
    done = subprocess.run([PYTHON, "-c", VERSION], capture_output=True, text=True, check=False)
    same = done.stdout.strip() == str(tuple(sys.version_info[:2]))
    return "" if same else f"{PYTHON} has another version than the packages of this environment"


@pytest.mark.slow
def test_the_suite_as_a_normal_user():
    """All promises hold, but for limits beside control groups of version 1, where podman ignores them."""
    if reason := why_not():
        pytest.skip(reason)
    account = pwd.getpwnam(USER)
    folder = Path(tempfile.mkdtemp())  # not below pytest's own folder, which other users may not enter
    os.chown(folder, account.pw_uid, account.pw_gid)
    paths = [path for path in sys.path if path and not path.startswith(sys.base_prefix)]
    variables = {
        "HOME": account.pw_dir,
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TMPDIR": str(folder),
        "XDG_RUNTIME_DIR": str(folder),
    }
    words = [f"{name}={value}" for name, value in variables.items()]
    limits = " and not limits_hold" if not Path("/sys/fs/cgroup/cgroup.controllers").exists() else ""
    pytest_words = ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "--basetemp", str(folder / "pytest")]
    wanted = ["-k", f"TestContainers{limits}", str(Path(__file__).with_name("test_conformance.py"))]
    try:
        done = subprocess.run(
            ["runuser", "-u", USER, "--", "env", "-i", *words, PYTHON, *pytest_words, *wanted],
            cwd=Path(__file__).parents[3],
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)

    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert " skipped" not in done.stdout.splitlines()[-1]
