"""
Compares segment attention with dense masked attention: time, extra memory and gradients of one layer.

`--length 1024` is quick. Memory is the growth of the peak resident memory; each variant runs in a separate process.
"""

import argparse
import json
import resource
import subprocess
import sys
import time

import numpy as np
import torch
from torch import Tensor

import turnwise_segment_attention as segments
from turnwise.layout import visible_keys
from turnwise.record.trajectory import Trajectory

NUM_HEADS, HEAD_SIZE, NUM_PATHS = 8, 64, 3


def build_record(length: int) -> Trajectory:
    """Return a record with a prompt, a block of three paths of different lengths, and text after it."""
    lengths = [length * share // 100 for share in (20, 25, 15)]
    trajectory = Trajectory(np.zeros(length // 5, np.int64))
    paths = trajectory.fork(NUM_PATHS)
    for path, size in zip(paths, lengths, strict=True):
        path.add_forced(np.zeros(size, np.int64))
    trajectory.join(paths)
    trajectory.add_forced(np.zeros(length - len(trajectory), np.int64))
    return trajectory


def make_inputs(length: int) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    shape = (1, NUM_HEADS, length, HEAD_SIZE)
    return [torch.randn(shape, requires_grad=True) for _ in range(3)], torch.randn(shape)


def attend(kind: str, trajectory: Trajectory, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    if kind == "segment":
        columns = [torch.tensor(getattr(trajectory, name)) for name in ("block_start", "path_start")]
        return segments.segment_attention(query, key, value, segments.plan(*columns))
    if kind == "causal":
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    rows = np.arange(len(trajectory))
    visible = torch.from_numpy(visible_keys(trajectory.block_start, trajectory.path_start, rows))
    mask = torch.zeros(visible.shape).masked_fill_(~visible, torch.finfo(torch.float32).min)
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(kind: str, length: int, threads: int) -> None:
    """Print seconds and MiB of one forward and backward pass, after a small warm-up."""
    torch.set_num_threads(threads)
    small, grad = make_inputs(256)
    attend(kind, build_record(256), *small).backward(grad)
    trajectory = build_record(length)
    inputs, grad = make_inputs(length)
    before, started, cpu = peak_mib(), time.perf_counter(), time.process_time()
    attend(kind, trajectory, *inputs).backward(grad)
    seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    print(json.dumps({"seconds": seconds, "cpu_s": cpu_s, "extra_mib": peak_mib() - before}))


def largest_difference(length: int) -> tuple[float, float]:
    """Return the largest difference of float32 gradients, and the largest gradient."""
    trajectory = build_record(length)
    grads = {}
    for kind in ("segment", "dense"):
        inputs, grad = make_inputs(length)
        attend(kind, trajectory, *inputs).backward(grad / length**0.5)
        grads[kind] = [each.grad for each in inputs]
    pairs = list(zip(*grads.values(), strict=True))
    return max((a - b).abs().max().item() for a, b in pairs), max(b.abs().max().item() for _, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=8192, help="tokens (default: 8192)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    parser.add_argument("--kind", choices=("segment", "dense", "causal"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.kind:
        measure(options.kind, options.length, options.threads)
        return
    torch.set_num_threads(options.threads)
    print(
        f"L {options.length}, {NUM_HEADS} heads of {HEAD_SIZE}, {NUM_PATHS} paths, float32, {options.threads} threads"
    )
    results = {}
    for kind in ("dense", "segment", "causal"):
        command = [sys.executable, __file__, "--kind", kind]
        command += ["--length", str(options.length), "--threads", str(options.threads)]
        results[kind] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        values = results[kind]
        print(f"{kind:8s} {values['cpu_s']:7.2f} CPU s {values['seconds']:7.2f} s +{values['extra_mib']:6.0f} MiB")
    dense, segment = results["dense"], results["segment"]
    print(
        f"segment attention needs 1/{dense['cpu_s'] / segment['cpu_s']:.1f} of the time"
        f" and {segment['extra_mib'] / dense['extra_mib']:.2f} of the extra memory"
    )
    difference, largest = largest_difference(options.length)
    print(
        f"largest difference of gradients {difference:.1e}, largest gradient {largest:.2f},"
        f" ratio {difference / largest:.1e}"
    )


if __name__ == "__main__":
    main()
