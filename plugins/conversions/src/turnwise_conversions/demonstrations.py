"""
Conversations as token ids for supervised fine-tuning (SFT).

The ids are the ones that a rollout would see: the prompt, then for each turn of the assistant its own tokens, and the
chat template's delta of the messages that follow. The loss covers the assistant's tokens alone, end-of-turn included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from attrs import frozen

from turnwise import Chat, Message
from turnwise.errors import DataError, TemplateError
from turnwise.media import MediaTokens, PlacedPicture
from turnwise.protocols import PictureChat
from turnwise.record.pictures import shifted, split_media
from turnwise.types import TokenArray, ToolSchema
from turnwise_result_files.messages import calls_of, is_malformed, shows_picture, text_of


@frozen(eq=False)
class Demonstration:
    """
    A conversation in tokens.

    Attributes:
        input_ids: (T,) int32.
        loss_mask: (T,) bool, True on the tokens that the model learns to write.
        pictures: in their order, each with its placeholders among the ids.
    """

    input_ids: TokenArray
    loss_mask: np.ndarray[tuple[int], np.dtype[np.bool_]]
    pictures: tuple[PlacedPicture, ...] = ()


WritePrompt = Callable[[Sequence[Message]], TokenArray | MediaTokens]
"""Returns the prompt of the messages before the first turn."""


def encode_demonstration(
    chat: Chat,
    messages: Sequence[Message],
    tools: Sequence[ToolSchema] = (),
    write_prompt: WritePrompt | None = None,
) -> Demonstration:
    """
    Return a conversation as a rollout would record it.

    A turn with `weight` 0 is in the context and not in the loss, as in OpenAI's fine-tuning files.

    Args:
        chat: template of the model.
        messages: they end with a turn of the assistant; calls of tools are in the OpenAI form.
        tools: schemas of the tools.
        write_prompt: of an agent that writes the prompt otherwise than the chat does, such as with a system prompt.

    Raises:
        DataError: the conversation has no turn of the assistant, or a malformed call, or the template writes a turn in
            a form that it does not continue; or a picture cannot be used, or is in a turn of the assistant.
        TemplateError: the template cannot show a message.
        ConfigError: a message has a picture, and the model takes none.
    """
    messages = [_with_arguments(message) for message in messages]
    turns = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
    if not turns or turns[-1] != len(messages) - 1:
        raise DataError("a demonstration ends with a message of the role assistant")
    if turns[0] == 0:
        raise DataError("a demonstration starts with a message of another role than assistant")
    before = messages[: turns[0]]
    parts: list[TokenArray | MediaTokens] = [
        _prompt(chat, before, tools) if write_prompt is None else write_prompt(before)
    ]
    mask = [False]
    for turn, following in zip(turns, [*turns[1:], None], strict=True):
        written = _encode_turn(chat, messages[: turn + 1], tools)
        parts.append(written)
        mask.append(_is_trained(messages[turn], turn))
        if following is not None:
            if following == turn + 1:
                raise DataError(f"messages {turn} and {following} are both of the role assistant")
            parts.append(_delta(chat, messages[turn + 1 : following], int(written[-1]), tools))
            mask.append(False)
    return _join(parts, mask)


def _join(parts: Sequence[TokenArray | MediaTokens], mask: Sequence[bool]) -> Demonstration:
    """Return parts end to end, each of which is learned or not."""
    pictures: list[PlacedPicture] = []
    num_before = 0
    for part in parts:
        pictures += shifted(split_media(part)[1], num_before)
        num_before += len(part)
    return Demonstration(
        input_ids=np.concatenate([split_media(part)[0] for part in parts]).astype(np.int32),
        loss_mask=np.concatenate([np.full(len(part), value) for part, value in zip(parts, mask, strict=True)]),
        pictures=tuple(pictures),
    )


def _prompt(chat: Chat, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> TokenArray | MediaTokens:
    """Return the ids of a conversation, with its pictures where the chat shows some."""
    return chat.picture_prompt(messages, tools) if isinstance(chat, PictureChat) else chat.prompt(messages, tools)


def _delta(
    chat: Chat, messages: Sequence[Message], last_token_id: int, tools: Sequence[ToolSchema]
) -> TokenArray | MediaTokens:
    """Return the ids of messages behind a turn, with their pictures where the chat shows some."""
    append = chat.picture_delta if isinstance(chat, PictureChat) else chat.delta
    return append(messages, last_token_id, with_tools=bool(tools))


def _is_trained(turn: Message, number: int) -> bool:
    weight = turn.get("weight", 1)
    if weight not in (0, 1):
        raise DataError(f"message {number}: weight must be 0 or 1, not {weight!r:.60}")
    return bool(weight)


def _with_arguments(message: Message) -> Message:
    """Return a message with an empty object for the arguments of a call that lacks them, as prompts have it."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_call_with_arguments(call) for call in calls]}


def _call_with_arguments(call: object) -> object:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    return call if arguments not in (None, "") else {**call, "function": {**function, "arguments": "{}"}}


def _encode_turn(chat: Chat, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> TokenArray:
    """
    Return the tokens of the last message, which the model would write.

    The template renders the conversation with the turn and one message more. Without the prompt before the turn and the
    delta behind it, the turn is left. Templates that drop reasoning before a user message keep it before a tool result.
    """
    number, turn = len(messages) - 1, messages[-1]
    if is_malformed(turn):
        raise DataError(f"message {number} has a call without a name, or whose arguments are no JSON object")
    if shows_picture(turn):
        raise DataError(f"message {number} is a turn of the assistant with a picture, and no model writes pictures")
    before = _ids_of(_prompt(chat, messages[:-1], tools))
    problem = "the chat template does not write this turn as the model would"
    for probe in _probes(turn):
        try:
            whole = _ids_of(_prompt(chat, [*messages, probe], tools))
            after = chat.delta([probe], next(iter(chat.stop_token_ids), 0), with_tools=bool(tools))
        except TemplateError as error:
            problem = str(error)
            continue
        ids = whole[len(before) : len(whole) - len(after)]
        fits = np.array_equal(whole[: len(before)], before) and np.array_equal(whole[len(whole) - len(after) :], after)
        if fits and len(ids) and int(ids[-1]) in chat.stop_token_ids and _shows(chat.text(ids), turn):
            return ids
    raise DataError(f"message {number}: {problem}")


def _ids_of(given: TokenArray | MediaTokens) -> TokenArray:
    return given.token_ids if isinstance(given, MediaTokens) else given


def _probes(turn: Message) -> Iterator[Message]:
    """Yield messages that may follow a turn."""
    yield {"role": "user", "content": "."}
    name, function, _ = next(iter(calls_of(turn)), ("call", "tool", ""))
    yield {"role": "tool", "content": ".", "tool_call_id": name, "name": function}


def _shows(text: str, turn: Message) -> bool:
    """Return whether a turn's text has all of its parts: content, reasoning and the names of its calls."""
    reasoning = str(turn.get("reasoning_content") or turn.get("reasoning") or "")
    parts = [text_of(turn), reasoning, *(function for _, function, _ in calls_of(turn))]
    return all(part.strip() in text for part in parts)
