"""A byte-level BPE tokenizer with single-digit tokens and ChatML markers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT: Final = "<|endoftext|>"
"""The padding token."""

TURN_START: Final = "<|im_start|>"
"""Opens a message; the role follows it."""

TURN_END: Final = "<|im_end|>"
"""Closes a message; the end-of-sequence token."""

VISION_START: Final = "<|vision_start|>"
"""Comes before the placeholders of a picture."""

VISION_END: Final = "<|vision_end|>"
"""Comes after them."""

IMAGE_PAD: Final = "<|image_pad|>"
"""A placeholder of a picture."""

VIDEO_PAD: Final = "<|video_pad|>"
"""A placeholder of a film, which the configs of vision-language models name too."""

VISION_TOKENS: Final = (VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD)
"""The special tokens of a vision-language model."""

CONTEXT_LENGTH: Final = 2048
"""Default context length in tokens."""

CHATML: Final = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""Chat template for roles and contents, without tools."""

VISION_CHATML: Final = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.content is string %}{{- message.content }}"
    "{%- else %}{%- for part in message.content %}"
    "{%- if part.type == 'text' %}{{- part.text }}"
    "{%- else %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}{%- endif %}"
    "{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""Chat template for contents of texts and pictures, as Qwen2.5-VL writes them: one placeholder for each picture."""


def byte_level_tokenizer(
    corpus: Iterable[str],
    vocab_size: int,
    *,
    tags: Sequence[str] = (),
    special_tokens: Sequence[str] = (),
    chat_template: str = CHATML,
    context_length: int = CONTEXT_LENGTH,
) -> PreTrainedTokenizerFast:
    """
    Train a tokenizer on a corpus.

    All 256 bytes are in the vocabulary and text is not normalised, so any text encodes and decodes without loss. Digits
    never merge, so a number has the same tokens in every context.

    Args:
        corpus: training texts.
        vocab_size: upper limit, including special tokens and tags; a small corpus may yield fewer merges.
        tags: added tokens that are not special, so `skip_special_tokens` keeps them.
        special_tokens: special tokens beside the markers of messages, such as `VISION_TOKENS`.
        chat_template: Jinja source.
        context_length: longest sequence in tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = (END_OF_TEXT, TURN_START, TURN_END, *special_tokens)
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
