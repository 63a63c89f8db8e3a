"""Parts of a run that the factories of plugins may use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from attrs import field, frozen

from turnwise.protocols.chat import Chat
from turnwise.protocols.judge import Judge
from turnwise.protocols.tool import Interaction, ReasoningParser, Tool, ToolParser
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
    """

    path: Path | None = None
    trust_remote_code: bool = False
    revision: str | None = None
    chat_template: Path | None = None
    template_options: JsonObject = field(factory=dict)


@frozen(kw_only=True)
class Resources:
    """
    Parts of a run that a factory may use besides its config; parts that the run lacks are None or empty.

    Attributes:
        model: the model.
        seed: of the run.
        chat: the chat template, when a model directory is configured.
        parser: the tool parser, when one is configured.
        reasoning_parser: splits the reasoning from a turn, when one is configured.
        tools: by the name in their schema.
        interaction: the user simulator, when one is configured.
        judge: a second model that rewards may ask, when one is configured.
        prompt_length: most tokens of a prompt; None for parts that are built outside of episodes.
        response_length: most tokens of a response, observations included; None as before.
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

    @property
    def tool_schemas(self) -> tuple[ToolSchema, ...]:
        """The schemas of all tools, in configured order."""
        return tuple(tool.schema for tool in self.tools.values())
