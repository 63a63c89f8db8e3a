"""A call of an agent's program to another model than the policy."""

from __future__ import annotations

from typing import Final

from attrs import frozen

MAX_CHARACTERS: Final = 65_536
"""Characters that a result keeps of a request, and of a response: a judge may get long conversations many times."""


@frozen(kw_only=True)
class OutsideCall:
    """
    A call to another model than the policy, such as a judge: context for readers, which no record has.

    Attributes:
        model: name that the program sent.
        path: of the request, such as `/chat/completions`.
        status: of HTTP; 0 when there was no response.
        request: body of the request, from `shorten`.
        response: body of the response as far as it came, from `shorten`.
        num_turns: turns of the policy before it, in all records of the episode.
    """

    model: str
    path: str = ""
    status: int = 200
    request: str
    response: str
    num_turns: int = 0


def shorten(text: str) -> str:
    """Return a text of at most `MAX_CHARACTERS` characters, or its start and the number of the others."""
    if len(text) <= MAX_CHARACTERS:
        return text
    return f"{text[:MAX_CHARACTERS]}… and {len(text) - MAX_CHARACTERS:,} characters more"
