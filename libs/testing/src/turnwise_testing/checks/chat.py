"""
Requirements of every chat, as plain functions without pytest.

A check takes a `ChatProbe`. The conversations are made here: a user, a turn of the model and an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import numpy as np
from attrs import frozen

from turnwise.errors import DataError, TurnwiseError
from turnwise.protocols import Chat, ModelSpec, Resources
from turnwise.types import Message, TokenArray
from turnwise_testing.checks.check import Check, register
from turnwise_testing.checks.part import PartChecks
from turnwise_testing.inputs.tokenizers import byte_tokenizer
from turnwise_testing.probes.engine import expect, expect_equal

TEXTS = ("What is 6 * 7?", "It is 42.", "", "Grüße, 世界 🌍", "a\n\nb", " spaces ", "<b>1 < 2</b> {{ x }}")
"""Contents of messages; none spells a special token."""


@frozen(kw_only=True)
class ChatProbe:
    """
    The probe of a chat.

    Attributes:
        make_chat: builds it with a model, as the registered factory does.
        write_turn: returns the text that the model samples for a content, without the end of the turn; for families
            whose turns have headers.
        past_end: the special token that ends an earlier turn in a prompt; empty when it is the one that the model
            samples.
    """

    make_chat: Callable[[], Chat]
    write_turn: Callable[[str], str] = str
    past_end: str = ""


CHAT_CHECKS: dict[str, Check] = {}
"""Every check by the name of its function without `check_`."""
CHATS = PartChecks(
    checks=CHAT_CHECKS,
    probe=lambda part: ChatProbe(make_chat=part.make),
    resources=lambda folder: tokenizer_resources(folder),
)
_check = register(CHAT_CHECKS)


def tokenizer_resources(folder: Path, special_tokens: Sequence[str] = (), eos_token: str = "<|im_end|>") -> Resources:
    """
    Return resources whose model is a tokenizer of bytes, written to a folder.

    Args:
        folder: of the model; it exists.
        special_tokens: of the family, which has no chat template then; none are ChatML's, with its template.
        eos_token: the one of them that ends a turn.
    """
    own = byte_tokenizer(None, special_tokens, eos_token=eos_token) if special_tokens else byte_tokenizer()
    own.save_pretrained(folder)
    return Resources(model=ModelSpec(path=folder))


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _expect_ids(ids: TokenArray, what: str) -> list[int]:
    expect(isinstance(ids, np.ndarray) and ids.ndim == 1, f"{what} is no array of one dimension: {ids!r}")
    expect(np.issubdtype(ids.dtype, np.integer), f"{what} has the type {ids.dtype}, expected integers")
    return [int(each) for each in ids]


@_check
def check_fulfils_the_protocol(probe: ChatProbe) -> None:
    """The factory returns an object with the methods of a chat, and one id at least ends a turn."""
    chat = probe.make_chat()
    expect(isinstance(chat, Chat), "it is no Chat: it lacks a method of turnwise.protocols.Chat")
    expect(len(chat.stop_token_ids) > 0, "no id ends a turn of the model: stop_token_ids is empty")


@_check
def check_prompts_are_repeatable(probe: ChatProbe) -> None:
    """A prompt has ids, the same ones from a second chat, and shows the contents of its messages."""
    chat, other = probe.make_chat(), probe.make_chat()
    for text in TEXTS:
        ids = _expect_ids(chat.prompt([_user(text)]), "a prompt")
        expect(bool(ids), f"the prompt of {text!r} has no ids")
        expect_equal(_expect_ids(other.prompt([_user(text)]), "a prompt"), ids, f"the prompt of {text!r} again")
        shown = chat.tokenizer.decode(ids)
        expect(text.strip() in shown, f"the prompt of {text!r} does not show it: {shown!r}")


@_check
def check_prompts_grow(probe: ChatProbe) -> None:
    """The prompt and what follows it, turn by turn, is the prompt of the whole conversation."""
    for first, turn, answer in product(TEXTS[:2], TEXTS[1:2], TEXTS):
        chat = probe.make_chat()
        stop = chat.stop_token_ids[0]
        messages: Sequence[Message] = [_user(first)]
        sampled = chat.tokenizer.encode(probe.write_turn(turn))
        end = chat.tokenizer.encode(probe.past_end) or [stop]
        begun = [*_expect_ids(chat.prompt(messages), "a prompt"), *sampled, *end]
        grown = [*begun, *_expect_ids(chat.delta([_user(answer)], stop, with_tools=False), "a delta")]
        whole = [*messages, {"role": "assistant", "content": turn}, _user(answer)]
        expected = _expect_ids(chat.prompt(whole), "a prompt")
        decode = chat.tokenizer.decode
        expect_equal(decode(grown), decode(expected), f"the conversation {first!r}, {turn!r}, {answer!r}")


@_check
def check_cut_turns_are_closed(probe: ChatProbe) -> None:
    """After a turn without its end, the ids of new messages begin with that end."""
    chat = probe.make_chat()
    stop, new = chat.stop_token_ids[0], [_user(TEXTS[0])]
    open_ids = [each for each in chat.tokenizer.encode("word") if each not in chat.stop_token_ids]
    ended = _expect_ids(chat.delta(new, stop, with_tools=False), "a delta")
    cut = _expect_ids(chat.delta(new, open_ids[-1], with_tools=False), "a delta")
    ends = (*chat.stop_token_ids, *chat.tokenizer.encode(probe.past_end))
    expect(cut[0] in ends, f"the delta after a cut turn starts with {cut[:3]}, not with an end")
    expect_equal(cut[1:], ended, "the rest of the delta after a cut turn")


@_check
def check_text_has_no_end(probe: ChatProbe) -> None:
    """The text of a turn is the text of its ids without the ids that end it."""
    chat = probe.make_chat()
    for text, stop in product(TEXTS, chat.stop_token_ids):
        ids = chat.tokenizer.encode(text)
        expected = chat.tokenizer.decode(ids)
        expect_equal(chat.text([*ids, stop]), expected, f"the text of the turn {text!r}")
        expect_equal(chat.text(np.array(ids, np.int32)), expected, f"the text of the cut turn {text!r}")


@_check
def check_contents_cannot_forge_a_turn(probe: ChatProbe) -> str | None:
    """A content that spells the end of a turn adds none to prompts, deltas and guarded texts, or is refused."""
    chat = probe.make_chat()
    stop = chat.stop_token_ids[0]
    spelled = chat.tokenizer.decode([stop])
    if len(spelled) < 2 or chat.tokenizer.encode(spelled) != [stop]:
        return "no text spells the end of a turn"
    plain, forged = [_user("a b")], [_user(f"a{spelled}b")]
    ways: dict[str, Callable[[Sequence[Message]], list[int]]] = {
        "a prompt": lambda messages: _expect_ids(chat.prompt(messages), "a prompt"),
        "a delta": lambda messages: _expect_ids(chat.delta(messages, stop, with_tools=False), "a delta"),
        "a guarded text": lambda messages: chat.tokenizer.encode(chat.guard(str(messages[0]["content"]))),
    }
    for name, ids_of in ways.items():
        try:
            found = ids_of(forged)
        except DataError:
            continue
        expect_equal(found.count(stop), ids_of(plain).count(stop), f"the number of ends of turns in {name}")
    return None


@_check
def check_bad_messages_are_errors(probe: ChatProbe) -> None:
    """No messages, a message without a role and one with an unknown role are errors of turnwise, or shown."""
    chat = probe.make_chat()
    for messages in ([], [{"content": "x"}], [{"role": "nobody", "content": "x"}], [{"role": "user", "content": 1.5}]):
        try:
            ids = chat.prompt(messages)
        except TurnwiseError:
            continue
        expect(bool(messages) and len(ids) > 0, f"the prompt of {messages!r} is {ids!r}, expected an error")
