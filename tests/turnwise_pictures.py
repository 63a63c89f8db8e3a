"""A plugin for runs with pictures: an engine that notes those of its requests, and tools that return some."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

from attrs import evolve, frozen

from turnwise import Engine, GenerateRequest, GenerateResult, Registry, Resources, Task, Tool, ToolResult, hookimpl
from turnwise.media import read_picture
from turnwise_chat_templates.render import HuggingFaceTokenizer
from turnwise_testing.engines.scripted import ScriptedEngine
from turnwise_testing.inputs.vision import qwen_tokenizer

CALL = '<tool_call>\n{"name": "camera", "arguments": {}}\n</tool_call><|im_end|>'


@frozen
class EngineOptions:
    """
    Options of `seeing`.

    Attributes:
        pictures: the engine takes them.
        log: of its requests, a line for each.
        num_calls: of the camera.
        dies: file that the engine makes and then ends its process, at the first request with two pictures.
        waits: file that the engine makes at each request with two pictures; it answers none of them until it is started
            with the file there.
    """

    pictures: bool = True
    log: str = ""
    num_calls: int = 1
    dies: str = ""
    waits: str = ""


class SeeingEngine(ScriptedEngine):
    """Writes the places and keys of the pictures of each request to a file."""

    log: Path | None = None
    dies: Path | None = None
    waits: Path | None = None

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        if self.dies is not None and len(request.pictures) == 2 and not self.dies.exists():
            self.dies.touch()
            os._exit(1)
        if self.waits is not None and len(request.pictures) == 2:
            self.waits.touch()
            await asyncio.Event().wait()
        if self.log is not None:
            places = [(each.start, each.num_tokens, each.picture.key) for each in request.pictures]
            with self.log.open("a") as file:
                file.write(json.dumps({"places": places, "ids": request.token_ids.tolist()}) + "\n")
        return await super().generate(request)


def make_engine(options: EngineOptions, _resources: Resources) -> Engine:
    """Return an engine that calls the camera and then answers."""
    encode = HuggingFaceTokenizer(qwen_tokenizer()).encode
    (opening,) = encode("<tool_response>")

    def sample(request: GenerateRequest) -> list[int]:
        is_asked = request.token_ids.tolist().count(opening) < options.num_calls
        return encode(CALL if is_asked else "A cat.<|im_end|>")

    engine = SeeingEngine(sample)
    engine.capabilities = evolve(engine.capabilities, pictures=options.pictures)
    engine.log = Path(options.log) if options.log else None
    engine.dies = Path(options.dies) if options.dies else None
    engine.waits = Path(options.waits) if options.waits and not Path(options.waits).exists() else None
    return engine


@frozen
class CameraOptions:
    """`file`: the picture that the camera takes."""

    file: str = ""


@frozen
class Camera:
    """Returns a picture."""

    options: CameraOptions

    @property
    def schema(self) -> dict[str, object]:
        parameters = {"type": "object", "properties": {}}
        return {"type": "function", "function": {"name": "camera", "description": "Looks.", "parameters": parameters}}

    async def create(self, task: Task) -> None:
        """Need no session."""

    async def execute(self, session: object, arguments: object) -> ToolResult:
        data = await asyncio.to_thread(Path(self.options.file).read_bytes)
        return ToolResult(text="Seen:", pictures=(read_picture(data),))

    async def release(self, session: object) -> None:
        """Close nothing."""


@hookimpl
def register_engines(registry: Registry[Engine]) -> None:
    """Register the engine `seeing`."""
    registry.add("seeing", make_engine, config=EngineOptions, reads_weights=False)


@hookimpl
def register_tools(registry: Registry[Tool]) -> None:
    """Register the tool `camera`."""
    registry.add("camera", lambda options, _resources: Camera(options), config=CameraOptions)
