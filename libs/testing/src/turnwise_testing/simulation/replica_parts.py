"""Parts of the simulated replicas: engines that check their weights, a trainer, and a transport between them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from attrs import define, field

from turnwise.errors import EngineError
from turnwise.protocols.weights import Weight, WeightManifest, WeightTarget
from turnwise.types import GenerateRequest, GenerateResult
from turnwise.weights.sleep import drops_weights
from turnwise.weights.sources import source_of
from turnwise_testing.simulation.run_parts import NAMES, weights_of
from turnwise_testing.simulation.tracing import TracingEngine, digest_of

Content = Mapping[str, int]
"""The version of each weight that an engine has."""


def content_of(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the version of each weight, by the rule of `weights_of`; `torn` for an array of two versions."""
    values = {name: {(int(value) - NAMES.index(name)) // 31 for value in array} for name, array in weights.items()}
    return {name: found.pop() if len(found) == 1 else "torn" for name, found in values.items()}


@define(eq=False)
class Trainer:
    """
    A trainer that changes its weights in place, and knows the content of each version.

    A version has the changed weights, and all others from the last successful update. Replicas may or may not have the
    weights of a failed update, so the next update contains them again.

    Attributes:
        contents: of each version.
        digests: of the weights of each version.
        violations: of invariants, in the order in which they were found.
        version: of the last update.
    """

    contents: dict[int, Content] = field(factory=lambda: {0: dict.fromkeys(NAMES, 0)})
    digests: dict[int, int] = field(factory=dict)
    violations: list[str] = field(factory=list)
    version: int = 0
    _last_success: int = 0
    _unclear: frozenset[str] = frozenset()
    _memory: dict[str, Any] = field(factory=lambda: weights_of(dict.fromkeys(NAMES, 0)))

    def __attrs_post_init__(self) -> None:
        self.digests[0] = digest_of(self._memory)

    def step(self, names: Iterable[str]) -> dict[str, Any]:
        """Start the next version, which changes these weights in place; return them."""
        self.version += 1
        self._unclear |= frozenset(names)
        changed = dict.fromkeys(sorted(self._unclear), self.version)
        self.contents[self.version] = {**self.contents[self._last_success], **changed}
        self.digests[self.version] = digest_of(weights_of(self.contents[self.version]))
        for name, array in weights_of(changed).items():
            self._memory[name][:] = array
        return {name: self._memory[name] for name in changed}

    def note_success(self, version: int) -> None:
        """Note that an update has succeeded."""
        self._last_success, self._unclear = version, frozenset()

    def check(self, name: str, version: int, weights: Mapping[str, object]) -> None:
        """Note a violation if a replica lacks a weight of the version that it serves."""
        if digest_of(weights) != self.digests[version]:
            found, wanted = content_of(weights), self.contents[version]
            is_torn = any(each == "torn" or each > version for each in found.values())
            kind = "torn weights" if is_torn else "old weights"
            self.note_violation(f"{kind}: {name} serves version {version} as {found}, not as {dict(wanted)}")

    def note_violation(self, text: str) -> None:
        self.violations.append(text)


@define(eq=False)
class WatchedEngine(TracingEngine):
    """
    A replica's engine, which reads an update in a thread, as engines with much memory do, and checks its weights.

    Attributes:
        name: in the texts of violations.
        trainer: knows the content of each version.
        step_s: seconds of sleep and wake-up.
    """

    name: str = field(default="a replica", kw_only=True)
    trainer: Trainer = field(kw_only=True)
    step_s: Callable[[], float] = field(default=lambda: 0.0, kw_only=True)

    @property
    def served(self) -> set[int]:
        """Digests of all weights that this engine has had."""
        return set(self._digests.values())

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        if self._has_weights and self.sleep_state.level == 0:
            self.trainer.check(self.name, self.weight_version, self.weights)
        return await super().generate(request)

    async def update_weights(self, weights: Iterable[Weight], version: int) -> None:
        def read() -> list[Weight]:
            return [(name, np.array(array)) for name, array in weights]

        try:
            changed = await asyncio.to_thread(read)
        except Exception as error:
            raise EngineError(f"cannot update the weights: {error}") from error
        before = self.weight_version
        await super().update_weights(changed, version)
        self._has_weights = set(self.weights) == set(NAMES)
        if version < before:
            self.trainer.note_violation(f"versions: {self.name} went from version {before} back to {version}")

    async def sleep(self, level: int) -> None:
        await asyncio.sleep(self.step_s())
        await super().sleep(level)
        if drops_weights(level):
            self.weights = {}

    async def wake_up(self, tags: Iterable[str] = ("weights", "kv_cache")) -> None:
        await asyncio.sleep(self.step_s())
        await super().wake_up(tags)


@define(eq=False)
class SimulatedTransport:
    """
    Carries weights inside the process.

    Attributes:
        read_s: seconds in which a reader reads one weight.
        lends: readers read the trainer's own arrays, which change after the update, as with `cuda_ipc`; else they read
            a copy, as with shared memory.
        lasting: more readers may come while a version is published.
    """

    read_s: Callable[[], float]
    lends: bool = False
    lasting: bool = False
    _published: dict[int, list[Weight]] = field(factory=dict, init=False)

    @asynccontextmanager
    async def publish(self, version: int, weights: Iterable[Weight], num_readers: int) -> AsyncIterator[WeightManifest]:
        source = source_of(weights)
        await asyncio.sleep(self.read_s())
        key = len(self._published)
        self._published[key] = [(name, array if self.lends else np.array(array)) for name, array in source]
        try:
            yield WeightManifest(version=version, specs=source.specs, locator={"key": key})
        finally:
            if not self.lends:  # the trainer keeps the arrays that it lends
                self._published[key] = []

    async def apply(self, engine: WeightTarget, manifest: WeightManifest) -> None:
        if self.lends:
            await engine.update_weights(self._read(manifest), manifest.version)
        else:
            weights = await asyncio.to_thread(lambda: list(self._read(manifest)))
            await engine.update_weights(weights, manifest.version)

    async def close(self) -> None:
        """Do nothing: no version outlives its context."""

    def _read(self, manifest: WeightManifest) -> Iterator[Weight]:
        if not (weights := self._published[manifest.locator["key"]]):
            raise EngineError("the weights are not published any more")
        for name, array in weights:
            time.sleep(self.read_s())
            yield name, array
