"""Conversations with pictures as bodies of each dialect, and files that no run can show."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from turnwise.media import Picture
from turnwise_testing.inputs.vision import make_picture

DIALECTS: Final = ("chat", "messages", "responses")
Piece = str | Picture
"""A text or a picture of a content."""


def url_of(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def write_url(dialect: str, url: str) -> dict[str, Any]:
    """Return the part of a picture with a URL."""
    if dialect == "chat":
        return {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
    if dialect == "responses":
        return {"type": "input_image", "image_url": url, "detail": "auto"}
    if not url.startswith("data:"):
        return {"type": "image", "source": {"type": "url", "url": url}}
    media_type, _, data = url.removeprefix("data:").partition(";base64,")
    return {"type": "image", "source": {"type": "base64", "media_type": media_type, "data": data}}


def write_parts(dialect: str, pieces: Iterable[Piece]) -> list[dict[str, Any]]:
    text = "input_text" if dialect == "responses" else "text"
    return [
        {"type": text, "text": each}
        if isinstance(each, str)
        else write_url(dialect, url_of(each.data, each.media_type))
        for each in pieces
    ]


def write_user(dialect: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {"role": "user", "content": parts}


def write_result(dialect: str, call_id: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the item of a tool's result."""
    if dialect == "chat":
        return {"role": "tool", "tool_call_id": call_id, "content": parts}
    if dialect == "responses":
        return {"type": "function_call_output", "call_id": call_id, "output": parts}
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call_id, "content": parts}]}


def write_turn(dialect: str, reply: Any) -> list[dict[str, Any]]:
    """Return a reply of the model as a client sends it back."""
    if dialect == "chat":
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.tool_calls
        ]
        return [{"role": "assistant", "content": reply.content} | ({"tool_calls": calls} if calls else {})]
    if dialect == "responses":
        text = {"role": "assistant", "content": [{"type": "output_text", "text": reply.content}]}
        calls = [
            {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments}
            for call in reply.tool_calls
        ]
        return [*([text] if reply.content or not calls else []), *calls]
    import json

    blocks = [{"type": "text", "text": reply.content}] if reply.content else []
    for call in reply.tool_calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)})
    return [{"role": "assistant", "content": blocks}]


def write_body(dialect: str, items: Sequence[Any], **more: Any) -> dict[str, Any]:
    least = {"model": "tiny", "input" if dialect == "responses" else "messages": list(items)}
    return least | ({"max_tokens": 99} if dialect == "messages" else {}) | more


def _saved(*frames: Any, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    more = {"save_all": True, "append_images": frames[1:]} if len(frames) > 1 else {}
    frames[0].save(file, form, **more, **options)
    return file.getvalue()


def _image(color: str) -> Any:
    from PIL import Image

    return Image.new("RGB", (16, 16), color)


def _turned() -> bytes:
    from PIL import Image

    exif = Image.Exif()
    exif[0x0112] = 6
    return _saved(_image("red"), form="JPEG", exif=exif)


def _bomb() -> bytes:
    """Return a PNG whose header promises 60,000 x 60,000 pixels."""
    data = bytearray(make_picture().data)
    data[16:24] = struct.pack(">II", 60_000, 60_000)
    data[29:33] = struct.pack(">I", zlib.crc32(bytes(data[12:29])))
    return bytes(data)


HOSTILE: Final[dict[str, tuple[Callable[[], bytes], str]]] = {
    "broken": (lambda: make_picture().data[:60], "is broken: "),
    "gif": (lambda: _saved(_image("red"), _image("blue"), form="GIF"), "has 2 frames; give one of them"),
    "apng": (lambda: _saved(_image("red"), _image("blue")), "has 2 frames"),
    "turned": (_turned, "has the EXIF orientation 6: turn its pixels"),
    "bomb": (_bomb, "pixels"),
    "svg": (lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is of no known type; known are image/png"),
    "html": (lambda: b"<html><script>alert(1)</script></html>", "is of no known type"),
    "text": (lambda: b"BM no picture at all", "is broken: "),
    "thin": (lambda: make_picture(2000, 2).data, "refuses a picture"),
}
"""Files that a chat refuses, and why."""
