"""What a response answers, and whether that is right: by the normal form of DAPO (arXiv:2503.14476) and Minerva."""

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
"""What says nothing about the value; taken out in this order."""


def last_answer(text: str, prefix: str, tail_chars: int) -> str | None:
    """Return what stands behind the last `prefix` on its line, among the last characters of a text; None if nothing."""
    found = re.findall(f"(?i){re.escape(prefix)}[ \t]*([^\n]+)", text[-tail_chars:])
    return found[-1].strip() if found else None


def is_right(answer: str, truth: str) -> bool:
    """Return whether an answer and the ground truth have one normal form."""
    return normal_form(answer) == normal_form(truth)


def normal_form(answer: str) -> str:
    """Return an answer without units, dollars and boxes, with one spelling of fractions, and no commas in numbers."""
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
