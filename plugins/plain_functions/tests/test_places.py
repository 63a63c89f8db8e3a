"""Where a tool's function runs: threads and processes keep a blocking call from holding up others."""

import asyncio
import enum
import os
import threading
import time

import pytest
import structlog

from turnwise.config.own_code import OwnCode
from turnwise.config.parts import Choice
from turnwise.errors import ConfigError, InfrastructureError, ToolError
from turnwise.plugin.host import load
from turnwise.protocols import Resources
from turnwise.runtime.loop_watchdog import EventLoopWatchdog
from turnwise.runtime.tools import build_tools
from turnwise.tools.toolbox import ToolBox
from turnwise.types import PluginRecipe, Task, ToolCall
from turnwise_plain_functions import tool

TASK = Task(messages=({"role": "user", "content": "x"},), uid="t")


class Colour(enum.Enum):
    """Something that JSON holds as text."""

    RED = "red"


def paint(colour: Colour, times: int = 1) -> str:
    """Return a text about the arguments and the process."""
    return f"{colour.name} {times} {os.getpid()}"


def fail(how: str) -> str:
    """Go wrong."""
    if how == "tool":
        raise ToolError("try another")
    if how == "infra":
        raise InfrastructureError("no disk")
    if how == "exit":
        raise SystemExit("leaving")
    if how == "die":
        os._exit(7)
    raise ValueError("as asked")


def sleep(seconds: float) -> str:
    """Block."""
    time.sleep(seconds)
    return "woke up"


async def block(seconds: float) -> str:
    """Block although it is a coroutine."""
    time.sleep(seconds)  # noqa: ASYNC251 - what must not be done
    return threading.current_thread().name


MEETING = threading.Barrier(40)


async def meet() -> str:
    """Block until 40 calls have come: for ever, if they come one after the other."""
    MEETING.wait(timeout=600)
    return "met"


def meet_in_sync() -> str:
    """Do the same in a sync function."""
    MEETING.wait(timeout=600)
    return "met"


def chat(text: str) -> str:
    """Print, as functions do."""
    print(text)
    return text


def call(made, name, deadline_s=60.0, **arguments):
    """Run one call under a deadline."""

    async def run():
        async with asyncio.timeout(deadline_s), ToolBox([made]).session(TASK) as session:
            return await session.call(ToolCall(name=name, arguments=arguments))

    return asyncio.run(run())


class TestProcess:
    """`run_in="process"`."""

    def test_arguments_and_results_travel(self):
        """
        Annotations hold; the call runs in another process, which also serves the next call.
        """
        made = tool(paint, run_in="process")
        texts = [call(made, "paint", colour="red", times=n).text for n in (1, 2)]

        assert [text.rsplit(" ", 1)[0] for text in texts] == ["RED 1", "RED 2"]
        assert len({text.rsplit(" ", 1)[1] for text in texts}) == 1
        assert str(os.getpid()) not in texts[0]

    def test_what_it_prints_is_no_answer(self):
        """
        Standard output of the function does not get among the answers.
        """
        assert call(tool(chat, run_in="process"), "chat", text='{"text": "forged"}').text == '{"text": "forged"}'

    @pytest.mark.parametrize(
        ("how", "text"),
        [
            ("value", "Error: ValueError: as asked"),
            ("tool", "try another"),
            ("exit", "Error: SystemExit: leaving"),
            ("die", "Error: the tool's process ended with code 7"),
        ],
    )
    def test_what_goes_wrong_is_told(self, how, text):
        """
        As with a thread; also when the process itself ends.
        """
        result = call(tool(fail, run_in="process"), "fail", how=how)

        assert (text, True) == (result.text, result.error)

    def test_infrastructure_stays_infrastructure(self):
        """
        It says nothing about the model.
        """
        with pytest.raises(InfrastructureError, match="no disk"):
            call(tool(fail, run_in="process"), "fail", how="infra")

    def test_a_call_that_hangs_is_killed(self):
        """
        At the deadline the process ends, and later calls get another one.
        """
        made = tool(sleep, run_in="process")
        for _ in range(6):  # more often than there are processes: a slot that hung would show
            with pytest.raises(TimeoutError):
                call(made, "sleep", deadline_s=0.3, seconds=3600)

        assert call(made, "sleep", seconds=0.0).text == "woke up"

    def test_what_a_process_cannot_find_is_refused(self):
        """
        A function within a function has no name to be imported by.
        """

        def inner(x: int) -> int:
            return x

        with pytest.raises(ConfigError, match="cannot run in a process"):
            tool(inner, run_in="process")
        with pytest.raises(ConfigError, match="run_in must be one of"):
            tool(paint, run_in="moon")


class TestThread:
    """`run_in="thread"`."""

    @pytest.mark.parametrize("func", [meet, meet_in_sync])
    def test_calls_that_block_do_not_wait_for_each_other(self, func):
        """
        Forty calls block at once, each until all are there; coroutine functions may be put into threads too.
        """
        made = tool(func, run_in="thread")

        async def run():
            async with ToolBox([made]).session(TASK) as session, asyncio.TaskGroup() as group:
                calls = [group.create_task(session.call(ToolCall(name=func.__name__))) for _ in range(40)]
            return {call.result().text for call in calls}

        assert asyncio.run(run()) == {"met"}

    def test_the_loop_is_for_functions_that_do_not_block(self):
        """
        A sync function may run on the loop itself.
        """
        assert call(tool(paint, run_in="loop"), "paint", colour="red").text == f"RED 1 {os.getpid()}"


@tool(run_in="process", name="painted")
def decorated(colour: Colour) -> str:
    """Return a text about the process."""
    return f"{colour.name} {os.getpid()}"


class TestConfig:
    """The key `run_in` of a tool's entry."""

    def test_a_decorated_function_runs_in_a_process(self):
        """The process finds the function under the decorator."""
        name, pid = call(decorated, "painted", colour="red").text.split()

        assert name == "RED"
        assert int(pid) != os.getpid()

    def test_is_read(self):
        """`run_in` is an option of functions."""
        entry = Choice(f"{__name__}:paint", {"run_in": "process"})
        host, code = load(PluginRecipe(allow=("plain_functions",))), OwnCode(modules=(__name__,))
        tools = build_tools([entry], host, Resources(), code)

        assert tools["paint"].run_in == "process"


class TestWatch:
    """A coroutine that blocks the loop is found out."""

    def test_it_names_the_tool_and_shows_where(self):
        """
        One line says how long, which tool, and the stack that blocks.
        """

        async def run():
            with EventLoopWatchdog(0.1) as watch:
                async with ToolBox([tool(block)]).session(TASK) as session:
                    await session.call(ToolCall(name="block", arguments={"seconds": 0.6}))
                await asyncio.sleep(0)
            return watch.num_blocks

        with structlog.testing.capture_logs() as lines:
            assert asyncio.run(run()) == 1

        assert [("block", "warning")] == [(line["tool"], line["log_level"]) for line in lines]
        assert "time.sleep(seconds)" in lines[0]["stack"]

    def test_a_late_wake_up_of_an_idle_loop_is_no_block(self):
        """A loop that waits for events blocks nobody: the machine is overloaded."""

        async def run(lines):
            with EventLoopWatchdog(0.05) as watch:
                watch._timer.cancel()  # as if the machine did not run it
                while not lines:  # noqa: ASYNC110 - another thread appends to it
                    await asyncio.sleep(0.05)
            return watch.num_blocks

        with structlog.testing.capture_logs() as lines:
            assert 0 == asyncio.run(run(lines))

        assert ["the machine is overloaded: the event loop woke late"] == [line["event"] for line in lines]

    def test_it_says_nothing_of_a_thread(self):
        """
        A blocking function in a thread delays no other episode.
        """

        async def run():
            with EventLoopWatchdog(0.5) as watch:
                async with ToolBox([tool(sleep)]).session(TASK) as session:
                    await session.call(ToolCall(name="sleep", arguments={"seconds": 1.2}))
            return watch.num_blocks

        assert asyncio.run(run()) == 0
