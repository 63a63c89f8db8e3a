"""Writes the results of a server as text for the model."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterable

from mcp.types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    GetPromptResult,
    ImageContent,
    ReadResourceResult,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

from turnwise import ToolResult
from turnwise.errors import DataError, ToolError
from turnwise.media import Picture, read_picture
from turnwise.showing import join_parts


def text_of_result(result: CallToolResult) -> str:
    """Return the blocks of a result, or its structured value when there are none."""
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return text_of_blocks(result.content)


def with_pictures(result: CallToolResult) -> ToolResult:
    """
    Return a result whose images are pictures, in the order of the server.

    `ToolError` for an image that is no base64, or of no known type.
    """
    if not any(_image_of(block) is not None for block in result.content):
        return ToolResult(text=text_of_result(result), error=bool(result.is_error))
    return join_parts(map(_part, result.content), error=bool(result.is_error))


def _part(block: ContentBlock) -> str | Picture:
    if (data := _image_of(block)) is None:
        return _text(block)
    try:
        return read_picture(b64decode(data, validate=True), "an image of the server")
    except (ValueError, DataError) as error:
        raise ToolError(f"the server returned an image that cannot be used: {error}") from error


def _image_of(block: object) -> str | None:
    """Return the base64 of a block that is an image, or a resource with the bytes of one; None for other blocks."""
    if isinstance(block, ImageContent):
        return block.data
    resource = block.resource if isinstance(block, EmbeddedResource) else None
    if isinstance(resource, BlobResourceContents) and (resource.mime_type or "").startswith("image/"):
        return resource.blob
    return None


def text_of_blocks(blocks: Iterable[ContentBlock]) -> str:
    """Return blocks as lines; of images and sounds the model learns that they are there."""
    return "\n".join(map(_text, blocks))


def text_of_resource(result: ReadResourceResult) -> str:
    """Return the contents of a resource."""
    return "\n".join(map(_resource, result.contents))


def text_of_prompt(result: GetPromptResult) -> str:
    """Return the messages of a prompt, each with its role."""
    return "\n\n".join(f"{message.role}: {_text(message.content)}" for message in result.messages)


def _text(block: object) -> str:
    match block:
        case TextContent():
            return block.text
        case ImageContent() | AudioContent():
            return _omitted(block.mime_type, block.data)
        case ResourceLink():
            return f"[resource {block.uri}: {block.description or block.name}]"
        case EmbeddedResource():
            return _resource(block.resource)
    return f"[{getattr(block, 'type', 'content')}: cannot be shown as text]"


def _resource(resource: TextResourceContents | BlobResourceContents) -> str:
    if isinstance(resource, TextResourceContents):
        return resource.text
    return _omitted(resource.mime_type or "data", resource.blob)


def _omitted(mime_type: str, base64: str) -> str:
    return f"[{mime_type}, {len(base64) * 3 // 4} bytes: cannot be shown as text]"
