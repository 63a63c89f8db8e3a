"""The device under test, figures to print, models, layouts and batches."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import define, field, frozen

from turnwise import EpisodeResult, RolloutBatch, Status, Task, Trajectory, TrajectoryScore
from turnwise.batch.rollout_batch import collate
from turnwise.protocols import Resources
from turnwise.weights.sources import as_numpy
from turnwise_testing.references.reference_model import save_random_model

DEVICE = os.environ.get("TURNWISE_TEST_DEVICE", "cuda")
FIGURES: list[str] = []
VOCABULARY = 512


def small(function: Callable[..., None]) -> Callable[..., None]:
    """Let a test run on a CPU in `make test`, too; such a variant takes about a second."""
    function.is_small = True  # type: ignore[attr-defined]  # read in conftest.py
    return function


@frozen
class Target:
    """
    A device under test.

    Attributes:
        name: as torch writes it.
        small: whether this is the variant of `make test`.
    """

    name: str
    small: bool = False

    @property
    def is_cuda(self) -> bool:
        return self.name.startswith("cuda")

    def pick(self, *, small: Any, cpu: Any, cuda: Any) -> Any:
        """Return the size of a problem for this device."""
        return small if self.small else cuda if self.is_cuda else cpu

    def synchronize(self) -> None:
        """Wait for all queued work."""
        if self.is_cuda:
            torch.cuda.synchronize(self.name)

    def free_bytes(self) -> int:
        """Return the free bytes of the GPU, as the driver counts them for all processes."""
        self.synchronize()
        return int(torch.cuda.mem_get_info(self.name)[0])

    @contextmanager
    def freed(self) -> Iterator[Freed]:
        """Measure the seconds of the body, and on a GPU the bytes that the driver got back."""
        result = Freed()
        before, started = self.free_bytes() if self.is_cuda else 0, time.perf_counter()
        yield result
        self.synchronize()
        result.seconds = time.perf_counter() - started
        if self.is_cuda:
            result.num_bytes = self.free_bytes() - before


@define
class Freed:
    """Seconds, and bytes that the driver got back (negative: taken); None on a CPU."""

    seconds: float = field(default=0.0, init=False)
    num_bytes: int | None = field(default=None, init=False)

    def __str__(self) -> str:
        taken = "bytes not measured" if self.num_bytes is None else f"{self.num_bytes / 2**20:+.0f} MiB free"
        return f"{self.seconds:.3f} s, {taken}"


def describe() -> str:
    """Return one line about the device and the packages."""
    import transformers

    name = torch.cuda.get_device_name(DEVICE) if DEVICE.startswith("cuda") and torch.cuda.is_available() else "a CPU"
    return f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}, transformers {transformers.__version__}"


def report(target: Target, text: str) -> None:
    """Print a line at the end of the session; the small variants print nothing."""
    if not target.small:
        FIGURES.append(f"{target.name}: {text}")


def save_qwen3(directory: Path, *, hidden_size: int, num_layers: int) -> Path:
    """Write a Qwen3 with random weights and untied embeddings, and return its directory."""
    from transformers import Qwen3Config

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 16 if hidden_size < 256 else hidden_size // 64,
        num_key_value_heads=hidden_size // 16 if hidden_size < 256 else hidden_size // 64,
        head_dim=16 if hidden_size < 256 else 64,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    return save_random_model(config, directory)


def make_engine(target: Target, model: Path, **options: Any) -> Any:
    """Return the embedded engine on a device, not started."""
    from turnwise_transformers_engine import TransformersConfig, TransformersEngine

    threads = None if target.is_cuda else 1
    defaults = {"max_context": 512, "num_blocks": 256, "seed": 0, "num_threads": threads}
    return TransformersEngine(TransformersConfig(model=model, device=target.name, **(defaults | options)), Resources())


def load_policy(target: Target, model: Path, dtype: str = "float32") -> Any:
    """Return the trainer's model on a device, in evaluation mode."""
    from turnwise import ModelSpec
    from turnwise_grpo_trainer.config import PolicyConfig
    from turnwise_grpo_trainer.learner.models import load_policy as load

    return load(PolicyConfig(device=target.name, dtype=dtype), ModelSpec(path=model)).to(target.name).eval()


def layout_columns(length: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (1, L) block_start and path_start: a prompt, three paths of different lengths, and text after them."""
    block, path = (torch.zeros(1, length, dtype=torch.int64) for _ in range(2))
    start = prompt = length // 5
    for share in (20, 25, 15):
        stop = start + length * share // 100
        block[0, start:stop], path[0, start:stop] = prompt, start
        start = stop
    return block.to(device), path.to(device)


def attention_inputs(length: int, device: str, dtype: torch.dtype, num_heads: int = 8) -> list[torch.Tensor]:
    """Return query, key and value, (1, H, L, 64) with gradients."""
    torch.manual_seed(0)
    values = [torch.randn(1, num_heads, length, 64) for _ in range(3)]
    return [each.to(device, dtype).requires_grad_() for each in values]


def make_batch(num_groups: int = 2, group_size: int = 4) -> RolloutBatch:
    """Return a batch of groups of conversations; the last record of each group has parallel paths."""
    random = np.random.default_rng(0)

    def ids(number: int) -> Any:
        return random.integers(0, VOCABULARY, number)

    def sampled(number: int) -> tuple[Any, Any]:
        return ids(number), -random.random(number).astype(np.float32)

    results = []
    for number in range(num_groups * group_size):
        record = Trajectory(ids(12))
        record.add_action(*sampled(20))
        if number % group_size == group_size - 1:
            paths = record.fork(3)
            for size, path in enumerate(paths, 4):
                path.add_action(*sampled(size))
            record.join(paths)
        record.add_observation(ids(9))
        record.add_action(*sampled(10 + number))
        results.append(
            EpisodeResult(
                task=Task(messages=({"role": "user", "content": "?"},), uid=f"t{number // group_size}"),
                rollout_n=number % group_size,
                status=Status.COMPLETED,
                trajectories=(record,),
                scores=(TrajectoryScore(value=float(number % 3)),),
            )
        )
    return collate(results, pad_token_id=0)


@define(eq=False)
class WeightKeeper:
    """The receiving end of a weight transport: keeps copies in host memory."""

    weights: dict[str, Any] = field(factory=dict, init=False)
    devices: set[str] = field(factory=set, init=False)

    async def update_weights(self, weights: Any, version: int) -> None:
        """Copy the weights of a version."""
        for name, tensor in weights:
            self.devices.add(str(getattr(tensor, "device", "host")))
            self.weights[name] = as_numpy(tensor, copy=True)


def receive_elsewhere(manifests: Any, results: Any) -> None:
    """Apply one manifest in another process, and send back a copy of the weights or the error."""
    import asyncio

    from turnwise_weight_transports.cuda_ipc import CudaIpcTransport

    keeper = WeightKeeper()
    try:
        asyncio.run(CudaIpcTransport().apply(keeper, manifests.get(timeout=120)))
    except Exception as error:  # noqa: BLE001 - the parent process raises it again
        results.put(repr(error))
    else:
        results.put({name: array.astype(np.float64).tolist() for name, array in keeper.weights.items()})
