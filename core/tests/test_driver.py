"""The episode driver: how an episode ends, and that it always ends."""

import asyncio
from collections.abc import Callable

import numpy as np
import pytest
from attrs import define, field

from turnwise import (
    Capabilities,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Reply,
    SamplingParams,
    State,
    Status,
    Task,
    TokenScore,
    ToolCall,
    ToolResult,
    TrajectoryScore,
    TurnScore,
)
from turnwise.driver import Recipe, run_episode
from turnwise.episode import LiveEpisode
from turnwise.episode_setup import EpisodeSpec, Limits, Services
from turnwise.errors import EngineError, InfrastructureError, ToolError
from turnwise.observer import Observer
from turnwise.telemetry import Observers
from turnwise.tools import ToolBox

EOS = 2


@define
class TinyEngine:
    """Answers each request with `turn`, cut to max_tokens; can wait for ever, and returns half of it on abort."""

    turn: list[int] = field(factory=lambda: [7, 8, EOS])
    hangs: bool = False
    error: Exception | None = None
    max_context: int | None = None
    requests: list[GenerateRequest] = field(factory=list)
    aborted: set[str] = field(factory=set)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(max_context=self.max_context)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.requests.append(request)
        if self.error:
            raise self.error
        while self.hangs:
            await asyncio.sleep(0.001)
            if request.request_id in self.aborted:
                return self._answer(self.turn[:1], FinishReason.ABORT)
        ids = self.turn[: request.sampling.max_tokens]
        return self._answer(ids, FinishReason.STOP if ids[-1:] == [EOS] else FinishReason.LENGTH)

    def _answer(self, ids: list[int], reason: FinishReason) -> GenerateResult:
        return GenerateResult(token_ids=ids, logprobs=[-0.5] * len(ids), finish_reason=reason, weight_version=3)

    async def abort(self, request_id: str) -> None:
        self.aborted.add(request_id)


@define
class LoopAgent:
    """Generates and observes `num_turns` times, or runs what a test gives it after the first turn."""

    num_turns: int = 2
    after: Callable | None = None
    observation: tuple[int, ...] = (5, 5)

    async def step(self, episode):
        if episode.state == State.PENDING:
            episode.begin(np.array([1, 1, 1]))
            return State.GENERATING
        await episode.generate()
        episode.memory["turns"] = episode.memory.get("turns", 0) + 1
        if self.after is not None:
            return await self.after(episode) or State.TERMINATED
        if episode.memory["turns"] >= self.num_turns:
            return State.TERMINATED
        episode.observe(np.array(self.observation))
        return State.GENERATING


@define
class ConstantReward:
    """Returns, raises or computes what a test gives it."""

    value: object = 1.0

    def score(self, episode):
        if isinstance(self.value, BaseException):
            raise self.value
        return self.value(episode) if callable(self.value) else self.value


class SomeTool:
    """One tool whose behaviour the test chooses."""

    def __init__(self, execute):
        self.schema = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
        self.run = execute
        self.released = 0

    async def create(self, task):
        return None

    async def execute(self, session, arguments):
        return await self.run()

    async def release(self, session):
        self.released += 1
        return 0.25


def run(agent=None, engine=None, *, reward=None, tools=None, limits=None, observers=(), interaction=None, use=None):
    """Run one episode on its own loop and return its result."""

    async def main():
        async with asyncio.TaskGroup() as background:
            services = Services(
                engine=engine or TinyEngine(),
                spawn=background.create_task,
                observers=Observers.of(observers),
                interaction=interaction,
            )
            task = Task(messages=({"role": "user", "content": "hi"},), uid="t")
            spec = EpisodeSpec(task=task, agent_name="loop", sampling=SamplingParams(stop_token_ids=(EOS,)))
            episode = LiveEpisode(spec, limits or Limits(), services)
            recipe = Recipe(agent=agent or LoopAgent(), reward=reward, tools=ToolBox(tools) if tools else None)
            async with asyncio.TaskGroup() as group:
                running = group.create_task(run_episode(episode, recipe))
                if use is not None:
                    group.create_task(use(episode))
            return running.result()

    return asyncio.run(main())


class TestEndings:
    """Every way to end has its status, and keeps what was sampled."""

    def test_completed(self):
        """
        The record is the prompt, the engine's turns and the observation between them.
        """
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
        """
        At every response length the record fits it, and the engine is asked only for what fits.
        """
        engine = TinyEngine()
        result = run(LoopAgent(num_turns=3), engine, limits=Limits(response_length=budget))

        t = result.trajectories[0]
        assert t.num_response_tokens <= budget
        assert result.status is Status.TRUNCATED
        assert t.segments[-1].origin.name == "ACTION"
        assert all(r.sampling.max_tokens <= budget for r in engine.requests)

    def test_context_of_the_engine_bounds_the_turn(self):
        """
        A request never asks for more than the engine's context holds.
        """
        engine = TinyEngine(max_context=5)
        result = run(engine=engine)

        assert [r.sampling.max_tokens for r in engine.requests] == [2]
        assert result.status is Status.TRUNCATED

    @pytest.mark.parametrize("max_context", range(4, 14))
    def test_no_observation_fills_the_context_of_the_engine(self, max_context):
        """
        Where the engine's context is the tighter bound, the last word is still the model's.
        """
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
    def test_engine_failures_say_whose(self, error, owner, kind):
        """
        What the engine raises fails the episode and is not the agent's fault.
        """
        result = run(engine=TinyEngine(error=error))

        assert (result.status, result.fault.owner, result.fault.kind) == (Status.FAILED, owner, kind)
        assert result.trajectories[0].prompt_ids.tolist() == [1, 1, 1]
        assert not result.trainable

    @pytest.mark.parametrize("error", [ValueError("bad"), SystemExit(3), KeyError("x")])
    def test_an_agent_that_raises_fails_alone(self, error):
        """
        Whatever an agent raises is its own failure, and the turn before it is kept.
        """

        async def boom(episode):
            raise error

        result = run(LoopAgent(after=boom))

        assert (result.status, result.fault.owner) == (Status.FAILED, "agent")
        assert type(error).__name__ in result.fault.traceback
        assert result.trajectories[0].response_ids.tolist() == [7, 8, EOS]

    def test_a_cancellation_that_nobody_asked_for_is_a_failure(self):
        """
        Whoever awaits a task that was cancelled has an error like any other; the episode's own task goes on.
        """

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
        """
        That is not the plugin's failure: it leaves as a cancellation.
        """

        async def cancelled(_episode):
            asyncio.current_task().cancel()
            await asyncio.Event().wait()

        with pytest.raises(asyncio.CancelledError):
            run(LoopAgent(after=cancelled))

    @pytest.mark.parametrize("state", [None, "", 3])
    def test_a_step_must_name_a_state(self, state):
        """
        A step that returns no state is a failure that says so.
        """

        class Agent:
            async def step(self, episode):
                return state

        assert "expected a state name" in run(Agent()).fault.message

    def test_an_agent_that_never_ends_is_stopped(self):
        """
        The number of steps is bounded.
        """

        class Agent:
            async def step(self, episode):
                return "again"

        result = run(Agent(), limits=Limits(max_steps=9))

        assert result.fault.message == "not terminated after 9 steps, last state 'again'"

    @pytest.mark.parametrize(("turn_s", "episode_s"), [(0.05, 9.0), (9.0, 0.05)])
    def test_a_slow_turn_keeps_what_was_sampled(self, turn_s, episode_s):
        """
        At a deadline the engine is asked to stop, and the part of the turn that it returns is recorded.
        """
        result = run(engine=TinyEngine(hangs=True), limits=Limits(turn_s=turn_s, episode_s=episode_s))

        assert (result.status, result.fault.owner) == (Status.TIMED_OUT, "engine")
        assert "took longer than 0.05 s" in result.fault.message
        assert result.trajectories[0].response_ids.tolist() == [7]

    def test_an_engine_that_ignores_abort_is_left(self):
        """
        After the grace period the episode ends without the engine's answer.
        """

        class Deaf(TinyEngine):
            async def abort(self, request_id):
                pass

        result = run(engine=Deaf(hangs=True), limits=Limits(turn_s=0.02, abort_grace_s=0.02))

        assert result.status is Status.TIMED_OUT
        assert result.trajectories[0].num_response_tokens == 0

    def test_an_agent_that_waits_too_long(self):
        """
        The episode's deadline holds for whatever an agent waits for.
        """

        async def wait(episode):
            await asyncio.sleep(60)

        result = run(LoopAgent(after=wait), limits=Limits(episode_s=0.05))

        assert (result.status, result.fault.owner) == (Status.TIMED_OUT, "agent")

    @pytest.mark.parametrize("hangs", [True, False])
    def test_abort_returns_what_there_is(self, hangs):
        """
        An aborted episode ends at once with its partial record, generating or not.
        """

        async def wait(episode):
            await asyncio.sleep(60)

        async def abort_soon(episode):
            await asyncio.sleep(0.02)
            episode.abort()

        result = run(LoopAgent(after=wait), TinyEngine(hangs=hangs), use=abort_soon)

        assert (result.status, result.fault.kind) == (Status.ABORTED, "EpisodeAborted")
        assert result.trajectories[0].num_response_tokens == (1 if hangs else 3)

    def test_an_engine_that_returns_too_much_is_refused(self):
        """
        Tokens past max_tokens never enter a record.
        """

        class Talkative(TinyEngine):
            async def generate(self, request):
                return self._answer([7] * 9, FinishReason.STOP)

        result = run(engine=Talkative(), limits=Limits(response_length=4))

        assert result.fault.message == "the engine returned 9 tokens for max_tokens=4"
        assert result.trajectories[0].num_response_tokens == 0

    def test_an_agent_that_appends_behind_the_engines_back_is_found(self):
        """
        A token that no engine returned cannot pass as an action.
        """

        async def forge(episode):
            episode.trajectory.add_action([9], [-0.1])

        result = run(LoopAgent(after=forge))

        assert (result.status, result.fault.kind) == (Status.FAILED, "InvariantError")

    def test_an_open_block_is_joined(self):
        """
        An episode that ends between fork and join keeps its paths.
        """

        async def fork(episode):
            path, _other = episode.trajectory.fork(2)
            await episode.generate(record=path)
            raise ValueError("in the middle")

        t = run(LoopAgent(after=fork)).trajectories[0]

        assert t.response_ids.tolist() == [7, 8, EOS, 7, 8, EOS]
        assert t.block_start[-1] == 6

    def test_paths_in_a_task_group(self):
        """
        Paths may generate at once; a budget that ends them all is a truncation, not a failure.
        """

        async def paths(episode):
            forked = episode.trajectory.fork(3)
            async with asyncio.TaskGroup() as group:
                for path in forked:
                    group.create_task(episode.generate(record=path))
            episode.trajectory.join(forked)

        assert run(LoopAgent(after=paths)).status is Status.COMPLETED
        assert run(LoopAgent(after=paths), limits=Limits(response_length=3)).status is Status.TRUNCATED


class TestPrompt:
    """Prompts that are too long."""

    @pytest.mark.parametrize("policy", ["error", "drop"])
    def test_refused(self, policy):
        """
        The episode fails as the data's fault, with the numbers.
        """
        result = run(limits=Limits(prompt_length=2, prompt_policy=policy))

        assert (result.status, result.fault.owner, result.fault.kind) == (Status.FAILED, "data", "PromptTooLongError")
        assert "has 3 tokens, more than prompt_length=2" in result.fault.message

    @pytest.mark.parametrize("policy", ["truncate_left", "truncate_right"])
    def test_cut(self, policy):
        """
        A truncating policy shortens the prompt to the limit.
        """
        result = run(limits=Limits(prompt_length=2, prompt_policy=policy))

        assert result.trajectories[0].num_prompt_tokens == 2


class TestTools:
    """Calls through the episode."""

    def call(self, execute, limits=None):
        results = []

        async def after(episode):
            results.append(await episode.call_tool(ToolCall(name="look")))

        tool = SomeTool(execute)
        result = run(LoopAgent(after=after), tools=[tool], limits=limits)
        return result, results, tool

    def test_a_good_call_is_counted(self):
        """
        Rewards, metrics and the release are kept.
        """

        async def execute():
            return ToolResult(text="found", reward=0.5, metrics={"hits": 2.0})

        result, results, tool = self.call(execute)

        assert [r.text for r in results] == ["found"]
        assert result.metrics.num_tool_calls == 1
        assert result.metrics.tool_reward == 0.75
        assert result.metrics.extra == {"tool/hits": 2.0}
        assert tool.released == 1

    def test_a_hanging_call_is_told_to_the_model(self):
        """
        The deadline of a call is not the end of the episode.
        """

        async def execute():
            await asyncio.sleep(60)

        result, results, tool = self.call(execute, Limits(tool_call_s=0.02))

        assert results[0].text == "Error: the tool did not answer within 0.02 seconds"
        assert (result.status, result.metrics.num_tool_errors, tool.released) == (Status.COMPLETED, 1, 1)

    @pytest.mark.parametrize("error", [ToolError("try again"), ValueError("odd"), TimeoutError("its own")])
    def test_an_error_is_told_to_the_model(self, error):
        """
        What a tool raises about its call becomes a text.
        """

        async def execute():
            raise error

        result, results, _tool = self.call(execute)

        assert result.status is Status.COMPLETED
        assert results[0].error
        assert str(error) in results[0].text

    def test_an_infrastructure_failure_is_not_the_models(self):
        """
        The episode fails, owned by infra, and is left out of the loss.
        """

        async def execute():
            raise InfrastructureError("sandbox is down")

        result, results, tool = self.call(execute)

        assert (result.status, result.fault.owner, results) == (Status.FAILED, "infra", [])
        assert tool.released == 1

    def test_no_tools_configured(self):
        """
        A call in a run without tools is an error text.
        """
        results = []

        async def after(episode):
            results.append(await episode.call_tool(ToolCall(name="x")))

        run(LoopAgent(after=after))

        assert "this run has no tools" in results[0].text


class TestRewards:
    """Scoring inside the rollout."""

    @pytest.mark.parametrize(
        ("value", "total"),
        [
            (0.5, 0.5),
            (TrajectoryScore(value=2.0), 2.0),
            (TurnScore(values=(1.0, 2.0)), 3.0),
            (TokenScore(values=(0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0)), 2.0),
            ([TrajectoryScore(value=-1.0)], -1.0),
        ],
    )
    def test_every_level(self, value, total):
        """
        A trajectory, turn or token score is kept, whichever the reward gives.
        """
        assert run(reward=ConstantReward(value)).reward == total

    def test_async_reward(self):
        """
        A reward may wait.
        """

        class Slow:
            async def score(self, episode):
                await asyncio.sleep(0)
                return TrajectoryScore(value=float(len(episode.trajectory.turns())))

        assert run(reward=Slow()).reward == 2.0

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (ValueError("no truth"), "no truth"),
            ("high", "expected a TrajectoryScore"),
            (float("nan"), "not finite"),
            (TurnScore(values=(1.0,)), "1 turn scores for 2 turns"),
            (TokenScore(values=(1.0,)), "1 token scores for 8"),
            (TokenScore(values=(0.0,) * 3 + (1.0,) + (0.0,) * 4), "did not sample"),
            ([1.0, 2.0], "2 scores for 1 trajectories"),
        ],
    )
    def test_a_bad_score_is_a_failure_of_its_own(self, value, text):
        """
        A reward that raises or returns nonsense fails the episode, owned by the reward; the record stays.
        """
        result = run(reward=ConstantReward(value))

        assert (result.status, result.fault.owner, result.scores) == (Status.FAILED, "reward", ())
        assert text in result.fault.message
        assert result.trajectories[0].num_response_tokens == 8

    def test_a_hanging_reward(self):
        """
        A reward has a deadline.
        """

        class Hanging:
            async def score(self, episode):
                await asyncio.sleep(60)

        result = run(reward=Hanging(), limits=Limits(reward_s=0.02))

        assert (result.fault.owner, result.fault.message) == ("reward", "reward Hanging took longer than 0.02 s")

    def test_failed_episodes_are_not_scored(self):
        """
        There is no reward for what the machine did.
        """
        assert run(engine=TinyEngine(error=EngineError("x")), reward=ConstantReward(1.0)).reward is None


class TestServices:
    """Observers and simulated users."""

    def test_observers_hear_everything_and_cannot_break_it(self):
        """
        Each event comes once per happening; an observer that raises is switched off and the run goes on.
        """
        heard = []

        class Ear(Observer):
            def on_episode_started(self, event):
                heard.append("started")

            def on_turn_finished(self, event):
                heard.append(event.num_new_tokens)

            def on_reward_finished(self, event):
                heard.append(event.reward)

            def on_episode_finished(self, event):
                heard.append(event.status)

        class Broken(Observer):
            def on_turn_finished(self, event):
                heard.append("broken")
                raise RuntimeError

        run(reward=ConstantReward(1.0), observers=[Broken(), Ear()])

        assert heard == ["started", "broken", 3, 3, 1.0, Status.COMPLETED]

    def test_interaction(self):
        """
        A user simulator has a session per episode, released at the end.
        """

        class User:
            released = None

            async def create(self, task):
                return [task.uid]

            async def respond(self, session, messages):
                session.append(len(messages))
                return Reply(content="go on")

            async def release(self, session):
                self.released = session

        async def ask(episode):
            await episode.interact()
            await episode.interact()

        user = User()
        assert run(LoopAgent(after=ask), interaction=user).status is Status.COMPLETED
        assert user.released == ["t", 1, 1]

    def test_no_interaction_configured(self):
        """
        An agent that asks for a user that is not there fails with the option's name.
        """

        async def ask(episode):
            await episode.interact()

        assert "set interaction in the config" in run(LoopAgent(after=ask)).fault.message


def test_seeds_depend_on_what_is_asked_alone():
    """
    Two runs of one episode ask with the same seeds, and its turns with different ones.
    """
    engines = [TinyEngine(), TinyEngine()]
    for engine in engines:
        run(engine=engine)
    first, second = ([r.sampling.seed for r in engine.requests] for engine in engines)

    assert first == second
    assert len(set(first)) == 2
