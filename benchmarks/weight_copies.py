"""
Measures how many bytes a weight update writes to host memory and to files, for each byte of weights.

    python benchmarks/weight_copies.py [--mib 256] [--tensors 32]

The way is that of a run on Ray with `weights.keep_last`: from arrays of a trainer in host memory through a transport to
the place from which the processes of an engine read them. Their own write, to the parameters of the model, is not
counted. A small library, built with the C compiler of this machine and loaded before libc, counts the bytes of every
`memcpy`, `memmove`, `write` and `pwrite` of 4 KiB or more in the process. The results do not depend on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from turnwise.runtime.ray.weights import GroupWeights
from turnwise.runtime.remote.supervision import make_slots
from turnwise.runtime.remote.weight_updates import WeightUpdater
from turnwise_engine_support.weight_checks import ExpectedWeights

MIB = 1 << 20
COUNTER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/types.h>

_Atomic unsigned long long turnwise_copied;
static void *(*move)(void *, const void *, size_t);
static void count(size_t n) { if (n >= 4096) atomic_fetch_add(&turnwise_copied, n); }

void *memmove(void *to, const void *from, size_t n) {
    count(n);
    if (!move) *(void **)&move = dlsym(RTLD_NEXT, "memmove");
    return move(to, from, n);
}
void *memcpy(void *to, const void *from, size_t n) { return memmove(to, from, n); }

ssize_t write(int fd, const void *from, size_t n) {
    static ssize_t (*next)(int, const void *, size_t);
    if (!next) *(void **)&next = dlsym(RTLD_NEXT, "write");
    count(n);
    return next(fd, from, n);
}
ssize_t pwrite64(int fd, const void *from, size_t n, off_t at) {
    static ssize_t (*next)(int, const void *, size_t, off_t);
    if (!next) *(void **)&next = dlsym(RTLD_NEXT, "pwrite64");
    count(n);
    return next(fd, from, n, at);
}
ssize_t pwrite(int fd, const void *from, size_t n, off_t at) { return pwrite64(fd, from, n, at); }
"""


def stage_for_vllm(weights: Iterable[Any], expected: ExpectedWeights) -> Any:
    """Put weights where vLLM's processes read them."""
    from turnwise_vllm_engine.weights import stage

    return stage(weights, expected, weight_dir=None, bucket_bytes=64 * MIB, whole=True)


def stage_for_sglang(weights: Iterable[Any], expected: ExpectedWeights) -> Any:
    """Put weights where SGLang's processes read them."""
    from turnwise_sglang_engine.staging import stage

    return stage(weights, expected, whole=True)


ENGINES = {"vllm": stage_for_vllm, "sglang": stage_for_sglang}
TRANSPORTS = ("shm", "ray", "disk")


class StagingEngine:
    """Receives weights as an engine does, up to the place from which its processes read them."""

    def __init__(self, stage: Callable[[Iterable[Any], ExpectedWeights], Any], expected: ExpectedWeights) -> None:
        self._stage, self._expected = stage, expected

    async def update_weights(self, weights: Iterable[Any], version: int) -> None:
        """Stage the weights, and free them."""
        with closing(await asyncio.to_thread(self._stage, weights, self._expected)):
            pass


def make_transport(name: str) -> Any:
    """Return a transport with its default options; `ray` starts a cluster of one process."""
    if name == "shm":
        from turnwise_weight_transports.shm import SharedMemoryTransport

        return SharedMemoryTransport()
    if name == "disk":
        from turnwise_weight_transports.disk import DiskTransport

        return DiskTransport()
    import ray

    from turnwise_weight_transports.ray_store import RayTransport

    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=2048 * MIB)
    return RayTransport()


async def update(transport: Any, engine: StagingEngine, weights: dict[str, Any], counted: Any) -> int:
    """Update one replica twice, and return the bytes that the second update wrote."""

    async def apply(manifest: Any) -> None:
        await transport.apply(engine, manifest)

    (slot,) = slots = make_slots("replica", 1)
    slot.handle = SimpleNamespace(update_weights=SimpleNamespace(remote=apply))
    group = GroupWeights(WeightUpdater(transport, "measured"), keep_last=True)
    await group.update(slots, weights, 1, lambda _slot, _reason: None)
    before = counted.value
    await group.update(slots, weights, 2, lambda _slot, _reason: None)
    return int(counted.value - before)


def measure(transport: str, engine: str, mib: int, tensors: int) -> float:
    """Return the bytes written for each byte of weights, in this process, which has loaded the library."""
    counted = ctypes.c_ulonglong.in_dll(ctypes.CDLL(os.environ.pop("LD_PRELOAD")), "turnwise_copied")
    rows = mib * MIB // tensors // 4096
    weights = {f"w{i}": np.full((rows, 1024), i, np.float32) for i in range(tensors)}
    target = StagingEngine(ENGINES[engine], ExpectedWeights({name: each.shape for name, each in weights.items()}))
    copied = asyncio.run(update(make_transport(transport), target, weights, counted))
    return copied / sum(each.nbytes for each in weights.values())


def main() -> None:
    """Measure every transport with every engine, each in a process, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--tensors", type=int, default=32)
    parser.add_argument("--one", nargs=2, metavar=("TRANSPORT", "ENGINE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        sys.stdout.write(json.dumps(measure(*options.one, options.mib, options.tensors)))
        return
    sys.stdout.write(f"bytes written for each byte of weights, {options.mib} MiB in {options.tensors} tensors\n")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "counter.so"
        source = library.with_suffix(".c")
        source.write_text(COUNTER, encoding="utf-8")
        command = ["cc", "-O2", "-fno-builtin", "-shared", "-fPIC", "-o", library, source, "-ldl"]
        subprocess.run(command, check=True)
        for transport in TRANSPORTS:
            for engine in ENGINES:
                size = ["--mib", str(options.mib), "--tensors", str(options.tensors)]
                command = [sys.executable, __file__, "--one", transport, engine, *size]
                environment = {**os.environ, "LD_PRELOAD": str(library)}
                done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
                sys.stdout.write(f"{transport:>6} {engine:>8} {json.loads(done.stdout):6.2f}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
