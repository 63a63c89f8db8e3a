"""Samples whose call is cancelled: the caller hears what the engine returns at the abort."""

import asyncio

import numpy as np
import pytest
from attrs import define, field
from episode_fakes import TinyEngine, run

from turnwise import Capabilities, FinishReason, State, Status
from turnwise.episode.setup import Limits


@define
class AbortingEngine(TinyEngine):
    """An engine that hangs until an abort, and returns one token then, unless `is_deaf`."""

    hangs: bool = True
    has_abort: bool = True
    is_deaf: bool = False
    was_cancelled: bool = False
    asked: asyncio.Event = field(factory=asyncio.Event)

    @property
    def capabilities(self):
        return Capabilities(abort=self.has_abort)

    async def generate(self, request):
        self.asked.set()
        try:
            return await super().generate(request)
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise

    async def abort(self, request_id):
        if not self.is_deaf:
            await super().abort(request_id)


def cut(engine, *, limits=None):
    """Cancel a sample once the engine has it; return the episode and the results that the caller has heard."""
    heard = []

    class CuttingAgent:
        async def step(self, episode):
            record = episode.begin(np.array([1, 1, 1]))
            calling = asyncio.ensure_future(episode.sample(record=record, on_cut=heard.append))
            await engine.asked.wait()
            calling.cancel()
            await asyncio.wait({calling})
            assert calling.cancelled()
            engine.hangs = False
            episode.append(await episode.sample(record=record), record=record)
            return State.TERMINATED

    return run(CuttingAgent(), engine, limits=limits), heard


def test_the_sampled_part_is_heard():
    """The engine is asked to abort, its token is handed over and not recorded, and the record can be sampled again."""
    result, (part,) = cut(engine := AbortingEngine())

    assert (Status.COMPLETED, 3) == (result.status, result.trajectories[0].num_response_tokens)
    assert ([7], FinishReason.ABORT) == (part.token_ids.tolist(), part.finish_reason)
    assert (1, False) == (len(engine.aborted), engine.was_cancelled)
    assert {"action": 3} == {name: number for name, number in result.metrics.num_tokens.items() if name == "action"}


@pytest.mark.parametrize("has_abort", [True, False])
def test_an_engine_that_returns_nothing_is_cancelled(has_abort):
    """A deaf engine is cancelled after the grace period, and one without the capability `abort` at once."""
    engine = AbortingEngine(has_abort=has_abort, is_deaf=True)
    result, heard = cut(engine, limits=Limits(abort_grace_s=0.05))

    assert (Status.COMPLETED, []) == (result.status, heard)
    assert engine.was_cancelled


def test_a_turn_that_ends_before_the_abort_is_heard():
    """A turn that the engine ends by itself is handed over whole."""

    class EndingEngine(AbortingEngine):
        async def abort(self, request_id):
            self.hangs = False

    result, (whole,) = cut(EndingEngine())

    assert (Status.COMPLETED, FinishReason.STOP) == (result.status, whole.finish_reason)
