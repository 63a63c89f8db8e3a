"""
A plugin that ends its process while the checkpoint of step 2 is written, at a place that `TURNWISE_TEST_SAVE` names.

`4096 shard` is behind the first 4096 bytes of the file with this text in its name: the limit for the size of files ends
the process there, and none of its code runs after it, as with SIGKILL.

Python tells of each file that it opens. safetensors opens its files in Rust, so their limit begins with the folder that
is made for them just before.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from typing import Final

_FOLDER: Final = "step-00000002.partial"


def _install(size: int, name: str) -> None:
    awaited, part = ("os.mkdir", "trainer") if name == "shard" else ("open", name)

    def hear(event: str, arguments: tuple[object, ...]) -> None:
        if event == awaited and _FOLDER in str(arguments[0]) and part in str(arguments[0]):
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.addaudithook(hear)


if _place := os.environ.get("TURNWISE_TEST_SAVE"):
    _size, _name = _place.split()
    _install(int(_size), _name)
