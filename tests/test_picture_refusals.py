"""What has no place for pictures refuses them by name, and drops none in silence."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable

import numpy as np
import pytest

import turnwise_conversions
from turnwise import EpisodeResult, ToolResult, Trajectory
from turnwise.batch.rollout_batch import collate
from turnwise.errors import BoundaryError, ConfigError, DataError, PluginError, TurnwiseError
from turnwise.media import Picture, find_picture
from turnwise.messages import text_of_result
from turnwise.showing import show_pictures
from turnwise.types import MediaTokens, PlacedPicture
from turnwise_conversions.hf_dataset import rows_of
from turnwise_gateway.server.mcp import _call_tool
from turnwise_result_files import to_tensordict
from turnwise_result_files.episode_rows import rows_of as file_rows
from turnwise_result_files.media import DECLARATION
from turnwise_testing.inputs.small_episodes import episode, trajectory
from turnwise_trl_bridge.worker import build_samples
from turnwise_verl_bridge.rows import check_trainable, to_queue_rows
from turnwise_viewer.case_source import write_case

CAT = find_picture(b"\x89PNG\r\n\x1a\n cat", "image/png")


def seen() -> EpisodeResult:
    """Return an episode whose record has a picture."""
    prompt = MediaTokens(token_ids=np.arange(4), pictures=[PlacedPicture(start=1, num_tokens=2, picture=CAT)])
    record = Trajectory(prompt)
    record.add_action([7], [-0.5])
    return episode(record)


def case(result: EpisodeResult) -> str:
    return write_case([{"open_columns": [{"name": "pictures", "declaration": DECLARATION, "values": "[]"}]}])


REFUSALS: dict[str, tuple[Callable[[EpisodeResult], object], type[TurnwiseError], str]] = {
    "chat": (
        turnwise_conversions.to_chat,
        DataError,
        f"episode t0/0: no message shows the picture {CAT.key[:12]} of its record",
    ),
    "atif": (turnwise_conversions.to_atif, DataError, "episode t0/0 has pictures, and an ATIF object without a folder"),
    "datasets": (lambda result: list(rows_of(result)), DataError, "and a data set of texts has no place"),
    "verl": (
        lambda result: to_queue_rows(collate([result], pad_token_id=0), result),
        ConfigError,
        "a record has pictures, and verl's model is neither",
    ),
    "tensordict": (
        lambda result: to_tensordict(collate([result], pad_token_id=0)),
        PluginError,
        "no place for the pictures of a batch",
    ),
    "source of a test": (case, DataError, "the source of a test has no place for pictures"),
}


@pytest.mark.parametrize("form", REFUSALS)
def test_exports(form):
    """Each names what has no place."""
    export, error, reason = REFUSALS[form]
    if form == "tensordict":
        pytest.importorskip("tensordict")
    with pytest.raises(error, match=reason):
        export(seen())


def test_trl():
    """The samples of a group."""
    pytest.importorskip("trl.experimental.async_grpo.async_rollout_worker")
    with pytest.raises(ConfigError, match="the samples for TRL have no place for pictures"):
        build_samples([seen()], 0)


def test_exports_of_texts_are_as_before():
    """An episode without pictures passes the same checks."""
    check_trainable(episode(trajectory()))
    assert turnwise_conversions.to_atif(episode(trajectory()))["schema_version"]


def test_agents_of_texts():
    """The result of a tool with pictures ends the episode of an agent that shows none."""
    assert text_of_result(ToolResult(text="ok"), "torl_python") == "ok"
    with pytest.raises(ConfigError, match="a tool returned 1 pictures, and agent 'torl_python' shows the model none"):
        text_of_result(ToolResult(text="ok", pictures=(CAT,)), "torl_python")


def test_a_chat_of_texts():
    """A chat of a plugin may have no pictures."""
    with pytest.raises(ConfigError, match="tool 'camera' returned pictures, and the chat object takes none"):
        show_pictures("", (CAT,), object(), "tool 'camera'")  # type: ignore[arg-type]


def test_a_tool_is_at_fault_for_its_picture():
    """Although the chat names it as data."""

    class Strict:
        def picture_prompt(self) -> None: ...

        def picture_delta(self) -> None: ...

        def check_picture(self, picture: Picture) -> None:
            raise DataError(f"picture {picture.key[:4]} is broken")

    with pytest.raises(BoundaryError, match="is broken") as caught:
        show_pictures("", (CAT,), Strict(), "tool 'camera'")  # type: ignore[arg-type]
    assert caught.value.owner == "tool"


def test_a_program_gets_the_pictures_of_tools():
    """The gateway's tools are those of an MCP server, which has a form for them."""

    class Backend:
        async def call_tool(self, _call: object) -> ToolResult:
            return ToolResult(text="Seen:", pictures=(CAT,))

    answer = asyncio.run(_call_tool({"name": "camera"}, Backend()))  # type: ignore[arg-type]
    text, image = answer["content"]  # type: ignore[misc]
    assert text == {"type": "text", "text": "Seen:"}
    assert (image["type"], image["mimeType"]) == ("image", "image/png")
    assert base64.b64decode(image["data"]) == CAT.data


def test_rows_of_files_are_their_own(tmp_path):
    """Files of results, in contrast, have a place."""
    from turnwise_result_files.media import MediaFolder

    (row,) = file_rows(seen(), None, MediaFolder(tmp_path))
    assert row["open_columns"][0]["declaration"] == DECLARATION
