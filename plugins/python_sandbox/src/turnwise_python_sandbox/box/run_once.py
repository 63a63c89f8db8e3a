"""Runs one program in this process, with rlimits only; the parent process kills it at its time limit."""

from __future__ import annotations

import contextlib
import json
import resource
import sys
from typing import Final, NoReturn

from turnwise_python_sandbox.box import confinement, program

_MIB: Final = 2**20
_INTERPRETER_MB: Final = 256
"""Address space for the interpreter itself."""


def main(settings_text: str) -> NoReturn:
    """
    Run the program.

    Args:
        settings_text: JSON with the keys ``limits`` (descriptor of the code, cpu_s, memory_mb, disk_mb) and
            ``import_path`` (directories to append to `sys.path`).
    """
    settings = json.loads(settings_text)
    code_fd, cpu_s, memory_mb, disk_mb = settings["limits"]
    sys.path += settings["import_path"]
    limits = {
        resource.RLIMIT_AS: (memory_mb + _INTERPRETER_MB) * _MIB,
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_FSIZE: disk_mb * _MIB,
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in limits.items():
        # macOS refuses to limit the address space.
        with contextlib.suppress(OSError, ValueError):
            confinement.set_limit(kind, value)
    sys.stdout.reconfigure(encoding="utf-8", line_buffering=True)  # type: ignore[union-attr]  # a real file
    program.run_file(code_fd)
