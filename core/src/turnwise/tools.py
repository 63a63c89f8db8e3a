"""
The tools of a run: how they are built from its config, and the box that gives each episode its session of them.

What a session does is `turnwise.tool_session`.
"""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import cattrs
from attrs import field, frozen

from turnwise.errors import ConfigError, TurnwiseError
from turnwise.function_tool import FunctionTool, function_tool, placed
from turnwise.protocols import Resources, Tool
from turnwise.registry import Registry, did_you_mean
from turnwise.tool_schema import CompiledSchema, Schema, compile_schema
from turnwise.tool_session import SUSPENDING, ToolSession
from turnwise.types import Task, ToolResult


def _by_name(tools: Iterable[Tool] | Mapping[str, Tool]) -> Mapping[str, Tool]:
    by_name: dict[str, Tool] = {}
    for tool in tools.values() if isinstance(tools, Mapping) else tools:
        name = compile_schema(tool.schema, type(tool).__qualname__).name
        if name in by_name:
            raise ConfigError(f"two tools are named {name!r}: give one of them another name in its schema")
        by_name[name] = tool
    return by_name


@frozen(eq=False)
class ToolBox:
    """
    The tools of a run, ready to be called in many episodes at once.

    Making one raises `ConfigError` when a schema is not valid or two tools have one name.

    Attributes:
        tools: by name, in configured order.
        release_s: seconds that releasing a session of one tool may take.
    """

    tools: Mapping[str, Tool] = field(converter=_by_name)
    release_s: float = 30.0
    _compiled: Mapping[str, CompiledSchema] = field(init=False, repr=False)

    @_compiled.default
    def _compile(self) -> Mapping[str, CompiledSchema]:
        return {name: compile_schema(tool.schema) for name, tool in self.tools.items()}

    @property
    def schemas(self) -> tuple[Schema, ...]:
        """The schemas of all tools, in configured order."""
        return tuple(tool.schema for tool in self.tools.values())

    @asynccontextmanager
    async def session(self, task: Task, notes: Mapping[str, Any] | None = None) -> AsyncIterator[ToolSession]:
        """
        Open an episode's session; whatever happens inside, what was created is released at the end.

        Args:
            task: what the episode runs.
            notes: by tool, what `ToolSession.suspend` returned when the episode was cut.
        """
        session = ToolSession(task, self.tools, self._compiled, self.release_s, notes or {})
        try:
            yield session
        finally:
            await session.release()


# Tools from a config


@frozen(kw_only=True)
class ToolSpec:
    """
    One entry of a config's list of tools: exactly one of `name`, `function` and `class_path`.

    Attributes:
        name: registered by a plugin.
        function: ``package.module:function``, see `function_tool`; its module must be allowed.
        class_path: ``package.module:Class``, a `Tool` built with `options` as keywords; its module must be allowed.
        options: of the registered tool or the class.
        schema: in place of the tool's own.
    """

    name: str = ""
    function: str = ""
    class_path: str = ""
    options: Mapping[str, Any] = field(factory=dict)
    schema: Schema | None = None

    @property
    def label(self) -> str:
        """What texts call it."""
        return repr(self.name or self.function or self.class_path)


_KINDS: Final = ("name", "function", "class")


def tool_specs(entries: object, where: str = "tools") -> tuple[ToolSpec, ...]:
    """
    Read a list of tools as a YAML file holds it.

    Args:
        entries: a list, or a mapping with the one key `tools`. An entry is the name of a registered tool, or a mapping
            with one of `name`, `function` and `class`, perhaps `schema`, and options as further keys.
        where: place of the list, for the text of an error.

    Raises:
        ConfigError: one line that names the entry and what was expected.
    """
    if isinstance(entries, Mapping) and set(entries) == {"tools"}:
        entries = entries["tools"]
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise ConfigError(f"{where}: expected a list of tools, got {type(entries).__name__}")
    return tuple(_spec(entry, f"{where}[{index}]") for index, entry in enumerate(entries))


def _spec(entry: object, where: str) -> ToolSpec:
    if isinstance(entry, str):
        entry = {"name": entry}
    if not isinstance(entry, Mapping) or any(not isinstance(key, str) for key in entry):
        raise ConfigError(f"{where}: expected a name, or a section with one of {', '.join(_KINDS)}, got {entry!r}")
    given = [kind for kind in _KINDS if kind in entry]
    if len(given) != 1:
        raise ConfigError(f"{where}: expected exactly one of the keys {', '.join(_KINDS)}, got {', '.join(entry)}")
    target, schema = entry[given[0]], entry.get("schema")
    if not isinstance(target, str) or not target:
        raise ConfigError(f"{where}.{given[0]}: expected text, got {target!r}")
    if schema is not None and not isinstance(schema, Mapping):
        raise ConfigError(f"{where}.schema: expected a section, got {schema!r}")
    options = {key: value for key, value in entry.items() if key not in (*_KINDS, "schema")}
    fields = {"name": "name", "function": "function", "class": "class_path"}
    return ToolSpec(**{fields[given[0]]: target}, options=options, schema=schema)


def structure_options(options: Any, config: type) -> Any:
    """Make an object of a config class from plain options; `ConfigError` says which option does not fit."""
    if isinstance(options, config):
        return options
    try:
        return cattrs.Converter(forbid_extra_keys=True).structure(options, config)
    except Exception as error:
        raise ConfigError("; ".join(cattrs.transform_error(error, path="options"))) from error


def load_tools(
    specs: Iterable[ToolSpec],
    registry: Registry[Tool],
    resources: Resources,
    allowed_modules: Sequence[str] = (),
    structure: Callable[[Any, type], Any] = structure_options,
) -> dict[str, Tool]:
    """
    Build the tools of a run.

    Args:
        specs: what the config asks for.
        registry: of the tools that plugins registered.
        resources: for the factories of registered tools.
        allowed_modules: modules, with all below them, from which functions and classes may come.
        structure: makes the options of a registered tool an object of its config class.

    Returns:
        The tools by the name in their schema, in the order of `specs`.

    Raises:
        ConfigError: one line that names the tool and what is wrong with it.
    """
    tools: list[Tool] = []
    for spec in specs:
        try:
            tool = _built(spec, registry, resources, allowed_modules, structure)
        except TurnwiseError as error:
            raise ConfigError(f"tool {spec.label}: {error}") from error
        except Exception as error:
            raise ConfigError(f"tool {spec.label} cannot be made: {type(error).__name__}: {error}") from error
        tools.append(_checked(tool, spec))
    return dict(_by_name(tools))


def _built(
    spec: ToolSpec,
    registry: Registry[Tool],
    resources: Resources,
    allowed: Sequence[str],
    structure: Callable[[Any, type], Any],
) -> Tool:
    if spec.function:
        return _from_function(spec, allowed)
    if spec.class_path:
        made: Tool = _allowed_object(spec.class_path, allowed)(**spec.options)
        return made
    entry = registry.get(spec.name)
    return entry.factory(structure(spec.options, entry.config), resources)


def _checked(tool: Tool, spec: ToolSpec) -> Tool:
    missing = [name for name in ("schema", "create", "execute", "release") if not hasattr(tool, name)]
    if missing:
        raise ConfigError(f"tool {spec.label} is not a Tool: {type(tool).__name__} has no {', '.join(missing)}")
    described = tool if spec.schema in (None, tool.schema) else DescribedTool(tool, spec.schema)
    compile_schema(described.schema, spec.label)
    return described


def _from_function(spec: ToolSpec, allowed: Sequence[str]) -> Tool:
    if others := spec.options.keys() - {"run_in"}:
        raise ConfigError(f"a function takes no option but run_in, got {', '.join(sorted(others))}")
    found = _allowed_object(spec.function, allowed)
    run_in = spec.options.get("run_in") or None
    if not isinstance(found, FunctionTool):
        return function_tool(found, schema=spec.schema, run_in=run_in)
    return placed(found, run_in) if run_in else found


def _allowed_object(path: str, allowed: Sequence[str]) -> Any:
    """Import what ``package.module:name`` names, when both the module and the home of what it holds are allowed."""
    module_name, _, name = path.partition(":")
    if not module_name or not name.isidentifier():
        raise ConfigError("expected the form package.module:name")
    _refuse_unlisted(module_name, allowed)
    module = importlib.import_module(module_name)
    if not hasattr(module, name):
        public = tuple(each for each, value in vars(module).items() if callable(value) and not each.startswith("_"))
        raise ConfigError(f"module {module_name} has no {name!r}{did_you_mean(name, public)}")
    found = getattr(module, name)
    # A listed module imports others: what it only borrows, such as os.system, is not what the user listed.
    home = getattr(found.func if isinstance(found, FunctionTool) else found, "__module__", None)
    _refuse_unlisted(home or module_name, allowed)
    return found


def _refuse_unlisted(module_name: str, allowed: Sequence[str]) -> None:
    if not any(module_name == entry or module_name.startswith(f"{entry}.") for entry in allowed):
        listed = ", ".join(allowed) or "nothing"
        raise ConfigError(f"module {module_name!r} is not allowed; list it in tool_modules, which holds {listed}")


@frozen(eq=False)
class DescribedTool:
    """A tool under another schema: perhaps another name, other descriptions or narrower parameters."""

    tool: Tool
    schema: Schema

    async def create(self, task: Task) -> object:
        """Begin the tool's own session."""
        return await self.tool.create(task)

    async def execute(self, session: object, arguments: Mapping[str, Any]) -> ToolResult:
        """Run the tool's own call."""
        return await self.tool.execute(session, arguments)

    async def release(self, session: object) -> float | None:
        """End the tool's own session."""
        return await self.tool.release(session)

    def __getattr__(self, name: str) -> Any:
        """Have `suspend` and `restore` when the tool has them."""
        if name in SUSPENDING:
            return getattr(self.tool, name)
        raise AttributeError(name)
