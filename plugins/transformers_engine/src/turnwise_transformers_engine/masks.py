"""Takes the ids that grammars exclude out of logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnwise.errors import EngineError
from turnwise_engine_support.grammars import TurnGrammar


def exclude_ids(logits: Any, states: Mapping[int, TurnGrammar]) -> dict[int, EngineError]:
    """
    Set the logits of ids that grammars exclude to -inf, in place.

    Args:
        logits: (B, V).
        states: of some rows, by their index.

    Returns:
        The errors of rows whose grammar has failed, by index; their logits stay as they are.
    """
    import torch

    failed: dict[int, EngineError] = {}
    for index, state in states.items():
        try:
            allowed = state.allowed()
        except EngineError as error:
            failed[index] = error
        else:
            logits[index].masked_fill_(~torch.from_numpy(allowed).to(logits.device), -torch.inf)
    return failed
