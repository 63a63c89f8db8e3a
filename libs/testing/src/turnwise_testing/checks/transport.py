"""
Requirements of every weight transport, both ends in one process: an update arrives unchanged, whole or not at all.

A check takes a `TransportProbe`. Nothing here knows pytest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import ml_dtypes
import numpy as np
from attrs import define, field, frozen

from turnwise.errors import EngineError
from turnwise.protocols.weights import Weight, WeightManifest, WeightTarget, WeightTransport
from turnwise_testing.checks.check import Check, register
from turnwise_testing.checks.part import PartChecks
from turnwise_testing.engines.scripted import ScriptedEngine
from turnwise_testing.probes.engine import expect, expect_equal, expect_refusal

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


@frozen(kw_only=True)
class TransportProbe:
    """
    The probe of a weight transport.

    Attributes:
        make_transport: builds it, as the registered factory does.
        weights: makes weights from a seed.
    """

    make_transport: MakeTransport
    weights: Callable[[int], dict[str, Any]] = some_weights


TRANSPORT_CHECKS: dict[str, Check] = {}
"""Every check by the name of its function without `check_`."""
WEIGHT_TRANSPORTS = PartChecks(
    checks=TRANSPORT_CHECKS,
    probe=lambda part: TransportProbe(make_transport=part.make),
)
_check = register(TRANSPORT_CHECKS)


@_check
def check_fulfils_the_protocol(probe: TransportProbe) -> None:
    """The factory returns an object with the methods of a weight transport."""
    made = probe.make_transport()
    expect(isinstance(made, WeightTransport), f"{type(made).__name__} lacks `publish`, `apply` or `close`")


@_check
async def check_weights_arrive_as_they_were(probe: TransportProbe) -> None:
    """Names, order, shapes, dtypes and bits are the same, at two replicas at once, version after version."""
    engines = [ReceivingEngine(), ReceivingEngine()]
    for version in (1, 2):
        weights = probe.weights(version)
        expect_equal(await carry(probe.make_transport(), engines, weights, version), [None, None], "the errors")
        for engine in engines:
            assert_same(weights, engine.weights)
            expect_equal(engine.names, tuple(weights), "the names that the engine was told")
            expect_equal(engine.weight_version, version, "the version that the engine was told")


@_check
async def check_a_refusing_replica_harms_no_other(probe: TransportProbe) -> None:
    """`apply` passes the engine's exception on; the next version reaches every reader."""
    engines = [ReceivingEngine(), RefusingEngine()]
    errors = await carry(probe.make_transport(), engines, probe.weights(1), 1)
    expect(isinstance(errors[1], EngineError), f"apply raised {errors[1]!r}, expected the engine's EngineError")
    expect_equal(await carry(probe.make_transport(), engines[:1], probe.weights(2), 2), [None], "the errors after it")
    assert_same(probe.weights(2), engines[0].weights)


@_check
async def check_an_offer_that_has_ended_is_refused(probe: TransportProbe) -> None:
    """Applying after the context was left raises, and the engine keeps its weights."""
    engine, transport = ReceivingEngine(), probe.make_transport()
    async with transport.publish(1, probe.weights(1).items(), 1) as manifest:
        pass
    await expect_refusal(transport.apply(engine, manifest), "applying after the context was left")
    await transport.close()
    expect_equal(list(engine.weights), [], "the weights of the engine")


@_check
async def check_a_lasting_version_reaches_later_replicas(probe: TransportProbe) -> None:
    """A transport that is `lasting` lets more replicas apply a version, also after a later one was published."""
    transport, engines = probe.make_transport(), [ReceivingEngine(), ReceivingEngine()]
    if not getattr(transport, "lasting", False):
        return
    async with transport.publish(1, probe.weights(1).items(), 1) as manifest:
        await transport.apply(engines[0], manifest)
        expect_equal(await carry(transport, [ReceivingEngine()], probe.weights(2), 2), [None], "the errors")
        await transport.apply(engines[1], manifest)
    for engine in engines:
        assert_same(probe.weights(1), engine.weights)


@_check
async def check_close_is_harmless(probe: TransportProbe) -> None:
    """`close` may come before anything was published, and twice."""
    transport = probe.make_transport()
    await transport.close()
    await transport.close()


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
    expect_equal(list(actual), list(expected), "the names of the weights")
    for name, array in expected.items():
        form = (str(actual[name].dtype), actual[name].shape)
        expect_equal(form, (str(array.dtype), array.shape), f"dtype and shape of {name}")
        expect(array.tobytes() == actual[name].tobytes(), f"{name} has other numbers")


def _copy(array: Any) -> Any:
    from turnwise.weights.sources import as_numpy

    return np.array(as_numpy(array))
