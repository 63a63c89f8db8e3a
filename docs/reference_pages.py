"""
The lines of each page of `docs/reference/`, read off the sources of the core.

Docstrings become prose, their `Attributes:` and the fields of attrs classes tables, and the parsers of argparse lists.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import ModuleType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin

import attrs

from turnwise import (
    config,
    config_runtime,
    engine,
    hookspecs,
    judge,
    protocols,
    record,
    result,
    trajectory,
    types,
    weights,
)
from turnwise.cli import make_parser
from turnwise.config_parts import file_fields
from turnwise.config_schema import attribute_docs
from turnwise.config_structure import unstructure
from turnwise.host import KINDS, Host, load
from turnwise.types import PluginRecipe

ROOT: Final = Path(__file__).parents[1]
HELP: Final = argparse._HelpAction  # noqa: SLF001 - argparse has no public name for it
SUBPARSERS: Final = argparse._SubParsersAction  # noqa: SLF001 - argparse has no public name for it
PLUGINS: Final = tuple(
    sorted(re.findall(r"^-e plugins/(\w+)", (ROOT / "requirements-dev.txt").read_text(encoding="utf-8"), re.MULTILINE))
)
"""The plugins that every developer has, which are those of this repository."""

_WIDTH: Final = 120
_FUNCTIONS: Final = ast.FunctionDef | ast.AsyncFunctionDef

# Hooks


def hooks_page() -> Iterator[str]:
    """Yield the lines of the page about hooks."""
    yield from ("# Hooks", "", *prose(inspect.getdoc(hookspecs) or ""), *_HOOKS_INTRODUCTION.splitlines(), "")
    for node in ast.parse(inspect.getsource(hookspecs)).body:
        if isinstance(node, ast.FunctionDef):
            yield from hook_lines(node)


def hook_lines(node: ast.FunctionDef) -> Iterator[str]:
    """Yield what the page says about one hook."""
    yield from (f"## {node.name}", "", *fenced(signature_of(node, inspect.getsource(hookspecs)), "python"), "")
    meaning, _, slots = (ast.get_docstring(node) or "").partition("\n\n")
    before, _, example = slots.partition("Example::\n")
    yield from (markdown(meaning), "")
    for slot in re.split(r"\n(?=[A-Z])", before.strip()):
        name, _, text = slot.partition(":")
        yield from wrapped(f"- **{name}**: {markdown(text)}")
    yield from ("", *fenced(textwrap.dedent(example).strip(), "python"), "")


# Protocols, types and results


def protocols_page() -> Iterator[str]:
    """Yield the lines of the page about protocols."""
    yield from ("# Protocols", "", *prose(inspect.getdoc(protocols) or ""), *_PROTOCOLS_INTRODUCTION.splitlines(), "")
    for module in (engine, protocols, judge, weights):
        for name in public_classes(module):
            yield from class_lines(module, name)


def types_page() -> Iterator[str]:
    """Yield the lines of the page about the data that protocols exchange."""
    yield from ("# Types", "", *prose(inspect.getdoc(types) or ""))
    for name in public_classes(types):
        yield from class_lines(types, name)


def results_page() -> Iterator[str]:
    """Yield the lines of the page about what a run hands back."""
    yield from ("# Results", "", *_RESULTS_INTRODUCTION.splitlines(), "")
    yield from class_lines(result, "EpisodeResult")
    yield from class_lines(record, "TokenRecord")
    yield from class_lines(trajectory, "Trajectory")
    yield from class_lines(trajectory, "Path")
    # Read as text: importing the module would import torch.
    source = (ROOT / "core/src/turnwise/batch.py").read_text(encoding="utf-8")
    tree = ast.parse(source)
    (batch,) = (each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == "RolloutBatch")
    summary, _, attributes = (ast.get_docstring(batch) or "").partition("\n\nAttributes:\n")
    yield from ("## RolloutBatch", "", *prose(ast.get_docstring(tree) or ""))
    yield from prose(summary)
    for item in re.split(r"\n(?=    \w)", f"\n{attributes}")[1:]:
        name, _, text = item.strip().partition(": ")
        yield from wrapped(f"- `{name}`: {markdown(text)}")
    yield ""
    yield from members_of(batch, source)


def public_classes(module: ModuleType) -> Iterator[str]:
    """Yield the names of a module's own public classes, in the order of the source."""
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name


def class_lines(module: ModuleType, name: str) -> Iterator[str]:
    """Yield what a page says about a class."""
    source, kind = inspect.getsource(module), getattr(module, name)
    (node,) = (each for each in ast.parse(source).body if isinstance(each, ast.ClassDef) and each.name == name)
    yield from (f"## {name}", "", *prose(summary_of(kind)))
    if attrs.has(kind):
        yield from fields_table(kind)
    elif issubclass(kind, Enum):
        yield from ("Values: " + ", ".join(f"`{each.value}`" for each in kind) + ".", "")
    yield from members_of(node, source)


def members_of(node: ast.ClassDef, source: str) -> Iterator[str]:
    """Yield the described attributes, the properties and the methods of a class."""
    methods: list[str] = []
    for member, following in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(member, ast.AnnAssign) and isinstance(following, ast.Expr):
            yield from wrapped(f"- `{ast.unparse(member)}`: {markdown(ast.literal_eval(following.value))}")
        elif isinstance(member, _FUNCTIONS) and not member.name.startswith("_"):
            if is_property(member):
                text = markdown(ast.get_docstring(member) or "")
                yield from wrapped(f"- `{member.name}: {ast.unparse(member.returns or ast.Constant(None))}`: {text}")
            else:
                methods += [
                    *fenced(signature_of(member, source), "python"),
                    "",
                    *prose(ast.get_docstring(member) or ""),
                ]
    yield from ("", *methods)


def is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a method is read as an attribute."""
    return any(ast.unparse(each) == "property" for each in node.decorator_list)


def signature_of(node: ast.FunctionDef | ast.AsyncFunctionDef, source: str) -> str:
    """Return the signature of a function as it is written, without `self` and its body."""
    lines = source.splitlines()[node.lineno - 1 : node.body[0].lineno - 1]
    text = re.sub(r"\b(self|cls)(, |,\n\s*)?", "", "\n".join(lines), count=1)
    return f"{textwrap.dedent(text)} ..."


# Config


def config_page() -> Iterator[str]:
    """Yield the lines of the page about config files."""
    yield from ("# Config", "", *_CONFIG_INTRODUCTION.splitlines(), "")
    yield from ("## The file", "", *prose(summary_of(config.RunConfig)), *fields_table(config.RunConfig, in_file=True))
    sections = {
        "model": config.ModelConfig,
        "data": config.DataConfig,
        "rollout": config.RolloutConfig,
        "rollout.sampling, rollout.validation_sampling": types.SamplingParams,
        "rollout.deadlines": config.DeadlinesConfig,
        "judge": config.JudgeConfig,
        "judge.pool": config_runtime.PoolConfig,
        "runtime": config.RuntimeConfig,
        "runtime.ray": config_runtime.RayConfig,
        "telemetry": config.TelemetryConfig,
    }
    for name, kind in sections.items():
        yield from (f"## {name}", "", *prose(summary_of(kind)), *fields_table(kind, in_file=True))
    yield from ("## Options of the plugins", "", "What the plugins of this repository register, and their options.", "")
    yield from options_lines(load(PluginRecipe(allow=PLUGINS)))


def options_lines(host: Host) -> Iterator[str]:
    """Yield the options of every registered part that a config can name, by kind."""
    for kind in KINDS:
        places = [code(item.name) for item in attrs.fields(config.RunConfig) if item.metadata.get(config.KIND) == kind]
        for entry in host.registry(kind).entries().values() if places else ():
            yield from (f"### {entry.name}", "", f"In {', '.join(places)}; plugin `{entry.owner}`.", "")
            yield from (
                fields_table(entry.config, in_file=True) if attrs.fields(entry.config) else ("It has no options.", "")
            )


def fields_table(kind: type, *, in_file: bool = False) -> Iterator[str]:
    """Yield a table of the fields of an attrs class, in the words of config files or of Python."""
    docs = attribute_docs(kind)
    yield from (f"| {'key' if in_file else 'field'} | type | default | meaning |", "| --- | --- | --- | --- |")
    for field in file_fields(kind):
        kinds, default = type_text(field.type), default_text(field, json.dumps if in_file else repr)
        kinds = kinds.replace("None", "null") if in_file else kinds
        cells = (code(field.name), code(kinds), default, markdown(docs.get(field.name, "")))
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""


def type_text(kind: Any) -> str:
    """Return a type as people write it, without the modules of its names."""
    if get_origin(kind) is Literal:
        return " | ".join(map(str, get_args(kind)))
    if get_origin(kind) in (Union, UnionType):
        return " | ".join(map(type_text, get_args(kind)))
    text = kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", text).replace("NoneType", "None")


def default_text(field: attrs.Attribute[Any], written: Callable[[Any], str]) -> str:
    """Return the default of a field; of an attrs class what differs from that class's own defaults."""
    default: Any = field.default
    if default is attrs.NOTHING:
        return "required"
    if hasattr(default, "factory"):
        default = default.factory()
    if attrs.has(type(default)):
        changed = {
            each.name: getattr(default, each.name)
            for each in attrs.fields(type(default))
            if not hasattr(each.default, "factory") and getattr(default, each.name) != each.default
        }
        return ", ".join(code(f"{name}: {value}") for name, value in changed.items()) or "its defaults"
    return code(written(default if written is repr and isinstance(default, tuple) else unstructure(default)))


# The command line


def cli_page() -> Iterator[str]:
    """Yield the lines of the page about the command line."""
    parser = make_parser(load(PluginRecipe(allow=())))
    yield from ("# Command line", "", *prose(parser.description or ""))
    yield from (*_CLI_INTRODUCTION.splitlines(), "")
    for command, subparser in subparsers_of(parser).items():
        yield from command_lines(f"turnwise {command}", subparser, level=2)


def command_lines(name: str, parser: argparse.ArgumentParser, level: int) -> Iterator[str]:
    """Yield what the page says about a command and, below it, about its actions."""
    yield from (f"{'#' * level} {name}", "", *prose(sentence(parser.description or "")))
    actions = [action for action in actions_of(parser) if not isinstance(action, HELP)]
    plain = [action for action in actions if not isinstance(action, SUBPARSERS)]
    if plain or len(actions) == 0:
        yield from (*fenced(" ".join([name, *map(synopsis, plain)]), "text"), "")
    for action in plain:
        yield from wrapped(f"- {code(spelling(action))}: {action.help}.")
    if plain:
        yield ""
    for action_name, subparser in subparsers_of(parser).items():
        yield from command_lines(f"{name} {action_name}", subparser, level + 1)
    if parser.epilog:
        yield from (*fenced(parser.epilog.strip(), "text"), "")


def actions_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the arguments of a parser; argparse has no public way to ask."""
    return parser._actions  # noqa: SLF001 - argparse has no public way to ask


def subparsers_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the subcommands of a parser, each with its help as the description."""
    found: dict[str, argparse.ArgumentParser] = {}
    for action in actions_of(parser):
        if isinstance(action, SUBPARSERS):
            choices = action._get_subactions()  # noqa: SLF001 - argparse has no public way to ask
            helps = {each.dest: each.help for each in choices}
            for name, subparser in action.choices.items():
                subparser.description = subparser.description or helps.get(name)
                found[name] = subparser
    return found


def spelling(action: argparse.Action) -> str:
    """Return an argument as it is typed, without brackets."""
    value = action.metavar or action.dest.upper()
    if not action.option_strings:
        return str(value)
    return action.option_strings[0] if action.nargs == 0 else f"{action.option_strings[0]} {value}"


def synopsis(action: argparse.Action) -> str:
    """Return an argument in the way of a synopsis."""
    text = spelling(action) + (" ..." if action.nargs in ("*", "+") else "")
    required = action.required and action.nargs != "*"
    return text if required else f"[{text}]"


# Text


def summary_of(kind: type) -> str:
    """Return the docstring of a class without its `Attributes:`, which become a table."""
    return re.split(r"\n\nAttributes:\n", inspect.getdoc(kind) or "")[0]


def prose(text: str) -> Iterator[str]:
    """Yield a docstring as Markdown: paragraphs, code, `Args:` and the like as lists, and an empty line after each."""
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        head, _, rest = paragraph.partition("\n")
        if head in ("Args:", "Raises:"):
            items = [item.strip().partition(": ") for item in re.split(r"\n(?=    \S)", f"\n{rest}")[1:]]
            yield from (
                head,
                "",
                *(line for name, _, what in items for line in wrapped(f"- `{name}`: {markdown(what)}")),
            )
        elif head in ("Example:", "Returns:", "Yields:"):
            body = textwrap.dedent(rest)
            yield from fenced(body, "pycon") if head == "Example:" else wrapped(f"{head} {markdown(body)}")
        elif head.startswith(" "):
            yield from fenced(textwrap.dedent(paragraph), "python")
        else:
            yield from wrapped(markdown(paragraph).removesuffix("::"))
        yield ""


def markdown(text: str) -> str:
    """Return a docstring's text on one line, its code marked as Markdown does."""
    return " ".join(text.replace("``", "`").split())


def sentence(text: str) -> str:
    """Return a text with a capital at its start and a full stop at its end."""
    return f"{text[:1].upper()}{text[1:].removesuffix('.')}."


def wrapped(text: str) -> list[str]:
    """Return a paragraph or list item as lines."""
    indent = "  " if text.startswith("- ") else ""
    return textwrap.wrap(text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def code(text: str) -> str:
    """Return a text in the type of code."""
    return f"`{text}`"


def fenced(text: str, language: str) -> list[str]:
    """Return a block of code as lines."""
    return [f"```{language}", *text.splitlines(), "```"]


_HOOKS_INTRODUCTION: Final = """\
All hooks have one form. `Registry.add` takes the name that configs use, a factory, and the attrs class of the options.
A plugin has the hooks that it needs, once each."""

_PROTOCOLS_INTRODUCTION: Final = """\
The names are in `turnwise.protocols`; the common ones can be imported from `turnwise`. What the methods take and return
is on the page about [types](types.md)."""

_RESULTS_INTRODUCTION: Final = """\
What a run hands back: an `EpisodeResult` for each episode, with its token records, and a `RolloutBatch` of tensors for
a trainer. Shapes: P prompt tokens, R response tokens, T = P + R, and B rows of a batch."""

_CONFIG_INTRODUCTION: Final = """\
A run is described by one YAML or TOML file. `turnwise config show FILE` prints it with every default filled in, and
`turnwise config schema` the JSON Schema that an editor can complete from. `PATH=VALUE` on the command line changes a
value, such as `rollout.n=8`, `agent.max_assistant_turns=4` or `tools.0=calculator`.

- Relative paths start from the folder of the file. `package:NAME` and `package:NAME/FILE` name what an installed
  package ships.
- Where a key takes a part of a plugin, its value is the bare name, or a section with `name` and the part's options.
- On the command line a bare name, as in `engine=vllm`, replaces the section of another name with its options. A section
  that has this name already stays as it is, and `runtime=NAME` sets the name alone. `engine={name: vllm}` always
  replaces.
- An unknown key, a wrong type and a value out of bounds are errors that name the path and what was expected.
- Aliases, anchors and tags are refused, and a file has at most 1 MiB."""

_CLI_INTRODUCTION: Final = """\
Exit codes: 0; 2 for a bad config or bad input, after one line on standard error; 1 for anything else that failed.
Results go to standard output, logs and progress to standard error. A plugin adds commands through the hook
[register_commands](hooks.md#register_commands)."""

PAGES: Final[Mapping[str, Callable[[], Iterable[str]]]] = {
    "cli": cli_page,
    "config": config_page,
    "hooks": hooks_page,
    "protocols": protocols_page,
    "results": results_page,
    "types": types_page,
}
"""The lines of each page by its name."""
