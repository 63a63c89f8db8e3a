"""
Tools for models whose chat template shows none: their schemas, calls and results become the texts of messages.

The system message describes the tools and the format of a call, a turn with calls is the text that the tool parser
reads, and results are a message of the user. The template then renders messages that it knows, so the proofs of its
deltas hold for results of tools as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Final

from attrs import evolve, frozen

from turnwise.errors import ConfigError, TemplateError
from turnwise.protocols import Chat, CheckedChat, ToolFormat
from turnwise.types import MediaTokens, Message, Picture, TokenArray, ToolSchema
from turnwise_chat_templates.picture_parts import has_pictures
from turnwise_chat_templates.render import HuggingFaceTokenizer, content_text, load_arguments
from turnwise_chat_templates.shown import name_message
from turnwise_chat_templates.template import ChatTemplate

_OPEN, _CLOSE = "<tool_response>", "</tool_response>"
_RESULTS: Final = f"The result of each call comes in the next message, between {_OPEN} and {_CLOSE}."
_PROBE: Final[ToolSchema] = {"type": "function", "function": {"name": "probe"}}


@frozen(eq=False)
class WrittenToolsChat:
    """
    `turnwise.protocols.Chat` that writes tools into the system message.

    Attributes:
        template: of the model.
        tool_format: of the run's tool parser; None shows no tools.
    """

    template: ChatTemplate
    tool_format: ToolFormat | None = None

    def with_tool_format(self, tool_format: ToolFormat | None) -> Chat:
        key = "chat.tools: system_prompt"
        if tool_format is None:
            text = (
                "needs a tool parser whose format is ordinary text, such as `parser: hermes`; a model of the family"
                " gpt-oss needs `chat: harmony`, which shows tools in its own format"
            )
            raise ConfigError(f"{key} {text}")
        text = tool_format.describe([_PROBE])
        if spans := self.tokenizer.special_spans(text):
            token = text[slice(*spans[0])]
            raise ConfigError(f"{key}: the format of the parser has the special token {token!r}; choose another parser")
        return evolve(self, tool_format=tool_format)

    @property
    def tokenizer(self) -> HuggingFaceTokenizer:
        return self.template.tokenizer

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self.template.stop_token_ids

    def guard(self, content: str) -> str:
        return self.template.guard(content)

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> TokenArray:
        """
        Return (P,) ids of a conversation.

        Raises:
            TemplateError: as `ChatTemplate.prompt`, or the format cannot write a tool or a call.
            DataError: as `ChatTemplate.prompt`.
        """
        return self.template.prompt(self.write(messages, tools))

    def picture_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> TokenArray | MediaTokens:
        """Return the ids of a conversation that may have pictures; errors as `ChatTemplate.picture_prompt`."""
        return self.template.picture_prompt(self.write(messages, tools))

    def picture_delta(
        self, messages: Sequence[Message], last_token_id: int, *, with_tools: bool = True
    ) -> TokenArray | MediaTokens:
        """Return the ids of new messages that may have pictures; errors as `ChatTemplate.picture_delta`."""
        del with_tools  # as in `delta`
        return self.template.picture_delta(self.write(messages), last_token_id, with_tools=False)

    def check_picture(self, picture: Picture) -> None:
        self.template.check_picture(picture)

    def delta(self, messages: Sequence[Message], last_token_id: int, *, with_tools: bool = True) -> TokenArray:
        """Return (n,) ids of new messages; errors as `ChatTemplate.delta`."""
        del with_tools  # they are in the system message
        return self.template.delta(self.write(messages), last_token_id, with_tools=False)

    def text(self, token_ids: Sequence[int] | TokenArray) -> str:
        return self.template.text(token_ids)

    def check_conversation(
        self, number: int, messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> Mapping[str, float]:
        try:
            written = self.write(messages, tools)
        except TemplateError:  # a malformed call, which only its own tokens show
            return {}
        template: CheckedChat = self.template
        return template.check_conversation(number, written, ())

    def write(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> list[Message]:
        """
        Return the messages as the template gets them: none has calls or the role `tool`.

        Raises:
            TemplateError: the format cannot write a tool or a call.
        """
        written: list[Message] = []
        for is_result, block in groupby(enumerate(messages), lambda each: each[1].get("role") == "tool"):
            if is_result:
                written.append({"role": "user", "content": _results([message for _, message in block])})
            else:
                written.extend(self._without_calls(messages, index) for index, _ in block)
        return self._with_description(written, tools) if tools else written

    def _with_description(self, messages: list[Message], tools: Sequence[ToolSchema]) -> list[Message]:
        text = f"{self._format.describe(tools)}\n\n{_RESULTS}"
        if messages and messages[0].get("role") in ("system", "developer"):
            own = content_text(messages[0])
            return [{**messages[0], "content": f"{own}\n\n{text}" if own else text}, *messages[1:]]
        return [{"role": "system", "content": text}, *messages]

    def _without_calls(self, messages: Sequence[Message], index: int) -> Message:
        message = messages[index]
        if not message.get("tool_calls"):
            return message
        try:
            calls = [_read_call(call) for call in message["tool_calls"]]
            content = self._format.write_turn(content_text(message), calls)
        except TemplateError as error:
            raise TemplateError(f"{name_message(messages, index)}: {error}") from error
        return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": content}

    @property
    def _format(self) -> ToolFormat:
        if self.tool_format is None:
            raise TemplateError("the chat has no format of tools: the run has no tool parser")
        return self.tool_format


def _results(messages: Sequence[Message]) -> str | list[dict[str, Any]]:
    """Return the content that shows results of tools: a text, or parts if one of them has pictures."""
    if not any(map(has_pictures, messages)):
        return "\n".join(map(_result, messages))
    parts: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        content = message["content"] if has_pictures(message) else [{"type": "text", "text": content_text(message)}]
        opening = {"type": "text", "text": f"{_OPEN}\n" if index == 0 else f"\n{_OPEN}\n"}
        parts += [opening, *content, {"type": "text", "text": f"\n{_CLOSE}"}]
    return parts


def _result(message: Message) -> str:
    return f"{_OPEN}\n{content_text(message)}\n{_CLOSE}"


def _read_call(call: object) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the arguments of a call in the OpenAI form."""
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str):
        raise TemplateError("a call has no name")
    arguments = function.get("arguments") or {}
    try:
        value = load_arguments(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        value = None
    if not isinstance(value, Mapping):
        raise TemplateError("the arguments of a call are no JSON object")
    return name, value
