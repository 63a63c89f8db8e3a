"""Mistakes of agents and of the plugins around them: each has a text, and none costs the result of the episode."""

import asyncio

import pytest
import structlog
from episode_fakes import EOS, LookTool, LoopAgent, TinyEngine, run

from turnwise import FinishReason, GenerateRequest, GenerateResult, SamplingParams, Status, Task, ToolCall
from turnwise.episode.requests import continue_request, join_turn
from turnwise.episode.setup import Limits
from turnwise.layout import Objective
from turnwise.tools.toolbox import ToolBox


class OneStep:
    """An agent with one coroutine function as its only step."""

    def __init__(self, script):
        self.script = script

    async def step(self, episode):
        await self.script(episode)
        return "terminated"


async def read_the_record_too_early(episode):
    _ = episode.trajectory


async def observe_in_no_record(episode):
    episode.begin([1])
    episode.observe([5], record=[1, 2])


async def choose_an_unsupported_objective(episode):
    episode.begin([1])
    episode.objective = Objective.EXACT


@pytest.mark.parametrize(
    ("script", "text"),
    [
        (read_the_record_too_early, "the episode has no record yet: call begin(prompt_ids) first"),
        (observe_in_no_record, "expected a trajectory or one of its paths as record, got [1, 2]"),
        (choose_an_unsupported_objective, "objective 'exact' needs an engine that takes layouts"),
    ],
)
def test_a_mistake_of_an_agent_is_named(script, text):
    """The episode fails, and the agent is to blame."""
    result = run(OneStep(script))

    assert (Status.FAILED, "agent") == (result.status, result.fault.owner)
    assert text in result.fault.message


def test_a_record_that_changes_during_its_request():
    """The answer does not follow from the new tokens, so it is not appended."""
    sampling, changed = asyncio.Event(), asyncio.Event()

    class Engine(TinyEngine):
        async def generate(self, request):
            sampling.set()
            await changed.wait()
            return await super().generate(request)

    async def change(episode):
        episode.begin([1])
        request = asyncio.ensure_future(episode.generate())
        await sampling.wait()
        episode.observe([5])
        changed.set()
        await request

    result = run(OneStep(change), Engine())
    assert (Status.FAILED, "agent") == (result.status, result.fault.owner)
    assert "the record has changed while its turn was sampled" in result.fault.message
    assert [5] == result.trajectories[0].response_ids.tolist()


def test_an_objective_can_be_chosen():
    """The result has the chosen objective; choosing one that the engine supports anyway changes nothing."""

    async def choose(episode):
        episode.objective = Objective.EXPANDED
        episode.begin([1])
        await episode.generate()

    result = run(OneStep(choose))
    assert (Status.COMPLETED, Objective.EXPANDED) == (result.status, result.objective)


def test_forced_tokens_that_do_not_fit_truncate_the_episode():
    """The record keeps the tokens before them."""

    async def force(episode):
        episode.begin([1])
        episode.force([4, 4])
        episode.force([4] * 5)

    result = run(OneStep(force), limits=Limits(response_length=6))
    assert Status.TRUNCATED == result.status
    assert [4, 4] == result.trajectories[0].response_ids.tolist()


class TestClosing:
    """Sessions that cannot be closed."""

    def test_an_interaction_that_cannot_be_released(self):
        """The failure is reported, and the result stays."""

        class Broken:
            async def create(self, task):
                return None

            async def respond(self, session, messages):
                raise NotImplementedError

            async def release(self, session):
                raise ConnectionError("the user has hung up")

        async def respond(episode):
            with pytest.raises(Exception, match="NotImplementedError"):
                await episode.interact()

        with structlog.testing.capture_logs() as lines:
            result = run(LoopAgent(after=respond), interaction=Broken())

        assert (Status.COMPLETED, 3) == (result.status, result.trajectories[0].num_response_tokens)
        assert ["release failed"] == [line["event"] for line in lines if "hung up" in str(line)]

    def test_a_tool_that_cannot_be_suspended(self):
        """It is named and has no notes; the other tools keep theirs."""

        class Suspending(LookTool):
            async def suspend(self, session):
                return await self.run()

            async def restore(self, task, notes):
                return None

        async def fail():
            raise ConnectionError("no answer")

        async def note():
            return {"page": 3}

        failing, noting = Suspending(fail), Suspending(note)
        noting.schema = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}

        async def main():
            async with ToolBox([failing, noting]).session(Task(messages=(), uid="t")) as session:
                await session.call(ToolCall(name="look"))
                await session.call(ToolCall(name="other"))
                return await session.suspend()

        with structlog.testing.capture_logs() as lines:
            assert {"other": {"page": 3}} == asyncio.run(main())

        assert [("look", "warning")] == [(line["tool"], line["log_level"]) for line in lines if "tool" in line]
        assert (1, 0) == (failing.released, noting.released)


REQUEST = GenerateRequest(
    request_id="r", trajectory_id="t", token_ids=[1], sampling=SamplingParams(max_tokens=3, stop_token_ids=(EOS,))
)


class TestTurnsOfTwoParts:
    """A turn that was interrupted when nothing was left to sample."""

    @pytest.mark.parametrize(
        ("ids", "expected"),
        [([7, EOS], (FinishReason.STOP, EOS)), ([7, 8, 9], (FinishReason.LENGTH, None))],
        ids=["a stop token", "the limit"],
    )
    def test_it_gets_its_real_finish_reason(self, ids, expected):
        """No request is made for it, and its tokens stay."""
        saved = GenerateResult(
            token_ids=ids, logprobs=[-1.0] * len(ids), finish_reason=FinishReason.ABORT, weight_version=2
        )

        assert continue_request(REQUEST, saved) is None
        turn = join_turn(saved, None, REQUEST)

        assert expected == (turn.finish_reason, turn.stop_reason)
        assert ids == turn.token_ids.tolist()

    def test_an_unfinished_one_is_sampled_further(self):
        """With the rest of its limit, after its own tokens."""
        saved = TinyEngine().answer([7, 8], FinishReason.ABORT)
        rest = continue_request(REQUEST, saved)
        assert ([1, 7, 8], 1) == (rest.token_ids.tolist(), rest.sampling.max_tokens)


def test_an_error_without_a_text():
    """The class of an engine's error may fail to make its text: the episode fails with the name of the class."""

    class RudeError(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    result = run(LoopAgent(), TinyEngine(error=RudeError()))
    assert (Status.FAILED, "engine") == (result.status, result.fault.owner)
    assert "RudeError" in result.fault.message + result.fault.kind
