"""Builds the tokenizer: byte-level BPE with digits of their own and ChatML tags."""

# ruff: noqa: TID253 - for training only; no hook imports it

from collections.abc import Iterable
from importlib.resources import files
from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT: Final = "<|endoftext|>"
"""The padding token."""

TURN_START: Final = "<|im_start|>"
"""Opens a message; its role follows."""

TURN_END: Final = "<|im_end|>"
"""Closes a message; the end-of-sequence token."""

TAGS: Final = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Tags that are tokens but not special, so that decoding without special tokens keeps them."""

CONTEXT_LENGTH: Final = 2048
"""Longest sequence in tokens."""

_SPECIAL: Final = (END_OF_TEXT, TURN_START, TURN_END)


def build_tokenizer(corpus: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """
    Learns merges from a corpus.

    All 256 bytes are in the vocabulary and nothing is normalised, so any text encodes and decodes without loss. A
    digit never merges: the same number is the same tokens wherever it stands.

    Args:
        corpus: Texts to learn merges from.
        vocab_size: Entries wanted, added tokens included; fewer where the corpus holds fewer merges.

    Returns:
        The tokenizer, with the chat template of this package.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(TAGS),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in _SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return _wrap(tokenizer)


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The tokenizer as transformers uses it."""
    template = files("turnwise_calculator_demo").joinpath("chat_template.jinja").read_text(encoding="utf-8")
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers leaves it unannotated
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        chat_template=template,
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
