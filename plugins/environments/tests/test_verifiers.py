"""The bridge to verifiers, with its real environments and programs; without verifiers these tests are skipped."""

import asyncio
import shutil
import sys
from pathlib import Path

import pytest
from attrs import evolve

pytest.importorskip("verifiers.v1", reason="verifiers is not installed here: see the README")
if shutil.which("uv", path=str(Path(sys.executable).parent)) is None and shutil.which("uv") is None:
    pytest.skip("verifiers needs uv to prepare its programs", allow_module_level=True)

from turnwise import Resources, ToolCall
from turnwise.errors import ConfigError, DataError
from turnwise.types import Status
from turnwise_environments import EnvironmentConfig, Turn, make_agent
from turnwise_environments.verifiers_bridge import VerifiersEnvironment
from turnwise_environments.verifiers_service import VerifiersService
from turnwise_reported_reward import ReportedReward
from turnwise_testing.probes.agent import AgentProbe, make_task, probe_chat, probe_resources
from turnwise_testing.suites.environment import EnvironmentSuite

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
SITE = Path(__file__).parent / "verifiers_site"
TASK = make_task(extra={"idx": 2})  # 2 + 1
TOOLS = {"id": "outside_sums", "task": {"tools": True}}


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """The tasksets can be imported here and in the programs of verifiers; every service ends with its test."""
    monkeypatch.syspath_prepend(str(SITE))
    monkeypatch.setenv("PYTHONPATH", str(SITE))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    yield
    assert VerifiersService._services == {}


class TestGuess(EnvironmentSuite):
    """An environment that answers."""

    episode = ("9", "0", "3")
    task = TASK

    def make_environment(self):
        """Return the guessing game."""
        return VerifiersEnvironment(taskset="outside_guess")


def play(actions, finish=False, task=TASK, **options):
    """Return the observations of some actions, and the tools."""

    async def run():
        environment = VerifiersEnvironment(**options)
        try:
            seen = [await environment.reset(task, 0)]
            seen += [await environment.step(action) for action in actions]
            return [*seen, await environment.finish()] if finish else seen, environment.tools
        finally:
            await asyncio.to_thread(environment.close)

    return asyncio.run(run())


def test_the_messages_are_those_of_verifiers():
    """The first request is the prompt; the reward, with its weight, and the metrics come with the end."""
    (first, last), tools = play(["3"], taskset="outside_sums")

    assert first.messages == (
        {"role": "system", "content": "Answer with a number."},
        {"role": "user", "content": "What is 2 + 1?"},
    )
    assert (last.reward, last.done, last.metrics) == (2.0, True, {"replies": 1.0, "reward/exact": 2.0})
    assert tools == ()


def test_a_user_answers_the_turns():
    """Messages of the environment reach the model; only new ones are in an observation."""
    seen, _ = play(["9", "0", "3"], taskset="outside_guess")

    assert [each.messages for each in seen[1:3]] == [
        ({"role": "user", "content": "Too high."},),
        ({"role": "user", "content": "Too low."},),
    ]
    assert (seen[-1].reward, seen[-1].metrics["replies"]) == (2.0, 3.0)


def test_calls_of_one_turn_run_together():
    """verifiers runs all calls of a turn and answers each, a malformed and an unknown one too."""
    calls = (
        ToolCall(name="add", arguments={"a": 2, "b": 1}),
        ToolCall(name="add", arguments={"a": "x"}),
        ToolCall(name="shout", arguments={}),
        ToolCall(error="malformed", raw="{"),
    )
    seen, tools = play([Turn(calls=calls, ids=("c0", "c1", "c2", "c3")), Turn(text="3")], taskset=TOOLS)
    answers = seen[1].messages

    assert [tool["function"]["name"] for tool in tools] == ["add"]
    assert [(each["role"], each["tool_call_id"]) for each in answers] == [("tool", f"c{n}") for n in range(4)]
    assert answers[0]["content"] == "3"
    assert "validation error" in answers[1]["content"]
    assert answers[2]["content"] == "error: unknown tool 'shout'"
    assert answers[3]["content"].startswith("error: invalid JSON in tool arguments")
    assert (seen[2].reward, seen[2].done) == (2.0, True)


def test_a_budget_that_ends_lets_verifiers_score():
    """`finish` ends the conversation as a full context does, so the rewards see all turns so far."""
    seen, _ = play(
        [Turn(text="3", calls=(ToolCall(name="add", arguments={"a": 1, "b": 1}),), ids=("c",))], True, taskset=TOOLS
    )

    assert (seen[-1].reward, seen[-1].metrics["replies"]) == (2.0, 1.0)


def test_the_limit_of_verifiers_truncates():
    """`max_turns` of a role ends the episode at a limit, and not by its rules."""
    seen, _ = play(["9"], taskset="outside_guess", env={"player": {"max_turns": 1}})

    assert (seen[-1].done, seen[-1].truncated, seen[-1].reward) == (False, True, 0.0)


@pytest.mark.parametrize("extra", [{}, {"idx": -1}, {"idx": "2"}, {"idx": 4}])
def test_a_task_without_its_index(extra):
    """The row is at fault, and the line says why."""
    with pytest.raises(DataError, match=r"column 'idx' must have the index|the taskset has 4 tasks, and no task 4"):
        play([], task=make_task(extra=extra), taskset="outside_sums")


def test_an_error_of_the_taskset():
    """The failure has the words of verifiers."""
    with pytest.raises(RuntimeError, match=r"TaskError: .*KeyError: 'answer'"):
        play(["3"], taskset={"id": "outside_sums", "task": {"broken": True}})


def test_a_rewritten_conversation():
    """A harness that drops what the model has read and written cannot be trained on as one record."""
    with pytest.raises(RuntimeError, match="the harness rewrote the conversation"):
        play(["3"], taskset="outside_sums", env={"agent": {"harness": {"id": "outside_forgetful"}}})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"taskset": "no_such_taskset"}, "taskset 'no_such_taskset' not found"),
        ({"taskset": {"id": "outside_sums", "tsk": {}}}, "the config of verifiers does not fit: taskset.tsk"),
        ({"taskset": "outside_sums", "env": {"agent": {"max_turn": 1}}}, "does not fit: agent.max_turn"),
    ],
)
def test_a_wrong_config(options, text):
    """The error comes when the run is built, in one line."""
    with pytest.raises(ConfigError) as caught:
        VerifiersEnvironment(**options)

    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def run_agent(turns, resources, taskset, **limits):
    """Run the agent on a task."""
    config = EnvironmentConfig(environment="verifiers", options={"taskset": taskset})
    probe = AgentProbe(make_agent=lambda: make_agent(config, resources), resources=resources, turns=turns)
    return asyncio.run(probe.run(TASK, reward=ReportedReward(), limits=probe.limits(**limits)))


def test_an_episode_of_the_agent():
    """The agent plays the episode; its last turn has the reward of verifiers."""
    run = run_agent(("9", "3"), Resources(chat=probe_chat()), "outside_guess", response_length=1 << 12)

    assert run.result.status is Status.COMPLETED
    said = [message["content"] for message in run.result.messages[1:]]
    num_wrong = run.result.metrics.num_turns - 1
    assert said == ["What is 2 + 1?", *["9", "Too high."] * num_wrong, "3"]
    assert run.result.scores[0].values == (*[0.0] * num_wrong, 2.0)
    assert run.result.metrics.extra["environment/replies"] == run.result.metrics.num_turns


def test_an_episode_with_calls():
    """A turn of calls reaches verifiers as one message."""
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": %d}}</tool_call>'
    run = run_agent((call % 1 + call % 2, "3"), evolve(probe_resources(), tools={}), TOOLS, response_length=1 << 14)
    texts = [message["content"] for message in run.result.messages if message["role"] == "tool"]

    assert texts == ["3", "4"]
    assert run.result.scores[0].values == (0.0, 2.0)


def test_an_episode_without_tokens_is_scored():
    """The budget ends after the first turn, and verifiers scores that turn."""
    run = run_agent(("9",), Resources(chat=probe_chat()), "outside_guess", response_length=4)

    assert run.result.status is Status.TRUNCATED
    assert run.result.metrics.extra["environment/replies"] == 1.0


def test_tools_of_the_run_are_refused():
    """verifiers runs all calls, so a tool of the run would never be called."""
    config = EnvironmentConfig(environment="verifiers", options={"taskset": "outside_sums"})
    with pytest.raises(ConfigError, match="runs the calls of a turn itself: remove tools"):
        make_agent(config, probe_resources())
