"""verl's tools (`BaseTool`), from the YAML file that verl's `tool_config_path` names, as tools of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any
from uuid import uuid4

from attrs import field, frozen

from turnwise import Task, Tool, ToolResult
from turnwise.errors import ConfigError, DataError, ToolError
from turnwise.showing import join_parts
from turnwise.types import JsonObject, Picture, ToolSchema
from turnwise_verl_bridge.class_files import Section, accepted, make, read_sections, task_options, with_ground_truth
from turnwise_verl_bridge.config import VerlToolsConfig
from turnwise_verl_bridge.pictures import read_image


def build_tools(config: VerlToolsConfig) -> tuple[Tool, ...]:
    """Return the tools of a file in its order; `ConfigError` when one is not usable."""
    return tuple(_build(section, config) for section in read_sections(config.file, "tools"))


def _build(section: Section, config: VerlToolsConfig) -> VerlTool:
    unknown = section.rest.keys() - {"tool_schema"}
    if unknown:
        raise ConfigError(f"{section.place}: unknown key {min(unknown)!r}")
    if section.config.get("type", "native") != "native":
        raise ConfigError(
            f"{section.place}: tools of type {section.config['type']!r} are not supported; the tools 'mcp' of"
            " turnwise-mcp-tools run MCP servers"
        )
    given = section.rest.get("tool_schema")
    schema = None if given is None else _schema_object(given)
    tool = make(section, config.modules, config=dict(section.config), tool_schema=schema)
    missing = [name for name in ("create", "execute", "release") if not callable(getattr(tool, name, None))]
    if missing:
        raise ConfigError(f"{section.place}: {section.class_name} is no BaseTool: it has no {', '.join(missing)}")
    return VerlTool(tool=tool, schema=_plain_schema(tool, given), per_call=config.session == "call")


def _schema_object(schema: Mapping[str, object]) -> Any:
    """Return a schema as verl's tools expect it, with attributes; without verl, an object that has the same ones."""
    try:
        from verl.tools.schemas import OpenAIFunctionToolSchema
    except ImportError:
        return SchemaView(schema)
    return OpenAIFunctionToolSchema.model_validate(schema)


def _plain_schema(tool: Any, given: ToolSchema | None) -> ToolSchema:
    """Return the file's schema, or else the schema that the tool describes itself with."""
    if given is not None:
        return given
    own = tool.get_openai_tool_schema() if hasattr(tool, "get_openai_tool_schema") else tool.tool_schema
    plain: ToolSchema = own if isinstance(own, Mapping) else own.model_dump(exclude_unset=True, exclude_none=True)
    return plain


class SchemaView:
    """A JSON object whose values are attributes, in place of verl's pydantic models."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("_values", {})
        if name not in values:
            raise AttributeError(name)
        value = values[name]
        return SchemaView(value) if isinstance(value, Mapping) else value

    def model_dump(self, **_options: object) -> dict[str, Any]:
        """Return the object itself."""
        return dict(self._values)


@frozen
class VerlSession:
    """The instance of an episode, or of a call, and the options that its task has for the tool."""

    instance_id: str
    task: Task
    options: JsonObject = field(factory=dict)


@frozen(kw_only=True)
class VerlTool:
    """
    A tool of verl.

    Attributes:
        tool: has `create`, `execute`, `release`, and perhaps `calc_reward`.
        schema: which the model sees.
        per_call: each call has a new instance, as in verl's agent loop, and there is no reward at the end.
    """

    tool: Any
    schema: ToolSchema
    per_call: bool = False

    async def create(self, task: Task) -> VerlSession:
        """Create the episode's instance with the `create_kwargs` of the task's `tools_kwargs`."""
        options = task_options(task, "tools_kwargs").get(self.schema["function"]["name"], {})
        session = VerlSession(str(uuid4()), task, options if isinstance(options, Mapping) else {})
        return session if self.per_call else await self._create(session)

    async def execute(self, session: Any, arguments: Mapping[str, object]) -> ToolResult:
        opened: VerlSession = session
        if not self.per_call:
            return await self._execute(opened, arguments)
        instance = await self._create(VerlSession(str(uuid4()), opened.task, opened.options))
        try:
            return await self._execute(instance, arguments)
        finally:
            await self._release(instance)

    async def release(self, session: Any) -> float | None:
        """Return `calc_reward` of the episode's instance."""
        if self.per_call:
            return None
        try:
            if not hasattr(self.tool, "calc_reward"):
                return None
            options = self._options(session, "calc_reward_kwargs")
            return float(await self.tool.calc_reward(session.instance_id, **accepted(self.tool.calc_reward, options)))
        finally:
            await self._release(session)

    async def _create(self, session: VerlSession) -> VerlSession:
        given = self._options(session, "create_kwargs")
        # verl's agent loop passes one argument `create_kwargs`, and earlier versions its content.
        options = {"create_kwargs": dict(given), **with_ground_truth(self.tool.create, given, session.task)}
        made = await self.tool.create(session.instance_id, **accepted(self.tool.create, options))
        instance_id = made[0] if isinstance(made, tuple) else made
        return VerlSession(str(instance_id), session.task, session.options)

    async def _execute(self, session: VerlSession, arguments: Mapping[str, object]) -> ToolResult:
        options = accepted(self.tool.execute, self._options(session, "execute_kwargs"))
        response = await self.tool.execute(session.instance_id, dict(arguments), **options)
        if not isinstance(response, tuple) or len(response) != 3:
            raise TypeError(f"execute returned {response!r}, expected (response, reward, metrics)")
        answer, reward, metrics = response
        return join_parts(
            _parts_of(answer),
            reward=None if reward is None else float(reward),
            metrics={
                str(name): float(value)
                for name, value in (metrics or {}).items()
                if isinstance(value, Real) and not isinstance(value, bool)
            },
        )

    async def _release(self, session: VerlSession) -> None:
        options = accepted(self.tool.release, self._options(session, "release_kwargs"))
        await self.tool.release(session.instance_id, **options)

    @staticmethod
    def _options(session: VerlSession, name: str) -> Mapping[str, Any]:
        options = session.options.get(name)
        return options if isinstance(options, Mapping) else {}


def _parts_of(answer: object) -> Iterator[str | Picture]:
    """
    Yield the images and the text of a response, as verl's loop shows them; videos become a line.

    Raises:
        ToolError: an image is none of pillow and has no bytes.
    """
    if isinstance(answer, str):
        yield answer
        return
    images = getattr(answer, "image", None) or ()
    try:
        # Also one alone, and verl's loop leaves None out.
        for image in images if isinstance(images, list | tuple) else [images]:
            if image is not None:
                yield read_image(image, "an image of the response")
    except DataError as error:
        raise ToolError(str(error)) from error
    if text := getattr(answer, "text", None):
        yield str(text)
    if number := len(getattr(answer, "video", None) or ()):
        yield f"[{number} video{'s' if number > 1 else ''} left out]"
