"""Tools made from functions: schemas, results, threads."""

import asyncio
import contextvars
import functools
import json
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, Literal, Optional, Union

import pytest

from turnwise.errors import ConfigError
from turnwise.protocols import Resources, Tool
from turnwise.tools.schema import compile_schema
from turnwise.tools.toolbox import ToolBox
from turnwise.types import Task, ToolCall, ToolResult
from turnwise_plain_functions import reward, tool
from turnwise_plain_functions.adapter import FunctionAdapter
from turnwise_plain_functions.annotations import function_schema
from turnwise_plain_functions.docstrings import parse_docstring
from turnwise_plain_functions.results import as_result

TASK = Task(messages=({"role": "user", "content": "hi"},), uid="t")


class Color(Enum):
    """Colours of the tests."""

    RED = "red"
    BLUE = "blue"


COLOR = {"type": "string", "enum": ["red", "blue"], "description": "Colours of the tests."}


def schema_of(parameters: Mapping[str, Any], name: str = "probe") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


def parameters_of(func: Any) -> Mapping[str, Any]:
    return function_schema(func)[0]["function"]["parameters"]


def property_of(annotation: Any) -> Any:
    """Return the schema of one parameter with this annotation."""

    def probe(x): ...

    probe.__annotations__ = {"x": annotation}
    return parameters_of(probe)["properties"]["x"]


def call_once(made: Tool, **arguments: Any) -> ToolResult:
    async def run() -> ToolResult:
        async with ToolBox([made]).session(TASK) as session:
            return await session.call(ToolCall(name=made.schema["function"]["name"], arguments=arguments))

    return asyncio.run(run())


class TestFunctionSchemas:
    """Schemas from annotations and docstrings."""

    def test_a_typed_function_becomes_an_openai_schema(self):
        """Name, description, parameters, defaults and docs are all there."""

        def search(query: str, limit: int = 5, *, exact: bool = False) -> list[str]:
            """
            Search the web.

            Returns titles only.

            Args:
                query: What to look for,
                    in plain words.
                limit (int): Most results.

            Returns:
                Titles.
            """
            return []

        schema, arguments = function_schema(search)
        assert schema == {
            "type": "function",
            "function": {
                "name": "search",
                "description": "Search the web. Returns titles only.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "query": {"type": "string", "description": "What to look for, in plain words."},
                        "limit": {"type": "integer", "default": 5, "description": "Most results."},
                        "exact": {"type": "boolean", "default": False},
                    },
                    "required": ["query"],
                    "additionalProperties": False,
                },
            },
        }
        assert arguments.convert({"query": "x", "limit": 3.0}) == {"query": "x", "limit": 3}

    @pytest.mark.parametrize(
        ("annotation", "expected"),
        [
            (str, {"type": "string"}),
            (int, {"type": "integer"}),
            (float, {"type": "number"}),
            (bool, {"type": "boolean"}),
            (None, {"type": "null"}),
            (Any, {}),
            (list, {"type": "array"}),
            (dict, {"type": "object"}),
            (list[int], {"type": "array", "items": {"type": "integer"}}),
            (Sequence[str], {"type": "array", "items": {"type": "string"}}),
            (dict[str, float], {"type": "object", "additionalProperties": {"type": "number"}}),
            (Mapping[str, list[int]], property_of(dict[str, list[int]])),
            (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}),
            (Literal["a", 1, None], {"enum": ["a", 1, None]}),
            (Color, COLOR),
            (Optional[int], {"type": ["integer", "null"]}),  # noqa: UP045 - the old spelling is what is tested
            (Union[int, str], {"type": ["integer", "string"]}),  # noqa: UP007 - the old spelling is what is tested
            (int | None, {"type": ["integer", "null"]}),
            (list[str] | None, {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]}),
            (Color | None, {"anyOf": [COLOR, {"type": "null"}]}),
            (Annotated[int, "how many", 3], {"type": "integer", "description": "how many"}),
        ],
    )
    def test_each_annotation_has_its_schema(self, annotation: Any, expected: Any):
        """The mapping, one row a type; each result is a valid schema."""
        assert expected == property_of(annotation)
        compile_schema(schema_of({"type": "object", "properties": {"x": expected}}))

    @pytest.mark.parametrize(
        ("annotation", "text"),
        [
            (Iterator[int], "parameter 'x' has a type that JSON cannot carry: collections.abc.Iterator[int]"),
            (Callable[[int], int], "parameter 'x' has a type that JSON cannot carry: collections.abc.Callable"),
            (dict[str, type], "parameter 'x' has a type that JSON cannot carry: dict[str, type]"),
            (Enum("Odd", {"A": (1, 2)}), "an Enum of other values than texts and numbers: [(1, 2)]"),
            ("Missing", "its annotations cannot be read: name 'Missing' is not defined"),
        ],
    )
    def test_a_type_that_json_cannot_carry_is_named(self, annotation: Any, text: str):
        """One line names the tool, the parameter and the type."""
        with pytest.raises(ConfigError) as caught:
            property_of(annotation)
        assert str(caught.value).startswith("tool 'probe': ")
        assert text in str(caught.value)

    def test_every_parameter_needs_an_annotation_and_a_keyword(self):
        """Parameters that a model cannot fill in are refused when the tool is made."""

        def bare(x): ...
        def starred(*x: int): ...
        def keywords(**x: int): ...
        def positional(x: int, /): ...

        with pytest.raises(ConfigError, match="tool 'bare': parameter 'x' has no type annotation"):
            tool(bare)
        for func in (starred, keywords, positional):
            with pytest.raises(ConfigError, match="models call tools by keyword"):
                tool(func)

    def test_methods_partials_and_callables_are_functions_too(self):
        """Bound methods lose `self`, partials keep their docs, callables need a name."""

        class Index:
            """An index."""

            def find(self, key: str) -> str:
                """Find it."""
                return f"found {key}"

            def __call__(self, key: str) -> str:
                """Call it."""
                return f"called {key}"

        def add(a: int, b: int) -> int:
            """Add up."""
            return a + b

        assert call_once(tool(Index().find), key="k").text == "found k"
        assert call_once(tool(Index(), name="index"), key="k").text == "called k"
        three = tool(functools.partial(add, b=3), name="add_three")
        assert three.schema["function"]["description"] == "Add up."
        assert call_once(three, a=1).text == "4"
        with pytest.raises(ConfigError, match="has no name that the model could call"):
            tool(Index())

    def test_docstrings_need_no_sections(self):
        """A plain docstring is the description; none is an empty one."""
        assert parse_docstring("One\nline.") == ("One line.", {})
        assert parse_docstring("") == ("", {})
        assert parse_docstring("A.\n\nReturns:\n    x: no.\n\nArgs:\n    y: yes.") == ("A.", {"y": "yes."})
        assert parse_docstring("A.\n\nNote:\n    See b.\n\nArgs:\n    y (int): yes:\n        no.") == (
            "A.",
            {"y": "yes: no."},
        )
        assert parse_docstring("A.\n\nArgs:\n    any number") == ("A. Args: any number", {})

    def test_arguments_arrive_as_the_annotations_promise(self):
        """Whole floats become ints, values become Enum members, at any depth."""

        def probe(n: int, c: Color, cs: list[Color], m: dict[str, int], o: Color | None, k: int | None = 1) -> str:
            return repr((n, c, cs, m, o, k))

        result = call_once(tool(probe), n=3.0, c="red", cs=["blue"], m={"a": 2.0}, o=None, k=4.0)
        assert result.text == repr((3, Color.RED, [Color.BLUE], {"a": 2}, None, 4))
        result = call_once(tool(probe), n=3, c="red", cs=[], m={}, o="blue", k=None)
        assert result.text == repr((3, Color.RED, [], {}, Color.BLUE, None))

    def test_an_enum_default_shows_its_value(self):
        """Schemas hold JSON, so a default member appears as its value."""

        def probe(c: Color = Color.BLUE, items: list[int] = []): ...  # noqa: B006 - an unusual default on purpose

        properties = parameters_of(probe)["properties"]
        assert properties["c"]["default"] == "blue"
        assert properties["items"]["default"] == []


class TestFunctionTools:
    """Execution and return values of functions."""

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (None, ""),
            ("ä", "ä"),
            (3, "3"),
            (True, "true"),
            ({"ä": [1]}, '{"ä": [1]}'),
            ([1, {2}], "[1, [2]]"),
        ],
    )
    def test_what_a_function_returns_becomes_text(self, value: object, text: str):
        """Strings stay, None is empty, the rest is JSON."""
        assert ToolResult(text=text) == as_result(value)

    def test_a_result_passes_through(self):
        """A function may give rewards and metrics by returning a result."""
        result = ToolResult(text="x", reward=0.5, metrics={"m": 1.0})
        assert as_result(result) is result

    def test_sync_functions_run_in_threads_and_async_ones_inline(self):
        """A blocking function never blocks the loop, so blocking calls overlap: each of these waits for the others."""
        together = threading.Barrier(3)

        def block() -> bool:
            together.wait(60)
            return threading.current_thread() is threading.main_thread()

        async def inline() -> bool:
            await asyncio.sleep(0)
            return threading.current_thread() is threading.main_thread()

        async def run() -> list[str]:
            async with ToolBox([tool(block)]).session(TASK) as session, asyncio.TaskGroup() as group:
                tasks = [group.create_task(session.call(ToolCall(name="block"))) for _ in range(3)]
            return [task.result().text for task in tasks]

        assert asyncio.run(run()) == ["false"] * 3
        assert call_once(tool(inline)).text == "true"

    def test_a_stop_iteration_in_a_thread_is_an_answer(self):
        """`next` on an empty iterator must not hang the call."""

        def probe() -> str:
            return next(iter(()))

        assert call_once(tool(probe)) == ToolResult(text="Error: RuntimeError: StopIteration: ", error=True)

    @pytest.mark.parametrize("error", [GeneratorExit(), KeyboardInterrupt(), asyncio.CancelledError()], ids=repr)
    def test_what_would_end_the_loop_is_an_answer(self, error):
        """An interrupt or exit in a thread does not stop the loop or the waiting task."""

        def leave() -> str:
            raise error

        expected = f"Error: RuntimeError: {type(error).__name__}: "
        assert call_once(tool(leave)) == ToolResult(text=expected, error=True)

    def test_any_number_of_blocking_calls_overlap(self):
        """There is no pool to be filled: each call waits for all others."""
        together = threading.Barrier(100)

        def block() -> str:
            together.wait(60)
            return "met"

        async def run() -> set[str]:
            async with ToolBox([tool(block)]).session(TASK) as session, asyncio.TaskGroup() as group:
                tasks = [group.create_task(session.call(ToolCall(name="block"))) for _ in range(100)]
            return {task.result().text for task in tasks}

        assert {"met"} == asyncio.run(run())

    def test_a_call_that_hangs_is_left_behind(self):
        """Neither the deadline of the call nor the end of the loop waits for its thread."""
        release = threading.Event()
        ended = threading.Event()

        def hang() -> str:
            release.wait(60)
            ended.set()
            return "late"

        async def run() -> None:
            async with ToolBox([tool(hang)]).session(TASK) as session:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await session.call(ToolCall(name="hang"))

        asyncio.run(run())
        assert not ended.is_set()
        release.set()
        assert ended.wait(60)

    def test_an_answer_that_comes_after_the_deadline_is_dropped(self):
        """While the loop still runs."""
        release, ended = threading.Event(), threading.Event()

        def late() -> str:
            release.wait(60)
            ended.set()
            return "late"

        async def run() -> str:
            async with ToolBox([tool(late)]).session(TASK) as session:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await session.call(ToolCall(name="late"))
                release.set()
                await asyncio.to_thread(ended.wait, 60)
                return (await session.call(ToolCall(name="late"))).text

        assert asyncio.run(run()) == "late"

    def test_threads_see_the_context_of_their_task(self):
        """Log lines of a tool carry the values bound for its episode."""
        name: contextvars.ContextVar[str] = contextvars.ContextVar("name", default="none")

        def probe() -> str:
            return name.get()

        async def run() -> str:
            name.set("episode 7")
            async with ToolBox([tool(probe)]).session(TASK) as session:
                return (await session.call(ToolCall(name="probe"))).text

        assert asyncio.run(run()) == "episode 7"

    def test_an_exit_in_a_thread_is_an_answer(self):
        """A tool cannot end the run."""

        def leave() -> str:
            sys.exit(3)

        assert call_once(tool(leave)) == ToolResult(text="Error: SystemExit: 3", error=True)

    def test_a_schema_of_ones_own_replaces_the_annotations(self):
        """Then parameters need no annotation, but the schema must fit the function."""

        def probe(x, y=1):
            return f"{x}{y}"

        schema = schema_of({"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]})
        assert call_once(tool(probe, schema=schema), x=2).text == "21"
        for wrong in ({"x": {}, "z": {}}, {"y": {}}):
            bad = schema_of({"type": "object", "properties": wrong})
            with pytest.raises(ConfigError, match="tool 'probe': its schema does not fit the function"):
                tool(probe, schema=bad)


def test_json_of_results_is_json():
    """The model reads returned data as JSON."""
    assert json.loads(as_result({"a": [1, None, "ä"]}).text) == {"a": [1, None, "ä"]}


def yields(x: int) -> Iterator[int]:
    """Yield."""
    yield x


async def yields_async(x: int) -> AsyncIterator[int]:
    """Yield."""
    yield x


class Yields:
    """A callable whose call yields."""

    def __call__(self, x: int) -> Iterator[int]:
        """Yield."""
        yield x


@pytest.mark.parametrize("func", [yields, yields_async, Yields(), functools.partial(yields)])
@pytest.mark.parametrize("kind", ["agents", "interactions", "postprocessors", "rewards", "group_rewards"])
def test_a_generator_function_is_refused(func: Any, kind: str) -> None:
    """A call of such a function runs nothing, so no part but a tool is made of it, and the error says so."""
    with pytest.raises(ConfigError, match="is a generator function; return the values instead"):
        FunctionAdapter(Resources()).adapt(kind, func, {})
    if kind == "rewards":
        with pytest.raises(ConfigError, match="is a generator function"):
            reward(func)


@pytest.mark.parametrize("make", [lambda: iter([1]), lambda: (each for each in [1]), lambda: map(int, [1])])
def test_an_iterator_as_a_result_is_consumed(make: Any) -> None:
    """The model reads the values: the text of the object would tell it nothing."""
    assert call_once(tool(make, name="f")).text == "[1]"


@pytest.mark.parametrize(("given", "passed"), [(1.0, 1), (2, 2), (True, True), ("a", "a")])
def test_a_literal_is_passed_as_it_is_written(given: object, passed: object) -> None:
    """JSON counts 1.0 as 1; the function gets the value of its annotation, of that type."""
    seen: list[object] = []

    def pick(x: Literal[1, 2, True, "a"]) -> None:
        """Pick."""
        seen.append(x)

    call_once(tool(pick), x=given)
    assert [(type(each), each) for each in seen] == [(type(passed), passed)]
