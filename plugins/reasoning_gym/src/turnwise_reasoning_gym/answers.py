"""Answers in the texts of a model: where they are, and whether two of them are the same number."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Final

from attrs import frozen

from turnwise_reasoning_gym.config import Extraction

_TAG: Final = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_MINUS: Final = "\N{MINUS SIGN}"
_NUMBER: Final = re.compile(
    # A dash behind a digit, a letter or a bracket subtracts: the last number of "10-5" is 5.
    rf"(?:(?<![\w)])[-+{_MINUS}])?"
    # Commas only as separators of thousands: the last number of "1,2" is 2.
    r"(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
)


@frozen
class Answer:
    """
    The answer in a message.

    Attributes:
        text: empty if there is none.
        extracted: the text is the answer alone: a number, or the text of a tag; otherwise it is the whole message.
    """

    text: str
    extracted: bool


def find_answer(text: str, extraction: Extraction) -> Answer:
    """Return the answer in the last message of a model."""
    text = text.rpartition("</think>")[2]
    if extraction in ("auto", "tag") and (tagged := _TAG.findall(text)):
        return Answer(_with_hyphen(str(tagged[-1]).strip()), extracted=True)
    if extraction == "tag":
        return Answer("", extracted=True)
    if extraction == "number":
        numbers = _NUMBER.findall(text)
        return Answer(_with_hyphen(numbers[-1]).replace(",", "") if numbers else "", extracted=True)
    return Answer(text.strip(), extracted=False)


def is_same_number(answer: str, truth: str) -> bool:
    """Return whether both texts are numbers, and equal; the answer may have separators of thousands."""
    if not _NUMBER.fullmatch(answer):
        return False
    try:
        return Decimal(_with_hyphen(answer).replace(",", "")) == Decimal(truth)
    except InvalidOperation:
        return False


def _with_hyphen(text: str) -> str:
    """Return a number with the sign that programs read; any other text as it is."""
    return text.replace(_MINUS, "-") if _NUMBER.fullmatch(text) else text
