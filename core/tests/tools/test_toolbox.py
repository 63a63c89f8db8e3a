"""Tests of `turnwise.tools.toolbox` and `turnwise.tools.schema`."""

import asyncio
import timeit
from collections.abc import Mapping
from typing import Any

import pytest
from attrs import define, field
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.errors import ConfigError, EngineError, InfrastructureError, ToolError
from turnwise.protocols import Tool
from turnwise.tools.schema import compile_schema
from turnwise.tools.toolbox import DescribedTool, ToolBox
from turnwise.types import Task, ToolCall, ToolResult

TASK = Task(messages=({"role": "user", "content": "hi"},), uid="t")


def schema_of(parameters: Mapping[str, Any], name: str = "probe") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


def call_once(tool: Tool, **arguments: Any) -> ToolResult:
    return run_calls(tool, ToolCall(name=tool.schema["function"]["name"], arguments=arguments))[0]


def run_calls(tool: Tool, *calls: ToolCall) -> list[ToolResult]:
    async def run() -> list[ToolResult]:
        async with ToolBox([tool]).session(TASK) as session:
            return [await session.call(call) for call in calls]

    return asyncio.run(run())


@define(eq=False)
class Probe:
    """A tool that logs its calls, and may fail anywhere."""

    name: str = "probe"
    parameters: Mapping[str, Any] = field(factory=lambda: {"type": "object", "properties": {"x": {"type": "integer"}}})
    answer: Any = field(factory=lambda: ToolResult(text="ok"))
    release_reward: Any = None
    create_error: BaseException | None = None
    release_error: BaseException | None = None
    delay_s: float = 0.0
    release_s: float = 0.0
    log: list[Any] = field(factory=list)

    @property
    def schema(self) -> dict[str, Any]:
        """A schema with one integer."""
        return schema_of(self.parameters, self.name)

    async def create(self, task: Task) -> object:
        """Begin."""
        await asyncio.sleep(self.delay_s)
        if self.create_error is not None:
            raise self.create_error
        self.log.append("create")
        return f"session {self.log.count('create')}"

    async def execute(self, session: object, arguments: Mapping[str, Any]) -> ToolResult:
        """Answer or raise."""
        self.log.append(("execute", session, dict(arguments)))
        await asyncio.sleep(self.delay_s)
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer

    async def release(self, session: object) -> float | None:
        """End."""
        await asyncio.sleep(self.release_s)
        self.log.append("release")
        if self.release_error is not None:
            raise self.release_error
        return self.release_reward


class TestSchemas:
    """Schemas are checked when a tool is made, arguments when it is called."""

    @pytest.mark.parametrize(
        ("schema", "text"),
        [
            (None, "tool t.py: its schema must have the form {'type': 'function'"),
            ({"type": "function"}, "its schema must have the form"),
            ({"type": "tool", "function": {"name": "a"}}, "its schema must have the form"),
            (schema_of({"type": "object"}, name="a b"), "its name must be 1 to 64 of A-Z a-z 0-9 _ . -, got 'a b'"),
            (schema_of({"type": "object"}, name=3), "its name must be"),
            ({"type": "function", "function": {"name": "a", "description": 3}}, "tool 'a' (t.py): its description"),
            (schema_of({"type": "array"}), "its parameters must be a JSON schema with type 'object'"),
            (schema_of([]), "its parameters must be a JSON schema with type 'object'"),
            (
                schema_of({"type": "object", "properties": {"x": {"type": "int"}}}),
                "tool 'probe' (t.py): parameters.properties.x.type: a type is one of array, boolean, integer",
            ),
            (schema_of({"type": "object", "properties": {"x": {"type": "int"}}}), "object or string, got 'int'"),
            (
                schema_of({"type": "object", "properties": {"x": 1}}),
                'x: the value is not of types "boolean", "object", got 1',
            ),
            (
                schema_of({"type": "object", "required": "x"}),
                'parameters.required: the value is not of type "array", got',
            ),
            (schema_of({"type": "object", "properties": {"x": {"default": {1}}}}), "its parameters are not JSON"),
            (
                schema_of({"type": "object", "properties": {"x": {"pattern": "("}}}),
                'parameters.properties.x.pattern: the value is not a "regex", got',
            ),
            (schema_of({"type": "object", "$ref": "#/none"}), "does not exist"),
            (schema_of({"type": "object", "$ref": "http://localhost/x"}), "a schema may only refer to itself"),
        ],
    )
    def test_a_schema_that_is_not_valid_is_refused_in_one_line(self, schema: object, text: str):
        """The line names the tool and its fault."""
        with pytest.raises(ConfigError) as caught:
            compile_schema(schema, "t.py")
        assert text in str(caught.value)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            ({"n": 1}, ""),
            ({"n": "1"}, 'n: the value is not of type "integer"'),
            ({}, '"n" is a required property'),
            ({"n": 1, "z": 2}, "Additional properties are not allowed ('z' was unexpected)"),
            ({"n": 1, "deep": {"tags": ["a", 2]}}, 'deep.tags[1]: the value is not of type "string"'),
            ({"n": 1, "either": "x"}, 'either: the value is not of type "array" and the value is not of type "null"'),
            ({"n": 1, "color": "red"}, 'color: the value is not one of "blue" or "green"'),
            ({"n": "1", "color": "red"}, 'n: the value is not of type "integer"; color: '),
        ],
    )
    def test_a_wrong_argument_is_named_with_what_was_expected(self, arguments: dict[str, Any], text: str):
        """The model reads the field and the expected value."""
        properties = {
            "n": {"type": "integer"},
            "color": {"enum": ["blue", "green"]},
            "deep": {"properties": {"tags": {"items": {"type": "string"}}}},
            "either": {"anyOf": [{"type": "array"}, {"type": "null"}]},
        }
        compiled = compile_schema(
            schema_of({"type": "object", "properties": properties, "required": ["n"], "additionalProperties": False})
        )
        complaint = compiled.complaint(arguments)
        assert text in complaint
        assert bool(text) == bool(complaint)

    def test_a_complaint_never_repeats_a_huge_value(self):
        """Megabytes of a wrong argument stay out of the text."""
        compiled = compile_schema(schema_of({"type": "object", "properties": {"n": {"type": "integer"}}}))
        assert len(compiled.complaint({"n": "x" * 1_000_000})) < 100
        closed = compile_schema(schema_of({"type": "object", "additionalProperties": False}))
        assert len(closed.complaint({f"k{i}": i for i in range(10_000)})) < 400

    def test_values_that_are_no_json_are_complained_about(self):
        """Bottomless nesting and half characters are answered, not raised."""
        parameters = {"type": "object", "properties": {"y": {"minLength": 1}}, "required": ["y"]}
        compiled = compile_schema(schema_of(parameters))
        bottomless: list[Any] = []
        for _ in range(5000):
            bottomless = [bottomless]
        assert "they cannot be read as JSON: Recursion limit reached" in compiled.complaint({"x": bottomless})
        assert "they cannot be read as JSON" in compiled.complaint({"x": "\ud800"})
        assert "they cannot be read as JSON" in compiled.complaint({1: 2})

    @settings(max_examples=50)
    @given(st.dictionaries(st.text(), st.floats() | st.text(max_size=5) | st.lists(st.none() | st.booleans())))
    def test_any_arguments_are_checked_without_raising(self, arguments: dict[str, Any]):
        """Whatever a model may write as an object has an answer."""
        parameters = {"type": "object", "properties": {"a": {"type": ["string", "null"]}}, "required": ["a"]}
        assert isinstance(compile_schema(schema_of(parameters)).complaint(arguments), str)

    def test_checking_costs_microseconds(self):
        """Compiled once; a generous bound, for shared machines."""

        properties = {"a": {"type": "string"}, "b": {"type": "integer", "default": 1}}
        parameters = {"type": "object", "properties": properties, "required": ["a"], "additionalProperties": False}
        compiled = compile_schema(schema_of(parameters))
        seconds = min(timeit.repeat(lambda: compiled.complaint({"a": "x", "b": 2}), number=1000, repeat=5))
        assert seconds / 1000 < 50e-6


class TestSessions:
    """An episode's use of its tools."""

    def test_sessions_begin_with_the_first_call_and_all_end(self):
        """A tool that is never called is never created; rewards of releases add up."""
        used, other, idle = Probe("used", release_reward=0.5), Probe("other", release_reward=0.25), Probe("idle")

        async def run() -> float:
            async with ToolBox([used, other, idle]).session(TASK) as session:
                for name in ("used", "used", "other"):
                    await session.call(ToolCall(name=name, arguments={"x": 1}))
                assert session.released_reward == 0.0
            return session.released_reward

        assert asyncio.run(run()) == 0.75
        execute = ("execute", "session 1", {"x": 1})
        assert [used.log, other.log, idle.log] == [
            ["create", execute, execute, "release"],
            ["create", execute, "release"],
            [],
        ]

    def test_calls_at_the_same_time_share_one_session(self):
        """The first call creates, the others wait for it."""
        probe = Probe(delay_s=0.01)

        async def run() -> None:
            async with ToolBox([probe]).session(TASK) as session, asyncio.TaskGroup() as group:
                for _ in range(5):
                    group.create_task(session.call(ToolCall(name="probe")))

        asyncio.run(run())
        assert probe.log.count("create") == 1
        assert probe.log.count("release") == 1

    @pytest.mark.parametrize(
        ("call", "text"),
        [
            (ToolCall(name="prob"), "Error: there is no tool 'prob'; the tools are: probe"),
            (ToolCall(name="x" * 999), f"Error: there is no tool '{'x' * 64}'; the tools are: probe"),
            (ToolCall(name="probe", error="Error: bad JSON"), "Error: bad JSON"),
            (
                ToolCall(name="probe", arguments={"x": "1"}),
                "Error: the arguments of 'probe' do not fit: x: the value is not of type \"integer\"",
            ),
        ],
    )
    def test_a_call_that_cannot_be_run_is_answered(self, call: ToolCall, text: str):
        """The tool is not even created."""
        probe = Probe()
        assert run_calls(probe, call) == [ToolResult(text=text, error=True)]
        assert probe.log == []

    @pytest.mark.parametrize(
        ("error", "text"),
        [
            (ToolError("no such page"), "no such page"),
            (ValueError("bad\nthing"), "Error: ValueError: bad\nthing"),
            (KeyError(), "Error: KeyError"),
            (TimeoutError("mine"), "Error: TimeoutError: mine"),
            (SystemExit(1), "Error: SystemExit: 1"),
            (asyncio.CancelledError(), "Error: CancelledError"),
            (type("Odd", (BaseException,), {})("odd"), "Error: Odd: odd"),
        ],
    )
    def test_what_a_tool_raises_is_read_by_the_model(self, error: BaseException, text: str):
        """Also exceptions that are no `Exception`, and a cancellation from inside the tool."""
        assert run_calls(Probe(answer=error), ToolCall(name="probe")) == [ToolResult(text=text, error=True)]
        assert run_calls(Probe(create_error=error), ToolCall(name="probe")) == [ToolResult(text=text, error=True)]

    def test_a_failed_create_is_tried_again(self):
        """The next call opens a new session, and nothing is released that was not created."""
        probe = Probe(create_error=ToolError("not yet"))
        assert [r.text for r in run_calls(probe, ToolCall(name="probe"), ToolCall(name="probe"))] == ["not yet"] * 2
        assert probe.log == []

    @pytest.mark.parametrize("error", [InfrastructureError("disk"), EngineError("judge"), KeyboardInterrupt()])
    def test_what_says_nothing_about_the_model_is_raised(self, error: BaseException):
        """The episode fails, and open sessions are released."""
        probe = Probe(answer=error)
        with pytest.raises(type(error)):
            run_calls(probe, ToolCall(name="probe"))
        assert probe.log[-1] == "release"

    @pytest.mark.parametrize(
        ("answer", "text"),
        [
            ("text", "Error: TypeError: the tool returned str in place of a ToolResult"),
            (None, "Error: TypeError: the tool returned NoneType in place of a ToolResult"),
            (ToolResult(text="", reward=float("nan")), "Error: ValueError: the tool gave a reward that is not finite"),
            (ToolResult(text="", metrics={"m": "x"}), "Error: TypeError: the tool gave the metric 'm' the value 'x'"),
            (ToolResult(text="", metrics=None), "Error: AttributeError"),
            (ToolResult(text="", error="yes"), "Error: TypeError: the tool returned error='yes'"),
        ],
    )
    def test_an_answer_that_breaks_the_contract_is_an_error(self, answer: object, text: str):
        """The error names the tool's fault."""
        (result,) = run_calls(Probe(answer=answer), ToolCall(name="probe"))
        assert result.error
        assert result.text.startswith(text)

    def test_texts_can_always_be_encoded(self):
        """Half a surrogate pair, as in an undecodable file name, must not fail the episode's tokenizer."""
        (result,) = run_calls(Probe(answer=ToolResult(text="a\ud800b", reward=1.0)), ToolCall(name="probe"))
        assert result == ToolResult(text="a?b", reward=1.0)

    def test_a_release_that_raises_stops_no_other(self):
        """It is reported by tool name, and the rewards of the others count."""
        bad, late = Probe("bad", release_error=SystemExit()), Probe("late", release_s=9.0)
        odd, good = Probe("odd", release_reward=float("inf")), Probe("good", release_reward=1.0)

        async def run() -> Any:
            async with ToolBox([bad, late, odd, good], release_s=1.0).session(TASK) as session:
                for name in ("bad", "late", "odd", "good"):
                    await session.call(ToolCall(name=name))
            return session

        session = asyncio.run(run())
        failures = {name: type(error) for name, error in session.release_failures.items()}
        assert failures == {"bad": SystemExit, "late": TimeoutError, "odd": ValueError}
        assert session.released_reward == 1.0

    @pytest.mark.parametrize("num_tools", [1, 3])
    def test_everything_is_released_when_the_episode_is_cancelled(self, num_tools: int):
        """Also in the middle of a call."""
        probes = [Probe(f"p{i}") for i in range(num_tools)]

        async def run(reached: asyncio.Event) -> None:
            async with ToolBox(probes).session(TASK) as session:
                for probe in probes:
                    await session.call(ToolCall(name=probe.name))
                probes[-1].delay_s = 60.0
                reached.set()
                await session.call(ToolCall(name=probes[-1].name))

        async def cancel() -> None:
            reached = asyncio.Event()
            async with asyncio.TaskGroup() as group:
                task = group.create_task(run(reached))
                await reached.wait()
                await asyncio.sleep(0)
                task.cancel()

        asyncio.run(cancel())
        assert [probe.log[-1] for probe in probes] == ["release"] * num_tools

    def test_a_call_can_be_cancelled_by_its_deadline(self):
        """A cancellation from outside is passed on, not shown to the model."""
        probe = Probe(delay_s=60)

        async def run() -> None:
            async with ToolBox([probe]).session(TASK) as session:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.01):
                        await session.call(ToolCall(name="probe"))

        asyncio.run(run())

    def test_a_release_can_be_cancelled(self):
        """Cleaning up takes no longer than the driver allows."""
        probe = Probe(release_s=60)

        async def run() -> None:
            async with asyncio.timeout(0.05), ToolBox([probe]).session(TASK) as session:
                await session.call(ToolCall(name="probe"))

        with pytest.raises(TimeoutError):
            asyncio.run(run())

    def test_many_episodes_share_one_box(self):
        """Sessions of different episodes are different."""
        probe = Probe()
        box = ToolBox([probe])

        async def one() -> None:
            async with box.session(TASK) as session:
                await session.call(ToolCall(name="probe"))

        async def run() -> None:
            async with asyncio.TaskGroup() as group:
                for _ in range(10):
                    group.create_task(one())

        asyncio.run(run())
        assert probe.log.count("create") == probe.log.count("release") == 10

    def test_a_box_names_its_tools(self):
        """Names are unique; schemas keep their order."""
        box = ToolBox([Probe("b"), Probe("a")])
        assert [schema["function"]["name"] for schema in box.schemas] == ["b", "a"]
        assert list(box.tools) == ["b", "a"]
        assert list(ToolBox({"any": Probe("c")}).tools) == ["c"]
        with pytest.raises(ConfigError, match="two tools are named 'a'"):
            ToolBox([Probe("a"), Probe("a")])
        with pytest.raises(ConfigError, match=r"tool 'a' .*parameters must be a JSON schema"):
            ToolBox([Probe("a", parameters={})])
        assert ToolBox([]).schemas == ()


def test_a_described_tool_is_the_tool():
    """Sessions and rewards are the tool's own."""
    probe = Probe(release_reward=2.0)
    described = DescribedTool(probe, schema_of({"type": "object"}, "other"))
    assert call_once(described).text == "ok"
    assert probe.log == ["create", ("execute", "session 1", {}), "release"]


@define(eq=False)
class Keeping(Probe):
    """A tool that keeps something between episodes."""

    close_error: BaseException | None = None
    close_s: float = 0.0

    async def close_kept(self) -> None:
        """Note it, and end as the test says."""
        self.log.append("close_kept")
        await asyncio.sleep(self.close_s)
        if self.close_error is not None:
            raise self.close_error


@pytest.mark.parametrize(
    "fault", [{}, {"close_error": OSError("gone")}, {"close_error": SystemExit()}, {"close_s": 9.0}]
)
def test_each_tool_closes_what_it_keeps(fault):
    """A tool that fails or hangs stops no other, and a tool under another schema is asked, too."""
    first, second = Keeping("first", **fault), Keeping("second")
    described = DescribedTool(second, schema_of({"type": "object"}, "other"))

    asyncio.run(ToolBox([first, Probe("plain"), described], release_s=0.01).close_kept())

    assert (first.log, second.log) == (["close_kept"], ["close_kept"])
