"""The checks of tools, user simulators, postprocessors, observers, routers and commands, and their time limit."""

import asyncio
import re
import threading

import pytest
import torch
from attrs import evolve, frozen

from turnwise import Observer, Reply, ToolResult
from turnwise.errors import ConfigError, ToolError
from turnwise_testing.checks.check import run_check
from turnwise_testing.checks.command import COMMAND_CHECKS, CommandExample, CommandProbe
from turnwise_testing.checks.interaction import INTERACTION_CHECKS, InteractionProbe
from turnwise_testing.checks.observer import OBSERVER_CHECKS, ObserverProbe, make_events
from turnwise_testing.checks.postprocessor import POSTPROCESSOR_CHECKS, PostprocessorProbe
from turnwise_testing.checks.reward import REWARD_CHECKS, RewardExample, RewardProbe
from turnwise_testing.checks.router import ROUTER_CHECKS, RouterProbe
from turnwise_testing.checks.tool import TOOL_CHECKS, ToolExample, ToolProbe

SCHEMA = {
    "type": "function",
    "function": {
        "name": "note",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    },
}


class Notes:
    """A good tool: each session has its notes. Subclasses break one promise each."""

    schema = SCHEMA

    async def create(self, task):
        return []

    async def execute(self, session, arguments):
        if not arguments["text"]:
            raise ToolError("Error: empty")
        session.append(arguments["text"])
        await asyncio.sleep(0)
        return ToolResult(text=" ".join(session))

    async def release(self, session):
        return float(len(session))


class SharedNotes(Notes):
    session = []  # noqa: RUF012 - shared, which is the mistake

    async def create(self, task):
        return self.session


class ReturnsText(Notes):
    async def execute(self, session, arguments):
        return "noted"


class NamelessSchema(Notes):
    schema = {"type": "function", "function": {"parameters": {"type": "object"}}}  # noqa: RUF012 - never changed


class NeedsCalls(Notes):
    async def release(self, session):
        return session[0] and None


class NoRelease:
    schema = SCHEMA

    async def create(self, task): ...

    async def execute(self, session, arguments): ...


class User:
    """A good user simulator."""

    async def create(self, task):
        return {"turns": 0}

    async def respond(self, session, messages):
        session["turns"] += 1
        await asyncio.sleep(0)
        return Reply(content=f"Turn {session['turns']}?", should_terminate=session["turns"] == 3)

    async def release(self, session): ...


class TextUser(User):
    async def respond(self, session, messages):
        return "Why?"


class ForgetfulUser(User):
    def __init__(self):
        self.session = {"turns": 0}

    async def create(self, task):
        return self.session


class RewritingUser(User):
    async def respond(self, session, messages):
        messages.pop()
        return Reply(content="Again?")


class NegativeUser(User):
    async def respond(self, session, messages):
        return Reply(content="No.", reward=float("nan"))


class Lengths:
    """A good postprocessor."""

    def process(self, batch):
        return {"lengths": torch.stack([mask.sum() for mask in batch.split(batch.response_mask)])}


class Made:
    """A postprocessor made of a function."""

    def __init__(self, process):
        self.process = process


def overwrite(batch):
    batch.rm_scores.add_(1)
    return {}


class Counting(Observer):
    """A good observer."""

    def on_turn_finished(self, event):
        self.seconds = event.seconds


class Raising(Observer):
    def on_turn_finished(self, event):
        raise KeyError("x")


class ClosesOnce(Counting):
    def open(self):
        self.file = []

    def close(self):
        del self.file


class Clearing(Observer):
    def on_episode_finished(self, event):
        event.messages[-1]["content"] = ""


class Deaf(Observer):
    """Overrides nothing."""


@frozen
class Router:
    """A router made of a function of (request, replicas)."""

    choose: object

    def release(self, trajectory_id): ...


class Greet:
    """A good command."""

    help = "greet somebody by name"

    def add_arguments(self, parser):
        parser.epilog = "Examples:\n  turnwise greet you"
        parser.add_argument("name", help="to greet")

    def run(self, arguments):
        if arguments.name == "nil":
            raise ConfigError("there is no nil")
        print(f"Hello {arguments.name}.")
        return 0


class NoCode(Greet):
    def run(self, arguments):
        print("Hello you.")


class Silent(Greet):
    def add_arguments(self, parser):
        parser.epilog = "turnwise greet"
        parser.add_argument("name")


class Sentence(Greet):
    help = "Greets."


class NoExample(Greet):
    def add_arguments(self, parser):
        parser.add_argument("name", help="to greet")


TOOL = ToolProbe(
    make_tool=Notes,
    examples=(ToolExample(arguments={"text": "a"}, text="a"), ToolExample(arguments={"text": ""}, error=True)),
)
USER = InteractionProbe(make_interaction=User)
POST = PostprocessorProbe(make_postprocessor=Lengths)
WATCH = ObserverProbe(make_observer=Counting)
GREETINGS = (CommandExample(arguments=["you"], output="Hello you."), CommandExample(arguments=["nil"], exit_code=2))
COMMAND = CommandProbe(make_command=Greet, name="greet", examples=GREETINGS)


@pytest.mark.parametrize(
    ("checks", "probe"),
    [
        (TOOL_CHECKS, TOOL),
        (TOOL_CHECKS, ToolProbe(make_tool=lambda: (Notes(),))),
        (INTERACTION_CHECKS, USER),
        (POSTPROCESSOR_CHECKS, POST),
        (OBSERVER_CHECKS, WATCH),
        (COMMAND_CHECKS, COMMAND),
    ],
)
def test_a_good_part_passes_all(checks, probe):
    """Every check applies to it, unless there is no example to run."""
    skipped = [name for name, check in checks.items() if run_check(check, probe)]
    assert bool(skipped) == (getattr(probe, "examples", True) == ())


BAD = [
    (TOOL_CHECKS, evolve(TOOL, make_tool=SharedNotes), "sessions_do_not_mix", "text of note("),
    (TOOL_CHECKS, evolve(TOOL, make_tool=ReturnsText), "examples_have_their_results", "in place of a ToolResult"),
    (TOOL_CHECKS, evolve(TOOL, make_tool=NamelessSchema), "schema_is_valid", "its name must be"),
    (TOOL_CHECKS, evolve(TOOL, make_tool=NeedsCalls), "session_without_a_call_closes", "list index out of range"),
    (
        TOOL_CHECKS,
        evolve(TOOL, make_tool=NeedsCalls),
        "examples_have_their_results",
        "release of 'note' raised IndexErr",
    ),
    (TOOL_CHECKS, evolve(TOOL, make_tool=NoRelease), "fulfils_the_protocol", "NoRelease has no release"),
    (INTERACTION_CHECKS, InteractionProbe(make_interaction=TextUser), "replies_are_replies", "respond returned 'Why?'"),
    (INTERACTION_CHECKS, InteractionProbe(make_interaction=ForgetfulUser), "is_repeatable", "in a second session"),
    (INTERACTION_CHECKS, InteractionProbe(make_interaction=ForgetfulUser), "sessions_do_not_mix", "beside others"),
    (INTERACTION_CHECKS, InteractionProbe(make_interaction=RewritingUser), "replies_are_replies", "the conversation"),
    (INTERACTION_CHECKS, InteractionProbe(make_interaction=NegativeUser), "replies_are_replies", "the reward is nan"),
    (POSTPROCESSOR_CHECKS, lambda _b: None, "fields_fit_the_batch", "process returned a NoneType"),
    (POSTPROCESSOR_CHECKS, lambda b: {"x": b.response_mask.numpy()}, "fields_fit_the_batch", "field 'x' has a ndarray"),
    (POSTPROCESSOR_CHECKS, lambda b: {1: b.response_mask}, "fields_fit_the_batch", "the name of a field is 1"),
    (POSTPROCESSOR_CHECKS, lambda b: {"rm_scores": b.rm_scores}, "fields_fit_the_batch", "already has an attribute"),
    (POSTPROCESSOR_CHECKS, lambda _b: {"x": torch.zeros(1, 2, 3)}, "fields_fit_the_batch", "field 'x'"),
    (POSTPROCESSOR_CHECKS, overwrite, "batch_stays_unchanged", "['rm_scores']"),
    (POSTPROCESSOR_CHECKS, lambda b: {"x": torch.rand(len(b))}, "is_repeatable", "differ the second time"),
    (OBSERVER_CHECKS, ObserverProbe(make_observer=object), "fulfils_the_protocol", "object is no subclass"),
    (OBSERVER_CHECKS, ObserverProbe(make_observer=Deaf), "methods_are_called", "overrides no method"),
    (OBSERVER_CHECKS, ObserverProbe(make_observer=Raising), "every_event_is_understood", "raised KeyError"),
    (OBSERVER_CHECKS, ObserverProbe(make_observer=ClosesOnce), "closes_twice", "file"),
    (OBSERVER_CHECKS, ObserverProbe(make_observer=Clearing), "results_stay_unchanged", "an observed episode"),
    (
        ROUTER_CHECKS,
        RouterProbe(make_router=lambda: Router(lambda _q, _r: 99)),
        "chooses_available_replicas",
        "choose returned 99 ",
    ),
    (COMMAND_CHECKS, evolve(COMMAND, make_command=NoCode), "examples_have_their_results", "run returned None"),
    (COMMAND_CHECKS, evolve(COMMAND, make_command=Silent), "options_are_documented", "['name']"),
    (COMMAND_CHECKS, evolve(COMMAND, make_command=NoExample), "options_are_documented", "has no example"),
    (COMMAND_CHECKS, evolve(COMMAND, make_command=Sentence), "help_is_one_line", "ends with a full stop"),
    (COMMAND_CHECKS, evolve(COMMAND, make_command=object), "fulfils_the_protocol", "has no help, add_arguments, run"),
]


@pytest.mark.many_cases
@pytest.mark.parametrize(("checks", "probe", "check", "text"), BAD)
def test_a_bad_part_is_caught(checks, probe, check, text):
    """Each by the check that is about it, which says what the part did."""
    if checks is POSTPROCESSOR_CHECKS:
        probe = PostprocessorProbe(make_postprocessor=lambda process=probe: Made(process))
    with pytest.raises(Exception, match=re.escape(text)):
        run_check(checks[check], probe)


def test_the_probe_of_observers_has_every_event():
    """A new event of the core needs an example here."""
    assert set(make_events()) == {name for name in dir(Observer) if name.startswith("on_")}


class Waits:
    async def score(self, episode):
        await asyncio.Event().wait()


class Blocks:
    def score(self, episode):
        threading.Event().wait()


@pytest.mark.slow
def test_a_reward_that_waits_for_ever_fails_its_check():
    """It breaks its promise, and no thread of an earlier check is named; neither check nor test session hangs."""
    for make_reward in (Waits, Blocks, Waits, Blocks):
        probe = RewardProbe(make_reward=make_reward, examples=(RewardExample(answer="42"),))
        with pytest.raises(AssertionError) as caught:
            run_check(REWARD_CHECKS["returns_a_score"], probe, timeout_s=0.5)
        text = str(caught.value)
        assert text.startswith("nothing came within 0.5 s")
        assert text.endswith("; the promise: Every example has a finite `Score` that fits its trajectory.")
        # A waiting coroutine has no frame in the text.
        assert (f"{__file__}:" in text) == (make_reward is Blocks)
