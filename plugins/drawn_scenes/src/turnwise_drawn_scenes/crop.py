"""The tool `crop`: returns an enlarged part of the picture of the task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from PIL import Image

from turnwise import Task, ToolResult
from turnwise.errors import DataError, ToolError
from turnwise.media import decode_picture, is_picture_part, read_picture_part
from turnwise_drawn_scenes.drawing import encode

SIDES: Final = ("left", "top", "right", "bottom")
MIN_PIXELS: Final = 8
"""Shortest side of a part: a smaller one shows nothing."""
_LARGEST: Final = 128
"""A part is enlarged by a whole factor, to at most so many pixels on a side."""
TOOL_SCHEMA: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "crop",
        "description": "Shows an enlarged part of the picture.",
        "parameters": {
            "type": "object",
            "properties": {
                name: {"type": "integer", "description": f"The {name} edge of the part, in pixels of the picture."}
                for name in SIDES
            },
            "required": [*SIDES],
            "additionalProperties": False,
        },
    },
}
"""The tool's schema in OpenAI's format."""


class CropTool:
    """The tool `crop`. Its session is the decoded picture of the task."""

    @property
    def schema(self) -> Mapping[str, Any]:
        """The OpenAI function schema, with the four edges of the part."""
        return TOOL_SCHEMA

    async def create(self, task: Task) -> Image.Image:
        """Return the first picture of a task; `DataError` if it has none."""
        for message in task.messages:
            content = message.get("content")
            parts = content if isinstance(content, list) else []
            for part in filter(is_picture_part, parts):
                image: Image.Image = decode_picture(read_picture_part(part))
                return image.convert("RGB")
        raise DataError(f"task {task.uid!r} (row {task.sample_index}) has no picture, which the tool crop needs")

    async def execute(self, session: object, arguments: Mapping[str, object]) -> ToolResult:
        """Return the part as a PNG; `ToolError` with the reason if the edges describe no part of the picture."""
        assert isinstance(session, Image.Image)
        return ToolResult(text="", pictures=(encode(crop(session, [arguments.get(name) for name in SIDES])),))

    async def release(self, session: object) -> None:
        """Do nothing: the picture is freed with the session."""


def crop(image: Image.Image, edges: list[Any]) -> Image.Image:
    """
    Return a part of an image, enlarged by a whole factor without smoothing.

    Args:
        image: the picture of a task.
        edges: left, top, right and bottom in pixels; right and bottom are behind the last pixel.

    Raises:
        ToolError: an edge is no whole number, or the part is outside of the picture or too small.
    """
    for name, edge in zip(SIDES, edges, strict=True):
        if not isinstance(edge, int) or isinstance(edge, bool):
            raise ToolError(f"Error: {name} must be a whole number")
    left, top, right, bottom = edges
    if left < 0 or top < 0 or right > image.width or bottom > image.height:
        raise ToolError(f"Error: the picture has {image.width} x {image.height} pixels")
    if right - left < MIN_PIXELS or bottom - top < MIN_PIXELS:
        raise ToolError(f"Error: a part needs at least {MIN_PIXELS} x {MIN_PIXELS} pixels")
    part = image.crop((left, top, right, bottom))
    factor = max(1, _LARGEST // max(part.size))
    return part.resize((factor * part.width, factor * part.height), Image.Resampling.NEAREST)
