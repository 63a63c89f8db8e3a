"""
A fake SGLang with the names that the engine's process uses.

It copies this behaviour of SGLang 0.5.23: aborts match by prefix and are dropped if they arrive before the request;
`ignore_eos` also disables stop ids; the model's end-of-turn ids end turns; outputs are truncated silently; weights
outside a session are refused by a return value and not by an exception; the scheduler crashes if it has to sleep while
it is busy, or to wake up a tag that is awake.
"""

import os
import signal

from sglang.manager import Manager

__version__ = "0.0"


class Engine:
    """Makes a manager; the environment variable `FAKE_SGLANG` makes it fail."""

    def __init__(self, **arguments):
        mood = os.environ.get("FAKE_SGLANG", "")
        if mood == "raise":
            raise RuntimeError("no memory for the cache\nand more lines")
        if mood == "die":
            print("Traceback (most recent call last):\n  ...\nValueError: this model cannot be loaded", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        self.tokenizer_manager = Manager(arguments)
        self._scheduler_init_result = Sizes(arguments)
        if mood == "child":
            self.child = os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "1000")
            print(f"child {self.child}", flush=True)

    def shutdown(self):
        """Do nothing, so that the engine has to end the children."""


class Sizes:
    """The sizes that the schedulers report."""

    def __init__(self, arguments):
        self.scheduler_infos = [{"max_total_num_tokens": arguments.get("max_total_tokens", 4096)}]
