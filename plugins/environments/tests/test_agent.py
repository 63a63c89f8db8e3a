"""Episodes in environments: rewards of turns, failures and their owners, and the end of an environment."""

import asyncio
import threading
from typing import ClassVar

import pytest
from attrs import evolve

from turnwise import ToolCall
from turnwise.errors import ConfigError, DataError, InfrastructureError, ToolError
from turnwise.protocols import Resources
from turnwise.types import Status
from turnwise_environments import EnvironmentConfig, Observation, Turn, make_agent
from turnwise_testing.probes.agent import AgentProbe, make_task, probe_chat, probe_resources

HUNG = threading.Event()
"""Releases the calls that hang, so that no thread outlives its test."""


class Counter:
    """Counts to `goal` by turns; `on` names a method that behaves as `behaves` says."""

    closed = 0
    threads: ClassVar[set[str]] = set()

    def __init__(self, goal=3, on="", behaves="", repeatable=False):
        self.repeatable, self._goal, self._on, self._behaves, self._count = repeatable, goal, on, behaves, 0

    def reset(self, task, seed):
        self._count = 0
        self._misbehave("reset")
        return Observation(text=f"Seed {seed}.")

    def step(self, action):
        type(self).threads.add(threading.current_thread().name + str(threading.get_ident()))
        wrong = self._misbehave("step")
        if wrong is not None:
            return wrong
        self._count += 1
        return Observation(text=f"{self._count}", reward=self._count, done=self._count == self._goal)

    def close(self):
        type(self).closed += 1
        self._misbehave("close")

    def _misbehave(self, method):
        if method != self._on:
            return None
        match self._behaves:
            case "hangs":
                HUNG.wait(60)
            case "raises":
                raise KeyError("lost")
            case "exits":
                raise SystemExit(3)
            case "data":
                raise DataError("the row has no level")
            case "infra":
                raise InfrastructureError("the server is down")
            case "refuses":
                raise ToolError("Error: write a number")
            case "lies":
                return 7
            case "reward":
                return Observation(reward=float("nan"))
        return None


@pytest.fixture(autouse=True)
def fresh():
    """Count the closed environments of one test, and release its hanging calls."""
    Counter.closed, Counter.threads = 0, set()
    HUNG.clear()
    yield
    HUNG.set()


def play(limits=None, max_turns=None, reward=None, task=None, **options):
    """Run one episode of `Counter`."""
    seconds = 0.5 if options.get("behaves") == "hangs" else 60.0  # no other one may be late on a busy machine
    deadlines = {"reset_s": seconds, "step_s": seconds, "close_s": seconds}
    config = EnvironmentConfig(environment=f"{__name__}:Counter", options=options, max_turns=max_turns, **deadlines)
    resources = Resources(chat=probe_chat())
    probe = AgentProbe(make_agent=lambda: make_agent(config, resources), resources=resources, turns=("go",))
    limits = probe.limits(**limits) if limits else None
    return asyncio.run(probe.run(task or make_task(), reward=reward, limits=limits))


def test_each_turn_has_the_reward_of_its_step():
    """The rewards of the steps are noted by turn, as the reward `reported` reads them."""
    from turnwise_reported_reward import ReportedReward

    run = play(reward=ReportedReward())

    assert run.episode.memory["reported_score"] == {"turns": [1.0, 2.0, 3.0]}
    assert run.result.scores[0].values == (1.0, 2.0, 3.0)
    assert run.result.reward == 6.0
    assert run.episode.memory["ended_by"] == "environment"
    assert run.result.metrics.extra["environment/steps"] == 3.0


def test_the_last_turn_is_scored_when_no_token_is_left():
    """A complete turn is an action even if the budget leaves no room for another turn."""
    turn = 3  # "go" and its end
    run = play(limits={"response_length": turn})

    assert run.result.status is Status.TRUNCATED
    assert run.episode.memory["reported_score"] == {"turns": [1.0]}


def test_a_turn_that_the_budget_cuts_is_no_action():
    """The environment does not see half a turn; the turn has the reward 0."""
    run = play(limits={"response_length": 1})

    assert run.result.status is Status.TRUNCATED
    assert run.episode.memory["reported_score"] == {"turns": [0.0]}
    assert run.episode.memory["actions"] == []


def test_max_turns_ends_the_episode():
    """The limit of turns counts turns of the model, whose last one is still scored."""
    run = play(max_turns=2)

    assert run.result.status is Status.COMPLETED
    assert run.episode.memory["ended_by"] == "max_turns"
    assert run.episode.memory["reported_score"] == {"turns": [1.0, 2.0]}


def test_the_first_observation_joins_the_users_message():
    """The prompt has one message of the user, and a task's column `seed` is the seed."""
    run = play(task=make_task(extra={"seed": 11}))

    assert run.result.messages[0] == {"role": "user", "content": "Question 0?\n\nSeed 11."}


def test_a_group_shares_its_seed_and_tasks_do_not():
    """Episodes of one task begin alike; the seed of another task differs."""
    first, again, other = (play(task=make_task(number)).result.messages[0]["content"] for number in (1, 1, 2))

    assert first == again
    assert first.split("Seed")[1] != other.split("Seed")[1]


@pytest.mark.parametrize(
    ("on", "behaves", "owner", "text"),
    [
        ("reset", "raises", "tool", "reset raised KeyError: 'lost'"),
        ("step", "raises", "tool", "step raised KeyError: 'lost'"),
        ("step", "exits", "tool", "step raised SystemExit: 3"),
        ("step", "lies", "tool", "step returned 7, expected an Observation or a string"),
        ("step", "reward", "tool", "step raised ValueError: a reward or metric must be a finite number, got nan"),
        ("step", "hangs", "tool", "step took longer than 0.5 s"),
        ("reset", "hangs", "tool", "reset took longer than 0.5 s"),
        ("reset", "data", "data", "the row has no level"),
        ("step", "infra", "infra", "the server is down"),
    ],
)
def test_a_failure_has_its_owner_and_a_line(on, behaves, owner, text):
    """An environment that raises, hangs or returns nonsense fails its episode, and the line names it."""
    run = play(on=on, behaves=behaves)

    assert run.result.status is Status.FAILED
    assert run.result.fault.owner == owner
    assert run.result.fault.message.endswith(text)
    assert owner != "tool" or "Counter'" in run.result.fault.message


def test_a_refusal_is_for_the_model():
    """The model reads the text of a `ToolError` and has another turn."""
    run = play(on="step", behaves="refuses", max_turns=2)

    assert run.result.messages[-2]["content"] == "Error: write a number"
    assert run.result.status is Status.COMPLETED


@pytest.mark.parametrize("behaves", ["", "raises", "refuses"])
def test_an_environment_is_closed_once_in_every_case(behaves):
    """Every environment that began is closed, whatever ended its episode."""
    play(on="step", behaves=behaves, max_turns=3)

    assert Counter.closed == 1


def test_a_close_that_fails_or_hangs_keeps_the_result(capsys):
    """The episode counts, whatever closing does."""
    for behaves in ("raises", "hangs"):
        assert play(on="close", behaves=behaves).result.status is Status.COMPLETED


def test_all_calls_of_an_environment_run_in_one_thread():
    """Libraries may bind an environment to the thread that made it."""
    play()

    assert len(Counter.threads) == 1


def test_only_a_repeatable_environment_resumes():
    """An interrupted episode of another environment starts again."""
    agents = [
        make_agent(
            EnvironmentConfig(environment=f"{__name__}:Counter", options={"repeatable": repeatable}),
            Resources(chat=probe_chat()),
        )
        for repeatable in (True, False)
    ]

    assert [agent.resumable for agent in agents] == [True, False]


class Dice:
    """Claims to be repeatable, and is not."""

    repeatable = True
    rolls = 0

    def reset(self, task, seed):
        return "Roll."

    def step(self, action):
        type(self).rolls += 1
        return Observation(text="Again.", reward=float(self.rolls))

    def close(self):
        pass


def test_an_environment_that_does_not_repeat_is_found_out():
    """When the actions earn other rewards after a resume, the episode fails with a line that says so."""
    from turnwise_testing.checks.agent import _Forgetful

    config = EnvironmentConfig(environment=f"{__name__}:Dice")
    resources = Resources(chat=probe_chat())
    probe = AgentProbe(make_agent=lambda: make_agent(config, resources), resources=resources, turns=("go",))
    run = asyncio.run(probe.run(make_task(), agent=_Forgetful(probe.make_agent)))

    assert run.result.fault.message == f"environment '{__name__}:Dice' gave other rewards when it was repeated"


class Toolbox:
    """Has one tool, which repeats its argument, and ends at a text."""

    tools = (
        {
            "type": "function",
            "function": {
                "name": "echo",
                "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
            },
        },
    )

    def reset(self, task, seed):
        return "Begin."

    def step(self, action):
        if isinstance(action, ToolCall):
            return Observation(text=action.arguments["text"], reward=0.5)
        return Observation(done=True, reward=1.0)

    def close(self):
        pass


def test_calls_reach_the_environment_the_run_and_neither():
    """A call goes to the tool that it names; a wrong one is answered in words, and costs no step."""
    turns = (
        '<tool_call>{"name": "echo", "arguments": {"text": "hi"}}</tool_call>'
        '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
        '<tool_call>{"name": "echo", "arguments": {}}</tool_call>'
        '<tool_call>{"name": "shout", "arguments": {}}</tool_call>'
        "<tool_call>{</tool_call>"
    )
    config, resources = EnvironmentConfig(environment=f"{__name__}:Toolbox", max_turns=2), probe_resources()
    probe = AgentProbe(make_agent=lambda: make_agent(config, resources), resources=resources, turns=(turns,))
    run = asyncio.run(probe.run(make_task(), limits=probe.limits(response_length=1 << 14)))
    texts = [message["content"] for message in run.result.messages if message["role"] == "tool"]

    assert texts == [
        "hi",
        "3",
        "Error: the arguments of 'echo' do not fit: \"text\" is a required property",
        "Error: there is no tool 'shout'; the tools are: echo, add",
        "Error: malformed call: JSONDecodeError",
    ]
    assert run.episode.memory["reported_score"] == {"turns": [0.5, 0.5]}


class Whole(Toolbox):
    """Takes whole turns, repeats them as its answer, and pays at the end of the episode."""

    whole_turns = True
    repeatable = True
    seen: ClassVar[list[Turn]] = []

    def __init__(self, broken=False):
        self._broken = broken

    def step(self, action):
        type(self).seen.append(action)
        if self._broken:
            return Observation(messages=({"role": "assistant", "content": "no"},))
        answers = [{"role": "tool", "tool_call_id": each, "content": "done"} for each in action.ids]
        return Observation(messages=tuple(answers or [{"role": "user", "content": "on"}]), reward=0.25)

    async def finish(self):
        return Observation(reward=2.0, metrics={"finished": 1})


def play_whole(turns, max_turns=None, limits=None, **options):
    """Run one episode of `Whole`."""
    config = EnvironmentConfig(environment=f"{__name__}:Whole", max_turns=max_turns, options=options)
    resources = evolve(probe_resources(), tools={})
    probe = AgentProbe(make_agent=lambda: make_agent(config, resources), resources=resources, turns=turns)
    Whole.seen.clear()
    return asyncio.run(probe.run(make_task(), limits=probe.limits(**(limits or {"response_length": 1 << 14}))))


def test_an_environment_may_take_whole_turns():
    """All calls of a turn, also wrong ones, reach the environment at once, with the ids of their responses."""
    calls = '<tool_call>{"name": "echo", "arguments": {}}</tool_call><tool_call>{</tool_call>'
    run = play_whole((f"Wait.{calls}", "end"), max_turns=2)
    first, second = Whole.seen

    assert [(call.name, bool(call.error)) for call in first.calls] == [("echo", False), ("", True)]
    assert (first.text, second) == ("Wait.", Turn(text="end"))
    assert [each["tool_call_id"] for each in run.result.messages if each["role"] == "tool"] == list(first.ids)


def test_an_environment_that_does_not_end_is_finished():
    """The end by `max_turns` is told to an environment with `finish`, whose reward the last turn has too."""
    run = play_whole(("one", "two"), max_turns=2)

    assert run.episode.memory["reported_score"] == {"turns": [0.25, 2.25]}
    assert run.result.metrics.extra["environment/finished"] == 1.0


@pytest.mark.parametrize(("tokens", "rewards"), [(4, [2.25]), (2, [2.0])])
def test_a_budget_that_ends_finishes_the_environment(tokens, rewards):
    """With the last complete turn, and with one that the budget cuts, which is no step."""
    run = play_whole(("one",), limits={"response_length": tokens})

    assert run.result.status is Status.TRUNCATED
    assert run.episode.memory["reported_score"] == {"turns": rewards}


def test_a_repeatable_environment_of_whole_turns_resumes():
    """Its turns are in the notes of the episode, calls included, and are played again."""
    from turnwise_testing.checks.agent import _Forgetful

    config = EnvironmentConfig(environment=f"{__name__}:Whole", max_turns=3)
    resources = evolve(probe_resources(), tools={})
    turns = ('<tool_call>{"name": "echo", "arguments": {"text": "a"}}</tool_call>', "two", "three")
    probe = AgentProbe(make_agent=lambda: make_agent(config, resources), resources=resources, turns=turns)
    Whole.seen.clear()
    limits = probe.limits(response_length=1 << 14)
    run = asyncio.run(probe.run(make_task(), agent=_Forgetful(probe.make_agent), limits=limits))

    assert run.episode.memory["reported_score"] == {"turns": [0.25, 0.25, 2.25]}
    assert len(Whole.seen) > 3
    assert {each.calls[0].name for each in Whole.seen if each.calls} == {"echo"}


def test_only_the_reset_may_speak_for_the_assistant():
    """A message of the assistant in an answer would be tokens that the policy did not sample."""
    run = play_whole(("one",), broken=True)

    assert run.result.fault.owner == "tool"
    assert run.result.fault.message.endswith("step returned a message of the assistant")


def test_tools_of_the_run_beside_whole_turns_are_refused():
    """The environment would get the calls, and the run's tools none."""
    with pytest.raises(ConfigError, match="runs the calls of a turn itself: remove tools from the config"):
        make_agent(EnvironmentConfig(environment=f"{__name__}:Whole"), probe_resources())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"environment": "gymnasum"}, "'gymnasum' is not registered (did you mean 'gymnasium'?); registered are "),
        ({"environment": "no_such_module:Maze"}, "no module 'no_such_module'; install it, or add its folder"),
        ({"environment": f"{__name__}:Conter"}, "has no 'Conter'; did you mean 'Counter'?"),
        ({"environment": f"{__name__}:HUNG"}, "is Event, expected a class or a function"),
        ({"environment": f"{__name__}:AgentProbe"}, "cannot be made with its options: TypeError"),
        ({"environment": "guess_number", "options": {"lowest": 1}}, "unexpected keyword argument 'lowest'"),
        ({"environment": "builtins:dict"}, "dict has no reset, step, close"),
        ({"environment": "gymnasium", "options": {"id": "FrozenLak-v1"}}, "Did you mean: `FrozenLake`?"),
        (
            {"environment": "gymnasium", "options": {"id": "FrozenLake-v1", "actions": {"up": 9}}},
            "the action 'up' means 9, which is not in Discrete(4)",
        ),
        ({"environment": f"{__name__}:Toolbox"}, "cannot find tool calls: set parser in the config"),
    ],
)
def test_a_wrong_config_is_one_line(changes, text):
    """A wrong environment is refused when the run is built, in one line with the hint."""
    with pytest.raises(ConfigError) as caught:
        make_agent(EnvironmentConfig(**changes), Resources(chat=probe_chat()))

    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
