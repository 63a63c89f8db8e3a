"""
Builds the reference pages that come from values and not from docstrings: config, command line, packages and metrics.

`docs/generate.py` writes them. The site renders the other reference pages from docstrings.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin

import attrs
from gateway_fields import gateway_fields_page
from rings import RINGS, ring_of

from turnwise import errors, options, types
from turnwise.cli import make_parser
from turnwise.config import run as config
from turnwise.config import runtime as config_runtime
from turnwise.config.parts import file_fields
from turnwise.config.peer_keys import PEER_KEYS, TRL, VERL
from turnwise.config.structuring import unstructure
from turnwise.plugin.host import KINDS, Host, load
from turnwise.types import PluginRecipe
from turnwise_commands.config_schema import attribute_docs
from turnwise_grpo_trainer.report.metric_names import TRAINING_METRICS
from turnwise_observability.metrics import METRICS

ROOT: Final = Path(__file__).parents[1]
HELP: Final = argparse._HelpAction  # noqa: SLF001 - argparse has no public name for it
SUBPARSERS: Final = argparse._SubParsersAction  # noqa: SLF001 - argparse has no public name for it
PLUGINS: Final = tuple(
    sorted(re.findall(r"^-e plugins/(\w+)", (ROOT / "requirements-dev.txt").read_text(encoding="utf-8"), re.MULTILINE))
)
"""The plugins of this repository. Other installed plugins are left out, so the pages depend on the repository alone."""

_WIDTH: Final = 120

# Config


def config_page() -> Iterator[str]:
    """Yield the lines of the page about config files."""
    yield from ("# Config", "", *_CONFIG_INTRODUCTION.splitlines(), "")
    yield from ("## Top level", "", *prose(summary_of(config.RunConfig)), *fields_table(config.RunConfig))
    sections = {
        "model": config.ModelConfig,
        "data": config.DataConfig,
        "rollout": config.RolloutConfig,
        "rollout.sampling, rollout.validation_sampling": types.SamplingParams,
        "rollout.deadlines": options.Deadlines,
        "judge": config.JudgeConfig,
        "judge.pool": config_runtime.PoolConfig,
        "runtime": config.RuntimeConfig,
        "runtime.ray": config_runtime.RayConfig,
        "telemetry": config.TelemetryConfig,
    }
    for name, kind in sections.items():
        yield from (f"## {name}", "", *prose(summary_of(kind)), *fields_table(kind))
    yield from ("## Options of the plugins", "", "The parts that the plugins of this repository register, by kind.", "")
    yield from options_lines(load(PluginRecipe(allow=(*PLUGINS, "chat_templates"))))


def options_lines(host: Host) -> Iterator[str]:
    """Yield the options of every registered part that a config can name, by kind."""
    for kind in KINDS:
        places = [code(item.name) for item in attrs.fields(config.RunConfig) if item.metadata.get(config.KIND) == kind]
        for entry in host.registry(kind).entries().values() if places else ():
            yield from (f"### {entry.name}", "", f"In {', '.join(places)}; plugin `{entry.owner}`.", "")
            yield from fields_table(entry.config) if attrs.fields(entry.config) else ("It has no options.", "")
    for plugin, section in host.sections.items():
        for entry in host.registry(section.kind).entries().values() if section.kind else ():
            yield from (f"### {entry.name}", "", f"In the section `{plugin}`; plugin `{entry.owner}`.", "")
            yield from fields_table(entry.config) if attrs.fields(entry.config) else ("It has no options.", "")


def fields_table(kind: type) -> Iterator[str]:
    """Yield a table of the fields of an attrs class, in the words of config files."""
    docs = attribute_docs(kind)
    yield from ("| key | type | default | meaning |", "| --- | --- | --- | --- |")
    for field in file_fields(kind):
        kinds = type_text(field.type).replace("None", "null")
        cells = (code(field.name), code(kinds), default_text(field), markdown(docs.get(field.name, "")))
        yield "| " + " | ".join(cell(each) for each in cells) + " |"
    yield ""


def type_text(kind: Any) -> str:
    """Return a type in the notation of annotations, without module names."""
    if get_origin(kind) is Literal:
        return " | ".join(map(str, get_args(kind)))
    if get_origin(kind) in (Union, UnionType):
        return " | ".join(map(type_text, get_args(kind)))
    if get_origin(kind) is Mapping:
        return f"Mapping[{', '.join(map(type_text, get_args(kind)))}]"
    text = kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", text).replace("NoneType", "None")


def default_text(field: attrs.Attribute[Any]) -> str:
    """Return the default of a field; for an attrs class, the values that differ from the class's own defaults."""
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
    return code(json.dumps(unstructure(default)))


# The command line


def cli_page() -> Iterator[str]:
    """Yield the lines of the page about the command line."""
    host = load(PluginRecipe(allow=(*PLUGINS, "chat_templates", "testing")))
    parser = make_parser(host)
    yield from ("# Command line", "", *prose(parser.description or ""))
    yield from (*_CLI_INTRODUCTION.splitlines(), "")
    for command, subparser in subparsers_of(parser).items():
        lines = command_lines(f"turnwise {command}", subparser, level=2)
        yield from (next(lines), "", f"Of the plugin `{host.registry('commands').get(command).owner}`.", *lines)


def command_lines(name: str, parser: argparse.ArgumentParser, level: int) -> Iterator[str]:
    """Yield the section of a command and, below it, the sections of its actions."""
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
    """Return the arguments of a parser."""
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
    """Return an argument as a synopsis shows it: in brackets when it is optional."""
    text = spelling(action) + (" ..." if action.nargs in ("*", "+") else "")
    required = action.required and action.nargs != "*"
    return text if required else f"[{text}]"


# Errors


def errors_page() -> Iterator[str]:
    """Yield the lines of the page about exceptions."""
    yield from ("# Errors", "", *_ERRORS_INTRODUCTION.splitlines(), "")
    yield from ("| exception | is a | meaning |", "| --- | --- | --- |")
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, errors.TurnwiseError) and kind.__module__ == errors.__name__:
            bases = ", ".join(code(base.__name__) for base in kind.__bases__)
            yield f"| {code(name)} | {bases} | {cell(markdown(summary_of(kind)))} |"
    yield ""


# Packages and metrics


def packages_page() -> Iterator[str]:
    """Yield the lines of the page about distributions."""
    yield from ("# Packages", "", *_PACKAGES_INTRODUCTION.splitlines(), "")
    host = load(PluginRecipe(allow=(*PLUGINS, "chat_templates")))
    for ring, introduction in RINGS.items():
        yield from (f"## {ring}", "", *introduction.splitlines(), "")
        yield from _packages_table(ring, host)


def _packages_table(ring: str, host: Host) -> Iterator[str]:
    yield from ("| distribution | registers | description |", "| --- | --- | --- |")
    folders = ("core", "plugins/*", "libs/*")
    files = [path for folder in folders for path in sorted(ROOT.glob(f"{folder}/pyproject.toml"))]
    for file in files:
        if ring_of(file.parent) != ring:
            continue
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        owner = "builtins" if file.parent.name == "core" else file.parent.name
        link = f"[{project['name']}](../../{file.parent.relative_to(ROOT).as_posix()}/README.md)"
        yield f"| {link} | {registered_parts(host, owner)} | {cell(project['description'])} |"
    yield ""


def registered_parts(host: Host, owner: str) -> str:
    """Return the names that a plugin registers, by kind."""
    found = {
        kind: [code(entry.name) for entry in host.registry(kind).entries().values() if entry.owner == owner]
        for kind in host.kinds
    }
    return "; ".join(f"{kind.replace('_', ' ')} {', '.join(names)}" for kind, names in found.items() if names)


def metrics_page() -> Iterator[str]:
    """Yield the lines of the page about the metrics of Prometheus and of a training."""
    yield from ("# Metrics", "", "## Prometheus", "", *_METRICS_INTRODUCTION.splitlines(), "")
    yield from ("| metric | kind | labels | meaning |", "| --- | --- | --- | --- |")
    for metric in METRICS:
        yield f"| {code(metric.name)} | {metric.kind} | {', '.join(map(code, metric.labels))} | {cell(metric.help)} |"
    yield from ("", "## Training", "", *_TRAINING_INTRODUCTION.splitlines(), "")
    yield from ("| metric | meaning |", "| --- | --- |")
    for name, meaning in TRAINING_METRICS.items():
        yield f"| {code(name)} | {cell(meaning)} |"
    yield ""


# Text


def summary_of(kind: type) -> str:
    """Return the docstring of a class without its `Attributes:`, which become a table."""
    return re.split(r"\n\nAttributes:\n", inspect.getdoc(kind) or "")[0]


def prose(text: str) -> Iterator[str]:
    """Yield the paragraphs of a docstring as wrapped lines, with an empty line after each."""
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        yield from (*wrapped(markdown(paragraph)), "")


def markdown(text: str) -> str:
    """Return a docstring's text on one line, with Markdown's marks for code."""
    return " ".join(text.replace("``", "`").split())


def sentence(text: str) -> str:
    """Return a text that starts with a capital and ends with a full stop."""
    return f"{text[:1].upper()}{text[1:].removesuffix('.')}."


def wrapped(text: str) -> list[str]:
    """Return a paragraph or list item as lines of limited width."""
    indent = "  " if text.startswith("- ") else ""
    return textwrap.wrap(text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def cell(text: str) -> str:
    """Return a text as a cell of a table, with tags escaped."""
    return re.sub(r"<(?=/?\w)", "&lt;", text).replace("|", "\\|")


def code(text: str) -> str:
    """Return a text marked as code."""
    return f"`{text}`"


def fenced(text: str, language: str) -> list[str]:
    """Return a block of code as lines."""
    return [f"```{language}", *text.splitlines(), "```"]


_CONFIG_INTRODUCTION: Final = """\
One YAML or TOML file describes a run. `turnwise config show FILE` prints the file with every default filled in, and
`turnwise config schema` prints a JSON Schema for editors. `PATH=VALUE` on the command line changes a value, for example
`rollout.n=8`, `agent.max_assistant_turns=4` or `tools.0=calculator`.

- Relative paths start from the folder of the file. `package:NAME` is the folder `model` of an installed package, and
  `package:NAME/FILE` is a file of that package.
- A key that selects a plugin's part takes the part's name, or a section with `name` and the part's options.
- On the command line, a bare name such as `engine=vllm` replaces a section of another name with its options. A section
  of the same name keeps its options. `runtime=NAME` changes the name only. `engine={name: vllm}` always replaces the
  section.
- An unknown key, a wrong type or a value out of bounds is an error that names the path and the expected value.
- The loader rejects aliases, anchors, tags and files larger than 1 MiB."""

_CLI_INTRODUCTION: Final = """\
Exit codes: 0 for success, 2 for a bad config or bad input, and 1 for any other failure. A bad config prints one line to
standard error. Results go to standard output; logs and progress go to standard error. Plugins add commands with the
hook [register_commands](hooks.md)."""

_PACKAGES_INTRODUCTION: Final = """\
turnwise is a set of distributions: the core, and plugins that register parts by name. A config selects parts by these
names. `turnwise plugins` lists the plugins that are installed on your machine."""

_METRICS_INTRODUCTION: Final = """\
The observer `prometheus` exports these metrics.
[Observe a run](../how-to/observe-a-run.md#metrics-for-prometheus) shows how to turn it on, with useful queries."""

_TRAINING_INTRODUCTION: Final = """\
`turnwise train` writes these metrics to `metrics.jsonl`, one line for each step and each validation, and sends them to
the observers of the run. [Check that it learns](../how-to/train.md#check-that-it-learns) explains how to read them."""

_ERRORS_INTRODUCTION: Final = """\
The exceptions in `turnwise.errors`. A plugin raises ordinary exceptions; those here tell turnwise more.

- `ConfigError`, `DataError` and `PluginError` stop a command with one line and exit code 2.
- An exception in an episode ends that episode alone. It is data: `EpisodeResult.fault` has the owner of the code, the
  name of the exception, its text and its traceback.
- A tool raises `ToolError` with a text for the model, which may try again. Any other exception of a tool is an error
  result too, whose text starts with `Error:` and the name of the exception.
- An agent may raise `BudgetExhausted` when its next tokens do not fit. The episode is then `truncated`.
- `InfrastructureError` says that a machine or a service failed: the owner is `infra`, and the loss leaves the episode
  out."""

# Keys of other frameworks


def peer_keys_page() -> Iterator[str]:
    """Yield the lines of the page about the keys of verl and TRL."""
    yield from ("# Keys of verl and TRL", "", *_PEER_INTRODUCTION.splitlines())
    for peer in (VERL, TRL):
        yield from ("", f"## {peer}", "", "| key | here | note |", "|---|---|---|")
        for entry in PEER_KEYS:
            if entry.peer == peer:
                ours = f"`{entry.ours}`" if entry.ours else "-"
                yield f"| `{entry.key}` | {ours} | {entry.note.replace('|', chr(92) + '|')} |"


_PEER_INTRODUCTION: Final = """\
An unknown key of a config that has one of these names is an error which names the key here. verl's names are keys of
its config, TRL's are arguments of `GRPOConfig` and `GRPOTrainer`. Keys of `engine` are options of `vllm`, keys of
`agent` are options of `tool_agent`, and keys of `train` are options of `turnwise train`.

[Coming from verl](../how-to/coming-from-verl.md) and [coming from TRL](../how-to/coming-from-trl.md) show how code
moves."""


PAGES: Final[Mapping[str, Callable[[], Iterable[str]]]] = {
    "cli": cli_page,
    "config": config_page,
    "errors": errors_page,
    "gateway-fields": gateway_fields_page,
    "metrics": metrics_page,
    "packages": packages_page,
    "peer-keys": peer_keys_page,
}
"""The lines of each page, by the page's name."""
