"""
Grammars of turns in SGLang: the name of their backend, and how a request names its grammar.

SGLang calls `register` in each of its processes (entry points `sglang.srt.plugins`); otherwise SGLang is not imported.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

BACKEND: Final = "turnwise"
"""Name of the backend in SGLang's register."""


def register() -> None:
    """Register the backend in a process of SGLang; it is imported when a scheduler asks for it."""
    from sglang.srt.constrained.base_grammar_backend import register_grammar_backend

    register_grammar_backend(BACKEND, _make_backend)


def grammar_key(text: str, stop_token_ids: Sequence[int], read: Sequence[int]) -> str:
    """
    Return what SGLang's sampling parameter `ebnf` gives to the backend.

    Args:
        text: of the grammar.
        stop_token_ids: ids that end the turn.
        read: ids of the turn so far.
    """
    return json.dumps([text, list(stop_token_ids), list(read)])


def _make_backend(*arguments: Any) -> Any:
    from turnwise_sglang_engine.grammar_backend import make_backend

    return make_backend(*arguments)
