"""Plugins around an episode: tools, rewards, observers and simulated users."""

import asyncio
from fractions import Fraction

import numpy as np
import pytest
from episode_fakes import ConstantReward, LookTool, LoopAgent, TinyEngine, run

from turnwise import Observer, Reply, Status, TokenScore, ToolCall, ToolResult, TrajectoryScore, TurnScore
from turnwise.episode.setup import Limits
from turnwise.errors import EngineError, InfrastructureError, ToolError


class TestTools:
    """Tool calls of an episode."""

    def call(self, execute, limits=None):
        results = []

        async def after(episode):
            results.append(await episode.call_tool(ToolCall(name="look")))

        tool = LookTool(execute)
        result = run(LoopAgent(after=after), tools=[tool], limits=limits)
        return result, results, tool

    def test_a_good_call_is_counted(self):
        """Its reward, its metrics and the reward of the release enter the metrics."""

        async def execute():
            return ToolResult(text="found", reward=0.5, metrics={"hits": 2.0})

        result, results, tool = self.call(execute)

        assert [r.text for r in results] == ["found"]
        assert result.metrics.num_tool_calls == 1
        assert result.metrics.tool_reward == 0.75
        assert result.metrics.extra == {"tool/hits": 2.0}
        assert tool.released == 1

    def test_the_model_reads_the_error_of_a_hanging_call(self):
        """A call that exceeds its deadline returns an error, and the episode continues."""

        async def execute():
            await asyncio.sleep(60)

        result, results, tool = self.call(execute, Limits(tool_call_s=0.02))

        assert results[0].text == "Error: the tool did not answer within 0.02 seconds"
        assert (result.status, result.metrics.num_tool_errors, tool.released) == (Status.COMPLETED, 1, 1)

    @pytest.mark.parametrize("error", [ToolError("try again"), ValueError("odd"), TimeoutError("its own")])
    def test_the_model_reads_the_error_of_a_call(self, error):
        """An exception of a tool becomes the text of an erroneous result."""

        async def execute():
            raise error

        result, results, _tool = self.call(execute)

        assert result.status is Status.COMPLETED
        assert results[0].error
        assert str(error) in results[0].text

    def test_an_infrastructure_failure_fails_the_episode(self):
        """It fails with the owner infra, and the model reads no error."""

        async def execute():
            raise InfrastructureError("sandbox is down")

        result, results, tool = self.call(execute)

        assert (result.status, result.fault.owner, results) == (Status.FAILED, "infra", [])
        assert tool.released == 1

    def test_a_tool_gets_its_own_copy_of_the_arguments(self):
        """The journal recognizes a call by its arguments, so a tool that changes them must not reach them."""
        call = ToolCall(name="look", arguments={"names": ["a"]})

        class ChangingTool(LookTool):
            async def execute(self, session, arguments):
                arguments.pop("names").append("b")
                return ToolResult(text="changed")

        async def after(episode):
            assert (await episode.call_tool(call)).text == "changed"

        assert run(LoopAgent(after=after), tools=[ChangingTool(None)]).status is Status.COMPLETED
        assert call.arguments == {"names": ["a"]}

    def test_no_tools_configured(self):
        """A call in a run without tools returns an error."""
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
        """A reward may return trajectory, turn or token scores, or a number."""
        assert run(reward=ConstantReward(value)).reward == total

    @pytest.mark.parametrize(
        "value", [np.float32(0.5), np.float64(0.5), np.array([0.5])[0], Fraction(1, 2), np.array(0.5)]
    )
    def test_any_real_number_is_a_reward(self, value):
        """Numbers of numpy are rewards as those of Python are, also in an array without dimensions."""
        assert 0.5 == run(reward=ConstantReward(value)).reward

    def test_async_reward(self):
        """A reward may be asynchronous."""

        class Slow:
            async def score(self, episode):
                await asyncio.sleep(0)
                return TrajectoryScore(value=float(len(episode.trajectory.turns())))

        assert run(reward=Slow()).reward == 2.0

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (ValueError("no truth"), "no truth"),
            ("high", "expected a number, TrajectoryScore"),
            (float("nan"), "not finite"),
            (TurnScore(values=(1.0,)), "1 turn scores for 2 turns"),
            (TokenScore(values=(1.0,)), "1 token scores for 8"),
            (TokenScore(values=(0.0,) * 3 + (1.0,) + (0.0,) * 4), "did not sample"),
            ([1.0, 2.0], "2 scores for 1 trajectories"),
        ],
    )
    def test_a_bad_score_fails_the_episode(self, value, text):
        """A reward that raises or returns an invalid score fails the episode; the record stays."""
        result = run(reward=ConstantReward(value))

        assert (result.status, result.fault.owner, result.scores) == (Status.FAILED, "reward", ())
        assert text in result.fault.message
        assert result.trajectories[0].num_response_tokens == 8

    def test_a_hanging_reward_times_out(self):
        """A reward that exceeds `reward_s` fails the episode."""

        class Hanging:
            async def score(self, episode):
                await asyncio.sleep(60)

        result = run(reward=Hanging(), limits=Limits(reward_s=0.02))

        assert (result.fault.owner, result.fault.message) == ("reward", "reward Hanging took longer than 0.02 s")

    def test_a_reward_cannot_change_the_record(self):
        """The record is closed before the reward runs: it can neither append tokens nor sample further ones."""

        async def append(episode):
            episode.trajectory.add_action([1], [-1.0])

        async def observe(episode):
            episode.observe(np.ones(9999, np.int32))

        async def sample(episode):
            await episode.generate()

        for change, kind in ((append, "TrajectoryError"), (observe, "BudgetExhausted"), (sample, "TrajectoryError")):
            result = run(reward=ConstantReward(change))

            assert (result.status, result.fault.owner, result.fault.kind) == (Status.FAILED, "reward", kind)
            assert result.trajectories[0].num_response_tokens == 8

    def test_an_async_callable_that_a_sync_reward_returns_is_awaited(self):
        """A sync `score` may return an awaitable, which runs on the event loop."""

        async def score(episode):
            await asyncio.sleep(0)
            return 2.0

        assert run(reward=ConstantReward(score)).reward == 2.0

    def test_failed_episodes_are_not_scored(self):
        """A failed episode has no reward: its tokens say nothing about the policy."""
        assert run(engine=TinyEngine(error=EngineError("x")), reward=ConstantReward(1.0)).reward is None


class TestServices:
    """Observers and simulated users."""

    def test_observers_receive_every_event_and_cannot_fail_the_episode(self):
        """Each event is delivered once; an observer that raises is switched off, and the run continues."""
        received = []

        class Recorder(Observer):
            def on_episode_started(self, event):
                received.append("started")

            def on_turn_finished(self, event):
                received.append(event.num_new_tokens)

            def on_reward_finished(self, event):
                received.append(event.reward)

            def on_episode_finished(self, event):
                received.append(event.status)

        class Broken(Observer):
            def on_turn_finished(self, event):
                received.append("broken")
                raise RuntimeError

        run(reward=ConstantReward(1.0), observers=[Broken(), Recorder()])

        assert received == ["started", "broken", 3, 3, 1.0, Status.COMPLETED]

    def test_interaction(self):
        """A user simulator has one session for each episode, released at the end."""

        class User:
            released = None

            async def create(self, task):
                return [task.uid]

            async def respond(self, session, messages):
                session.append(len(messages))
                return Reply(content="continue")

            async def release(self, session):
                self.released = session

        async def ask(episode):
            await episode.interact()
            await episode.interact()

        user = User()
        assert run(LoopAgent(after=ask), interaction=user).status is Status.COMPLETED
        assert user.released == ["t", 1, 1]

    def test_no_interaction_configured(self):
        """An agent that needs a missing user simulator fails with the name of the option."""

        async def ask(episode):
            await episode.interact()

        assert "set interaction in the config" in run(LoopAgent(after=ask)).fault.message

    def test_a_user_that_returns_no_reply_fails_the_episode(self):
        """The fault names the simulator and the value."""

        class User:
            async def create(self, task):
                return None

            async def respond(self, session, messages):
                return "text"

            async def release(self, session):
                return None

        async def ask(episode):
            await episode.interact()

        fault = run(LoopAgent(after=ask), interaction=User()).fault
        assert (fault.owner, fault.message) == ("agent", "respond returned 'text', expected a Reply")
