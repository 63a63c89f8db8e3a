"""The tool `python`: schema, texts, truncation, and what is nobody's fault."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.errors import InfrastructureError
from turnwise.protocols import Resources, Tool
from turnwise.types import Task
from turnwise_python_sandbox import PythonTool, PythonToolConfig, RunResult, SandboxConfig, Status, Tier
from turnwise_python_sandbox.tool import observation, truncate

TASK = Task(messages=({"role": "user", "content": "?"},), uid="t")
SMALL = SandboxConfig(servers=1, timeout_s=2.0)


def result(status: Status = Status.OK, stdout: str = "", stderr: str = "", **more: object) -> RunResult:
    """A result of a run."""
    return RunResult(status=status, stdout=stdout, stderr=stderr, tier=Tier.LANDLOCK, **more)


def call(tool: PythonTool, *codes: str) -> list:
    """Run an episode with these calls."""

    async def episode() -> list:
        session = await tool.create(TASK)
        results = [await tool.execute(session, {"code": code}) for code in codes]
        assert await tool.release(session) is None
        return results

    return asyncio.run(episode())


@pytest.fixture(params=[False, True], ids=["fresh", "persistent"])
def tool(request: pytest.FixtureRequest) -> PythonTool:
    """The tool in both ways of running."""
    return PythonTool(PythonToolConfig(sandbox=SMALL, persistent=request.param), Resources())


def test_it_is_a_tool(tool: PythonTool) -> None:
    """It fulfils the protocol, and its schema takes one text named `code`."""
    assert isinstance(tool, Tool)
    parameters = tool.schema["function"]["parameters"]
    assert ("python", ["code"]) == (tool.schema["function"]["name"], parameters["required"])
    assert {"type": "string", "description": "The program."} == parameters["properties"]["code"]


def test_an_episode(tool: PythonTool) -> None:
    """Output, silence, an error: the model reads each, and goes on."""
    printed, silent, failed, after = call(tool, "print(1 + 1)", "x = 1", "1 / 0", "print('on')")

    assert ("2", False) == (printed.text, printed.error)
    assert ("(no output)", False) == (silent.text, silent.error)
    assert failed.error
    assert failed.text.endswith("ZeroDivisionError: division by zero")
    assert "on" == after.text
    assert printed.metrics["sandbox_tier"] in (1.0, 2.0)


def test_fresh_forgets_and_persistent_remembers(tool: PythonTool) -> None:
    """The one difference between the two."""
    _, second = call(tool, "x = 5", "print(x)")

    assert ("5" if tool._config.persistent else "NameError") in second.text


def test_limits_are_told(tool: PythonTool) -> None:
    """A program that was stopped says why, after what it printed."""
    (stopped,) = call(tool, "import signal\nsignal.signal(2, signal.SIG_IGN)\nprint('start')\nwhile True: pass")

    assert stopped.error
    assert stopped.text.startswith("start\n")
    assert "longer than 2 seconds" in stopped.text


def test_infrastructure_is_nobodys_fault(monkeypatch) -> None:
    """A sandbox that fails raises; the model reads nothing of it."""
    tool = PythonTool(PythonToolConfig(sandbox=SandboxConfig(remote_url="http://127.0.0.1:9")), Resources())

    with pytest.raises(InfrastructureError, match="the sandbox failed"):
        call(tool, "print(1)")


def test_no_isolation_is_an_infrastructure_error() -> None:
    """A machine where no tier works is not the model's fault either."""
    tool = PythonTool(PythonToolConfig(sandbox=SandboxConfig(tier=3)), Resources())

    with pytest.raises(InfrastructureError, match="no isolation works here"):
        call(tool, "print(1)")


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (Status.TIMEOUT, "longer than 10 seconds"),
        (Status.MEMORY, "more than 512 MB"),
        (Status.OUTPUT_LIMIT, "more than 1048576 bytes"),
        (Status.DISK_LIMIT, "64 MB or 1024 files"),
        (Status.CRASHED, "exit code 139"),
    ],
)
def test_each_verdict_has_its_words(status: Status, words: str) -> None:
    """The model learns which limit it met."""
    assert words in observation(result(status, exit_code=139), PythonToolConfig())


def test_where_errors_go() -> None:
    """After the output, their last line only, or nowhere."""
    ran = result(Status.ERROR, "out\n", "Traceback\n  line\nValueError: x\n")
    texts = [observation(ran, PythonToolConfig(errors=where)) for where in ("after", "last_line", "hidden")]

    assert ["out\nTraceback\n  line\nValueError: x", "out\nValueError: x", "out"] == texts


def test_a_lost_session_is_told() -> None:
    """The model must know that its variables are gone."""
    text = observation(result(Status.TIMEOUT, session_lost=True), PythonToolConfig())

    assert text.endswith("variables are gone")


def test_the_verdict_survives_truncation() -> None:
    """However long the output, the reason of the stop is read."""
    text = observation(result(Status.OUTPUT_LIMIT, "x" * 100_000), PythonToolConfig(max_chars=200))

    assert len(text) <= 200
    assert text.endswith("was stopped")


@given(st.text(max_size=400), st.integers(0, 300), st.sampled_from(["head", "tail", "middle"]))
def test_truncation_keeps_to_its_length(text: str, max_chars: int, keep: str) -> None:
    """Never longer than asked, unchanged when it fits, and the right end stays."""
    cut = truncate(text, max_chars, keep)

    assert len(cut) <= max_chars
    if len(text) <= max_chars:
        assert text == cut
    elif max_chars > 100 and keep == "tail":
        assert cut.endswith(text[-20:])
    elif max_chars > 100:
        assert cut.startswith(text[:20])
