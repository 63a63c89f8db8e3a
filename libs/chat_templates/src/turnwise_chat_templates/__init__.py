"""
Chats for turnwise: messages to token ids, and proofs that a template only appends.

The plugin registers `jinja`, the chat template of a model, and `harmony`, which writes the format of gpt-oss without
one. `FamilyChat` is a base class for chats without a template. Names are imported when they are asked for, because
tokenizers need `transformers`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turnwise_chat_templates.family import FamilyChat
    from turnwise_chat_templates.loading import load_chat
    from turnwise_chat_templates.template import ChatTemplate

__all__ = ["ChatTemplate", "FamilyChat", "load_chat"]

_HOMES = {"ChatTemplate": "template", "FamilyChat": "family", "load_chat": "loading"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
