"""The grammars of turns: which replies each form of a request allows, with a tokenizer whose tags are tokens."""

import asyncio
import json

import pytest
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from session_scenarios import make_call, user

from turnwise import Resources
from turnwise.errors import ConfigError
from turnwise.plugin.registry import Registry
from turnwise_chat_templates.template import ChatTemplate
from turnwise_gateway.agents.agent import build_parts
from turnwise_gateway.calls import CallRefusedError, Constraint
from turnwise_gateway.config import ExternalConfig
from turnwise_gateway.session.grammars import GrammarWriter, Reasoning
from turnwise_hermes_parser import register_tool_parsers as register_hermes
from turnwise_tiny_models.tokenizer import CHATML, byte_level_tokenizer
from turnwise_tool_parsers import register_tool_parsers

TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ANN = '{"name": "Ann", "age": 42}'
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in (("save", PERSON), ("find", {"properties": {"q": {"enum": ["a", "b"]}}, "required": ["q"]}))
]
TOOL_CHOICE = {"param": "tool_choice"}
JSON_SCHEMA = Constraint(kind="json_schema", param="response_format", schema=PERSON)
JSON_OBJECT = Constraint(kind="json_object", param="response_format")
NAMED = Constraint(kind="named", tools=("save",), **TOOL_CHOICE)
ALLOWED = Constraint(kind="allowed", tools=("find",), **TOOL_CHOICE)
MAY_ANSWER = Constraint(kind="allowed", tools=("find",), may_answer=True, **TOOL_CHOICE)
REQUIRED = Constraint(kind="required", **TOOL_CHOICE)
ONE_CALL = Constraint(kind="one_call", param="parallel_tool_calls")


def save(arguments=ANN):
    return f'<tool_call>\n{{"name": "save", "arguments": {arguments}}}\n</tool_call>'


FIND = '<tool_call>\n{"name": "find", "arguments": {"q": "b"}}\n</tool_call>'
# The forms that a request asks for, replies that are allowed, and replies that are not.
FORMS = {
    "schema": (
        [JSON_SCHEMA],
        (),
        [ANN, f"\n{ANN}", '{\n  "name": "",\n  "age": 1\n}'],
        ["Ann", '{"name": "Ann"}', save()],
    ),
    "object": ([JSON_OBJECT], (), ["{}", '{"a": [1, {"b": null}]}'], ["[]", '"a"', "{} and more"]),
    "schema or calls": ([JSON_SCHEMA], TOOLS, [ANN, save(), f"{FIND}\n{save()}"], ["{}", FIND.replace("b", "c")]),
    "schema or a call": ([JSON_SCHEMA, ONE_CALL], TOOLS, [ANN, save()], [f"{FIND}\n{save()}"]),
    "named": ([NAMED], TOOLS, [save()], [FIND, ANN, f"{save()}\n{save()}", save("{}"), f"Yes. {save()}"]),
    "allowed": ([ALLOWED], TOOLS, [FIND, f"{FIND}\n{FIND}"], [save(), f"{FIND}\n{save()}", "Yes."]),
    "allowed or text": ([MAY_ANSWER], TOOLS, [FIND, "Yes, {a} <b>."], [save(), f"Yes. {save()}"]),
    "required": ([REQUIRED], TOOLS, [FIND, save(), f"{save()}\n{FIND}"], ["Yes.", ANN]),
    "required once": ([REQUIRED, ONE_CALL], TOOLS, [FIND, save()], [f"{save()}\n{FIND}"]),
    "required before a schema": ([JSON_SCHEMA, REQUIRED], TOOLS, [FIND], [ANN]),
}


def make_chat(tags=TAGS):
    """Return a chat whose tags are tokens of their own."""
    return ChatTemplate(byte_level_tokenizer([ANN, "Yes."], 300 + len(tags), tags=tags), name="chatml")


def make_parser(name, chat):
    registry = Registry("tool parser")
    register_hermes(registry)
    register_tool_parsers(registry)
    entry = registry.get(name)
    return entry.factory(entry.config(), Resources(chat=chat))


def accepts(chat, grammar, text):
    """Return whether a text is allowed and may end there."""
    matcher = LLMatcher(from_tokenizer(chat.tokenizer._tokenizer), grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = chat.tokenizer.encode(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def ask(constraints, tools=TOOLS, **changes):
    return make_call(user("Who is it?"), tools=tools, constraints=tuple(constraints), **changes)


@pytest.mark.parametrize("tags", [TAGS, ()], ids=["tag tokens", "tags as text"])
@pytest.mark.parametrize("form", FORMS)
def test_forms(form, tags):
    """Each form allows the replies that have it, and no others; tags may be tokens or text."""
    chat = make_chat(tags)
    constraints, tools, good, bad = FORMS[form]

    grammar = GrammarWriter(chat, make_parser("hermes", chat), None).write(ask(constraints, tools))

    assert dict.fromkeys(good, True) | dict.fromkeys(bad, False) == {
        text: accepts(chat, grammar, text) for text in (*good, *bad)
    }


@pytest.mark.parametrize("tags", [TAGS, ()], ids=["tag tokens", "tags as text"])
@pytest.mark.parametrize(
    ("is_open", "good", "bad"),
    [
        (True, ["Hm, {1}.</think>", "</think>\n\n"], ["", "<think>a</think>", "Hm. "]),
        (False, ["", "<think>Hm, {1}.</think>", "<think></think>\n\n"], ["a</think>", "<think>a"]),
    ],
)
def test_reasoning_is_free(tags, is_open, good, bad):
    """The grammar begins behind the first closing tag; a prompt that opens reasoning asks for it."""
    chat = make_chat(tags)
    writer = GrammarWriter(chat, make_parser("hermes", chat), Reasoning("<think>", "</think>", is_open=is_open))

    for body, constraints in ((ANN, [JSON_SCHEMA]), (save(), [NAMED])):
        grammar = writer.write(ask(constraints))
        assert [True] * len(good) == [accepts(chat, grammar, start + body) for start in good]
        wrong = bad if tags or not is_open else [text for text in bad if "</think>" not in text]  # a text may spell it
        assert [False] * len(wrong) == [accepts(chat, grammar, start + body) for start in wrong]
        assert not accepts(chat, grammar, f"{good[-1]}no JSON")


@pytest.mark.parametrize(("name", "call"), [("llama3_json", '{"name": "save", "parameters": ANN}')])
def test_other_formats(name, call):
    """Any format that writes the arguments of a call as JSON has a grammar."""
    chat = make_chat()

    grammar = GrammarWriter(chat, make_parser(name, chat), None).write(ask([NAMED]))

    assert accepts(chat, grammar, call.replace("ANN", ANN))
    assert not accepts(chat, grammar, save())


def test_forms_without_a_grammar_are_refused():
    """The field is named: a format of calls without JSON, a run without a parser, an unknown tool, no tools."""
    chat = make_chat()
    xml, none = GrammarWriter(chat, make_parser("qwen3_coder", chat), None), GrammarWriter(chat, None, None)
    cases = [
        (xml, ask([NAMED]), "calls has no grammar"),
        (xml, ask([JSON_SCHEMA]), "'tools' cannot constrain"),
        (none, ask([REQUIRED]), "no tool parser"),
        (none, ask([Constraint(kind="named", tools=("other",), **TOOL_CHOICE)]), "'other', whose schema"),
        (none, ask([REQUIRED], tools=()), "there are no tools"),
    ]
    for writer, call, complaint in cases:
        with pytest.raises(CallRefusedError, match=complaint) as refused:
            writer.write(call)
        assert refused.value.param in ("tools", "tool_choice")
    assert none.write(ask([JSON_OBJECT])) is not None  # text may be constrained without a parser
    assert none.write(ask([ONE_CALL])) is None  # alone it is a wish
    assert none.write(ask([])) is None


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "properties": {"a": {"not": {}}}}, '"not"'),
        ({"type": "string", "format": "postcode"}, "postcode"),
        ({"$ref": "#/$defs/missing"}, "missing"),
        ({"type": "string", "pattern": "(?=a)"}, "look-around"),
        ({"uniqueItems": True, "x-guidance": {"lenient": True}}, "uniqueItems"),
    ],
)
def test_keywords_that_nothing_can_constrain_are_named(schema, keyword):
    """The error has the field and the keyword; a client cannot switch the check off."""
    writer = GrammarWriter(chat := make_chat(), make_parser("hermes", chat), None)
    tool = {"type": "function", "function": {"name": "save", "parameters": {"properties": {"a": schema}}}}
    cases = [
        (ask([Constraint(kind="json_schema", param="text.format", schema=schema)], tools=()), "text.format"),
        (ask([NAMED], tools=[tool]), "tools"),
    ]
    for call, param in cases:
        if param == "tools" and "$ref" in schema:
            continue  # inside of a tool the reference has another root
        with pytest.raises(CallRefusedError, match=keyword) as refused:
            asyncio.run(writer.check(call))
        assert (refused.value.kind, refused.value.param) == ("unsupported", param)


class Reader:
    """A reasoning parser without tags."""

    def split(self, text):
        return "", text


def test_a_run_that_cannot_constrain_does_not_start(monkeypatch):
    """Reasoning without known tags, reasoning that nothing splits, and a missing package are errors of the config."""
    chat = make_chat()
    config = ExternalConfig(function="x:y", structured_output="constrain")
    with pytest.raises(ConfigError, match="Reader has no tags"):
        build_parts(config, Resources(chat=chat, reasoning_parser=Reader()))
    thinking = ChatTemplate(
        byte_level_tokenizer([ANN], 300, tags=TAGS, chat_template=f"{CHATML}{{{{ '<think>' }}}}"), name="thinking"
    )
    with pytest.raises(ConfigError, match="set reasoning_parser"):
        build_parts(config, Resources(chat=thinking, parser=make_parser("hermes", thinking)))
    assert build_parts(config, Resources(chat=chat)).grammars is not None
    monkeypatch.setattr("turnwise_gateway.session.grammars.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"turnwise-gateway\[grammar\]"):
        build_parts(config, Resources(chat=chat))


def test_a_schema_is_written_as_the_client_sent_it():
    """Its keywords stay, and only the white space is bounded."""
    grammar = GrammarWriter(make_chat(), None, None).write(ask([JSON_SCHEMA], tools=()))

    written = json.loads(grammar.partition("%json ")[2].splitlines()[0])
    assert {**PERSON, "x-guidance": written["x-guidance"]} == written
