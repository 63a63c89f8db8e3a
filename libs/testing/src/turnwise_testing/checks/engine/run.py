"""
Runs the engine checks without pytest, so that the command line can run them on a real engine.

The checks are in `serving`, `layout`, `grammar`, `pictures`, `weights`, `load` and `handover`.
Not covered: throughput and device memory.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from attrs import define, evolve, field

from turnwise.errors import EngineError
from turnwise.protocols import Engine
from turnwise_testing.checks.engine import grammar, handover, layout, load, pictures, serving, weights
from turnwise_testing.checks.engine.check import ENGINE_CHECKS, EngineCheck, MakeEngine
from turnwise_testing.checks.engine.delays import NO_DELAYS, DelayedLoop, DelayedReference, Delays
from turnwise_testing.probes.engine import EngineProbe

__all__ = ["CHECK_MODULES", "ENGINE_CHECKS", "EngineCheck", "EngineChecker", "MakeEngine"]

CHECK_MODULES = (serving, layout, grammar, pictures, weights, load, handover)
"""Modules with checks; importing them fills `ENGINE_CHECKS`."""


@define(eq=False)
class EngineChecker:
    """
    Runs checks one after the other on engines that it makes, starts and stops; use it in a ``with`` statement.

    Attributes:
        make_engine: returns an engine that was not started.
        probe: of the engine.
        shared: let the checks that want a running engine share one, in one event loop, until one of them fails:
            for engines that start slowly.
    """

    make_engine: MakeEngine
    probe: EngineProbe
    shared: bool = field(default=False, kw_only=True)
    _runner: asyncio.Runner | None = field(default=None, init=False)
    _engine: Engine | None = field(default=None, init=False)

    def __enter__(self) -> EngineChecker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, name: str, delays: Delays = NO_DELAYS) -> str:
        """
        Run one check, under delays if they are given.

        Returns:
            Empty when it passed, or why it does not apply to this engine.

        Raises:
            AssertionError: the engine fails the check; any other exception is the engine's own.
        """
        check = ENGINE_CHECKS[name]
        engine = self._engine if self._engine is not None and not check.fresh else self.make_engine()
        if missing := check.missing(engine.capabilities, self.probe):
            return missing
        try:
            if self.shared and not check.fresh:
                self._run_shared(check, engine, delays)
            else:
                with asyncio.Runner(loop_factory=DelayedLoop) as runner:
                    runner.run(self._run_alone(check, engine, delays))
        except BaseExceptionGroup as group:
            raise _first(group) from group
        return ""

    def close(self) -> None:
        """Stop the shared engine, if there is one."""
        engine, self._engine = self._engine, None
        runner, self._runner = self._runner, None
        if runner is not None:
            with runner:
                if engine is not None:
                    runner.run(engine.stop())

    def _run_shared(self, check: EngineCheck, engine: Engine, delays: Delays) -> None:
        self._runner = self._runner or asyncio.Runner(loop_factory=DelayedLoop)
        try:
            if self._engine is None:
                self._engine = engine
                self._runner.run(engine.start())
            self._runner.run(self._check(check, engine, delays))
        except BaseException:
            # A failed check must not affect the next one.
            with suppress(EngineError):
                self.close()
            raise

    async def _run_alone(self, check: EngineCheck, engine: Engine, delays: Delays) -> None:
        try:
            if not check.fresh:
                await engine.start()
            await self._check(check, engine, delays)
        finally:
            await engine.stop()

    async def _check(self, check: EngineCheck, engine: Engine, delays: Delays) -> None:
        probe = self.probe
        if delays.weights and probe.reference is not None:
            probe = evolve(probe, reference=DelayedReference(probe.reference, delays.weights))
        with delays.applied(asyncio.get_running_loop()):
            await check.function(engine, probe)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first exception of a task group."""
    first: BaseException = group
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first
