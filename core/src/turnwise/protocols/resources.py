"""Parts of a run that the factories of plugins may use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path

from attrs import field, frozen

from turnwise.errors import ConfigError, describe
from turnwise.protocols.chat import Chat
from turnwise.protocols.judge import Judge
from turnwise.protocols.tool import Interaction, ReasoningFormat, ReasoningParser, Tool, ToolParser
from turnwise.types import JsonObject, ToolSchema


@frozen(kw_only=True)
class ModelSpec:
    """
    The model of a run.

    Attributes:
        path: directory with config, weights and tokenizer.
        trust_remote_code: run code of the model's repository; needs `revision`.
        revision: pinned commit, recorded in the run.
        chat_template: file that replaces the model's own template.
        template_options: keyword arguments for the template, such as `enable_thinking`.
        name: id on the hub, or the name of the directory or file; empty if nobody gave one.
        commit: of the hub; None for a local model.
    """

    path: Path | None = None
    trust_remote_code: bool = False
    revision: str | None = None
    chat_template: Path | None = None
    template_options: JsonObject = field(factory=dict)
    name: str = ""
    commit: str | None = None


def _import_place(place: str) -> object:
    """Return the object at a place in a module; without a run there is no list of files that may be imported."""
    home, _, name = place.rpartition(":")
    try:
        module = import_module(home)
    except (ImportError, TypeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{home}.".startswith(f"{error.name}."):
            text = f"{place}: no module {error.name!r}; install it, or add its folder to PYTHONPATH"
        else:
            text = f"{place}: cannot be imported: {describe(error)}"
        raise ConfigError(text) from error
    if not hasattr(module, name):
        close = get_close_matches(name, [each for each in vars(module) if not each.startswith("_")], 1)
        raise ConfigError(f"module {home} has no {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
    found: object = getattr(module, name)
    return found


@frozen(kw_only=True)
class Resources:
    """
    Parts of a run that a factory may use besides its config; parts that the run lacks are None or empty.

    Attributes:
        model: the model.
        seed: of the run.
        chat: the chat template, when a model directory is configured.
        parser: the tool parser, when one is configured.
        reasoning_parser: splits the reasoning from a turn, when one is configured; `reasoning` has the default, too.
        tools: by the name in their schema.
        interaction: the user simulator, when one is configured.
        judge: a second model that rewards may ask, when one is configured.
        prompt_length: most tokens of a prompt; None for parts that are built outside of episodes.
        response_length: most tokens of a response, observations included; None as before.
        find_code: returns the user's own code at a place that an option names, `package.module:Name` or
            `./file.py:Name`; it raises `ConfigError` for a file that `modules` does not list, and for code that cannot
            be imported.
    """

    model: ModelSpec = field(factory=ModelSpec)
    seed: int = 0
    chat: Chat | None = None
    parser: ToolParser | None = None
    reasoning_parser: ReasoningParser | None = None
    tools: Mapping[str, Tool] = field(factory=dict)
    interaction: Interaction | None = None
    judge: Judge | None = None
    prompt_length: int | None = None
    response_length: int | None = None
    find_code: Callable[[str], object] = _import_place

    @property
    def reasoning(self) -> ReasoningParser | None:
        """The configured reasoning parser, or else the one that fits the format of the tool parser, if it has one."""
        if self.reasoning_parser is None and isinstance(self.parser, ReasoningFormat):
            return self.parser.reasoning_parser
        return self.reasoning_parser

    @property
    def tool_schemas(self) -> tuple[ToolSchema, ...]:
        """The schemas of all tools, in configured order."""
        return tuple(tool.schema for tool in self.tools.values())
