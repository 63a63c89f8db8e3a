"""A field with a value of a type that it never has is refused by its name or counted, and never served in silence."""

import pytest
from real_requests import TOOLS, USER, make_engine, send

from turnwise_gateway.dialects import DIALECTS

NAMES = [dialect.name for dialect in DIALECTS]
RULES = {dialect.name: dialect.fields.rules for dialect in DIALECTS}
VALUES = ("x", "", 5, 0, 1, -3, 1.5, 0.0, 1.0, True, False, [], [None], [5], ["x"], {}, {"x": 1})
"""At least two values of each type of JSON but null, which is the same as no field."""
TEXTS = {"stop", "system"}
"""Fields that are a string, or a list of strings or texts."""


def kind_of(value):
    """The type of JSON; whole numbers are numbers."""
    return float if type(value) is int else type(value)


def kinds_of(dialect, name):
    """The types of the values that the documentation has for a field or for an object with fields."""
    rules = [rule for rule in RULES[dialect] if rule.name == name]
    found = {kind_of(value) for rule in rules for value in (rule.example, *rule.neutral)}
    return found | ({str, list} if name in TEXTS else set()) or {dict}


@pytest.mark.many_cases(3)
@pytest.mark.parametrize("dialect", NAMES)
def test_no_field_is_served_with_a_value_of_another_type(dialect):
    """Numbers are no flags, flags are no numbers, and an empty value of any type is no empty list."""
    names = sorted({rule.name.partition(".")[0] for rule in RULES[dialect]})
    cases = [(name, value) for name in names for value in VALUES if kind_of(value) not in kinds_of(dialect, name)]

    bodies = [{"tools": TOOLS[dialect]} | {name: value} for name, value in cases]
    sent = send(dialect, *bodies, engine=make_engine, structured_output="wish")

    wrong = [
        (name, value, each.status)
        for (name, value), each in zip(cases, sent, strict=True)
        if not each.counts and not (each.status == 400 and f"'{name}" in each.message)
    ]
    assert [] == wrong


@pytest.mark.parametrize("key", ["prefix", "partial"])
@pytest.mark.parametrize("dialect", ["chat", "responses"])
def test_a_message_that_the_model_shall_continue_is_refused(dialect, key):
    """Some servers begin the next turn with it; here it would end before a fresh turn. A false flag is left out."""
    history = "messages" if dialect == "chat" else "input"
    started = {"role": "assistant", "content": "The answer is"}

    on, off, wrong = send(
        dialect, *({history: [USER, {**started, key: value}]} for value in (True, False, "x")), engine=make_engine
    )

    assert (400, f"'{history}[1].{key}' is not supported") == (on.status, on.message.partition(":")[0])
    assert (200, {}) == (off.status, off.counts)
    assert (400, True) == (wrong.status, f"'{history}[1].{key}'" in wrong.message)


def test_parts_of_a_response_that_it_never_has_are_counted():
    """Parts in `include` that this server never has change nothing, and are counted."""
    known = ["message.output_text.logprobs", "reasoning.encrypted_content"]

    sent = send("responses", *({"include": each} for each in (known, ["x"], [*known, "x"])), engine=make_engine)

    assert [{}, {"ignored_include": 1}, {"ignored_include": 1}] == [each.counts for each in sent]


@pytest.mark.parametrize("mode", [None, "all", "none", ""])
@pytest.mark.parametrize("dialect", ["chat", "responses"])
def test_a_choice_of_some_tools_has_a_mode(dialect, mode):
    """Another one than `auto` and `required` is refused by its place; it never means `required`."""
    function = {"type": "function", "name": "add"}
    named = function if dialect == "responses" else {"type": "function", "function": {"name": "add"}}
    allowed = {"mode": mode, "tools": [named]}
    choice = {"type": "allowed_tools"} | (allowed if dialect == "responses" else {"allowed_tools": allowed})

    (refused,) = send(
        dialect, {"tools": TOOLS[dialect], "tool_choice": choice}, engine=make_engine, structured_output="wish"
    )

    place = "tool_choice" if dialect == "responses" else "tool_choice.allowed_tools"
    assert (400, True) == (refused.status, f"'{place}.mode'" in refused.message)
