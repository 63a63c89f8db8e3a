"""Texts and pictures of a result reach the record in the order in which the tool returned them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from attrs import evolve, frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise import Agent, Chat, Status, Tool, ToolResult
from turnwise.media import Picture, picture_part
from turnwise.protocols import ModelSpec, Resources
from turnwise.record.step_results import RecordedCall
from turnwise.showing import join_parts, split_parts
from turnwise.types import ToolCall
from turnwise_chat_templates import load_chat
from turnwise_environments import EnvironmentConfig, Observation
from turnwise_environments import make_agent as make_environment_agent
from turnwise_gateway.session.tool_calls import _shorten
from turnwise_middleware.config import RedactSecretsConfig
from turnwise_middleware.interception import ToolUse
from turnwise_middleware.redact_secrets import RedactSecrets
from turnwise_plain_functions import tool
from turnwise_result_files.media import MediaFolder
from turnwise_result_files.unfinished import _call_to_row, _to_call
from turnwise_testing.inputs.vision import make_picture, save_qwen
from turnwise_testing.probes.agent import AgentProbe, ProbeParser, make_task
from turnwise_tool_agent.agent import ToolAgent
from turnwise_tool_agent.config import ToolAgentConfig

CAT, DOG = make_picture(20, 30, "red"), make_picture(50, 20, "blue", "JPEG")
CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
Part = str | Picture
PARTS = st.lists(st.sampled_from(["One", "two", "", CAT, DOG]), min_size=1, max_size=7)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    """The chat of a small Qwen3-VL."""
    return load_chat(ModelSpec(path=save_qwen(tmp_path_factory.mktemp("model"))))


@frozen
class Look:
    """Returns a result of parts."""

    parts: list[Part]

    @property
    def schema(self) -> dict[str, Any]:
        """No arguments."""
        parameters = {"type": "object", "properties": {}}
        return {"type": "function", "function": {"name": "look", "description": "", "parameters": parameters}}

    async def create(self, task: object) -> None:
        """Need no session."""

    async def execute(self, session: object, arguments: object) -> ToolResult:
        return join_parts(self.parts)

    async def release(self, session: object) -> None:
        """Close nothing."""


def of_list(parts: list[Part]) -> Tool:
    def look() -> list:  # type: ignore[type-arg]  # as users write it
        """Return a list."""
        return parts

    return tool(look)


def of_generator(parts: list[Part]) -> Tool:
    def look() -> Iterator[object]:
        """Yield one after the other."""
        yield from parts

    return tool(look)


def of_coroutine(parts: list[Part]) -> Tool:
    async def look() -> tuple:  # type: ignore[type-arg]  # as users write it
        """Return a tuple."""
        return tuple(parts)

    return tool(look)


TOOLS: dict[str, Callable[[list[Part]], Tool]] = {
    "result": Look,
    "list": of_list,
    "generator": of_generator,
    "coroutine": of_coroutine,
}


class Quiet:
    """An environment beside a tool."""

    tools = ()

    def __init__(self, **_options: object) -> None: ...

    def reset(self, task: object, seed: int) -> Observation:
        return Observation(text="Go.")

    def step(self, action: object) -> Observation:
        return Observation(text="On.")

    def close(self) -> None: ...


def of_tool_agent(resources: Resources) -> Agent:
    return ToolAgent(ToolAgentConfig(max_assistant_turns=2), resources)


def of_environment(resources: Resources) -> Agent:
    return make_environment_agent(EnvironmentConfig(environment=f"{__name__}:Quiet", max_turns=2), resources)


AGENTS = {"tool_agent": of_tool_agent, "environment": of_environment}


def play(chat: Chat, made: Tool, agent: str) -> Any:
    """Run an episode that calls the tool once."""
    resources = Resources(chat=chat, parser=ProbeParser(chat), tools={"look": made})
    probe = AgentProbe(make_agent=lambda: AGENTS[agent](resources), resources=resources, turns=(CALL,))

    async def run() -> Any:
        engine = probe.engine()
        engine.capabilities = evolve(engine.capabilities, pictures=True)
        await engine.start()
        return await probe.run(make_task(), engine=engine, limits=probe.limits())

    return asyncio.run(run()).result


def in_order(parts: list[Part]) -> list[Any]:
    """Return the characters and the keys of pictures in order, without white space."""
    return [each for part in parts for each in (part.replace("\n", "") if isinstance(part, str) else [part.key])]


def shown(content: Any) -> list[Any]:
    """Do the same for the content of a message."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    keys = {picture_part(each)["image_url"]["url"]: each for each in (CAT, DOG)}  # type: ignore[index]  # a URL is there
    return in_order([part["text"] if part["type"] == "text" else keys[part["image_url"]["url"]] for part in parts])


@pytest.mark.parametrize("agent", AGENTS)
@pytest.mark.parametrize("kind", TOOLS)
@settings(max_examples=8, deadline=None)
@given(parts=PARTS)
def test_the_record_has_the_order_of_the_tool(chat: Any, kind: str, agent: str, parts: list[Part]) -> None:
    """The message shows the parts in order, and the record is the chat's rendering of the message."""
    if kind == "list" and not any(isinstance(part, Picture) for part in parts):
        return  # a list of texts is JSON
    result = play(chat, TOOLS[kind](parts), agent)
    assert result.status is Status.COMPLETED, result.fault
    (message,) = [each for each in result.messages if each["role"] == "tool"]
    if kind != "coroutine" or any(isinstance(part, Picture) for part in parts):
        assert shown(message["content"]) == in_order(parts)
    (record,) = result.trajectories
    pictures = [part for part in parts if isinstance(part, Picture)]
    assert [each.picture.key for each in record.pictures] == [each.key for each in pictures]
    delta = chat.picture_delta([message], chat.stop_token_ids[0], with_tools=True)
    ids = getattr(delta, "token_ids", delta).tolist()
    assert any(record.input_ids[start : start + len(ids)].tolist() == ids for start in range(len(record.input_ids)))


@given(parts=PARTS, most=st.integers(1, 12))
def test_what_changes_a_result_keeps_its_order(parts: list[Part], most: int, tmp_path_factory: Any) -> None:
    """Limits of the text, a wrapper that hides secrets, and the files of an interrupted episode."""
    given_parts = ["sk-" + "a" * 30, *parts, "sk-" + "b" * 30, CAT]
    result = join_parts(given_parts)
    pictures = [part.key for part in given_parts if isinstance(part, Picture)]

    use = ToolUse(name="look", arguments={}, task=make_task())
    redacted = asyncio.run(RedactSecrets(RedactSecretsConfig()).after_tool(use, result))
    hidden = RedactSecretsConfig().replacement
    assert in_order(split_parts(redacted)) == in_order([hidden, *parts, hidden, CAT])

    short = _shorten(result, most)
    assert [part.key for part in split_parts(short) if isinstance(part, Picture)] == pictures
    assert len(short.text) <= most

    media = MediaFolder(tmp_path_factory.mktemp("media"))
    row = json.loads(
        json.dumps(_call_to_row(RecordedCall(call=ToolCall(name="look"), result=result, seconds=0.0), media))
    )
    assert _to_call(row, media).result == result
