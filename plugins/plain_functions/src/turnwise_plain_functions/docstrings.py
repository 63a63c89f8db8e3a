"""Reads Google-style docstrings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from docstring_parser import ParseError
from docstring_parser.google import GoogleParser, Section, SectionType

_FREE_TEXT: Final = [
    "Returns",
    "Yields",
    "Raises",
    "Example",
    "Examples",
    "Note",
    "Notes",
    "Warning",
    "Warnings",
    "References",
    "Attributes",
]
_DOCSTRINGS: Final = GoogleParser(
    [
        *(Section(title, "param", SectionType.MULTIPLE) for title in ("Args", "Arguments", "Parameters")),
        *(Section(title, title, SectionType.SINGULAR) for title in (*_FREE_TEXT, "See Also")),
    ]
)


def parse_docstring(text: str) -> tuple[str, Mapping[str, str]]:
    """Return the summary of a Google-style docstring as one paragraph, and its parameters' descriptions by name."""
    try:
        parsed = _DOCSTRINGS.parse(text)
    except ParseError:  # a list of arguments without colons: people can read it, and so can the model
        return " ".join(text.split()), {}
    docs = {item.arg_name: " ".join((item.description or "").split()) for item in parsed.params}
    return " ".join((parsed.description or "").split()), docs
