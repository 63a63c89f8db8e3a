"""
A pretended SGLang: the few names that the engine's process uses, with SGLang's ways and without its weight.

What it copies, each seen in SGLang 0.5.23: aborts match by prefix and are forgotten when they come before the request;
`ignore_eos` switches stop ids off as well; the model's end-of-turn ids end turns; outputs are clipped without a word;
weights are refused outside a session, by an answer and not by an exception; the scheduler dies of sleeping while it is
busy, and of waking what is awake.
"""

import os
import signal

from sglang.manager import Manager

__version__ = "0.0"


class Engine:
    """Makes a manager of the arguments; `FAKE_SGLANG` in the environment makes it fail."""

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
        """End the children: left to the engine."""


class Sizes:
    """What the schedulers tell of themselves."""

    def __init__(self, arguments):
        self.scheduler_infos = [{"max_total_num_tokens": arguments.get("max_total_tokens", 4096)}]
