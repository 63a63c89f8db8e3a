"""
A server of the tests: notes of one process, and tools that fail in every way.

    python notes_server.py [PORT | babble]
"""

import base64
import os
import sys
import time

from mcp import MCPError
from mcp.server import MCPServer
from mcp.server.mcpserver import Image
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import BlobResourceContents, EmbeddedResource, ImageContent, TextContent, TextResourceContents

PIXEL = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC")

server = MCPServer("notes")
notes: list[str] = []


@server.tool()
def add_note(text: str, times: int = 1) -> str:
    """Keeps a note."""
    notes.extend([text] * times)
    return f"{len(notes)} notes"


@server.tool()
def describe() -> dict[str, object]:
    """Returns the process and the variable SECRET."""
    return {"pid": os.getpid(), "secret": os.environ.get("SECRET", ""), "other": os.environ.get("UNRELATED", "")}


@server.tool()
def fail() -> str:
    """Raises."""
    raise ToolError("no such note")


@server.tool()
def refuse(code: int) -> str:
    """Answers with an error of the protocol."""
    raise MCPError(code=code, message="not today")


@server.tool()
def draw() -> Image:
    """Returns an image."""
    return Image(data=b"123456", format="png")


@server.tool()
def photograph() -> list[str | Image]:
    """Returns a picture between words."""
    return ["before", Image(data=PIXEL, format="png"), "after"]


@server.tool()
def picture_file() -> list[EmbeddedResource]:
    """Returns a picture and a sound as resources."""
    files = {"image/png": PIXEL, "audio/wav": b"RIFF"}
    blobs = [
        BlobResourceContents(uri=f"notes://{kind}", mime_type=kind, blob=base64.b64encode(data).decode())
        for kind, data in files.items()
    ]
    return [EmbeddedResource(type="resource", resource=blob) for blob in blobs]


@server.tool()
def show(blocks: list[str]) -> list[TextContent | ImageContent | EmbeddedResource]:
    """Returns blocks: `image`, `file` and `page`, each with a name behind a colon, and texts."""
    return [_block(*block.partition(":")) for block in blocks]


def _block(kind: str, colon: str, name: str) -> TextContent | ImageContent | EmbeddedResource:
    image = base64.b64encode(PIXEL + name.encode()).decode()
    if kind == "image" and colon:
        return ImageContent(type="image", data=image, mime_type="image/png")
    if kind == "file" and colon:
        blob = BlobResourceContents(uri=f"notes://{name}", mime_type="image/png", blob=image)
        return EmbeddedResource(type="resource", resource=blob)
    if kind == "page" and colon:
        page = TextResourceContents(uri=f"notes://{name}", mime_type="text/plain", text=name)
        return EmbeddedResource(type="resource", resource=page)
    return TextContent(type="text", text=kind + colon + name)


@server.tool()
def die() -> str:
    """Ends the process."""
    print("dying as asked", file=sys.stderr, flush=True)
    os._exit(3)


@server.tool()
def wait() -> str:
    """Takes longer than any call may."""
    time.sleep(3600)
    return ""


@server.resource("notes://all")
def all_notes() -> str:
    """All notes."""
    return "\n".join(notes) or "none"


@server.prompt()
def summarize(style: str) -> str:
    """Asks for a summary."""
    return f"Summarize the notes, {style}."


if __name__ == "__main__":
    if sys.argv[1:] == ["babble"]:
        print("loading...\x1b[2J\n" * 500, flush=True)  # where its client expects messages
        server.run("stdio")
    elif len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
