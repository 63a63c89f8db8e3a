"""
Chat templates that only append: ids of the prompt once, then only the ids of new messages.

Sampled text is never rendered or tokenized again. `delta` gives the ids that new messages add after a turn of the
model, as the template would render them. `ChatTemplate` proves on probe conversations that this holds, separately for
each kind of message (see `turnwise_chat_templates.delta`).

    chat = load_chat(ModelSpec(path=Path("models/qwen")))
    ids = chat.prompt([{"role": "user", "content": "What is 6 * 7?"}], tools)
    ids = [*ids, *sampled]
    ids = [*ids, *chat.delta([{"role": "tool", "content": "42"}], last_token_id=ids[-1])]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import structlog

from turnwise.errors import ConfigError, TemplateError
from turnwise.options import SpecialTokenPolicy
from turnwise.protocols.chat import COMPARED_METRIC
from turnwise.types import JsonObject, MediaTokens, Message, Picture, TokenArray, ToolSchema
from turnwise_chat_templates.call_ids import CallIdRules
from turnwise_chat_templates.contents import ContentGuard
from turnwise_chat_templates.conversations import ConversationCheck
from turnwise_chat_templates.delta import DeltaProver, DeltaTemplate
from turnwise_chat_templates.picture_parts import has_pictures, pictures_of
from turnwise_chat_templates.picture_proof import PictureProver
from turnwise_chat_templates.pictures import Placeholders
from turnwise_chat_templates.probe import BASE, Plain, with_answer_keys
from turnwise_chat_templates.render import (
    REASONING_KEYS,
    HuggingFaceTokenizer,
    PromptCache,
    Renderer,
    content_text,
    find_unreadable_arguments,
    plain_message,
)
from turnwise_chat_templates.shown import ShownMessages

_VERIFIED_ROLES = (("user",), ("tool",), ("tool", "tool"), ("tool", "user"))
_PLAIN_KEYS = frozenset({"role", "content", "name", "tool_call_id"})
_CALL_FORMS: tuple[dict[str, bool], ...] = (
    {},
    {"none_as_text": True},
    {"none_as_text": True, "arguments_as_text": True},
)
"""How templates want tool calls of earlier turns, the most common form first; DeepSeek's is the last."""


def _forms_of(messages: Sequence[Message], reasoning_key: str) -> Iterator[dict[str, Any]]:
    """
    Yield the forms of a conversation.

    A template that does not know the role `developer` knows `system`. The reasoning has the template's own name for it,
    unless the template refuses that: gpt-oss shows no reasoning beside a content with calls.
    """
    forms: Sequence[dict[str, Any]] = _CALL_FORMS if any(each.get("tool_calls") for each in messages) else ({},)
    renames = any(not each.keys().isdisjoint(REASONING_KEYS) and reasoning_key not in each for each in messages)
    for key in (reasoning_key, "") if reasoning_key and renames else ("",):
        named = [{**form, "reasoning_key": key} for form in forms]
        yield from named
        if any(message.get("role") == "developer" for message in messages):
            yield from ({**form, "developer_as_system": True} for form in named)


def _refuse_pictures(messages: Sequence[Message]) -> None:
    """Raise `TemplateError` for the first message with pictures, which the methods for texts do not show."""
    for message in messages:
        if has_pictures(message):
            content_text(message)


class ChatTemplate:
    """
    `turnwise.protocols.Chat` over a transformers tokenizer and its chat template.

    Args:
        tokenizer: any tokenizer of transformers, with `chat_template` set.
        template_options: keyword arguments for the template, such as `enable_thinking`.
        stop_token_ids: additional ids that end a turn, besides the template's and the tokenizer's.
        name: of the template, for error texts.
        special_tokens: treatment of special tokens that messages spell; schemas of tools are not messages.
        check_every: one conversation in so many is compared with its rendering as a whole; 0 compares none.
        placeholders: of pictures; None for a model that takes none.

    Raises:
        TemplateError: the template is missing, larger than 1 MiB, does not parse, or can append neither user messages
            nor tool results.
        ConfigError: an option is not one of the template.
    """

    def __init__(  # noqa: PLR0913 - keywords, each with a default
        self,
        tokenizer: Any,
        template_options: JsonObject | None = None,
        *,
        stop_token_ids: Sequence[int] = (),
        name: str = "the chat template",
        special_tokens: SpecialTokenPolicy = "text",
        check_every: int = 64,
        placeholders: Placeholders | None = None,
    ) -> None:
        self._tokenizer = HuggingFaceTokenizer(tokenizer)
        self._contents = ContentGuard(self._tokenizer.special_tokens, special_tokens)
        self._renderer = Renderer(tokenizer, template_options or {}, name)
        self._prover = DeltaProver(self._renderer, self._tokenizer)
        self._placeholders = placeholders
        self._pictures: PictureProver | None = None
        self._prompts = PromptCache(self._tokenizer)
        self._shown = ShownMessages(self._renderer)
        self._call_ids = CallIdRules(self._renderer, self._contents.value)
        self._deltas: dict[tuple[str, ...], DeltaTemplate | str] = {}
        self._check_every = check_every
        self._has_warned = False
        self._conversations = ConversationCheck(self._renderer, self._plain, self._delta_template, self._suffix)
        self._renderer.render(BASE)
        self._renderer.check_options()
        self.verify()
        self._stops = self._stop_texts(stop_token_ids)

    @property
    def tokenizer(self) -> HuggingFaceTokenizer:
        return self._tokenizer

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a turn of the model: the template's first, then the tokenizer's and those given."""
        return tuple(self._stops)

    def guard(self, content: str) -> str:
        return self._contents.text(content)

    def verify(self) -> tuple[DeltaTemplate | str, ...]:
        """
        Return the templates of a user message, one tool result, two, and a tool result before a user message.

        A text is the reason why it can append none. Other kinds are proven when they first occur, and each kind once.

        Raises:
            TemplateError: neither user messages nor tool results can be appended.
        """
        found = {roles: self._prove(roles) for roles in _VERIFIED_ROLES}
        user, tool = found["user",], found["tool",]
        if isinstance(user, str) and isinstance(tool, str):
            raise TemplateError(f"{user}; {tool}")
        return tuple(found.values())

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> TokenArray:
        """
        Return (P,) ids of a conversation.

        Raises:
            TemplateError: the template refuses the conversation or does not show a part of it, or a content is not
                text. The text names the message.
            DataError: a message spells a special token and the policy is `refuse`.
        """
        _refuse_pictures(messages)
        return self._prompts.encode(self._render(messages, tools)[0])

    def shown_messages(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> list[Plain]:
        """
        Return the messages in the form in which `prompt` gives them to the template.

        It is not always the given one: where the template knows no role `developer`, the role is `system`.

        Raises:
            TemplateError, DataError: as `prompt` does.
        """
        _refuse_pictures(messages)
        return self._render(messages, tools)[1]

    def delta(self, messages: Sequence[Message], last_token_id: int, *, with_tools: bool = True) -> TokenArray:
        """
        Append messages of the environment: tool results in the order of their calls, and user messages.

        Raises:
            TemplateError: messages of these roles cannot be appended, a content is not text, or a tool message lacks
                the `name` or `tool_call_id` that the template shows.
            DataError: a message spells a special token and the policy is `refuse`.
        """
        _refuse_pictures(messages)
        template = self._delta_template(messages)
        if with_tools and template.moves_tools:
            raise TemplateError(template.moves_tools)
        start = template.start(self._stops.get(last_token_id))
        # The text starts with the token before the delta, so that the rest is split as in a whole conversation.
        return np.array(self._tokenizer.encode(start + self._suffix(template, messages)), np.int32)[1:]

    def picture_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> TokenArray | MediaTokens:
        """
        Return the ids of a conversation that may have pictures; without any, those of `prompt`.

        Raises:
            TemplateError, DataError: as `prompt` does; or a picture cannot be read or shown.
            ConfigError: the model takes no pictures.
        """
        pictures, placeholders = self._pictures_of(messages)
        if placeholders is None:
            return self.prompt(messages, tools)
        return placeholders.encode(self._render(messages, tools)[0], pictures, self._prompts.encode)

    def picture_delta(
        self, messages: Sequence[Message], last_token_id: int, *, with_tools: bool = True
    ) -> TokenArray | MediaTokens:
        """Append messages that may have pictures, as `delta` appends texts; errors as in `picture_prompt`."""
        pictures, placeholders = self._pictures_of(messages)
        if placeholders is None:
            return self.delta(messages, last_token_id, with_tools=with_tools)
        template = self._delta_template(messages)
        if with_tools and template.moves_tools:
            raise TemplateError(template.moves_tools)
        self._picture_prover(placeholders).prove(template, self._plain(messages), with_tools=with_tools)
        text = template.start(self._stops.get(last_token_id)) + self._suffix(template, messages)
        return placeholders.encode(text, pictures, self._tokenizer.encode, num_before=1)

    def check_picture(self, picture: Picture) -> None:
        """Raise `DataError` for a picture that the chat refuses, `ConfigError` if the model takes none."""
        self._require_placeholders().check(picture)

    def _picture_prover(self, placeholders: Placeholders) -> PictureProver:
        if self._pictures is None:
            self._pictures = PictureProver(self._renderer, self._tokenizer, placeholders, self._prover)
        return self._pictures

    def _pictures_of(self, messages: Sequence[Message]) -> tuple[list[Picture], Placeholders | None]:
        """Return the pictures of messages and what shows them; None if they have none."""
        if not any(map(has_pictures, messages)):
            return [], None
        return pictures_of(messages), self._require_placeholders()

    def _require_placeholders(self) -> Placeholders:
        if self._placeholders is None:
            raise ConfigError(
                f"{self._renderer.name}: the model takes no pictures: its directory has no image processor"
            )
        return self._placeholders

    def text(self, token_ids: Sequence[int] | TokenArray) -> str:
        end = len(token_ids)
        while end and token_ids[end - 1] in self._stops:
            end -= 1
        return self._tokenizer.decode(token_ids[:end])

    def takes_call_id(self, call_id: str, tool: str) -> bool:
        return self._call_ids.take(call_id, tool)

    def write_call_id(self, tool: str, number: int) -> str:
        return self._call_ids.write(tool, number)

    def check_conversation(
        self, number: int, messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> Mapping[str, float]:
        if not self._check_every or number % self._check_every:
            return {}
        difference = self._conversations.find_difference(messages, tools)
        if difference is None:
            return {}
        if difference and not self._has_warned:
            self._has_warned = True
            structlog.get_logger().warning(
                "the chat template renders a conversation differently", template=self._renderer.name, at=difference
            )
        return {COMPARED_METRIC: 1.0, "template/differing_conversations": float(bool(difference))}

    def _plain(self, messages: Sequence[Message]) -> list[Plain]:
        key = self._renderer.reasoning_key
        plain = [plain_message(message, reasoning_key=key, with_pictures=True) for message in messages]
        return [self._contents.value(message) for message in plain]

    def _render(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> tuple[str, list[Plain]]:
        """Return the text of a conversation, and the first form of it in which the template shows all of it."""
        if not messages:
            raise TemplateError("a prompt needs at least one message")
        error, hides = TemplateError("no form was tried"), ""
        messages = self._call_ids.rename(messages)
        for form in _forms_of(messages, self._renderer.reasoning_key):
            # The guard comes after it: the arguments are read out of JSON that may have escaped a special token.
            whole = [plain_message(message, **form, with_pictures=True) for message in messages]
            plain: list[Plain] = self._contents.value(whole)
            try:
                text = self._renderer.render(plain, tools)
                if plain != whole:  # the template's own checks of contents must see special tokens whole
                    self._renderer.render(whole, tools)
            except TemplateError as refusal:
                error = refusal
                continue
            found = self._shown.find_hidden(plain, tools, text)
            if not found:
                return text, whole
            hides = found  # of the last form: the reason that no form can help
        if hides:
            raise TemplateError(f"{self._renderer.name} does not fit the prompt: {hides}")
        if place := find_unreadable_arguments(messages):
            raise TemplateError(f"{place}: the arguments are no JSON object, and {error}") from error
        raise error

    def _delta_template(self, messages: Sequence[Message]) -> DeltaTemplate:
        try:
            roles = tuple([message["role"] for message in messages])
        except KeyError as error:
            raise TemplateError("a message has no role") from error
        template = self._deltas.get(roles) or self._prove(roles)
        if isinstance(template, str):
            raise TemplateError(template)
        return template

    def _prove(self, roles: tuple[str, ...]) -> DeltaTemplate | str:
        """Return the template of messages of these roles, or why there is none."""
        if roles not in self._deltas:
            try:
                self._deltas[roles] = self._prover.find(roles)
            except TemplateError as error:
                self._deltas[roles] = str(error)
        return self._deltas[roles]

    def _suffix(self, template: DeltaTemplate, messages: Sequence[Message]) -> str:
        """Return the text of the messages and the next generation prompt."""
        is_text = template.pieces is not None and not any(map(has_pictures, messages))
        if is_text and all(message.keys() <= _PLAIN_KEYS for message in messages):
            return template.fill([self._contents.text(content_text(message)) for message in messages])
        uncut = [plain_message(message, with_pictures=True) for message in messages]
        plain: list[Plain] = self._contents.value(uncut)
        for key in template.needs:
            if any(message["role"] == "tool" and not message.get(key) for message in plain):
                raise TemplateError(f"{self._renderer.name} shows {key!r} of a tool message, so each needs one")
        whole = self._prover.whole(template, with_answer_keys(plain))
        if plain != uncut:  # as in a prompt
            self._prover.whole(template, with_answer_keys(uncut))
        return template.suffix(whole)

    def _stop_texts(self, more: Sequence[int]) -> dict[int, str]:
        templates = [template for template in self._deltas.values() if isinstance(template, DeltaTemplate)]
        ids = [self._tokenizer.encode(template.stop)[0] for template in templates]
        if self._tokenizer.eos_token_id is not None:
            ids.append(self._tokenizer.eos_token_id)
        return {token_id: self._tokenizer.decode([token_id]) for token_id in dict.fromkeys((*ids, *more))}
