"""
A plugin for the tests of training: an engine whose samples depend on the weights and the request's seed alone.

It serves one request at a time, so no batch changes a bit. A model learns the reward `even_ids` in a few steps. The
observer `witness` sends a signal to its process at a chosen event, and logs the episodes that each step learnt from,
which the postprocessor `seen` records.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from attrs import frozen

from turnwise import (
    Capabilities,
    Engine,
    Episode,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Observer,
    PackedBatch,
    Postprocessor,
    Registry,
    Resources,
    Reward,
    TrajectoryScore,
    hookimpl,
)
from turnwise.errors import EngineError
from turnwise.events.dispatch import EVENTS
from turnwise.events.observer import MetricsLogged, Place, TrainingStarted


@frozen(kw_only=True)
class SeededConfig:
    """
    Options.

    Attributes:
        latency_s: seconds that every request waits, as for a tool.
        hold_every: the first request of every so many groups waits to be interrupted, for at most
            30 seconds; 0 for none.
        refused_version: the engine refuses the weights of this version; 0 for none.
    """

    latency_s: float = 0.0
    hold_every: int = 0
    refused_version: int = 0


class SeededEngine:
    """Samples with one generator per request."""

    def __init__(self, config: SeededConfig, resources: Resources) -> None:
        self._config, self._path = config, resources.model.path
        self._model: Any = None
        self._version, self._asleep, self._running = 0, False, 0
        self._turn = asyncio.Lock()
        self._groups: set[str] = set()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(seeds=True, weight_updates=True, sleep_levels=frozenset({1}), max_context=512)

    async def start(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(self._path, dtype=torch.float32).eval()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        assert not self._asleep, "asleep"
        if self._config.hold_every and request.group_id not in self._groups:
            self._groups.add(request.group_id)
            if len(self._groups) % self._config.hold_every == 1:
                await asyncio.sleep(30)
        self._running += 1
        await asyncio.sleep(self._config.latency_s)
        async with self._turn:
            result = self._sampled(request)
        self._running -= 1
        return result

    def _sampled(self, request: GenerateRequest) -> GenerateResult:
        import torch

        generator = torch.Generator().manual_seed(request.sampling.seed or 0)
        ids, logprobs, cache = [], [], None
        inputs = torch.tensor(np.asarray(request.token_ids)).long()[None]
        with torch.inference_mode():
            for _ in range(request.sampling.max_tokens or 8):
                output = self._model(input_ids=inputs, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                scores = (output.logits[0, -1] / request.sampling.temperature).log_softmax(-1)
                token = int(torch.multinomial(scores.exp(), 1, generator=generator))
                ids.append(token)
                logprobs.append(float(scores[token]))
                inputs = torch.tensor([[token]])
                if token in request.sampling.stop_token_ids:
                    break
        stopped = ids[-1] in request.sampling.stop_token_ids
        return GenerateResult(
            token_ids=np.array(ids, np.int32),
            logprobs=np.minimum(np.array(logprobs, np.float32), 0.0),
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            weight_version=self._version,
        )

    async def abort(self, request_id: str) -> None:
        """Do nothing: requests are short."""

    async def sleep(self, level: int) -> None:
        self._asleep = True

    async def wake_up(self, tags: Iterable[str] = ("weights", "kv_cache")) -> None:
        self._asleep = self._asleep and "kv_cache" not in tags

    async def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        import torch

        if version and version == self._config.refused_version:
            raise EngineError("no room for the weights")
        targets = self._model.state_dict()
        async with self._turn:
            for name, array in weights:
                targets[name].copy_(torch.tensor(np.asarray(array)))
            self._version = version

    def stats(self) -> Mapping[str, float]:
        return {"num_running": self._running}

    async def stop(self) -> None:
        self._model = None


class EvenIds:
    """The share of sampled ids that are even."""

    def score(self, episode: Episode) -> TrajectoryScore:
        record = episode.trajectory
        ids = record.response_ids[record.response_mask == 1]
        return TrajectoryScore(value=float((ids % 2 == 0).mean()) if len(ids) else 0.0)


SEEN: list[str] = []
"""Episodes of the last batch, as uid/rollout."""


class Seen:
    """Records the episodes of a batch."""

    def process(self, batch: PackedBatch) -> Mapping[str, Any]:
        """Add no field."""
        SEEN[:] = [f"{row.uid}/{row.rollout_n}" for row in batch.rows]
        return {}


class Witness(Observer):
    """
    Sends `TURNWISE_TEST_SIGNAL`, such as `SIGKILL on_turn_finished 3`, at the third such event of the process.

    It writes the episodes that each step learnt from to `learnt.jsonl`, with the step.
    """

    place: ClassVar[Place] = "driver"

    def __init__(self) -> None:
        name, self._event, count = (os.environ.get("TURNWISE_TEST_SIGNAL") or "SIGKILL none 0").split()
        self._signal, self._left = getattr(signal, name), int(count)
        self._folder: Path | None = None

    def on_training_started(self, event: TrainingStarted) -> None:
        self._folder = event.folder
        self._count("on_training_started")

    def on_metrics_logged(self, event: MetricsLogged) -> None:
        if self._folder is not None and "reward/mean" in event.values:
            with (self._folder / "learnt.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": event.step, "episodes": SEEN}) + "\n")
        self._count("on_metrics_logged")

    def _count(self, name: str) -> None:
        if name == self._event:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), self._signal)


def _counting(name: str) -> Any:
    return lambda self, _event: self._count(name)


for _name in EVENTS:
    if _name not in vars(Witness):
        setattr(Witness, _name, _counting(_name))


@hookimpl
def register_engines(registry: Registry[Engine]) -> None:
    """Add `seeded`."""
    registry.add("seeded", SeededEngine, config=SeededConfig)


@hookimpl
def register_rewards(registry: Registry[Reward]) -> None:
    """Add `even_ids`."""
    registry.add("even_ids", lambda config, resources: EvenIds())


@hookimpl
def register_observers(registry: Registry[Observer]) -> None:
    """Add `witness`."""
    registry.add("witness", lambda config, resources: Witness())


@hookimpl
def register_postprocessors(registry: Registry[Postprocessor]) -> None:
    """Add `seen`."""
    registry.add("seen", lambda config, resources: Seen())
