"""Extracts the answer of a response and compares it in the normal form of DAPO (arXiv:2503.14476) and Minerva."""

from __future__ import annotations

import re
from typing import Final

_REMOVED: Final = (
    "an ", "a ", ".$", "\\$", r"\ ", " ", "mbox", ",\\text{and}", "\\text{and}", "\\text{m}", "\\text{}",
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points",
    "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students",
    "childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}",
    r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', "\\dots",
)  # fmt: skip
"""Texts without meaning for the value, which are removed in this order."""


def extract_last_answer(text: str, prefix: str, tail_chars: int) -> str | None:
    """Return the rest of the line after the last `prefix` in the last `tail_chars` characters; None if it is empty."""
    found = re.findall(f"(?i){re.escape(prefix)}[ \t]*([^\n]+)", text[-tail_chars:])
    return found[-1].strip() if found else None


def is_correct(answer: str, truth: str) -> bool:
    """Return whether an answer and the ground truth have the same normal form."""
    return normalize(answer) == normalize(truth)


def normalize(answer: str) -> str:
    """Remove units, dollars, boxes and commas from an answer, and unify the notation of fractions and roots."""
    answer = answer.split("=")[-1].strip()
    for removed in _REMOVED:
        answer = answer.replace(removed, "")
    answer = re.sub(r"(.*?)(\$)(.*?)(\$)(.*)", r"$\3$", answer)
    for command in ("text", "textbf", "overline", "boxed", "mathrm"):
        answer = re.sub(rf"\\{command}\{{([^{{}}]*)\}}", r"\1", answer)
    answer = re.sub(r"\\[dt]frac", r"\\frac", answer)
    answer = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", answer)
    answer = re.sub(r"sqrt([^{])", r"sqrt{\1}", answer)
    answer = answer.replace("$", "").rstrip(".")
    return answer.replace(",", "") if answer.replace(",", "").isdigit() else answer
