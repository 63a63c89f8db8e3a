"""The reward: is the final answer the right number?"""

import re
from typing import Final

_TOOL_CALL: Final = re.compile(r"<tool_call>.*?(?:</tool_call>|\Z)", re.DOTALL)
"""A call is not an answer, so a number in it counts for nothing, be the call closed or cut off."""

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
    Scores the last number of an answer against the ground truth.

    Tool calls are removed first. The last number that is left decides. It may have a sign (`-` or the minus sign
    U+2212), thousands separators (`1,234`) and a fraction of zeros (`497.0`), and anything around it: `#### 497`,
    `\boxed{497}`, `**497**`, `The answer is 497.`

    Args:
        text: The last assistant text of the episode.
        ground_truth: The right answer, a whole number such as "497".

    Returns:
        1.0 where both are the same whole number; 0.0 otherwise, also where the text holds no number.

    Raises:
        ValueError: The ground truth is not a whole number: the data is wrong, which no score should hide.
    """
    expected = final_answer(ground_truth)
    if expected is None:
        raise ValueError(f"ground truth {ground_truth!r} is not a whole number")
    return float(final_answer(text) == expected)


def final_answer(text: str) -> str | None:
    """
    The last number of a text in one spelling: digits without leading zeros, `-` before them where negative.

    Args:
        text: Any text; tool calls in it are passed over.

    Returns:
        The number, or None where there is none or where the last one is not whole.
    """
    matches = list(_NUMBER.finditer(_TOOL_CALL.sub(" ", text)))
    return _whole_number(matches[-1]) if matches else None


def _whole_number(match: re.Match[str]) -> str | None:
    """One spelling for a matched number; text, not int, because Python refuses to read more than 4300 digits."""
    if (match["fraction"] or "").strip("0"):
        return None
    digits = match["whole"].replace(",", "").lstrip("0") or "0"
    is_negative = match["sign"] in {"-", "\u2212"} and digits != "0"
    return f"-{digits}" if is_negative else digits
