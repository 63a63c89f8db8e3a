"""The parts of the run that its sessions share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from turnwise import Chat, ToolParser
from turnwise.types import ToolSchema
from turnwise_gateway.session.drafts import Settle
from turnwise_gateway.session.grammars import GrammarWriter
from turnwise_gateway.session.options import SessionOptions
from turnwise_gateway.tree.messages import Split


@frozen(kw_only=True)
class SessionParts:
    """
    Parts of the run that sessions share.

    Attributes:
        chat: the chat template.
        parser: finds tool calls; None in a run without one.
        split: splits the reasoning from a text; None leaves it in the content of replies.
        settle: the same for an unfinished text; None if replies with reasoning are not streamed while they are sampled.
        tools: schemas of the run's tools.
        seed: of the run.
        template_options: `model.template_options` of the run.
        options: rules and limits.
        grammars: writes grammars of turns; None unless `options.structured_output` is `constrain`.
    """

    chat: Chat
    parser: ToolParser | None = None
    split: Split | None = None
    settle: Settle | None = None
    tools: tuple[ToolSchema, ...] = ()
    seed: int = 0
    template_options: Mapping[str, Any] = field(factory=dict)
    options: SessionOptions = field(factory=SessionOptions)
    grammars: GrammarWriter | None = None
