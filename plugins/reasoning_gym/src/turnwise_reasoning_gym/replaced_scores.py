"""Scores that replace reasoning-gym's where it pays wrong answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Final

_NAN: Final = re.compile(r"(?<![a-z])nan(?:[ij]\b|\b)", re.IGNORECASE)
"""Not a number, also as a part of a complex number."""
_TOLERANCE: Final = Fraction(1, 10_000)
_RELATIVE_TOLERANCE: Final = Fraction(1, 50)


def has_nan(text: str) -> bool:
    """Return whether a text is or contains not-a-number, whose distance to a right answer counts as none."""
    return _NAN.search(text) is not None


def _is_same_word(answer: str, truth: str) -> bool:
    """Compare two texts; reasoning-gym asks Python whether each is empty, so any answer is right."""
    return answer.strip().rstrip(".").lower() == truth.lower()


def _is_same_probability(answer: str, truth: str) -> bool:
    """
    Compare two probabilities, as decimals or fractions.

    reasoning-gym compares their first characters, too, and gives one point to `0`. Its tolerance of 0.0001 would give
    that to `0` for a small probability, so here it is at most a fiftieth of the right answer.
    """
    try:
        right = Fraction(truth)
        return abs(Fraction(answer.replace(",", "")) - right) <= min(_TOLERANCE, right * _RELATIVE_TOLERANCE)
    except (ValueError, ZeroDivisionError):
        return False


IS_RIGHT: Final[Mapping[str, Callable[[str, str], bool]]] = {
    "coin_flip": _is_same_probability,
    "game_of_life_halting": _is_same_word,
}
"""By data set: whether an answer is right, from the answer and the right one."""
