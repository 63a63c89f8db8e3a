"""Byte-level BPE with digits of their own and ChatML marks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT: Final = "<|endoftext|>"
"""The padding token."""

TURN_START: Final = "<|im_start|>"
"""Opens a message; its role follows."""

TURN_END: Final = "<|im_end|>"
"""Closes a message; the end-of-sequence token."""

CONTEXT_LENGTH: Final = 2048
"""Longest sequence in tokens, where nothing else is said."""

CHATML: Final = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""Chat template of roles and contents, without tools."""


def byte_level_tokenizer(
    corpus: Iterable[str],
    vocab_size: int,
    *,
    tags: Sequence[str] = (),
    chat_template: str = CHATML,
    context_length: int = CONTEXT_LENGTH,
) -> PreTrainedTokenizerFast:
    """
    Learn merges from a corpus.

    All 256 bytes are in the vocabulary and nothing is normalised, so any text encodes and decodes without loss. A
    digit never merges: the same number is the same tokens wherever it stands.

    Args:
        corpus: texts to learn merges from.
        vocab_size: entries wanted, added tokens included; fewer where the corpus holds fewer merges.
        tags: tokens that are not special, so that decoding without special tokens keeps them.
        chat_template: Jinja source.
        context_length: longest sequence in tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = (END_OF_TEXT, TURN_START, TURN_END)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(tags),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers leaves it unannotated
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        chat_template=chat_template,
        model_max_length=context_length,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
