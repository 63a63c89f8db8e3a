"""
A real tokenizer with no download: one id per byte, ChatML with tools, ready for tests and demos.

    tokenizer = byte_tokenizer()
    tokenizer.encode("A")                              # [65]: the id of a byte is the byte
    tokenizer.decode([65, tokenizer.eos_token_id])     # "A<|im_end|>"
    chat = ChatTemplate(tokenizer)

It is a genuine transformers tokenizer: it saves to a directory, loads again, and renders chat templates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""The special tokens of ChatML: ids 256, 257 and 258."""

TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""One id each but not special, as in Qwen's tokenizers: decoding keeps them."""

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' }}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within ' }}
    {{- '<tool_call></tool_call> XML tags:\\n<tool_call>\\n' }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + (message.content or '') }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}
                {{- '\\n' }}
            {%- endif %}
            {{- '<tool_call>\\n{"name": "' + tool_call.function.name + '", "arguments": ' }}
            {{- tool_call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""ChatML with Qwen's tools: no default system prompt, content verbatim, consecutive tool results in one user turn."""


def byte_tokenizer(
    chat_template: str | None = CHATML,
    special_tokens: Sequence[str] = SPECIAL_TOKENS,
    *,
    tags: Sequence[str] = TAGS,
    bos_token: str | None = None,
    eos_token: str | None = "<|im_end|>",
) -> PreTrainedTokenizerFast:
    """
    Build a byte-level tokenizer without merges: every text has one tokenization, and decodes to itself.

    Args:
        chat_template: Jinja source; None leaves it unset.
        special_tokens: of the template, from id 256 in this order; decoding may skip them.
        tags: added after the special tokens, one id each, never skipped.
        bos_token: value of `bos_token` in templates; it is added to the special tokens if it is not among them.
        eos_token: value of `eos_token` in templates, the model's end-of-turn token; added like `bos_token`.

    Returns:
        The tokenizer; ids 0 to 255 are the bytes of UTF-8.
    """
    from transformers import AddedToken, PreTrainedTokenizerFast

    roles: Mapping[str, Any] = {
        key: token for key, token in (("bos_token", bos_token), ("eos_token", eos_token)) if token is not None
    }
    special = list(dict.fromkeys((*special_tokens, *roles.values())))
    backend = _byte_backend()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags if tag not in special])
    if "<|endoftext|>" in special:
        roles = {**roles, "pad_token": "<|endoftext|>"}
    build: Any = PreTrainedTokenizerFast  # its constructor is not annotated
    tokenizer: PreTrainedTokenizerFast = build(tokenizer_object=backend, chat_template=chat_template, **roles)
    return tokenizer


def _byte_backend() -> Any:
    """Return a `tokenizers.Tokenizer` whose vocabulary is the 256 bytes, in their own order."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _byte_symbols() -> list[str]:
    """
    Return the printable character for each byte, as in byte-level BPE (Radford et al., 2019).

    Printable Latin-1 maps to itself; every other byte, in order, to a character from U+0100.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
