"""The text for the model names the place of a mismatch, however deep in alternatives it is."""

import pytest

from turnwise.tools.schema import compile_schema

INNER = {
    "type": "object",
    "properties": {"tags": {"type": "array", "items": {"type": "string"}}, "size": {"type": "integer"}},
    "required": ["tags"],
}


def complaint(schema, value):
    parameters = {"type": "object", "properties": {"filter": schema}, "$defs": {"inner": INNER}}
    function = {"name": "search", "parameters": parameters}
    return compile_schema({"type": "function", "function": function}).complaint({"filter": value})


@pytest.mark.parametrize("word", ["anyOf", "oneOf"])
@pytest.mark.parametrize(
    ("wrap", "place"),
    [
        (lambda schema: schema, "filter"),
        (lambda schema: {"type": "array", "items": schema}, "filter[0]"),
        (lambda schema: {"type": "object", "properties": {"more": schema}}, "filter.more"),
    ],
    ids=["alone", "in a list", "in an object"],
)
@pytest.mark.parametrize("inner", [INNER, {"$ref": "#/$defs/inner"}], ids=["inline", "reference"])
@pytest.mark.parametrize(
    ("value", "path", "text"),
    [
        ({"tags": ["a", 3]}, ".tags[1]", 'is not of type "string"'),
        ({"tags": ["a"], "size": "x"}, ".size", 'is not of type "integer"'),
        ({"tags": 3}, ".tags", 'is not of type "array"'),
    ],
    ids=["item", "property", "list"],
)
def test_the_place_in_an_alternative(word, wrap, place, inner, value, path, text):
    """An optional object is an alternative of an object and null."""
    wrapped = value if place == "filter" else [value] if place.endswith("]") else {"more": value}

    found = complaint(wrap({word: [inner, {"type": "null"}]}), wrapped)

    assert f"{place}{path}: the value {text}" in found
    assert f'{place}: the value is not of type "null"' in found


def test_alternatives_in_alternatives():
    """Each level is looked into."""
    schema = {"anyOf": [{"type": "null"}, {"anyOf": [{"type": "integer"}, INNER]}]}

    assert "filter.tags[0]: the value is not of type" in complaint(schema, {"tags": [1]})


def test_alternatives_that_fail_at_one_place():
    """The place comes once."""
    schema = {"anyOf": [{"type": "integer"}, {"type": "null"}]}

    assert complaint(schema, "x") == 'filter: the value is not of type "integer" and the value is not of type "null"'
