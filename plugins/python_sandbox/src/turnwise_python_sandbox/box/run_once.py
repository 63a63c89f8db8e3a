"""One program in a process of its own, with rlimits and no more; the outside kills it at its time."""

from __future__ import annotations

import contextlib
import json
import resource
import sys
from typing import NoReturn

from turnwise_python_sandbox.box import confinement, program

_MIB = 2**20
_ROOM_FOR_PYTHON_MB = 256


def main(settings_text: str) -> NoReturn:
    """Run the code, with settings as JSON: ``limits`` (descriptor of the code, cpu_s, memory_mb, disk_mb), ``path``."""
    settings = json.loads(settings_text)
    code, cpu_s, memory_mb, disk_mb = settings["limits"]
    sys.path += settings["path"]
    limits = {
        resource.RLIMIT_AS: (memory_mb + _ROOM_FOR_PYTHON_MB) * _MIB,
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_FSIZE: disk_mb * _MIB,
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in limits.items():
        # macOS has no working limit of the address space.
        with contextlib.suppress(OSError, ValueError):
            confinement.set_limit(kind, value)
    sys.stdout.reconfigure(encoding="utf-8", line_buffering=True)  # type: ignore[union-attr]
    program.run_file(code)
