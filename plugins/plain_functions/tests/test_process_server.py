"""The process of tools: it answers line by line, whatever a function does, and ends with its input."""

import json
import os
import subprocess
import sys
from enum import Enum

import pytest

from turnwise.errors import ConfigError, InfrastructureError, ToolError
from turnwise.media import find_picture
from turnwise.report import Report
from turnwise.types import ToolResult
from turnwise_plain_functions.process import _result, check_importable
from turnwise_plain_functions.process_server import answer
from turnwise_plain_functions.results import as_result

PIXEL = find_picture(b"\x89PNG\r\n\x1a\n", "image/png")


class Unit(Enum):
    """A unit of length."""

    METRE = "m"


def add(a: int, b: int = 1) -> int:
    """Add."""
    return a + b


def spell(unit: Unit) -> str:
    """Return the name of a unit."""
    return unit.name


async def fetch() -> ToolResult:
    """Return a result of several parts."""
    return ToolResult(text="page", reward=0.5, metrics={"pages": 1.0})


def photograph() -> list:
    """Return texts and a picture."""
    return ["before", PIXEL, "after"]


def report() -> ToolResult:
    """Return a report for people."""
    return ToolResult(text="", report=Report(title="ran", facts={"code": 0}))


def refuse(how: str) -> str:
    """Raise."""
    kinds = {"tool": ToolError, "infra": InfrastructureError, "exit": SystemExit, "value": ValueError}
    raise kinds[how]("as asked")


def ask(name, *, convert=True, **arguments):
    return answer({"module": __name__, "name": name, "arguments": arguments, "convert": convert})


@pytest.fixture(autouse=True)
def this_module(monkeypatch):
    """Make this module importable by its name."""
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or _Module())


class _Module:
    add, spell, fetch, refuse = map(staticmethod, (add, spell, fetch, refuse))
    photograph, report = map(staticmethod, (photograph, report))


def test_results():
    """Sync and async functions; `convert` gives the arguments the types of the annotations."""
    assert "3" == ask("add", a=2)["text"]
    assert "METRE" == ask("spell", unit="m")["text"]
    assert "AttributeError" == ask("spell", unit="m", convert=False)["raised"]
    found = ask("fetch")
    assert ("page", 0.5, {"pages": 1.0}, False) == tuple(found[key] for key in ("text", "reward", "metrics", "error"))


@pytest.mark.parametrize("name", ["photograph", "report"])
def test_results_cross_the_border(name):
    """Pictures and reports are on the other side what the function returned."""
    crossed = _result(json.loads(json.dumps(ask(name))))
    assert as_result(globals()[name]()) == crossed


@pytest.mark.parametrize(
    ("how", "kind"),
    [("tool", "ToolError"), ("infra", "InfrastructureError"), ("exit", "SystemExit"), ("value", "ValueError")],
)
def test_exceptions_are_answers(how, kind):
    """An exit of the function ends its call and not the process."""
    assert {"raised": kind, "text": "as asked"} == ask("refuse", how=how)


def test_the_process_answers_in_order_and_ends_with_its_input():
    """What a function prints does not mix with the answers."""
    requests = [
        {"module": "builtins", "name": "print", "arguments": {"end": "printed"}, "convert": False},
        {"module": "operator", "name": "no_such_function", "arguments": {}, "convert": False},
    ]
    lifeline, end = os.pipe()
    server = subprocess.run(
        [sys.executable, "-m", "turnwise_plain_functions.process_server", str(lifeline)],
        input="".join(json.dumps(each) + "\n" for each in requests),
        pass_fds=[lifeline],
        capture_output=True,
        text=True,
        start_new_session=True,
        check=True,
    )
    for pipe in (lifeline, end):
        os.close(pipe)

    printed, missing = map(json.loads, server.stdout.splitlines())
    assert ("", False) == (printed["text"], printed["error"])
    assert "AttributeError" == missing["raised"]
    assert "printed" in server.stderr


def test_a_function_that_its_name_does_not_find_is_refused():
    """The process would run another function."""

    def make_other():
        def add() -> None:
            """Do something else."""

        add.__qualname__ = "add"
        return add

    check_importable(add, "add")
    with pytest.raises(ConfigError, match=r"tool 'add' cannot run in a process: .*\.add is something else"):
        check_importable(make_other(), "add")
