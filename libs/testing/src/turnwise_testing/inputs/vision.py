"""
Chat templates of vision-language models, pictures, and directories with real processors, without a download.

The templates give the output of the public ones for the messages that turnwise renders: roles, texts, pictures, and
calls where the model has them. They are written for these tests, and are no copies.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from turnwise.media import Picture, find_picture
from turnwise_testing.inputs.tokenizers import SPECIAL_TOKENS, TAGS, byte_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

QWEN_TOKENS: Final = (*SPECIAL_TOKENS, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")

_PARTS: Final = """\
{%- macro parts_of(content) %}
    {%- if content is string %}{{- content }}
    {%- else %}
        {%- for part in content %}
            {%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif 'text' in part %}{{- part.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
"""

QWEN_2_5_VL: Final = (
    _PARTS
    + """\
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + parts_of(message.content) + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
)
"""Qwen2.5-VL: a default system prompt, and no tools."""

QWEN_3_VL: Final = (
    _PARTS
    + """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- parts_of(messages[0].content) + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' }}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within ' }}
    {{- '<tool_call></tool_call> XML tags:\\n<tool_call>\\n' }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + parts_of(messages[0].content) + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + parts_of(message.content) + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + parts_of(message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + parts_of(message.content) + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
)
"""Qwen3-VL: tools as Qwen's text models have them, and no default system prompt."""


INTERN_VL: Final = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}{{- message.content }}
    {%- else %}
        {%- for part in message.content %}{{- '<IMG_CONTEXT>\\n' if part.type == 'image' else part.text }}{%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""InternVL3 in the form of transformers."""

INTERN_TOKENS: Final = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}

GEMMA_3: Final = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
    {%- if message.content is string %}{{- message.content | trim }}
    {%- else %}
        {%- for part in message.content %}
            {{- '<start_of_image>' if part.type == 'image' else (part.text | trim) }}
        {%- endfor %}
    {%- endif %}
    {{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""
"""Gemma 3: contents are trimmed. The public template also refuses roles that do not alternate."""

GEMMA_TOKENS: Final = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}

IDEFICS_3: Final = """\
{{- '<|im_start|>' }}
{%- for message in messages %}
    {{- message.role | capitalize + (':' if message.content[0].type == 'image' else ': ') }}
    {%- for part in message.content %}
        {%- if part.type == 'image' %}{{- '<image>' }}{%- elif part.type == 'text' %}{{- part.text }}{%- endif %}
    {%- endfor %}
    {{- '<end_of_utterance>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'Assistant:' }}{%- endif %}
"""
"""Idefics3 and SmolVLM: every content is a list of parts."""

IDEFICS_TOKENS: Final = (
    *("<|endoftext|>", "<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", "<image>", "<global-img>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)


def make_picture(width: int = 32, height: int = 32, color: str = "red", form: str = "PNG") -> Picture:
    """Return a picture of one color."""
    from PIL import Image

    return _encode(Image.new("RGB", (width, height), color), form)


def draw_picture(seed: int, height: int = 24, width: int = 24, form: str = "PNG") -> Picture:
    """Return a picture of random blocks of colour; `form` is a format of pillow."""
    from PIL import Image

    blocks = Image.fromarray(np.random.default_rng(seed).integers(0, 255, (3, 3, 3), dtype=np.uint8))
    return _encode(blocks.resize((width, height), Image.Resampling.NEAREST), form)


def _encode(image: Any, form: str) -> Picture:
    file = io.BytesIO()
    image.save(file, form)
    return find_picture(file.getvalue(), f"image/{form.lower()}")


def qwen_tokenizer(template: str = QWEN_3_VL) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes with Qwen's tokens of pictures."""
    return byte_tokenizer(template, QWEN_TOKENS, tags=TAGS)


def save_qwen(folder: Path, template: str = QWEN_3_VL, processor_class: str = "Qwen3VLProcessor") -> Path:
    """Write the tokenizer, template and image processor of a small Qwen; a token has 8 x 8 pixels."""
    from transformers import Qwen2VLImageProcessorPil

    qwen_tokenizer(template).save_pretrained(folder)
    options: dict[str, object] = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 4096}}
    Qwen2VLImageProcessorPil(**options).save_pretrained(folder)
    name_processor(folder, processor_class)
    return folder


def name_processor(folder: Path, processor_class: str) -> None:
    """Write the class of the processor to the config of the image processor, as models have it."""
    file = folder / "preprocessor_config.json"
    options = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(options | {"processor_class": processor_class}), encoding="utf-8")


def save_intern(folder: Path) -> Path:
    """Write a small InternVL that cuts pictures into tiles."""
    from transformers import GotOcr2ImageProcessorPil

    special = (*SPECIAL_TOKENS, *INTERN_TOKENS.values())
    save_with_tokens(folder, byte_tokenizer(INTERN_VL, special, tags=TAGS), INTERN_TOKENS)
    size = {"height": 16, "width": 16}
    GotOcr2ImageProcessorPil(size=size, crop_to_patches=True, min_patches=1, max_patches=4).save_pretrained(folder)
    options = {"processor_class": "InternVLProcessor", "image_seq_length": 4}
    (folder / "processor_config.json").write_text(json.dumps(options), encoding="utf-8")
    return folder


def save_gemma(folder: Path) -> Path:
    """Write a small Gemma 3."""
    from transformers import Gemma3ImageProcessorPil

    special = ("<pad>", "<bos>", "<start_of_turn>", "<end_of_turn>", *GEMMA_TOKENS.values())
    tokenizer = byte_tokenizer(GEMMA_3, special, tags=(), bos_token="<bos>", eos_token="<end_of_turn>")
    save_with_tokens(folder, tokenizer, GEMMA_TOKENS)
    Gemma3ImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(folder)
    options = {"processor_class": "Gemma3Processor", "image_seq_length": 4}
    (folder / "processor_config.json").write_text(json.dumps(options), encoding="utf-8")
    return folder


def save_idefics(folder: Path) -> Path:
    """Write a small Idefics3 that cuts pictures into tiles."""
    from transformers import Idefics3ImageProcessorPil

    byte_tokenizer(IDEFICS_3, IDEFICS_TOKENS, tags=(), eos_token="<end_of_utterance>").save_pretrained(folder)
    sizes = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
    Idefics3ImageProcessorPil(**sizes).save_pretrained(folder)
    options = {"processor_class": "Idefics3Processor", "image_seq_len": 3}
    (folder / "processor_config.json").write_text(json.dumps(options), encoding="utf-8")
    return folder


def save_with_tokens(folder: Path, tokenizer: PreTrainedTokenizerFast, tokens: Mapping[str, str]) -> None:
    """Write a tokenizer whose special tokens of a family have names, as its processor asks for them."""
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    options = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(options | {"extra_special_tokens": dict(tokens)}), encoding="utf-8")
