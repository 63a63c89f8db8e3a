"""
Builds the tools of a run from the entries of `tools` and `tools_file`.

An entry names a registered tool or set of tools, a Python function or a class. Functions and classes come only from
modules that `tool_modules` lists.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from turnwise.config.file import read_mapping
from turnwise.config.parts import Choice, RegisteredTool, ToolClass, ToolEntry, ToolFunction, check_module_allowed
from turnwise.config.resolve import build_part
from turnwise.config.structuring import structure
from turnwise.errors import ConfigError, TurnwiseError, describe
from turnwise.plugin.host import Host
from turnwise.plugin.registry import did_you_mean
from turnwise.protocols import Resources, Tool
from turnwise.tools.function import FunctionTool, function_tool, placed
from turnwise.tools.schema import compile_schema
from turnwise.tools.toolbox import DescribedTool, tools_by_name
from turnwise.types import ToolSchema


@frozen
class ToolsFile:
    """The content of a `tools_file`: `tools` as in a run's config."""

    tools: tuple[ToolEntry, ...]


def read_tools_file(path: Path) -> tuple[ToolEntry, ...]:
    """Read a YAML or TOML file with the one key `tools`; `ConfigError` has one line for each problem."""
    try:
        file: ToolsFile = structure(read_mapping(path), ToolsFile)
    except ConfigError as error:
        lines = [line.removeprefix(f"{path}: ") for line in str(error).splitlines()]
        raise ConfigError("\n".join(f"{path}: {line}" for line in lines)) from error
    return file.tools


def build_tools(
    entries: Iterable[ToolEntry],
    host: Host,
    resources: Resources,
    allowed_modules: Sequence[str] = (),
    base_dir: Path | None = None,
) -> dict[str, Tool]:
    """
    Build the tools of a config's entries, in their order, by the name in the schema.

    Functions and classes may come from `allowed_modules` and their submodules. Relative paths in options start from
    `base_dir`.

    Raises:
        ConfigError: one line that names the tool and the problem.
    """
    tools: list[Tool] = []
    for entry in entries:
        label = repr(_name_target(entry))
        try:
            tool = _build(entry, host, resources, allowed_modules, base_dir)
        except TurnwiseError as error:  # has a text for users already
            raise ConfigError(f"tool {label}: {error}") from error
        except Exception as error:
            raise ConfigError(f"tool {label} cannot be built: {describe(error)}") from error
        schema = entry.schema if isinstance(entry, RegisteredTool | ToolFunction | ToolClass) else None
        if not isinstance(tool, tuple):
            tools.append(_check_tool(tool, schema, label))
        elif schema is not None:
            raise ConfigError(f"tool {label}: it is a set of {len(tool)} tools, which 'schema' cannot replace")
        else:
            tools.extend(_check_tool(each, None, label) for each in tool)
    return dict(tools_by_name(tools))


def _name_target(entry: ToolEntry) -> str:
    if isinstance(entry, Choice):
        return entry.name
    return entry.function if isinstance(entry, ToolFunction) else entry.target


def _build(
    entry: ToolEntry, host: Host, resources: Resources, allowed: Sequence[str], base_dir: Path | None
) -> Tool | tuple[Tool, ...]:
    if isinstance(entry, Choice):
        built: Tool | tuple[Tool, ...] = build_part(host, "tools", entry, resources, base_dir=base_dir)
        return built
    if isinstance(entry, ToolClass):
        made: Tool = _import_allowed(entry.target, allowed, base_dir)(**entry.options)
        return made
    found = _import_allowed(entry.function, allowed, base_dir)
    if not isinstance(found, FunctionTool):  # a plain function; the decorator has made a tool of the others
        return function_tool(found, schema=entry.schema, run_in=entry.run_in)
    return placed(found, entry.run_in) if entry.run_in else found


def _check_tool(tool: Tool, schema: ToolSchema | None, label: str) -> Tool:
    missing = [name for name in ("schema", "create", "execute", "release") if not hasattr(tool, name)]
    if missing:
        raise ConfigError(f"tool {label} is not a Tool: {type(tool).__name__} has no {', '.join(missing)}")
    described = tool if schema in (None, tool.schema) else DescribedTool(tool, schema)
    compile_schema(described.schema, label)
    return described


def _import_allowed(target: str, allowed: Sequence[str], base_dir: Path | None) -> Any:
    """Import the object ``package.module:name``, if both this module and the one that defines it are allowed."""
    module_name, _, name = target.partition(":")
    check_module_allowed(module_name, allowed)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # The folder is not added to the path: each file in it could replace a library, in every process of the run.
        if base_dir is None or not any((base_dir / f"{error.name}{end}").exists() for end in ("", ".py")):
            raise
        raise ConfigError(f"{error}, but a file beside the config is: set PYTHONPATH={base_dir}") from error
    if not hasattr(module, name):
        public = tuple(each for each, value in vars(module).items() if callable(value) and not each.startswith("_"))
        raise ConfigError(f"module {module_name} has no {name!r}{did_you_mean(name, public)}")
    found = getattr(module, name)
    # An allowed module has names of other modules, such as os.system, which the user has not allowed.
    origin = getattr(found.func if isinstance(found, FunctionTool) else found, "__module__", None)
    check_module_allowed(origin or module_name, allowed)
    return found
