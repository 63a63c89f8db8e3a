"""
A fake SGLang with the names that the engine's process uses.

It copies this behaviour of SGLang 0.5.23: aborts match by prefix and are dropped if they arrive before the request;
`ignore_eos` also disables stop ids; the model's end-of-turn ids end turns; outputs are truncated silently; weights
outside a session are refused by a return value and not by an exception; the scheduler crashes if it has to sleep while
it is busy, or to wake up a tag that is awake.
"""

import json
import os
import signal
import socket
import time
from pathlib import Path

from sglang.manager import Manager

__version__ = "0.0"


class Engine:
    """
    Makes a manager, on the first node.

    The environment variable `FAKE_SGLANG` makes it fail. `FAKE_SGLANG_NOTES` names a folder for notes on each server.
    """

    def __init__(self, **arguments):
        note(arguments)
        mood = os.environ.get("FAKE_SGLANG", "")
        if mood == "raise":
            raise RuntimeError("no memory for the cache\nand more lines")
        if mood == "die on another node" and arguments.get("node_rank"):
            mood = "die"
        if mood == "die":
            print("Traceback (most recent call last):\n  ...\nValueError: this model cannot be loaded", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        self.tokenizer_manager = None if arguments.get("node_rank") else Manager(arguments)
        self._scheduler_init_result = Sizes(arguments)
        if arguments.get("nnodes", 1) > 1:
            self.peers = meet(arguments["dist_init_addr"], arguments["nnodes"], arguments["node_rank"])
        if mood == "child":
            self.child = os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "1000")
            print(f"child {self.child}", flush=True)

    def shutdown(self):
        """Do nothing, so that the engine has to end the children."""


def note(arguments):
    """Write what this server was started with."""
    if folder := os.environ.get("FAKE_SGLANG_NOTES"):
        names = ("nnodes", "node_rank", "dist_init_addr", "device", "tp_size")
        about = {name: arguments.get(name) for name in names} | {
            "gpus": os.environ["CUDA_VISIBLE_DEVICES"],
            "blocks": os.environ.get("SGLANG_BLOCK_NONZERO_RANK_CHILDREN", "1"),
        }
        Path(folder, f"{os.getpid()}.json").write_text(json.dumps(about))


def meet(address, number, rank):
    """Return connections between the first node and every other one, as soon as all are there."""
    host, _, port = address.rpartition(":")
    if not rank:
        with socket.create_server((host, int(port))) as server:
            return [server.accept()[0] for _ in range(number - 1)]
    while True:
        try:
            return [socket.create_connection((host, int(port)))]
        except ConnectionRefusedError:
            time.sleep(0.01)


class Sizes:
    """The schedulers: the sizes that they report, and their end."""

    def __init__(self, arguments):
        self.scheduler_infos = [{"max_total_num_tokens": arguments.get("max_total_tokens", 4096)}]

    def block_until_scheduler_exits(self):
        """Wait for ever: the fake has no schedulers that could end before it."""
        time.sleep(1e6)
