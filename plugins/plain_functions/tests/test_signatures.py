"""Tools as people type them: one row a signature, in each place where a tool runs."""

from __future__ import annotations

import asyncio
import functools
import json
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

import typed_tools as tools
from signature_rows import ROWS, Row

from turnwise.errors import ConfigError
from turnwise.tools.toolbox import ToolBox
from turnwise.types import Task, ToolCall, ToolResult
from turnwise_plain_functions import tool
from turnwise_plain_functions.results import MAX_YIELDED, as_result, shown_default

TASK = Task(messages=({"role": "user", "content": "x"},), uid="t")


def call(made: Any, **arguments: Any) -> ToolResult:
    async def run() -> ToolResult:
        async with ToolBox([made]).session(TASK) as session:
            return await session.call(ToolCall(name=made.schema["function"]["name"], arguments=arguments))

    return asyncio.run(run())


def by_name(row: Row) -> str:
    return row.func.__name__


@pytest.mark.parametrize("row", ROWS, ids=by_name)
def test_a_signature_has_its_schema_and_its_values(row: Row) -> None:
    """The model sees the schema, the function gets the annotated type, and the result is JSON or a text."""
    made = tool(row.func)

    assert made.schema["function"]["parameters"]["properties"]["x"] == row.schema
    assert type(made.keywords({"x": row.accepted})["x"]).__name__ == row.kind
    assert call(made, x=row.accepted).text == row.text
    json.dumps(made.schema, allow_nan=False)


@pytest.mark.parametrize("row", ROWS, ids=by_name)
def test_a_wrong_value_is_answered_in_one_line(row: Row) -> None:
    """The line names the tool, the place of the value and the expectation."""
    made = tool(row.func)
    name = made.schema["function"]["name"]

    result = call(made, x=row.refused)

    assert (f"Error: the arguments of {name!r} do not fit: {row.complaint}", True) == (result.text, result.error)


def test_values_survive_a_process() -> None:
    """A process builds the types again: all signatures give there what they give in a thread."""
    rows = [row for row in ROWS if row.func is not tools.wrapped]  # a wrapper has the place of its function
    made = [tool(row.func, run_in="process") for row in rows]

    assert [row.text for row in rows] == [call(each, x=row.accepted).text for each, row in zip(made, rows, strict=True)]
    refused = [call(each, x=row.refused).text for each, row in zip(made, rows, strict=True)]
    assert [row.complaint for row in rows] == [text.split(" do not fit: ")[-1] for text in refused]


@pytest.mark.parametrize("row", ROWS, ids=by_name)
def test_a_pickled_tool_is_the_same(row: Row) -> None:
    """Ray sends tools to its actors, which build the types again."""
    made = pickle.loads(pickle.dumps(tool(row.func)))

    assert call(made, x=row.accepted).text == row.text


@pytest.mark.parametrize(
    ("func", "arguments", "text"),
    [
        (tools.Shop().find, {"x": "12345678-1234-5678-1234-567812345678"}, "12345678-1234-5678-1234-567812345678"),
        (tools.Shop(), {"x": "1.50"}, "1.50"),
        (tools.Shop.of_class, {"x": "red"}, "red"),
        (tools.Shop.static, {"x": [1]}, '[1, "b"]'),
        (tools.three_times, {"x": 2}, "2"),
        (tools.aliased, {"from": 1}, "1"),
        (tools.with_field, {}, "3"),
        (tools.count, {"to": 3}, "[0, 1, 2]"),
        (tools.count_async, {"to": 3}, "[0, 1, 2]"),
        (tools.lines, {"to": 2}, "0\n1\n"),
        (tools.lines, {"to": 0}, ""),
        (tools.endless, {"to": 1}, f"Error: the function yielded more than {MAX_YIELDED} values"),
    ],
)
@pytest.mark.parametrize("run_in", ["thread", "loop"])
def test_callables_and_generators_are_tools(func: Any, arguments: dict[str, Any], text: str, run_in: Any) -> None:
    """Methods, partials and objects convert too; the values of a generator are a text or a list."""
    assert call(tool(func, name="f", run_in=run_in), **arguments).text == text


@pytest.mark.parametrize(("func", "text"), [(tools.count, "[0, 1]"), (tools.count_async, "[0, 1]")])
def test_a_generator_runs_in_a_process(func: Any, text: str) -> None:
    """There it is consumed as well."""
    assert call(tool(func, run_in="process"), to=2).text == text


def test_an_abandoned_generator_ends() -> None:
    """After the deadline of its call, the thread of a generator ends at the next value."""
    started, go, closed = threading.Event(), threading.Event(), threading.Event()

    def slow():
        try:
            started.set()
            go.wait(60)
            yield 1
            yield 2
        finally:
            closed.set()

    async def run() -> None:
        async with ToolBox([tool(slow)]).session(TASK) as session:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await session.call(ToolCall(name="slow"))

    asyncio.run(run())
    go.set()
    assert closed.wait(60)


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (complex | subprocess.Popen, "Unable to generate pydantic-core schema for <class 'subprocess.Popen'>"),
        (list[socket] if (socket := type("Socket", (), {})) else None, "Unable to generate pydantic-core schema"),
        (functools.partial, "a type that JSON cannot carry: functools.partial"),
    ],
)
def test_an_unknown_class_is_refused_in_one_line(annotation: Any, text: str) -> None:
    """The line names the tool, the parameter, the annotation and the class."""

    def probe(x): ...

    probe.__annotations__ = {"x": annotation}
    with pytest.raises(ConfigError) as caught:
        tool(probe)
    assert str(caught.value).startswith("tool 'probe': parameter 'x' has a type that JSON cannot carry: ")
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"b", "a"}, '["a", "b"]'),
        ({3, 1, 20}, "[1, 3, 20]"),
        (b"text", "text"),
        ([b"\xff"], '["_w=="]'),
        (float("nan"), "nan"),
        ({"a": float("inf")}, '{"a": "inf"}'),
        (tools.Point(1.0, label="a"), '{"x": 1.0, "y": 0.0, "label": "a", "inner": null}'),
        (tools.User(name="a", age=1), '{"name": "a", "age": 1, "born": null}'),
        ([tools.Item("a", tags={"z", "b"})], '[{"name": "a", "price": "1.50", "tags": ["b", "z"]}]'),
        (tools.Color.RED, "red"),
        ({tools.Color.RED: 1}, '{"red": 1}'),
        (range(3), "[0, 1, 2]"),
    ],
)
def test_a_result_becomes_its_json_form(value: object, text: str) -> None:
    """Sets have an order, and no result is the text of a Python object."""
    assert as_result(value).text == text


def test_an_object_without_a_text_is_an_error() -> None:
    """The address of an object tells the model nothing."""
    with pytest.raises(TypeError, match="the function returned a object, expected a value that JSON can carry"):
        as_result([object()])


def test_what_a_prompt_cannot_contain_is_no_default() -> None:
    """A default that is no JSON stays out of the schema."""
    assert [shown_default(each) for each in (float("inf"), [float("nan")], object())] == [{}, {}, {}]


def test_commands_do_not_import_pydantic() -> None:
    """Only a program that makes a tool pays for the import."""
    modules = "sys, turnwise, turnwise_plain_functions.adapter"
    program = f"import {modules}; print('pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@given(data=st.data())
def test_values_round_trip_through_the_schema(data: st.DataObject) -> None:
    """The JSON form of a value fits the schema of its type and becomes an equal value."""
    name, values = data.draw(st.sampled_from(sorted(STRATEGIES.items())))
    value = data.draw(values)
    made = _TOOLS[name]
    sent = json.loads(json.dumps(shown_default(value)["default"]))

    assert ToolBox([made])._compiled[name].complaint({"x": sent}) == ""
    assert made.keywords({"x": sent}) == {"x": value}


_TEXTS = st.text(st.characters(codec="utf-8"), max_size=8)
_ITEMS = st.builds(
    tools.Item,
    _TEXTS,
    st.decimals(allow_nan=False, allow_infinity=False),
    st.sets(_TEXTS, max_size=3),
)
STRATEGIES: dict[str, st.SearchStrategy[Any]] = {
    "unique": st.sets(st.integers(-(2**40), 2**40)),
    "pair": st.tuples(st.integers(-(2**40), 2**40), _TEXTS),
    "moment": st.datetimes(),
    "day": st.dates(),
    "hour": st.times(),
    "unique_id": st.uuids(),
    "data": _TEXTS.map(str.encode),
    "color": st.sampled_from(tools.Color),
    "level": st.sampled_from(tools.Level),
    "item": _ITEMS,
    "cart": st.builds(tools.Cart, st.lists(_ITEMS, max_size=3), st.none() | st.dates()),
    "points": st.dictionaries(
        _TEXTS, st.builds(tools.Point, st.floats(allow_nan=False, allow_infinity=False), label=st.just("ab"))
    ),
}
_TOOLS = {name: tool(getattr(tools, name)) for name in STRATEGIES}
