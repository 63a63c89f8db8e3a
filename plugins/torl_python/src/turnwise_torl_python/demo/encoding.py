"""Encodes demonstrations as token ids, with a mask of the tokens that the model writes."""

# ruff: noqa: TID253 - for training only; no hook imports it

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerFast

from turnwise_torl_python.config import QUESTION_PLACEHOLDER, TORL_PROMPT
from turnwise_torl_python.demo.problems import Problem
from turnwise_torl_python.demo.solver import Turn


def prompt_text(problem: Problem) -> str:
    """Return ToRL's plain prompt for a problem."""
    return TORL_PROMPT.replace(QUESTION_PLACEHOLDER, problem.question)


def encode(tokenizer: PreTrainedTokenizerFast, problem: Problem, turns: Sequence[Turn]) -> tuple[list[int], list[bool]]:
    """Return the ids of a demonstration, and for each whether the model writes it."""
    parts = [(prompt_text(problem), False)]
    for turn in turns:
        parts.append((turn.text if turn.output is not None else turn.text + "<|im_end|>", True))
        if turn.output is not None:
            parts.append((f"\n{turn.output}\n```\n", False))
    ids: list[int] = []
    mask: list[bool] = []
    for text, is_action in parts:
        piece = tokenizer.encode(text, add_special_tokens=False)
        ids += piece
        mask += [is_action] * len(piece)
    return ids, mask
