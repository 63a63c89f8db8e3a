"""Compares the conversations of a session with the chat template's renderings of the whole, after its last call."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Final

from turnwise.protocols import CheckedChat
from turnwise.threads import in_thread
from turnwise_gateway.session.records import SessionRecords

_MAX_RECORDS: Final = 4


async def check_conversations(book: SessionRecords) -> None:
    """
    Count the conversations of the first records that differ, if it is the turn of the episode.

    A conversation is rendered several times, so this happens in a thread, and other sessions do not wait for it.
    """
    if not isinstance(book.chat, CheckedChat):
        return
    for found in await in_thread(partial(_compare, book, book.chat), {}):
        for name, value in found.items():
            book.episode.record_metric(name, value)


def _compare(book: SessionRecords, chat: CheckedChat) -> list[Mapping[str, float]]:
    number = book.episode.task.sample_index + book.episode.rollout_n
    return [
        chat.check_conversation(number, record.last_node.conversation(), json.loads(record.tools))
        for record in book.records[:_MAX_RECORDS]
    ]
