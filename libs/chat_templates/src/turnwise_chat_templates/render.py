"""
Text of messages and ids of text: the two things that are asked of a transformers tokenizer.

The template itself is rendered by transformers, in its sandboxed Jinja environment.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from turnwise.errors import ConfigError, TemplateError
from turnwise.messages import record_metric
from turnwise.types import JsonDict, JsonObject, Message, TokenArray, ToolSchema
from turnwise_chat_templates.byte_decoder import ByteDecoder
from turnwise_chat_templates.contents import CUT, SPECIAL_TOKENS_METRIC
from turnwise_chat_templates.picture_parts import has_pictures, plain_parts
from turnwise_chat_templates.probe import Plain, common_start, template_words

MAX_TEMPLATE_BYTES = 1 << 20
_ARGUMENTS = frozenset(
    {"chat_template", "continue_final_message", "conversation", "documents", "max_length", "messages", "padding"}
    | {"add_generation_prompt", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize"}
    | {"tokenizer_kwargs", "tools", "truncation"}
)
"""Parameters of `apply_chat_template` that are no options of the template."""
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Names of the reasoning in messages, the most common first."""


class HuggingFaceTokenizer:
    """
    `turnwise.protocols.Tokenizer` over a transformers tokenizer, fast or slow.

    Attributes:
        special_tokens: texts of the special tokens, the longest first.
        added_tokens: texts that were added to the vocabulary, each with one id; special tokens included.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Called directly and without offsets, the Rust tokenizer saves a fifth to a half of `tokenizer.encode`.
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._bytes = ByteDecoder.of(self._backend)
        self.special_tokens = sorted(_special_tokens(tokenizer), key=len, reverse=True)
        added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
        self.added_tokens = frozenset(str(token) for token in added.values()) - {""}
        self._special_pattern = re.compile("|".join(map(re.escape, self.special_tokens)) or "(?!)")

    @property
    def eos_token_id(self) -> int | None:
        eos = self._tokenizer.eos_token_id
        return None if eos is None else int(eos)

    @property
    def pad_token_id(self) -> int | None:
        pad = getattr(self._tokenizer, "pad_token_id", None)
        return None if pad is None else int(pad)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; a `turnwise_chat_templates.contents.CUT` splits it and has no id."""
        if num_cuts := text.count(CUT):
            if (record := record_metric.get(None)) is not None:
                record(SPECIAL_TOKENS_METRIC, num_cuts)
            tokenizer, cut_id = self._cutting
            return [token_id for token_id in tokenizer._encode(text) if token_id != cut_id]  # noqa: SLF001 - of this class
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        backend = self._backend
        if backend is None:
            return [int(token_id) for token_id in self._tokenizer.encode(text, add_special_tokens=False)]
        if backend.truncation is not None or backend.padding is not None:
            # Left over from another caller's `tokenizer(..., truncation=True)`; its next call sets them anew.
            backend.no_truncation()
            backend.no_padding()
        ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    @cached_property
    def _cutting(self) -> tuple[HuggingFaceTokenizer, int]:
        """
        A copy of the tokenizer in which the cut is one more special token, and the id of it.

        A text that is encoded whole is split as without the cut. It is made when a content first spells a special
        token, which takes some tenths of a second with a large vocabulary.
        """
        twin = copy.deepcopy(self._tokenizer)
        twin.add_tokens([CUT], special_tokens=True)
        return HuggingFaceTokenizer(twin), int(twin.convert_tokens_to_ids(CUT))

    def decode(self, token_ids: Sequence[int] | TokenArray) -> str:
        ids = token_ids.tolist() if isinstance(token_ids, np.ndarray) else list(token_ids)
        if self._bytes is not None:
            return self._bytes.decode(ids)
        if self._backend is not None:
            # transformers' own method looks at the type of every id first.
            quick: str = self._backend.decode(ids, skip_special_tokens=False)
            return quick
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def special_spans(self, text: str) -> list[tuple[int, int]]:
        """Return (start, end) of each special token that the text spells, in order."""
        return [match.span() for match in self._special_pattern.finditer(text)]


def _special_tokens(tokenizer: Any) -> frozenset[str]:
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    special = {str(token) for token in added.values() if token.special} | set(tokenizer.all_special_tokens)
    return frozenset(special - {""})


class Renderer:
    """
    A tokenizer's chat template with the options of a run.

    Attributes:
        name: of the template, for error texts.
        sources: Jinja sources; more than one where a model has a separate template for tools.

    Raises:
        TemplateError: there is no template, or it is larger than 1 MiB.
        ConfigError: an option would replace an argument of the rendering itself.
    """

    def __init__(self, tokenizer: Any, options: JsonObject, name: str) -> None:
        if taken := _ARGUMENTS & set(options):
            raise ConfigError(f"model.template_options: {min(taken)!r} is not an option of a template")
        template = getattr(tokenizer, "chat_template", None)
        self.name = name
        self.sources: tuple[str, ...] = tuple(template.values()) if isinstance(template, dict) else (template or "",)
        self._tokenizer = tokenizer
        self._options = dict(options)
        if not any(self.sources):
            raise TemplateError(f"{name} is missing: the tokenizer has no `chat_template`")
        if max(len(source.encode()) for source in self.sources) > MAX_TEMPLATE_BYTES:
            raise TemplateError(f"{name} is larger than {MAX_TEMPLATE_BYTES} bytes")

    @cached_property
    def reasoning_key(self) -> str:
        """The name that the template has for the reasoning of a message; empty if it shows none."""
        texts = {text for _kind, text in self._words}
        return next((key for key in REASONING_KEYS if key in texts), "")

    @cached_property
    def _words(self) -> frozenset[tuple[str, str]]:
        """(kind, text) of each name and text in the template."""
        words = (word for source in self.sources for word in template_words(source))
        return frozenset((kind, text) for kind, text in words if kind in ("name", "string"))

    def check_options(self) -> None:
        """Raise `ConfigError` for an option that the template never names, such as a misspelt one."""
        names = {text for kind, text in self._words if kind == "name"}
        if unknown := sorted(set(self._options) - names):
            raise ConfigError(f"model.template_options: {self.name} has no option {unknown[0]!r}")

    def render(self, messages: Iterable[Message], tools: Sequence[ToolSchema] = (), *, generate: bool = True) -> str:
        """Return the text of plain messages; `generate` adds the start of the next turn. Raises `TemplateError`."""
        if self._takes_parts_alone:
            messages = map(_with_parts, messages)
        return self._render(messages, tools, generate=generate)

    @cached_property
    def _takes_parts_alone(self) -> bool:
        """Whether the template shows a content only if it is a list of parts; the template of Idefics3 does."""
        texts = []
        for message in (_PROBE, _with_parts(_PROBE)):
            try:
                texts.append(self._render([message], (), generate=True))
            except TemplateError:
                texts.append("")
        return _PROBE["content"] not in texts[0] and _PROBE["content"] in texts[1]

    def _render(self, messages: Iterable[Message], tools: Sequence[ToolSchema], *, generate: bool) -> str:
        import jinja2

        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages),
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=generate,
                **self._options,
            )
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"{self.name} does not parse: line {error.lineno}: {error.message}") from error
        # The exceptions that a template's expressions raise on messages of another form.
        except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise TemplateError(f"{self.name} fails: {_one_line(error)}") from error
        return text


def _with_parts(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


_PROBE: Message = {"role": "user", "content": "tw7content"}


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def content_text(message: Message) -> str:
    """Return a content as one string: None is empty, text parts are joined, and all else is a `TemplateError`."""
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and not isinstance(content, bytes):
        return "".join(map(_part_text, content))
    raise TemplateError(f"the content of a message must be text, not {type(content).__name__}")


def _part_text(part: object) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise TemplateError(f"the content of a message may hold parts of type 'text' only, not {kind!r}")


def plain_message(
    message: Message,
    *,
    none_as_text: bool = False,
    arguments_as_text: bool = False,
    developer_as_system: bool = False,
    reasoning_key: str = "",
    with_pictures: bool = False,
) -> Plain:
    """
    Return a message as templates expect it: content as one string, no keys that hold None or no calls.

    Args:
        message: in the OpenAI form.
        none_as_text: beside tool calls, content that is None becomes empty as it does elsewhere.
        arguments_as_text: the arguments of a call are JSON; else they are the object that most templates expect.
        developer_as_system: the role `developer` becomes `system`, its older name.
        reasoning_key: name of the reasoning, if it has another name in the message; empty leaves it.
        with_pictures: a content with pictures is a list of parts; without, it is a `TemplateError`.
    """
    plain = {key: value for key, value in message.items() if value is not None and (key != "tool_calls" or value)}
    plain["content"] = plain_parts(message) if with_pictures and has_pictures(message) else content_text(message)
    if developer_as_system and plain.get("role") == "developer":
        plain["role"] = "system"
    if reasoning_key and reasoning_key not in plain:
        reasoning = next((plain[key] for key in REASONING_KEYS if key in plain), None)
        plain |= {} if reasoning is None else {reasoning_key: reasoning}
    if calls := plain.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call, arguments_as_text) for call in calls]
        if message.get("content") is None and not none_as_text:
            plain["content"] = None
    return plain


def _plain_call(call: JsonObject, arguments_as_text: bool) -> JsonDict:
    function = call.get("function")
    if not isinstance(function, Mapping):
        return dict(call)
    arguments = function.get("arguments")
    if arguments is None or arguments == "":  # some clients write these for a call without arguments
        arguments = {}
    if arguments_as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not arguments_as_text and isinstance(arguments, str):
        arguments = _object_or_text(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def _object_or_text(text: str) -> object:
    try:
        value = load_arguments(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


def load_arguments(text: str) -> Any:
    """Return the value of the arguments of a call; `ValueError` if they are no JSON, or a number is not finite."""
    return _decode(text)


def _read_finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):  # a template would show another number, or a word that is no JSON
        raise ValueError("a number is not finite")
    return number


_decode = json.JSONDecoder(parse_float=_read_finite, parse_constant=_read_finite).decode


def find_unreadable_arguments(messages: Sequence[Message]) -> str:
    """Return the place of the first call whose arguments are no JSON object, and "" if there is none."""
    for index, message in enumerate(messages):
        for number, call in enumerate(message.get("tool_calls") or ()):
            function = _plain_call(call, arguments_as_text=False).get("function")
            if isinstance(function, Mapping) and not isinstance(function.get("arguments"), Mapping):
                return f"messages[{index}].tool_calls[{number}]"
    return ""


class PromptCache:
    """
    Encodes whole prompts, remembering the last ones and the ids of the beginnings that they share.

    The samples of a group have one prompt, and a data set's prompts are measured before its episodes begin. With forty
    tools a prompt is 25 kB of schemas, the same in every episode of a run, and encoding it costs twenty
    times its rendering. A head is known by its text and the special token behind it, where a tokenizer splits any
    text; it is kept only if head and rest, encoded one by one, gave the ids of the whole.
    """

    min_chars = 512
    max_chars = 1 << 18
    max_heads = 8
    max_prompts = 64

    def __init__(self, tokenizer: HuggingFaceTokenizer) -> None:
        self._tokenizer = tokenizer
        self._heads: dict[str, tuple[int, TokenArray]] = {}
        self._prompts: dict[str, TokenArray] = {}
        self._last = ""

    def encode(self, text: str) -> TokenArray:
        """Return the ids of the text, the same that `HuggingFaceTokenizer.encode` gives."""
        if CUT in text:  # rare, and the head may end in it
            return self._ids(text)
        known = self._prompts.get(text)
        if known is not None:
            return known.copy()
        ids = self._encode(text)
        if len(text) <= self.max_chars:  # a longer text is not kept
            _drop_oldest(self._prompts, self.max_prompts)
            self._prompts[text] = ids.copy()
        return ids

    def _encode(self, text: str) -> TokenArray:
        heads = dict(self._heads)  # another thread may change them
        known = max((known for known in heads if text.startswith(known)), key=len, default=None)
        if known is not None:
            num_chars, head_ids = heads[known]
            return np.concatenate((head_ids, self._ids(text[num_chars:])))
        ids = self._ids(text)
        if len(text) <= self.max_chars:
            self._learn(text, ids)
            self._last = text
        return ids

    def _ids(self, text: str) -> TokenArray:
        return np.array(self._tokenizer.encode(text), np.int32)

    def _learn(self, text: str, ids: TokenArray) -> None:
        spans = self._tokenizer.special_spans(text[: common_start(text, self._last)])
        if not spans or spans[-1][0] < self.min_chars:
            return
        start, end = spans[-1]
        head_ids = self._ids(text[:start])
        if not np.array_equal(ids, np.concatenate((head_ids, self._ids(text[start:])))):
            return
        _drop_oldest(self._heads, self.max_heads)
        self._heads[text[:end]] = (start, head_ids)


def _drop_oldest(entries: dict[str, Any], most: int) -> None:
    """Make room for one entry more, where other threads change the entries too."""
    if len(entries) >= most:
        entries.pop(next(iter(list(entries)), ""), None)
