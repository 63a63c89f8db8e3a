"""Our schemas beside those of transformers' `get_json_schema`: each difference has a reason."""

from __future__ import annotations

import sys
import typing
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from signature_rows import ROWS, Row

utils = pytest.importorskip("transformers.utils")

REFUSED = "transformers refuses the annotation"
CLASS = "transformers names every class an object and says nothing of its fields or its text"
DEFAULT = "ours shows the default, the bounds and the description of the annotation"
LENGTHS = "ours says how many values a tuple has"
NULLABLE = "ours writes null as a type, as JSON schema does, and transformers as `nullable`"
TYPES = "transformers names the types of an enum of several types too"
REASONS = {
    REFUSED: "sequence iterable collection mapping many unique frozen member defaults wrapped",
    CLASS: "moment day hour duration decimal unique_id data path address color level unit colors day_or_text"
    " color_or_text item items cart point points user movie song shelf named_pair node tree pet user_id awaited",
    DEFAULT: "real flag bounded with_field described",
    LENGTHS: "pair",
    NULLABLE: "optional implicit",
    TYPES: "mixed",
}
BY_NAME = {name: reason for reason, names in REASONS.items() for name in names.split()}
_EXTRA = {"default", "minimum", "maximum", "description"}


def of_transformers(func: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the schema of `x`, or None when transformers refuses it; it needs types that are no texts, and docs."""
    monkeypatch.setattr(func, "__annotations__", typing.get_type_hints(func))
    monkeypatch.setattr(func, "__doc__", "Call it.\n\nArgs:\n    x: The value.\n")
    try:
        made = utils.get_json_schema(func)
    except utils.chat_template_utils.TypeHintParsingException:
        return None
    schema = dict(made["function"]["parameters"]["properties"]["x"])
    assert schema.pop("description") == "The value."
    return schema


def reason(theirs: Any, ours: Any) -> str:
    """Return the reason for the difference of two schemas, empty when there is none."""
    if theirs is None:
        return REFUSED
    if theirs == ours:
        return ""
    if theirs == {key: value for key, value in ours.items() if key not in _EXTRA}:
        return DEFAULT
    if theirs == {key: value for key, value in ours.items() if key not in ("minItems", "maxItems")}:
        return LENGTHS
    if "null" in ours.get("type", ()) and theirs["type"] in ours["type"]:
        return NULLABLE
    if theirs.get("enum") == ours.get("enum") and "enum" in ours:
        return TYPES
    return CLASS if "object" in str(theirs) else f"unknown: {theirs} and {ours}"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.func.__name__)
def test_a_difference_has_a_reason(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that was trained on transformers' schemas reads the same, or more."""
    assert BY_NAME.get(row.func.__name__, "") == reason(of_transformers(row.func, monkeypatch), row.schema)
