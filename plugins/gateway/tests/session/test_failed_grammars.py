"""A grammar that fails in the engine refuses its call by the field that asked for it; the session continues."""

import json

import pytest
from attrs import evolve
from real_requests import TOOLS, send
from session_scenarios import Sessions, make_call, user

from turnwise import Status
from turnwise.errors import EngineError, GrammarError
from turnwise_gateway.calls import CallRefusedError, Constraint
from turnwise_gateway.dialects import DIALECTS
from turnwise_gateway.replay.request_file import log_session, read_requests
from turnwise_testing.engines.scripted import SCRIPTED_CAPABILITIES, ScriptedEngine

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
FORMS = {
    "chat": [
        ("response_format", {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}),
        ("response_format", {"type": "json_object"}),
        ("tool_choice", {"type": "function", "function": {"name": "add"}}),
        ("tool_choice", "required"),
    ],
    "messages": [
        ("output_config.format", {"type": "json_schema", "schema": SCHEMA}),
        ("output_format", {"type": "json_schema", "schema": SCHEMA}),
        ("tool_choice", {"type": "tool", "name": "add", "disable_parallel_tool_use": True}),
        ("tool_choice", {"type": "any"}),
    ],
    "responses": [
        ("text.format", {"type": "json_schema", "name": "a", "schema": SCHEMA}),
        ("text.format", {"type": "json_object"}),
        ("tool_choice", {"type": "function", "name": "add"}),
        ("tool_choice", "required"),
    ],
}
"""The fields of each dialect that ask for a form, with values."""
LOOPS = {
    "itself": {"$ref": "#"},
    "each other": {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}}},
    "all of itself": {"allOf": [{"$ref": "#"}]},
    "any of itself": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
}
"""Schemas that are valid, and that no JSON text fits in finite time."""


def failing_engine(error, *, after=0):
    """Return an engine that fails turns under a grammar, after some tokens were told, and answers all others."""

    class FailingEngine(ScriptedEngine):
        async def generate(self, request):
            if request.grammar is not None:
                if after and request.on_tokens is not None:
                    request.on_tokens(list(range(40, 40 + after)))
                raise error
            return await super().generate(request)

    def make(probe):
        sampled = [*probe.chat.tokenizer.encode("Yes."), probe.chat.stop_token_ids[0]]
        capabilities = evolve(SCRIPTED_CAPABILITIES, grammars=True)
        return FailingEngine(lambda _request: sampled, capabilities=capabilities)

    return make


def nested(path, value):
    """Return a body with a value at a path."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("dialect", [dialect.name for dialect in DIALECTS])
def test_a_failed_grammar_is_a_refusal_of_its_field(dialect, after):
    """In each dialect, for each field, plain or streamed, before or behind the first token; a free turn is answered."""
    engine = failing_engine(GrammarError("the grammar failed: it has 3810 items"), after=after)
    forms = [(path, nested(path, value) | {"tools": TOOLS[dialect]}) for path, value in FORMS[dialect]]
    bodies = [body | {"stream": is_stream} for _, body in forms for is_stream in (False, True)]

    *refused, free = send(dialect, *bodies, {}, engine=engine, structured_output="constrain")

    assert free.status == 200
    for (path, _), plain, streamed in zip(forms, refused[::2], refused[1::2], strict=True):
        assert (400, True) == (plain.status, plain.message.startswith(f"'{path}'")), plain
        assert "it has 3810 items" in plain.message
        text = streamed.body if isinstance(streamed.body, str) else json.dumps(streamed.body)
        assert f"'{path}' asks for a form" in text
        assert "the engine failed" not in text


@pytest.mark.parametrize("constraint", ["json_object", "named"])
def test_only_the_grammar_spares_the_session(constraint, tmp_path):
    """Another error of the engine under the same grammar ends the session; the refusal is counted and in the file."""
    form = Constraint(kind=constraint, param="here", tools=("add",) if constraint == "named" else ())
    one_call = Constraint(kind="one_call", param="parallel_tool_calls")
    kinds = []

    async def scenario(session):
        log_session(session, tmp_path / "requests")
        for text, constraints in (("a", (one_call, form)), ("b", (form,)), ("c", ())):
            try:
                (await session.answer(make_call(user(text), constraints=constraints))).confirm()
            except CallRefusedError as refusal:
                kinds.append((refusal.kind, refusal.param))

    failed = failing_engine(GrammarError("the grammar failed"))
    spared = Sessions().run(scenario, engine=failed, structured_output="constrain")

    assert kinds == [("grammar", "here"), ("grammar", "here")]
    assert (spared.result.status, spared.result.fault) == (Status.COMPLETED, None)
    assert [len(record.turns()) for record in spared.records if record.turns()] == [1]
    assert spared.counts["refused_grammar"] == 2
    (file,) = (tmp_path / "requests").glob("*.jsonl")
    assert [("grammar", "here")] * 2 == [
        (event["kind"], event["param"]) for event in read_requests(file).events if event["event"] == "refused"
    ]

    kinds.clear()
    ended = Sessions().run(scenario, engine=failing_engine(EngineError("broken")), structured_output="constrain")

    assert [("engine", None), ("session_closed", None), ("session_closed", None)] == kinds
    assert (Status.FAILED, "engine") == (ended.result.status, ended.result.fault.owner)


@pytest.mark.parametrize("schema", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("dialect", [dialect.name for dialect in DIALECTS])
def test_a_schema_that_no_text_fits_reaches_no_engine(dialect, schema):
    """As the form of the text, in each dialect; the engine would fail."""
    path, form = next((path, form) for path, form in FORMS[dialect] if "json_schema" in form.values())
    holder = form.get("json_schema", form)
    broken = {**form, "json_schema": {**holder, "schema": schema}} if holder is not form else {**form, "schema": schema}

    refused, free = send(
        dialect, nested(path, broken), {}, engine=failing_engine(EngineError("reached")), structured_output="constrain"
    )

    assert (400, 200) == (refused.status, free.status)
    assert f"'{path}' has a schema that cannot constrain a reply: no text fits it" in refused.message
