"""
A plugin for `test_recorded_trajectories.py`: a scripted engine that writes one of a few texts, chosen by the request.

The choice depends on the request's seed alone, so every runtime, machine and version samples the same tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from attrs import frozen

from turnwise import Engine, GenerateRequest, Registry, Resources, hookimpl
from turnwise_testing.engines.scripted import ScriptedEngine


@frozen(kw_only=True)
class RecordedConfig:
    """
    Options.

    Attributes:
        texts: the turns that the model may write, as the tokenizer of the run's model encodes them.
    """

    texts: tuple[str, ...]


class RecordedEngine(ScriptedEngine):
    """Writes one of the configured texts for each request."""

    def __init__(self, config: RecordedConfig, resources: Resources) -> None:
        super().__init__(self._write, record=False)
        self._config, self._path = config, resources.model.path
        self._turns: list[list[int]] = []

    async def start(self) -> None:
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(self._path)
        self._turns = [tokenizer.encode(text, add_special_tokens=False) for text in self._config.texts]
        await super().start()

    def _write(self, request: GenerateRequest) -> list[int]:
        draws = np.random.default_rng([request.sampling.seed or 0, len(request.token_ids)])
        turn = self._turns[int(draws.integers(len(self._turns)))]
        # Sometimes the model stops in the middle, so that budgets and unfinished tags are part of the record.
        return turn[: int(draws.integers(1, len(turn) + 1))] if draws.random() < 0.2 else turn


@hookimpl
def register_engines(registry: Registry[Engine]) -> None:
    """Add `recorded`."""
    registry.add("recorded", RecordedEngine, config=RecordedConfig)
