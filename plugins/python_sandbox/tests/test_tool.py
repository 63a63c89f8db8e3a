"""The tool `python`: schema, observations, truncation, failures of the sandbox."""

from __future__ import annotations

import asyncio

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from turnwise.errors import InfrastructureError
from turnwise.protocols import Resources, Tool
from turnwise.record.step_results import Counters, RecordedCall
from turnwise.types import Task, ToolCall
from turnwise_python_sandbox import PythonTool, PythonToolConfig, RunResult, SandboxConfig, Status, Tier
from turnwise_python_sandbox.tool import format_observation, truncate

TASK = Task(messages=({"role": "user", "content": "?"},), uid="t")
SMALL = SandboxConfig(servers=1, timeout_s=60.0)


def build_result(status: Status = Status.OK, stdout: str = "", stderr: str = "", **more: object) -> RunResult:
    """Return a result of a run."""
    return RunResult(status=status, stdout=stdout, stderr=stderr, tier=Tier.LANDLOCK, **more)


def call(tool: PythonTool, *codes: str) -> list:
    """Run an episode with these calls, and return their results."""

    async def episode() -> list:
        session = await tool.create(TASK)
        results = [await tool.execute(session, {"code": code}) for code in codes]
        assert await tool.release(session) is None
        return results

    return asyncio.run(episode())


@pytest.fixture(params=[False, True], ids=["fresh", "persistent"])
def tool(request: pytest.FixtureRequest) -> PythonTool:
    """The tool, with one interpreter per call and with one per episode."""
    return PythonTool(PythonToolConfig(sandbox=SMALL, persistent=request.param), Resources())


def test_it_is_a_tool(tool: PythonTool) -> None:
    """It implements the protocol `Tool`, and its schema has one string parameter `code`."""
    assert isinstance(tool, Tool)
    parameters = tool.schema["function"]["parameters"]
    assert ("python", ["code"]) == (tool.schema["function"]["name"], parameters["required"])
    assert {"type": "string", "description": "The program."} == parameters["properties"]["code"]


def test_an_episode(tool: PythonTool) -> None:
    """Observations show output, no output and an error, and later calls still work."""
    printed, silent, failed, after = call(tool, "print(1 + 1)", "x = 1", "1 / 0", "print('on')")

    assert ("2", False) == (printed.text, printed.error)
    assert ("(no output)", False) == (silent.text, silent.error)
    assert failed.error
    assert failed.text.endswith("ZeroDivisionError: division by zero")
    assert "on" == after.text
    assert set(printed.metrics) - {"sandbox_wall_s"} <= {"sandbox_calls_in_tier_1", "sandbox_calls_in_tier_2"}


def test_the_metrics_of_an_episode_count_the_calls_of_each_tier(tool: PythonTool) -> None:
    """The record adds up the metrics of calls, so that three calls in one tier are three calls and no tier 3."""
    counters = Counters()
    results = call(tool, "print(1)", "1 / 0", "pass")
    for result in results:
        counters.add_call(RecordedCall(call=ToolCall(name="python", arguments={}), result=result))

    tiers = {name: value for name, value in counters.extra.items() if "tier" in name}
    assert [3.0] == list(tiers.values())
    assert set(tiers) <= {"tool/sandbox_calls_in_tier_1", "tool/sandbox_calls_in_tier_2"}
    assert counters.extra["tool/sandbox_wall_s"] == pytest.approx(sum(r.metrics["sandbox_wall_s"] for r in results))


def test_only_a_persistent_tool_keeps_variables(tool: PythonTool) -> None:
    """A variable of one call exists in the next only if the tool is persistent."""
    _, second = call(tool, "x = 5", "print(x)")

    assert ("5" if tool._config.persistent else "NameError") in second.text


@pytest.mark.many_cases(1)
def test_an_exceeded_limit_is_explained(tool: PythonTool) -> None:
    """The observation of a stopped program has its output, then the reason."""
    code = "import signal\nsignal.signal(2, signal.SIG_IGN)\nprint('start')\nwhile True: pass"
    for timeout_s in (2.0, 8.0, 60.0):  # the first in which a busy machine prints a line
        sandbox = evolve(SMALL, timeout_s=timeout_s)
        (stopped,) = call(PythonTool(evolve(tool._config, sandbox=sandbox), Resources()), code)
        if "start" in stopped.text:
            break

    assert stopped.error
    assert stopped.text.startswith("start\n")
    assert f"longer than {timeout_s:g} seconds" in stopped.text


def test_a_failing_sandbox_raises() -> None:
    """A failure of the sandbox raises `InfrastructureError` instead of becoming an observation."""
    tool = PythonTool(PythonToolConfig(sandbox=SandboxConfig(remote_url="http://127.0.0.1:9")), Resources())

    with pytest.raises(InfrastructureError, match="the sandbox failed"):
        call(tool, "print(1)")


def test_no_isolation_is_an_infrastructure_error() -> None:
    """A machine where no tier works raises `InfrastructureError` too."""
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
def test_each_limit_has_its_message(status: Status, words: str) -> None:
    """The observation names the limit and its value."""
    assert words in format_observation(build_result(status, exit_code=139), PythonToolConfig())


def test_the_option_errors_places_them() -> None:
    """Standard error comes after the output, is cut to its last line, or is left out."""
    ran = build_result(Status.ERROR, "out\n", "Traceback\n  line\nValueError: x\n")
    texts = [format_observation(ran, PythonToolConfig(errors=where)) for where in ("after", "last_line", "hidden")]

    assert ["out\nTraceback\n  line\nValueError: x", "out\nValueError: x", "out"] == texts


def test_a_lost_session_is_reported() -> None:
    """The observation says that the variables are gone."""
    text = format_observation(build_result(Status.TIMEOUT, session_lost=True), PythonToolConfig())

    assert text.endswith("variables are gone")


def test_the_reason_survives_truncation() -> None:
    """A long output does not displace the reason at the end."""
    text = format_observation(build_result(Status.OUTPUT_LIMIT, "x" * 100_000), PythonToolConfig(max_chars=200))

    assert len(text) <= 200
    assert text.endswith("was stopped")


@given(st.text(max_size=400), st.integers(0, 300), st.sampled_from(["head", "tail", "middle"]))
def test_truncation_keeps_to_its_length(text: str, max_chars: int, keep: str) -> None:
    """The result is never too long, a short text is unchanged, and the right end is kept."""
    cut = truncate(text, max_chars, keep)

    assert len(cut) <= max_chars
    if len(text) <= max_chars:
        assert text == cut
    elif max_chars > 100 and keep == "tail":
        assert cut.endswith(text[-20:])
    elif max_chars > 100:
        assert cut.startswith(text[:20])
