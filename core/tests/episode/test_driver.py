"""The episode driver: how an episode ends, and that it always ends."""

import asyncio
import gc
import weakref
from types import SimpleNamespace

import attrs
import numpy as np
import pytest
from episode_fakes import EOS, ConstantReward, LookTool, LoopAgent, TinyEngine, run

from turnwise import Capabilities, FinishReason, GenerateResult, Status, ToolCall, ToolResult
from turnwise.batch.rollout_batch import collate
from turnwise.episode.setup import Limits
from turnwise.errors import EngineError, InfrastructureError
from turnwise.protocols.chat import COMPARED_METRIC

FIELDS = [each.name for each in attrs.fields(GenerateResult)]


class TestEndings:
    """Every end has its status, and the record keeps the sampled tokens."""

    def test_completed(self):
        """The record is the prompt, the engine's turns and the observation between them."""
        result = run()

        assert (result.status, result.fault) == (Status.COMPLETED, None)
        (t,) = result.trajectories
        assert t.input_ids.tolist() == [1, 1, 1, 7, 8, EOS, 5, 5, 7, 8, EOS]
        assert t.response_mask.tolist() == [1, 1, 1, 0, 0, 1, 1, 1]
        assert set(t.weight_versions[t.response_mask == 1].tolist()) == {3}
        assert result.metrics.num_turns == 2
        assert result.metrics.num_tokens == {"prompt": 3, "action": 6, "observation": 2, "forced": 0}
        assert result.metrics.mask_ratio == 6 / 8

    @pytest.mark.parametrize("budget", range(1, 12))
    def test_no_budget_is_ever_passed(self, budget):
        """At every response length the record fits, and no request asks for more than fits."""
        engine = TinyEngine()
        result = run(LoopAgent(num_turns=3), engine, limits=Limits(response_length=budget))

        t = result.trajectories[0]
        assert t.num_response_tokens <= budget
        assert result.status is Status.TRUNCATED
        assert t.segments[-1].origin.name == "ACTION"
        assert all(r.sampling.max_tokens <= budget for r in engine.requests)

    def test_context_of_the_engine_bounds_the_turn(self):
        """A request never asks for more than the engine's context holds."""
        engine = TinyEngine(max_context=5)
        result = run(engine=engine)

        assert [r.sampling.max_tokens for r in engine.requests] == [2]
        assert result.status is Status.TRUNCATED

    @pytest.mark.parametrize("max_context", range(4, 14))
    def test_no_observation_fills_the_context_of_the_engine(self, max_context):
        """If the engine's context is the tighter bound, the record still ends with a turn of the model."""
        result = run(LoopAgent(num_turns=3), TinyEngine(max_context=max_context))

        t = result.trajectories[0]
        assert len(t) <= max_context
        assert t.segments[-1].origin.name == "ACTION"

    @pytest.mark.parametrize(
        ("error", "owner", "kind"),
        [
            (EngineError("no memory"), "engine", "EngineError"),
            (InfrastructureError("network"), "infra", "InfrastructureError"),
            (RuntimeError("odd"), "engine", "RuntimeError"),
        ],
    )
    def test_engine_failures_have_an_owner(self, error, owner, kind):
        """An exception of the engine fails the episode and is not the agent's fault."""
        result = run(engine=TinyEngine(error=error))

        assert (result.status, result.fault.owner, result.fault.kind) == (Status.FAILED, owner, kind)
        assert result.trajectories[0].prompt_ids.tolist() == [1, 1, 1]
        assert not result.trainable

    @pytest.mark.parametrize("error", [ValueError("bad"), SystemExit(3), KeyError("x")])
    def test_an_agent_that_raises_fails_alone(self, error):
        """An exception of an agent is its own failure, and the record keeps the turn before it."""

        async def boom(episode):
            raise error

        result = run(LoopAgent(after=boom))

        assert (result.status, result.fault.owner) == (Status.FAILED, "agent")
        assert type(error).__name__ in result.fault.traceback
        assert result.trajectories[0].response_ids.tolist() == [7, 8, EOS]

    def test_a_cancelled_task_of_a_plugin_is_a_failure(self):
        """A plugin that awaits a cancelled task fails like any other; the episode's own task continues."""

        async def awaits_a_cancelled_task(_episode):
            loop = asyncio.get_running_loop()
            cancelled = loop.create_future()
            loop.call_soon(cancelled.cancel)
            return await cancelled

        for result, owner in (
            (run(LoopAgent(after=awaits_a_cancelled_task)), "agent"),
            (run(reward=ConstantReward(awaits_a_cancelled_task)), "reward"),
        ):
            assert (result.status, result.fault.owner) == (Status.FAILED, owner)
            assert result.fault.kind == "CancelledError"
            assert result.trajectories[0].response_ids.tolist()[:3] == [7, 8, EOS]

    def test_the_task_of_an_episode_can_be_cancelled(self):
        """A cancellation of the episode's own task is not the plugin's failure; it reaches the agent and passes on."""
        started, seen = asyncio.Event(), []

        async def wait(_episode):
            started.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError as error:
                seen.append(error)
                raise

        async def fail(_episode):
            await started.wait()
            raise ValueError("the worker fails")

        with pytest.raises(ExceptionGroup) as raised:
            run(LoopAgent(after=wait), use=fail)

        assert (len(seen), [str(error) for error in raised.value.exceptions[0].exceptions]) == (1, ["the worker fails"])

    @pytest.mark.parametrize("state", [None, "", 3])
    def test_a_step_must_name_a_state(self, state):
        """A step that returns no state fails the episode, and the fault says so."""

        class Agent:
            async def step(self, episode):
                return state

        assert "expected a state name" in run(Agent()).fault.message

    def test_an_agent_that_never_ends_is_stopped(self):
        """An agent that does not terminate fails after `max_steps` steps."""

        class Agent:
            async def step(self, episode):
                return "again"

        result = run(Agent(), limits=Limits(max_steps=9))

        assert result.fault.message == "not terminated after 9 steps, last state 'again'"

    @pytest.mark.parametrize(("turn_s", "episode_s"), [(0.05, 9.0), (9.0, 0.05)])
    def test_a_slow_turn_keeps_what_was_sampled(self, turn_s, episode_s):
        """At a deadline the engine aborts the request, and the record keeps the part of the turn that it returns."""
        result = run(engine=TinyEngine(hangs=True), limits=Limits(turn_s=turn_s, episode_s=episode_s))

        assert (result.status, result.fault.owner) == (Status.TIMED_OUT, "engine")
        assert "took longer than 0.05 s" in result.fault.message
        assert result.trajectories[0].response_ids.tolist() == [7]

    def test_an_engine_that_ignores_an_abort_is_not_awaited(self):
        """After the grace period the episode ends without the engine's result."""

        class IgnoringEngine(TinyEngine):
            async def abort(self, request_id):
                pass

        result = run(engine=IgnoringEngine(hangs=True), limits=Limits(turn_s=0.02, abort_grace_s=0.02))

        assert result.status is Status.TIMED_OUT
        assert result.trajectories[0].num_response_tokens == 0

    def test_an_agent_that_waits_too_long_times_out(self):
        """The episode's deadline applies to any wait of an agent."""

        async def wait(episode):
            await asyncio.sleep(60)

        result = run(LoopAgent(after=wait), limits=Limits(episode_s=0.05))

        assert (result.status, result.fault.owner) == (Status.TIMED_OUT, "agent")

    @pytest.mark.parametrize("hangs", [True, False])
    def test_an_abort_returns_the_partial_record(self, hangs):
        """An aborted episode ends at once with its partial record, during a request or between two."""

        waits = asyncio.Event()

        class Engine(TinyEngine):
            async def generate(self, request):
                if hangs:
                    waits.set()
                return await super().generate(request)

        async def wait(episode):
            waits.set()
            await asyncio.sleep(60)

        async def abort_soon(episode):
            await waits.wait()
            episode.abort()

        result = run(LoopAgent(after=wait), Engine(hangs=hangs), use=abort_soon)

        assert (result.status, result.fault.kind) == (Status.ABORTED, "EpisodeAborted")
        assert result.trajectories[0].num_response_tokens == (1 if hangs else 3)

    def test_the_replicas_of_the_turns_are_counted_once(self):
        """An episode names the replicas that sampled its turns, in the order of their first turn."""

        class Pool(TinyEngine):
            replicas = iter([3, 0, 3])

            async def generate(self, request):
                return attrs.evolve(self.answer([7], FinishReason.STOP), replica=next(self.replicas))

        assert run(LoopAgent(num_turns=3), Pool()).metrics.replicas == (3, 0)

    @pytest.mark.parametrize("num_requests", [1, 2, 3])
    def test_requests_without_an_observation_between_them_are_one_turn(self, num_requests):
        """The metrics of an episode and the rows of a batch count the same turns."""

        async def continue_turn(episode):
            for _ in range(num_requests - 1):
                await episode.generate()

        result = run(LoopAgent(after=continue_turn))

        assert result.trajectories[0].num_response_tokens == 3 * num_requests
        assert [result.metrics.num_turns] == collate([result], pad_token_id=0).num_turns.tolist() == [1]

    def test_an_engine_that_returns_too_much_fails(self):
        """Tokens beyond max_tokens never enter a record."""

        class ExceedingEngine(TinyEngine):
            async def generate(self, request):
                return self.answer([7] * 9, FinishReason.STOP)

        result = run(engine=ExceedingEngine(), limits=Limits(response_length=4))

        assert result.fault.message == "the engine returned 9 tokens for max_tokens=4"
        assert result.trajectories[0].num_response_tokens == 0

    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({"finish_reason": "weird"}, "the finish reason 'weird'"),
            ({"num_cached_tokens": None}, "returned None cached tokens"),
            ({"logprobs": [-0.5, 5.0, -0.5]}, "the log-probability 5"),
            ({"weight_version": np.zeros(4, np.int32)}, "4 weight versions for 3 tokens"),
            ({"token_ids": [7, 100, 8]}, "the id 100 for a vocabulary of 100 ids"),
        ],
    )
    def test_an_impossible_answer_of_the_engine_fails(self, changes, text):
        """An answer that no sampler can give is the engine's failure, and never enters a record."""

        class OddEngine(TinyEngine):
            capabilities = Capabilities(vocab_size=100)

            async def generate(self, request):
                answer = {"token_ids": [7, 99, 8], "logprobs": [-0.5, 9e-4, -0.5], "finish_reason": FinishReason.STOP}
                return GenerateResult(**answer | (changes if self.requests else {}))

        engine = OddEngine()
        assert run(LoopAgent(num_turns=1), engine).status is Status.COMPLETED
        engine.requests.append(None)
        result = run(engine=engine)

        assert (result.status, result.fault.owner, result.fault.kind) == (Status.FAILED, "engine", "EngineError")
        assert text in result.fault.message
        assert result.trajectories[0].num_response_tokens == 0

    def test_an_answer_of_another_type_fails(self):
        """An object that only looks like a result is the engine's failure."""

        class DuckEngine(TinyEngine):
            async def generate(self, request):
                return SimpleNamespace(**{name: getattr(self.answer([7], FinishReason.STOP), name) for name in FIELDS})

        assert "expected a GenerateResult" in run(engine=DuckEngine()).fault.message

    def test_an_agent_that_cancels_its_own_task_fails_alone(self):
        """The cancellation ends its episode and does not reach the worker."""

        async def cancel(_episode):
            asyncio.current_task().cancel()
            await asyncio.Event().wait()

        result = run(LoopAgent(after=cancel))

        assert (result.status, result.fault.owner, result.fault.kind) == (Status.FAILED, "agent", "CancelledError")

    def test_an_action_that_no_engine_sampled_is_found(self):
        """An agent cannot record its own tokens as actions."""

        async def forge(episode):
            episode.trajectory.add_action([9], [-0.1])

        result = run(LoopAgent(after=forge))

        assert (result.status, result.fault.kind) == (Status.FAILED, "InvariantError")

    def test_an_open_block_is_joined(self):
        """An episode that ends between fork and join keeps the tokens of its paths."""

        async def fork(episode):
            path, _other = episode.trajectory.fork(2)
            await episode.generate(record=path)
            raise ValueError("in the middle")

        t = run(LoopAgent(after=fork)).trajectories[0]

        assert t.response_ids.tolist() == [7, 8, EOS, 7, 8, EOS]
        assert t.block_start[-1] == 6

    def test_paths_in_a_task_group(self):
        """Paths may generate at the same time; a budget that ends them all truncates the episode."""

        async def paths(episode):
            forked = episode.trajectory.fork(3)
            async with asyncio.TaskGroup() as group:
                for path in forked:
                    group.create_task(episode.generate(record=path))
            episode.trajectory.join(forked)

        assert run(LoopAgent(after=paths)).status is Status.COMPLETED
        assert run(LoopAgent(after=paths), limits=Limits(response_length=3)).status is Status.TRUNCATED


class TestPrompt:
    """A prompt that is longer than `prompt_length`."""

    @pytest.mark.parametrize("policy", ["error", "drop"])
    def test_fails_the_episode(self, policy):
        """The policies error and drop fail the episode with the data as owner; the fault has the numbers."""
        result = run(limits=Limits(prompt_length=2, prompt_policy=policy))

        assert (result.status, result.fault.owner, result.fault.kind) == (Status.FAILED, "data", "PromptTooLongError")
        assert "has 3 tokens, more than prompt_length=2" in result.fault.message

    @pytest.mark.parametrize("policy", ["truncate_left", "truncate_right"])
    def test_is_shortened(self, policy):
        """The truncating policies shorten the prompt to the limit."""
        result = run(limits=Limits(prompt_length=2, prompt_policy=policy))

        assert result.trajectories[0].num_prompt_tokens == 2


class ComparingChat:
    """Compares every conversation, and finds a difference in each."""

    def check_conversation(self, number, messages, tools):
        return {COMPARED_METRIC: 1.0, "template/differing_conversations": 1.0}


@pytest.mark.parametrize("num_own", [0, 3])
def test_conversations_are_compared_once(num_own):
    """The driver compares the messages of an episode, unless the agent has compared its conversations itself."""

    async def answer(episode):
        episode.messages.append({"role": "assistant", "content": "ok"})
        for _ in range(num_own):
            episode.record_metric(COMPARED_METRIC, 1.0)

    result = run(LoopAgent(after=answer), chat=ComparingChat())

    assert result.status is Status.COMPLETED
    assert result.metrics.extra[COMPARED_METRIC] == (num_own or 1)
    assert ("template/differing_conversations" in result.metrics.extra) == (num_own == 0)


def test_seeds_depend_on_the_request_alone():
    """Two runs of an episode use the same seeds, and the turns of one run different ones."""
    engines = [TinyEngine(), TinyEngine()]
    for engine in engines:
        run(engine=engine)
    first, second = ([r.sampling.seed for r in engine.requests] for engine in engines)

    assert first == second
    assert len(set(first)) == 2


def test_the_capabilities_of_an_engine_are_looked_up_once():
    """They are constant, and a property that builds a new object costs time on every turn."""
    engine = TinyEngine()
    run(LoopAgent(num_turns=5), engine)

    assert (len(engine.requests), engine.num_capability_lookups) == (5, 1)


def test_an_ended_episode_is_freed_without_the_garbage_collector():
    """Its last reference frees it, with its arrays. A cycle would keep both until a collection stops the process."""
    started = []

    async def look():
        return ToolResult(text="1")

    async def call(episode):
        started.append(weakref.ref(episode))
        await episode.call_tool(ToolCall(name="look"))

    gc.disable()
    try:
        result = run(LoopAgent(after=call), tools=[LookTool(look)])
        assert [episode() for episode in started] == [None]
    finally:
        gc.enable()
    assert result.status is Status.COMPLETED
