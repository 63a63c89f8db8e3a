"""The conformance suite of weight transports: an update arrives unchanged, whole or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from attrs import define, field

from turnwise.errors import EngineError
from turnwise.protocols import Resources
from turnwise.protocols.weights import Weight, WeightManifest, WeightTarget, WeightTransport
from turnwise_testing.scripted import ScriptedEngine
from turnwise_testing.suite import PluginSuite

MakeTransport = Callable[[], WeightTransport]


def some_weights(seed: int = 0) -> dict[str, Any]:
    """Return weights of several shapes and dtypes, an empty and a single one among them."""
    random = np.random.default_rng(seed)
    return {
        "embed.weight": random.standard_normal((32, 16)).astype(np.float32),
        "norm.weight": random.standard_normal(16).astype(ml_dtypes.bfloat16),
        "scale": np.array(1.5 + seed, np.float32),
        "head.weight": random.standard_normal((5, 16)).astype(np.float16),
        "none": np.empty((0, 4), np.float32),
    }


@define(eq=False)
class ReceivingEngine(ScriptedEngine):
    """An engine that keeps all of an update, or nothing."""

    weights: dict[str, Any] = field(factory=dict, init=False)
    names: tuple[str, ...] = field(default=(), init=False)

    async def update_weights(self, weights: Iterable[Weight], version: int) -> None:
        """Copy the weights off the event loop, as engines do."""
        self.names = tuple(spec.name for spec in weights.specs)  # type: ignore[attr-defined]  # transports hand over a WeightSource
        copies = await asyncio.to_thread(lambda: {name: _copy(array) for name, array in weights})
        self.weights, self.weight_version = copies, version


class RefusingEngine(ReceivingEngine):
    """An engine that takes one weight and no more."""

    async def update_weights(self, weights: Iterable[Weight], version: int) -> None:
        """Refuse in the middle."""
        await asyncio.to_thread(lambda: next(iter(weights)))
        raise EngineError("the model has no such weight")


class WeightTransportSuite(PluginSuite):
    """
    The conformance suite of weight transports, both ends in one process.

    May be overridden: `config`, `resources`, `make_transport`, and `weights`, which makes the published weights.
    """

    hook = "register_weight_transports"

    @pytest.fixture
    def make_transport(self, config: object, resources: Resources) -> MakeTransport:
        """A maker of transports; may be overridden."""
        factory = self.entry().factory
        return lambda: factory(config, resources)

    @pytest.fixture
    def weights(self) -> Callable[[int], dict[str, Any]]:
        """A function of a seed; may be overridden."""
        return some_weights

    def test_weights_arrive_as_they_were(self, make_transport: MakeTransport, weights: Any) -> None:
        """Names, order, shapes, dtypes and bits are the same, at two replicas at once, version after version."""
        engines = [ReceivingEngine(), ReceivingEngine()]

        async def scenario() -> None:
            for version in (1, 2):
                await carry(make_transport(), engines, weights(version), version)
                for engine in engines:
                    assert_same(weights(version), engine.weights)
                    assert engine.names == tuple(weights(version))
                    assert engine.weight_version == version

        within(scenario())

    def test_a_refusing_replica_harms_no_other(self, make_transport: MakeTransport, weights: Any) -> None:
        """`apply` passes the engine's exception on; the next version reaches every reader."""
        engines = [ReceivingEngine(), RefusingEngine()]

        async def scenario() -> None:
            errors = await carry(make_transport(), engines, weights(1), 1)
            assert isinstance(errors[1], EngineError)
            assert await carry(make_transport(), engines[:1], weights(2), 2) == [None]
            assert_same(weights(2), engines[0].weights)

        within(scenario())

    def test_an_offer_that_has_ended_is_refused(self, make_transport: MakeTransport, weights: Any) -> None:
        """Applying after the context was left raises, and the engine keeps its weights."""
        engine = ReceivingEngine()

        async def scenario() -> None:
            transport = make_transport()
            async with transport.publish(1, weights(1).items(), 1) as manifest:
                pass
            with pytest.raises(EngineError):
                await transport.apply(engine, manifest)
            await transport.close()

        within(scenario())
        assert engine.weights == {}

    def test_close_is_harmless(self, make_transport: MakeTransport) -> None:
        """Before anything was published, and twice."""

        async def scenario() -> None:
            transport = make_transport()
            await transport.close()
            await transport.close()

        within(scenario())


async def carry(
    transport: WeightTransport, engines: Iterable[WeightTarget], weights: dict[str, Any], version: int
) -> list[Exception | None]:
    """Publish weights and apply them to every engine at once; return the exception of each."""
    replicas = tuple(engines)
    async with (
        transport.publish(version, tuple(weights.items()), len(replicas)) as manifest,
        asyncio.TaskGroup() as group,
    ):
        tasks = [group.create_task(_applied(transport, engine, manifest)) for engine in replicas]
    await transport.close()
    return [task.result() for task in tasks]


async def _applied(transport: WeightTransport, engine: WeightTarget, manifest: WeightManifest) -> Exception | None:
    try:
        await transport.apply(engine, manifest)
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return error
    return None


def within(scenario: Coroutine[Any, Any, None], timeout_s: float = 60.0) -> None:
    """Run a scenario, but not forever."""
    asyncio.run(asyncio.wait_for(scenario, timeout_s))


def assert_same(expected: dict[str, Any], actual: dict[str, Any]) -> None:
    """Compare weights bit by bit."""
    assert list(expected) == list(actual)
    for name, array in expected.items():
        assert (str(array.dtype), array.shape) == (str(actual[name].dtype), actual[name].shape)
        assert array.tobytes() == actual[name].tobytes(), f"{name} has other numbers"


def _copy(array: Any) -> Any:
    from turnwise.weights.sources import as_numpy

    return np.array(as_numpy(array))
