"""
Builds the tools of a run from the entries of `tools` and `tools_file`.

An entry names a registered tool or set of tools, or a function, a class or an object of the user's own code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from attrs import frozen

from turnwise.config.file import read_mapping
from turnwise.config.own_code import OwnCode
from turnwise.config.parts import FILE_END, Choice, ToolChoice
from turnwise.config.resolve import build_part
from turnwise.config.structuring import structure
from turnwise.errors import ConfigError, PluginError
from turnwise.plugin.host import Host
from turnwise.protocols import Resources, Tool
from turnwise.tools.schema import compile_schema
from turnwise.tools.toolbox import DescribedTool, tools_by_name
from turnwise.types import ToolSchema


@frozen
class ToolsFile:
    """The content of a `tools_file`: `tools` as in a run's config."""

    tools: tuple[ToolChoice, ...]


def read_tools_file(path: Path, modules: Iterable[str] = ()) -> tuple[ToolChoice, ...]:
    """
    Read a YAML or TOML file with the one key `tools`: entries as in a run's config, or all of them in verl's form.

    Entries of verl have a `class_name`; the tools `verl` build them, from classes of verl and of the given modules.

    Raises:
        ConfigError: one line for each problem.
    """
    data = read_mapping(path)
    if data.keys() == {"tools"} and _is_verl_form(data["tools"]):
        allowed = ["verl", *(name for name in modules if not name.endswith(FILE_END))]
        return (ToolChoice("verl", {"file": str(path), "modules": allowed}),)
    try:
        file: ToolsFile = structure(data, ToolsFile)
    except ConfigError as error:
        lines = [line.removeprefix(f"{path}: ") for line in str(error).splitlines()]
        raise ConfigError("\n".join(f"{path}: {line}" for line in lines)) from error
    return file.tools


def _is_verl_form(entries: object) -> bool:
    listed = entries if isinstance(entries, list) else []
    return bool(listed) and all(isinstance(each, Mapping) and "class_name" in each for each in listed)


def build_tools(entries: Iterable[Choice], host: Host, resources: Resources, code: OwnCode) -> dict[str, Tool]:
    """
    Build the tools of a config's entries, in their order, by the name in the schema.

    Relative paths in options start from the folder of the code.

    Raises:
        ConfigError: lines that name the tool and the problem.
    """
    tools: list[Tool] = []
    for entry in entries:
        try:
            built = build_part(host, "tools", entry, resources, code=code)
            schema = entry.schema if isinstance(entry, ToolChoice) else None
            tools.extend(_described(built, schema, repr(entry.name)))
        except (ConfigError, PluginError) as error:
            raise ConfigError(f"tool {entry.name!r}: {str(error).removeprefix(f'{entry.name}: ')}") from error
    return dict(tools_by_name(tools))


def _described(built: Tool | tuple[Tool, ...], schema: ToolSchema | None, label: str) -> Iterator[Tool]:
    if isinstance(built, tuple) and schema is not None:
        raise ConfigError(f"it is a set of {len(built)} tools, which 'schema' cannot replace")
    for tool in built if isinstance(built, tuple) else (built,):
        described = tool if schema is None or schema == tool.schema else DescribedTool(tool, schema)
        compile_schema(described.schema, label)
        yield described
