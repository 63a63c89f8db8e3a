"""The reward: compares the final number of an answer with the ground truth."""

import re
from typing import Final

_TOOL_CALL: Final = re.compile(r"<tool_call>.*?(?:</tool_call>|\Z)", re.DOTALL)
"""Matches a complete or truncated tool call; a number inside it is not an answer."""

_NUMBER: Final = re.compile(
    r"""
    (?<![\w.,])                             # not inside a word or another number
    (?P<sign>(?<![0-9)\]][ ])[-+\u2212])?   # a sign, unless it reads as the minus of "5 - 3"
    (?P<whole>[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)
    (?:\.(?P<fraction>[0-9]+))?
    (?![\w]|[.,][0-9])
    """,
    re.VERBOSE,
)


def exact_match(text: str, ground_truth: str) -> float:
    r"""
    Compare the last number of an answer with the ground truth.

    Numbers in tool calls do not count. The number may have a sign (`-` or the minus sign U+2212), thousands separators
    (`1,234`) and a fraction of zeros (`497.0`), and any text around it: `#### 497`, `\boxed{497}`, `**497**`,
    `The answer is 497.`

    Args:
        text: The last assistant text of the episode.
        ground_truth: The correct answer, an integer such as "497".

    Returns:
        1.0 if both are the same integer, otherwise 0.0.

    Raises:
        ValueError: The ground truth is not an integer: the data is wrong, and a score would hide the error.
    """
    expected = final_answer(ground_truth)
    if expected is None:
        raise ValueError(f"ground truth is {ground_truth!r}, expected an integer")
    return float(final_answer(text) == expected)


def final_answer(text: str) -> str | None:
    """
    Return the last number of a text in canonical form: no leading zeros, `-` if negative.

    Numbers in tool calls do not count. Returns None if there is no number or the last one is not an integer.
    """
    matches = list(_NUMBER.finditer(_TOOL_CALL.sub(" ", text)))
    return _canonical_integer(matches[-1]) if matches else None


def _canonical_integer(match: re.Match[str]) -> str | None:
    # Text and not int: Python refuses to parse more than 4300 digits.
    if (match["fraction"] or "").strip("0"):
        return None
    digits = match["whole"].replace(",", "").lstrip("0") or "0"
    is_negative = match["sign"] in {"-", "\u2212"} and digits != "0"
    return f"-{digits}" if is_negative else digits
