"""Every field of the documentation's table, sent to a real session in each dialect, has the effect that it says."""

import pytest
from real_requests import LEAST, TOOLS, make_engine, send
from session_scenarios import user

from turnwise_gateway.dialects import DIALECTS, find_dialect
from turnwise_gateway.dialects.exchange import Received
from turnwise_gateway.dialects.request_body import RequestBody, RequestMemory

NAMES = [dialect.name for dialect in DIALECTS]
RULES = {dialect.name: dialect.fields.rules for dialect in DIALECTS}
ROWS = {(rule.name, rule.form): rule for rules in RULES.values() for rule in rules}
"""The rows of the table in the documentation."""


def ask(dialect, *bodies, **options):
    """Send requests with a tool, each the least one with some more fields."""
    return send(dialect, *({"tools": TOOLS[dialect]} | body for body in bodies), engine=make_engine, **options)


def effect_of(rule, sent):
    """The effect of a field, as a client and the metrics see it."""
    names = {rule.counted or rule.name, rule.name.partition(".")[0]}
    if sent.status == 400 and f"'{rule.name.partition('.')[0]}" in sent.message:
        return "refused, or wished" if "`structured_output: wish`" in sent.message else "refused"
    counted = {name.partition("_")[0] for name in sent.counts if name.partition("_")[2] in names}
    assert (200, len(sent.counts)) == (sent.status, len(counted)), (rule.name, sent)
    return "".join(counted) or "served"


@pytest.mark.many_cases(3)
@pytest.mark.parametrize("dialect", NAMES)
@pytest.mark.parametrize("option", ["refuse", "wish", "constrain"])
def test_each_field_has_its_effect(dialect, option):
    """It is served, a wish, constrained, ignored, or refused by its name; the option decides of some."""
    table = find_dialect(dialect).fields
    own = {(rule.name, rule.form): rule for rule in table.rules}
    rows = {key: own.get(key, rule) for key, rule in ROWS.items() if rule.name not in LEAST[dialect]}
    optional = {"refuse": "refused, or wished", "wish": "wished", "constrain": "constrained"}[option]
    words = {"template": "refused", "optional": optional}
    expected = {key: table.effect_of(*key) for key in rows}
    if option == "constrain":  # the wish for one call alone is no form
        required = [key for key in rows if key[0] == "tool_choice" and expected[key] == "wished"]
        expected |= dict.fromkeys(required, "constrained")

    sent = ask(dialect, *(rule.body(rule.example) for rule in rows.values()), structured_output=option)

    assert {key: words.get(effect, effect) for key, effect in expected.items()} == {
        key: effect_of(rule, each) for (key, rule), each in zip(rows.items(), sent, strict=True)
    }


@pytest.mark.parametrize("dialect", NAMES)
def test_neutral_values_change_nothing(dialect):
    """Null and the neutral values of all fields are served, without a count."""
    given = [
        (rule.name, value, rule.body(value))
        for rule in RULES[dialect]
        for value in (None, *rule.neutral)
        if rule.name not in LEAST[dialect]
    ]

    sent = ask(dialect, *(body for _, _, body in given))

    for (name, value, _), each in zip(given, sent, strict=True):
        assert (200, set()) == (each.status, set(each.counts)), (name, value, each)


class _Watched(dict):
    """The fields of a request, and the names that a dialect has asked for."""

    def __init__(self, values, asked):
        super().__init__(values)
        self.asked = asked

    def get(self, key, default=None):
        self.asked.add(key)
        return super().get(key, default)


@pytest.mark.parametrize("dialect", NAMES)
def test_the_table_has_each_field_that_a_dialect_reads(dialect):
    """A field that the code asks for, and that no row describes, would be missing in the documentation."""
    asked = set()
    made = find_dialect(dialect)
    body = RequestBody.of(dialect, made.list_key, _Watched(LEAST[dialect] | {"tools": TOOLS[dialect]}, asked))

    made.read(Received.of(body, {}, b"", RequestMemory(), is_question=False))

    assert asked <= {rule.name.partition(".")[0] for rule in made.fields.rules}
    assert {made.list_key, "tools", "stream"} <= asked


@pytest.mark.parametrize("dialect", NAMES)
def test_options_of_the_template(dialect):
    """The value of the run is neutral; another value, and an option that the run lacks, are refused with a sentence."""
    own = {"enable_thinking": False, "level": "low"}
    bodies = [
        {"chat_template_kwargs": {"enable_thinking": False, "level": "low"}},
        {"enable_thinking": False, "chat_template_kwargs": {"level": None}},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"enable_thinking": True},
        {"chat_template_kwargs": {"add_date": True}},
    ]

    sent = ask(dialect, *bodies, template_options=own)

    assert [(200, {}), (200, {})] == [(each.status, each.counts) for each in sent[:2]]
    assert [400, 400, 400] == [each.status for each in sent[2:]]
    assert "'chat_template_kwargs.enable_thinking'" in sent[2].message
    assert "`model.template_options` has False" in sent[3].message
    assert "has no 'add_date'" in sent[4].message


def test_a_prefill_is_refused():
    """A last message of the assistant is no start of the turn: with `continue_final_message` the call is refused."""
    messages = [user("Name a colour."), {"role": "assistant", "content": "It is"}]

    (sent,) = ask("chat", {"messages": messages, "continue_final_message": True})

    assert 400 == sent.status
    assert "begins each turn itself" in sent.message
