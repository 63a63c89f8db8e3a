"""The base class: each pair of methods, vetoes, wrong results, errors, deadlines and the notes of changes."""

import asyncio
from typing import ClassVar

import pytest
from attrs import evolve

from turnwise import RunInfo, Status, ToolCall, ToolResult, TrajectoryScore
from turnwise.protocols import ServingAgent
from turnwise_middleware import Middleware, wrap_tool
from turnwise_middleware.wrappers import MiddlewareError
from turnwise_testing.checks.wrapper import middleware_probe
from turnwise_testing.engines.scripted import ScriptedEngine


def wrapped(middleware, kind, part):
    """Return a part inside of a middleware, by the hooks of the plugin."""
    return middleware_probe(lambda: middleware).make_wrap()(kind, part)


def results_of(middleware, count=8):
    """Return the results of some episodes inside of a middleware."""
    probe = middleware_probe(lambda: middleware)

    async def run():
        return [(await probe.run(number)).result for number in range(count)]

    return asyncio.run(run())


def failure_of(middleware, count=8):
    """Return the text of the first episode that fails."""
    with pytest.raises(AssertionError) as raised:
        results_of(middleware, count)
    return str(raised.value)


def test_without_a_method_nothing_is_wrapped():
    """Parts stay the objects that they were."""
    part = object()
    for kind in ("agents", "engines", "postprocessors", "rewards", "tool_parsers", "tools"):
        assert part is wrapped(Middleware(), kind, part)


class ChangedArguments(Middleware):
    """Adds 0 to everything."""

    async def before_tool(self, use):
        return {**use.arguments, "b": 0}


def test_changed_arguments():
    """The tool gets them, the record keeps the model's call, and the note counts them."""
    results = results_of(ChangedArguments())
    answers = {m["content"] for result in results for m in result.messages if m["role"] == "tool"}

    assert {"2", "1", "5"} & answers
    assert not {"13"} & answers
    assert any("tool/middleware/ChangedArguments/changed_arguments" in r.metrics.extra for r in results)


class PlainText(Middleware):
    """Parses nothing."""

    name = "plain"

    def before_parse(self, token_ids):
        return False


def test_a_vetoed_parse_is_text():
    """No tool runs, the messages have the calls as text, and each episode has the note."""
    results = results_of(PlainText())

    assert all(0 == result.metrics.num_tool_calls for result in results)
    assert any("<tool_call>" in result.messages[-1]["content"] for result in results)
    assert {1.0} == {result.metrics.extra["middleware/plain/vetoed_parse"] for result in results}


class OtherTool(Middleware):
    """Sends every call to another tool."""

    def after_parse(self, text, calls):
        return text, [ToolCall(name="nothing", arguments={}) for _call in calls]


def test_changed_calls():
    """The calls that run are the changed ones."""
    results = results_of(OtherTool())
    answers = {m["content"] for result in results for m in result.messages if m["role"] == "tool"}

    assert answers
    assert all("there is no tool 'nothing'" in answer for answer in answers)
    assert any("middleware/OtherTool/changed_parse" in result.metrics.extra for result in results)


class Short(Middleware):
    """Ends episodes after their first turn; gives 7 to the others."""

    async def before_step(self, episode):
        return "terminated" if len(episode.turn_records) == 1 else None

    async def after_step(self, episode, state):
        return state

    async def before_reward(self, episode):
        return 7


def test_a_vetoed_step_and_a_vetoed_reward():
    """The agent makes no second turn, and the reward is not asked."""
    results = results_of(Short())

    assert {1} == {len(result.trajectories[0].turns()) for result in results}
    assert [(TrajectoryScore(value=7.0),)] * len(results) == [result.scores for result in results]
    assert any("middleware/Short/vetoed_step" in result.metrics.extra for result in results)
    assert {1.0} == {result.metrics.extra["middleware/Short/vetoed_reward"] for result in results}


def method(name, value):
    """Return a middleware with one method that returns a value or raises it."""

    def run(*_arguments):
        if isinstance(value, BaseException):
            raise value
        return value

    async def run_async(*arguments):
        return run(*arguments)

    is_sync = name.endswith(("parse", "postprocess"))
    return type("Wrong", (Middleware,), {name: run if is_sync else run_async})()


@pytest.mark.parametrize("name", ["tool", "parse", "step", "reward"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("value", [KeyError("x"), object()], ids=["raises", "wrong type"])
def test_a_failing_method_fails_the_episode(name, when, value):
    """The harness is at fault: the owner is `infra`, and the text names middleware, class and method."""
    text = failure_of(method(f"{when}_{name}", value))

    assert f"infra MiddlewareError: {when}_{name} of middleware 'Wrong' (test_interception.Wrong): " in text.replace(
        f"{__name__}.Wrong", "test_interception.Wrong"
    )
    assert ("KeyError: 'x'" if isinstance(value, KeyError) else "expected") in text


class Hanging(Middleware):
    """Never returns from a call of a tool."""

    async def after_tool(self, use, result):
        await asyncio.Event().wait()


def test_the_deadline_of_a_call_covers_its_middleware():
    """The model reads that the tool did not answer, and the episode continues."""
    from turnwise_testing.probes import agent as agent_probe
    from turnwise_testing.probes.wrapped_parts import ToolLoop

    outer, plain = Hanging(), agent_probe.probe_resources()
    tools = {name: wrapped(outer, "tools", tool) for name, tool in plain.tools.items()}
    resources = evolve(plain, tools=tools)
    agents = agent_probe.AgentProbe(make_agent=lambda: ToolLoop(resources), resources=resources)

    async def run():
        limits = agents.limits(tool_call_s=0.05)
        return [(await agents.run(agent_probe.make_task(number), limits=limits)).result for number in range(8)]

    results = asyncio.run(run())
    answers = {m["content"] for result in results for m in result.messages if m["role"] == "tool"}
    assert "Error: the tool did not answer within 0.05 seconds" in answers
    assert {Status.COMPLETED, Status.TRUNCATED} >= {result.status for result in results}


class Fields(Middleware):
    """Lets no postprocessor run, or drops a field."""

    def __init__(self, runs):
        super().__init__()
        self.runs = runs

    def before_postprocess(self, batch):
        return self.runs

    def after_postprocess(self, batch, fields):
        return {name: value for name, value in fields.items() if name != "secret"}


@pytest.mark.parametrize(("runs", "expected"), [(True, {"open": 1}), (False, {})])
def test_postprocessors(runs, expected):
    """A vetoed one adds nothing."""

    class Both:
        def process(self, batch):
            return {"open": 1, "secret": 2}

    assert expected == wrapped(Fields(runs), "postprocessors", Both()).process(None)


class Stages(Middleware):
    """Remembers the stages of an engine."""

    seen: ClassVar[list] = []

    async def before_engine(self, stage):
        if stage == "sleep":
            raise RuntimeError("not now")
        self.seen.append(f"before {stage}")

    async def after_engine(self, stage, seconds):
        assert seconds >= 0
        self.seen.append(f"after {stage}")


def test_the_lifecycle_of_an_engine():
    """Each stage is seen before and after; an exception is a veto."""
    Stages.seen.clear()
    inner = ScriptedEngine()
    engine = wrapped(Stages(), "engines", inner)

    async def run():
        await engine.start()
        with pytest.raises(MiddlewareError, match=r"before_engine of middleware 'Stages' .*: RuntimeError: not now"):
            await engine.sleep(1)
        await engine.update_weights([], 3)
        await engine.stop()

    asyncio.run(run())
    stages = ("start", "update_weights", "stop")
    assert [f"{when} {stage}" for stage in stages for when in ("before", "after")] == Stages.seen
    assert engine.generate == inner.generate


def test_an_agent_with_servers_keeps_them():
    """Its `open` and `close` are found, and its attributes too."""

    class Serving:
        resumable = False

        async def step(self, episode):
            return "terminated"

        async def open(self):
            return {"a": "http://localhost"}

        async def close(self):
            self.closed = True

    inner = Serving()
    agent = wrapped(Short(), "agents", inner)
    assert isinstance(agent, ServingAgent)
    assert {"a": "http://localhost"} == asyncio.run(agent.open())
    asyncio.run(agent.close())
    assert inner.closed
    assert agent.resumable is False


class Named(Middleware):
    """Adds its name to results."""

    def __init__(self, label):
        super().__init__()
        self.name = label

    async def before_tool(self, use):
        return {**use.arguments, "order": [*use.arguments.get("order", ()), self.name]}

    async def after_tool(self, use, result):
        return evolve(result, text=f"{result.text} {self.name}")


def test_the_outer_middleware_is_first_and_last():
    """It sees the call before the inner one, and the result after it; both leave their notes."""

    class Order:
        schema: ClassVar = {"type": "function", "function": {"name": "order", "parameters": {"type": "object"}}}

        async def create(self, task):
            return None

        async def execute(self, session, arguments):
            return ToolResult(text=" ".join(arguments["order"]))

        async def release(self, session):
            return None

    section = (Named("outer"), Named("inner"))
    tool = wrap_tool(Order(), RunInfo(config={}, role="driver", section=section))

    async def run():
        return await tool.execute(await tool.create(None), {})

    result = asyncio.run(run())
    assert "outer inner inner outer" == result.text
    assert {
        f"middleware/{name}/changed_{what}" for name in ("inner", "outer") for what in ("result", "arguments")
    } == set(result.metrics)
