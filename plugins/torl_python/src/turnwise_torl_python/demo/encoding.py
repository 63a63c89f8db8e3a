"""Builds the tokenizer of the tiny model, and demonstrations as token ids with the mask of what the model writes."""

# ruff: noqa: TID253 - for training only; no hook imports it

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from turnwise_torl_python.config import QUESTION_MARK, TORL_PROMPT
from turnwise_torl_python.demo.problems import Problem
from turnwise_torl_python.demo.solver import Turn

CONTEXT_LENGTH: Final = 1024
_SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHATML: Final = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def build_tokenizer(corpus: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """
    Learn a byte-level BPE from a corpus: any text encodes without loss, and a digit never merges.

    Args:
        corpus: texts to learn merges from.
        vocab_size: entries wanted; fewer where the corpus holds fewer merges.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in _SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers leaves it unannotated
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=_CHATML,
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def prompt_text(problem: Problem) -> str:
    """Return ToRL's plain prompt of a problem."""
    return TORL_PROMPT.replace(QUESTION_MARK, problem.question)


def encode(tokenizer: PreTrainedTokenizerFast, problem: Problem, turns: Sequence[Turn]) -> tuple[list[int], list[bool]]:
    """Return the ids of a demonstration and, of the same length, whether the model writes the token."""
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
