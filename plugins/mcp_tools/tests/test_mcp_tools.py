"""Tools of MCP servers, real processes, in episodes."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise import Resources, Task, Tool, ToolCall, ToolResult
from turnwise.errors import ConfigError, InfrastructureError
from turnwise.media import Picture
from turnwise.showing import split_parts
from turnwise.tools.toolbox import ToolBox
from turnwise_mcp_tools import make_tools
from turnwise_mcp_tools.config import McpConfig, ServerConfig

sys.path.insert(0, str(Path(__file__).parent))

from notes_server import PIXEL

pytestmark = pytest.mark.usefixtures("starts_a_process")

SERVER = Path(__file__).with_name("notes_server.py")
NOTES = ServerConfig(command="python", args=(str(SERVER),))
TASK = Task(messages=[{"role": "user", "content": "go"}], uid="task")


def tools_of(**options: object) -> tuple[Tool, ...]:
    return make_tools(McpConfig(**({"servers": {"notes": NOTES}} | options)), Resources())


@pytest.fixture(scope="module")
def tools() -> tuple[Tool, ...]:
    """The tools of a server in default mode."""
    return tools_of(resources=True, prompts=True, call_s=20.0)


def calls_of(*calls: tuple[str, dict[str, object]]) -> list[ToolCall]:
    return [ToolCall(name=name, arguments=arguments) for name, arguments in calls]


def run_episode(tools: tuple[Tool, ...], *calls: tuple[str, dict[str, object]]) -> list[ToolResult]:
    """Call one after the other in one episode."""

    async def run() -> list[ToolResult]:
        async with ToolBox(tools).session(TASK) as session:
            return [await session.call(call) for call in calls_of(*calls)]

    return asyncio.run(run())


def pid_of(result: ToolResult) -> int:
    return int(json.loads(result.text)["pid"])


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_model_gets_the_tools_of_the_server(tools: tuple[Tool, ...]) -> None:
    """Names, descriptions and parameters are as the server lists them."""
    schemas = {tool.schema["function"]["name"]: tool.schema["function"] for tool in tools}

    assert list(schemas) == [
        *("add_note", "describe", "fail", "refuse", "draw", "photograph", "picture_file", "show", "die", "wait"),
        *("notes_list_resources", "notes_read_resource", "notes_get_prompt"),
    ]
    assert schemas["add_note"]["description"] == "Keeps a note."
    assert schemas["add_note"]["parameters"]["required"] == ["text"]
    assert "summarize(style)" in schemas["notes_get_prompt"]["description"]


def test_tools_of_an_episode_share_a_process(tools: tuple[Tool, ...]) -> None:
    """Notes stay for the episode, and the process ends with it."""
    first, second, described, resource = run_episode(
        tools,
        ("add_note", {"text": "a", "times": 2}),
        ("add_note", {"text": "b"}),
        ("describe", {}),
        ("notes_read_resource", {"uri": "notes://all"}),
    )

    assert [first.text, second.text, resource.text] == ["2 notes", "3 notes", "a\na\nb"]
    assert not is_alive(pid_of(described))
    assert run_episode(tools, ("add_note", {"text": "c"}))[0].text == "1 notes"


@pytest.mark.slow
def test_parallel_calls_open_one_process(tools: tuple[Tool, ...]) -> None:
    """Calls of one turn run together, and the first of them starts the server."""

    async def run() -> list[ToolResult]:
        async with ToolBox(tools).session(TASK) as session:
            calls = calls_of(("describe", {}), ("describe", {}), ("add_note", {"text": "a"}))
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(session.call(call)) for call in calls]
            return [task.result() for task in running]

    one, other, added = asyncio.run(run())

    assert pid_of(one) == pid_of(other)
    assert added.text == "1 notes"


def test_failures_are_texts_for_the_model(tools: tuple[Tool, ...]) -> None:
    """Errors of a tool, wrong arguments and images are said in words."""
    failed, mismatch, image, unknown = run_episode(
        tools,
        ("fail", {}),
        ("add_note", {"text": 5}),
        ("draw", {}),
        ("notes_read_resource", {"uri": "notes://none"}),
    )

    assert failed.error
    assert "no such note" in failed.text
    assert mismatch.error
    assert "do not fit" in mismatch.text
    assert image.text == "[image/png, 6 bytes: cannot be shown as text]"
    assert unknown.error
    assert "notes://none" in unknown.text


@pytest.mark.slow
def test_images_are_pictures_where_the_config_says_so() -> None:
    """A text without them stays as it is; bytes of no known picture are an error for the model."""
    shown, broken, plain = run_episode(
        tools_of(pictures=True), ("photograph", {}), ("draw", {}), ("add_note", {"text": "x"})
    )
    before, picture, after = split_parts(shown)
    assert (before, after) == ("before", "after")
    assert isinstance(picture, Picture)
    assert (picture.media_type, picture.data[:4]) == ("image/png", b"\x89PNG")
    assert broken.error
    assert "an image that cannot be used" in broken.text
    assert plain.pictures == ()


BLOCKS = st.one_of(
    st.tuples(st.sampled_from(["image:", "file:", "page:"]), st.sampled_from("abc")).map("".join),
    st.text("xy\n é", max_size=4),
)


@pytest.mark.slow
@settings(max_examples=3, deadline=None)
@given(st.lists(st.lists(BLOCKS, max_size=8), min_size=20, max_size=60))
def test_the_order_of_the_server(listed: list[list[str]]) -> None:
    """Texts, images and resources come in the server's order, whatever it returns."""
    results = run_episode(tools_of(pictures=True, call_s=20.0), *(("show", {"blocks": each}) for each in listed))
    for blocks, result in zip(listed, results, strict=True):
        if not any(block.startswith(("image:", "file:")) for block in blocks):
            assert not result.pictures
            continue
        expected: list[str | bytes] = []
        for block in blocks:
            kind, _colon, name = block.partition(":")
            if kind in ("image", "file"):
                expected.append(PIXEL + name.encode())
                continue
            text = name if kind == "page" else block
            joins = expected and isinstance(expected[-1], str)
            expected[-1 if joins else len(expected) :] = [f"{expected[-1]}\n{text}" if joins else text]
        shown = [part if isinstance(part, str) else part.data for part in split_parts(result)]
        assert shown == [part for part in expected if part]


def test_images_in_resources_are_pictures_too() -> None:
    """A server that gives the bytes of a file as a resource shows them; without the option they are a line."""
    (shown,) = run_episode(tools_of(pictures=True), ("picture_file", {}))
    assert [each.media_type for each in shown.pictures] == ["image/png"]
    assert shown.text == "[audio/wav, 6 bytes: cannot be shown as text]"
    (told,) = run_episode(tools_of(), ("picture_file", {}))
    assert told.text.startswith("[image/png, ")
    assert told.pictures == ()


@pytest.mark.slow
def test_prompts_and_resources(tools: tuple[Tool, ...]) -> None:
    """They are lists, texts and messages."""
    resources, prompt = run_episode(
        tools,
        ("notes_list_resources", {}),
        ("notes_get_prompt", {"name": "summarize", "arguments": {"style": "briefly"}}),
    )

    assert resources.text == "notes://all: All notes."
    assert prompt.text == "user: Summarize the notes, briefly."


@pytest.mark.slow
def test_a_server_that_dies_is_started_again_once() -> None:
    """The model learns that the state is lost; the next death fails the episode, with the server's last line."""
    tools = tools_of(restarts=1)

    async def run() -> tuple[ToolResult, ToolResult]:
        async with ToolBox(tools).session(TASK) as session:
            await session.call(ToolCall(name="add_note", arguments={"text": "a"}))
            died = await session.call(ToolCall(name="die", arguments={}))
            added = await session.call(ToolCall(name="add_note", arguments={"text": "b"}))
            with pytest.raises(InfrastructureError, match=r"'notes' ended.*dying as asked"):
                await session.call(ToolCall(name="die", arguments={}))
            return died, added

    died, added = asyncio.run(run())

    assert died.error
    assert "state is lost" in died.text
    assert died.metrics == {"mcp_restarts": 1}
    assert added.text == "1 notes"


@pytest.mark.many_cases(1)
@pytest.mark.parametrize("code", [-32000, -32001, -32601, -32603, -1, 7])
def test_an_error_of_the_protocol_is_an_answer(code: int) -> None:
    """Whatever code a server answers with, it runs on with its state: the model reads the error."""
    tools = tools_of(restarts=0)
    added, refused, again, counted = run_episode(
        tools,
        ("add_note", {"text": "a"}),
        ("refuse", {"code": code}),
        ("refuse", {"code": code}),
        ("add_note", {"text": "b"}),
    )

    assert [refused.error, again.error] == [True, True]
    assert ["not today" in each.text for each in (refused, again)] == [True, True]
    assert [added.text, counted.text] == ["1 notes", "2 notes"]


@pytest.mark.slow
def test_lines_that_are_no_messages_are_one_line(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A server that prints among its messages works, and the log has one line about it, not a traceback for each."""
    tools = tools_of(servers={"notes": ServerConfig(command="python", args=(str(SERVER), "babble"))})
    capfd.readouterr()
    caplog.clear()
    (added,) = run_episode(tools, ("add_note", {"text": "a"}))
    printed = "".join([*capfd.readouterr(), caplog.text])

    assert added.text == "1 notes"
    assert printed.count("prints lines that are no messages") == 1
    assert "Traceback" not in printed
    assert len(printed.splitlines()) < 10


@pytest.mark.slow
def test_a_call_that_takes_too_long_ends() -> None:
    """The model reads that there was no answer."""
    (result,) = run_episode(tools_of(call_s=0.3, start_s=60.0), ("wait", {}))

    assert result.error
    assert "no answer within 0.3 s" in result.text


@pytest.mark.slow
def test_episodes_share_a_server_while_they_run() -> None:
    """`shared` keeps one process for episodes that overlap, and ends it after the last."""
    tools = tools_of(session="shared")

    async def run() -> list[ToolResult]:
        async with ToolBox(tools).session(TASK) as one:
            first = await one.call(ToolCall(name="describe", arguments={}))
            async with ToolBox(tools).session(TASK) as other:
                second = await other.call(ToolCall(name="describe", arguments={}))
            third = await one.call(ToolCall(name="describe", arguments={}))
            return [first, second, third]

    pids = {pid_of(result) for result in asyncio.run(run())}

    assert len(pids) == 1
    assert not is_alive(pids.pop())


@pytest.mark.slow
def test_a_cancelled_episode_ends_its_process() -> None:
    """Also when it is cancelled while it waits for the server."""
    tools = tools_of()

    async def run() -> int:
        pids: list[int] = []
        is_waiting = asyncio.Event()

        async def episode() -> None:
            async with ToolBox(tools).session(TASK) as session:
                pids.append(pid_of(await session.call(ToolCall(name="describe", arguments={}))))
                is_waiting.set()
                await session.call(ToolCall(name="wait", arguments={}))

        task = asyncio.get_running_loop().create_task(episode())
        await is_waiting.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return pids[0]

    assert not is_alive(asyncio.run(run()))


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of a server that speaks HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(SERVER), str(port)], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        while "Uvicorn running" not in process.stderr.readline():
            assert process.poll() is None, "the server ended"
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_server_with_an_address(address: str) -> None:
    """Its state belongs to its process, whoever connects."""
    tools = tools_of(servers={"web": ServerConfig(url=address, headers={"X-Team": "a"})})

    assert run_episode(tools, ("add_note", {"text": "a"}))[0].text == "1 notes"
    assert run_episode(tools, ("add_note", {"text": "b"}))[0].text == "2 notes"


@pytest.mark.slow
def test_names_that_two_servers_have_get_a_prefix() -> None:
    """`auto` changes these names only; `never` leaves the clash to the run, which refuses it."""
    two = {"a": NOTES, "b": NOTES}

    tools = tools_of(servers=two, include=("a.*", "b.add_note"))
    names = [tool.schema["function"]["name"] for tool in tools]

    shared = ["describe", "fail", "refuse", "draw", "photograph", "picture_file", "show", "die", "wait"]
    assert names == ["a_add_note", *shared, "b_add_note"]
    assert [each.text for each in run_episode(tools, ("a_add_note", {"text": "x"}), ("b_add_note", {"text": "x"}))] == [
        "1 notes",
        "1 notes",
    ]
    with pytest.raises(ConfigError, match="two tools are named 'add_note'"):
        ToolBox(tools_of(servers=two, prefix="never"))


@pytest.mark.slow
def test_patterns_choose_tools() -> None:
    """A pattern that fits nothing is refused."""
    tools = tools_of(include=("notes.*",), exclude=("notes.[dfprsw]*",))

    assert [tool.schema["function"]["name"] for tool in tools] == ["add_note"]
    with pytest.raises(ConfigError, match=r"'notes\.ad' fits no tool of notes\.add_note"):
        tools_of(include=("notes.ad",))


@pytest.mark.parametrize(
    ("server", "problem"),
    [
        (ServerConfig(command="no-such-program"), "'bad' cannot be used.*No such file"),
        (ServerConfig(command="python", args=("-c", "import sys; sys.exit('no licence')")), "'bad'.*no licence"),
        (ServerConfig(command="python", args=("-c", "print('hello'); input()")), "'bad' "),
        (ServerConfig(url="http://127.0.0.1:9/mcp"), "'bad' cannot be used"),
    ],
    ids=["missing", "exits", "speaks something else", "not there"],
)
def test_a_server_that_cannot_be_used_is_named(server: ServerConfig, problem: str) -> None:
    """One line says which, and why."""
    start_s = 2.0 if "input()" in str(server.args) else 60.0  # only this one is there and never answers
    with pytest.raises(ConfigError, match=problem) as error:
        tools_of(servers={"bad": server}, start_s=start_s)

    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_a_server_gets_its_variables_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values come from the environment by name, and the rest of the environment stays here."""
    monkeypatch.setenv("MY_SECRET", "s3")
    monkeypatch.setenv("UNRELATED", "private")
    server = ServerConfig(command="python", args=(str(SERVER),), env={"SECRET": "${MY_SECRET}-${MISSING:-default}"})

    (result,) = run_episode(tools_of(servers={"notes": server}), ("describe", {}))

    described = json.loads(result.text)
    assert (described["secret"], described["other"]) == ("s3-default", "")
    with pytest.raises(ConfigError, match="'notes' needs the environment variable NOT_SET"):
        tools_of(servers={"notes": ServerConfig(command="python", env={"SECRET": "${NOT_SET}"})})
