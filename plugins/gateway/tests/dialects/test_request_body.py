"""A body that is read from an earlier one is read as if there were none."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from turnwise_gateway.calls import CallRefusedError
from turnwise_gateway.dialects import RequestMemory, find_dialect, read_exchange
from turnwise_gateway.dialects.request_body import RequestBody
from turnwise_gateway.dialects.strict_json import read_json

TEXTS = st.sampled_from(["", "a", "b", "é", "世界", "\U0001f600", 'say "}], [{"', "\\ud83d", "x" * 300])
VALUES = st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-9, 9) | TEXTS
ITEMS = st.recursive(
    VALUES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(["model", "tools", "stream", "stream_options", "temperature", "é", "input", "stop"])
FORMATS = st.fixed_dictionaries({"ensure_ascii": st.booleans(), "indent": st.sampled_from([None, None, 1])})

CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
CHAT_ITEMS = (
    {"role": "system", "content": "You help."},
    {"role": "user", "content": "Hi.", "name": "me"},
    {"role": "user", "content": [{"type": "text", "text": "é"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "Hm."},
    {"role": "assistant", "content": "Done."},
    {"role": "tool", "tool_call_id": "c", "content": "5"},
    {"role": "tool", "content": "5"},
    {"role": "user", "content": [{"type": "image_url"}]},
    "no object",
)
MESSAGES_ITEMS = (
    {"role": "user", "content": "Hi."},
    {"role": "system", "content": "x-anthropic-billing-header: 1\nBe brief."},
    {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "redacted_thinking", "data": "x"}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "add", "input": {"x": "é"}}]},
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "c", "is_error": True}, {"type": "text", "text": "b"}],
    },
    {"role": "user", "content": [{"type": "image"}]},
)
RESPONSES_ITEMS = (
    {"role": "user", "content": "Hi."},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "One."}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
    {"type": "reasoning", "encrypted_content": "gAAA"},
    {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}", "namespace": "math"},
    {"type": "function_call", "call_id": "d", "name": "add", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "5"},
    {"type": "item_reference"},
)
DIALECTS = {"chat": CHAT_ITEMS, "messages": MESSAGES_ITEMS, "responses": RESPONSES_ITEMS}
TOOLS = (
    [],
    [{"type": "function", "name": "add", "function": {"name": "add", "strict": True}}, {"type": "web_search"}],
    [{"type": "namespace", "name": "math", "tools": [{"name": "add"}]}],
    "no list",
)


def list_key(dialect):
    return "input" if dialect == "responses" else "messages"


@st.composite
def bodies_of_agents(draw, items):
    """Draw bodies of one session: conversations that grow, are edited, go back, or change their other fields."""
    bodies, conversation = [], []
    head, tail = {}, {}
    for _ in range(draw(st.integers(1, 6))):
        change = draw(st.sampled_from(["grow", "grow", "grow", "edit", "cut", "fields", "same"]))
        if change == "grow":
            conversation = conversation + draw(st.lists(items, max_size=3))
        elif change == "edit" and conversation:
            index = draw(st.integers(0, len(conversation) - 1))
            conversation = [*conversation[:index], draw(items), *conversation[index + 1 :]]
        elif change == "cut":
            conversation = conversation[: draw(st.integers(0, len(conversation)))]
        elif change == "fields":
            head, tail = (draw(st.dictionaries(KEYS, VALUES | ITEMS, max_size=2)) for _ in range(2))
        bodies.append((head, conversation, tail))
    return bodies


def slow_read(dialect, source):
    """Return the values and the digest of a body that is parsed as a whole, or the reason against it."""
    try:
        body = RequestBody.of(dialect, list_key(dialect), read_json(source))
    except CallRefusedError as error:
        return error.message
    return json.dumps(body.values, sort_keys=True), body.digest


def fast_read(memory, dialect, source):
    try:
        body = memory.read(dialect, list_key(dialect), source)
    except CallRefusedError as error:
        return error.message
    memory.keep(body)
    return json.dumps(body.values, sort_keys=True), body.digest


def check_same(dialect, sources):
    memory = RequestMemory()
    for source in sources:
        assert slow_read(dialect, source) == fast_read(memory, dialect, source)


@given(st.sampled_from(sorted(DIALECTS)), bodies_of_agents(ITEMS), st.data())
def test_bodies_are_read_as_if_alone(dialect, bodies, data):
    """Whatever the bodies before, the values and the digest are those of the whole body."""
    written = []
    for head, conversation, tail in bodies:
        form = data.draw(FORMATS)
        value = {**head, list_key(dialect): conversation} | {key: tail[key] for key in tail if key not in head}
        written.append(json.dumps(value, **form).encode())

    check_same(dialect, written)


@given(bodies_of_agents(ITEMS), st.data())
def test_broken_bodies_are_refused_as_if_alone(bodies, data):
    """A body that is broken at any place is refused with the same words, or understood in the same way."""
    sources = []
    for head, conversation, tail in bodies:
        source = json.dumps({**head, "messages": conversation, "tail": tail}).encode()
        sources.append(source)
        place = data.draw(st.integers(0, len(source)))
        junk = data.draw(st.sampled_from([b"", b",", b"]", b"}", b"\xff", b"NaN", b'"', b"\\ud800", b" ", b"1e999"]))
        cut = data.draw(st.integers(0, 2))
        sources.append(source[:place] + junk + source[place + cut :])

    check_same("chat", sources)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (b'{"messages":[1]}', b'{"messages":[12]}'),
        (b'{"messages":[{"a":1}]}', b'{"messages":[{"a":1},]}'),
        (b'{"messages":[{"a":1}]}', b'{"messages":[{"a":1} {"a":1}]}'),
        (b'{"messages":[{"a":1}]}', b'{"messages":[{"a":1}],"messages":[]}'),
        (b'{"x":1,"messages":[{"a":1}]}', b'{"x":1,"messages":[{"a":1}],"x":2}'),
        (b'{"messages":[{"a":1}]}', b'{"messages":[{"a":1}]}]'),
        (b'{"messages":[{"a":1}]}', b'{"messages":[{"a":1},{"b":"\\ud800"}]}'),
        (b'{"messages":[{"a":1}],"x":1}', b'{"messages":[{"a":1}],"x":"\\udfff"}'),
        (b'{"messages":[{"a":1}]}', b'{"messages":[{"a":1},{"b":1,"b":1}]}'),
        (b'{"messages":[{"a":1}]}', b'{"messages":[{"a":1},' + b"[" * 98 + b"]" * 98 + b"]}"),
        (b'{"messages":[{"a":1}]}', b'{"messages":[{"a":1},' + b"[" * 99 + b"]" * 99 + b"]}"),
        (b'{"messages":[{"a":1}]}', b'{"messages":[{"a":1}],"x":' + b"[" * 99 + b"]" * 99 + b"}"),
        (b'{"messages":[{"a":1}]}', b'{"messages":[{"a":1}],"x":' + b"[" * 100 + b"]" * 100 + b"}"),
        (b'{"messages":[{"a":1}]}', b'{"messages":[{"a":1},"\xff"]}'),
        ('{"messages":["é","ü"]}'.encode(), '{"messages":["é","ü","世"],"x":"é"}'.encode()),
        (b'{"messages":[]}', b'{"messages":[ ]}'),
        (b"{}", b' {"messages" : [ 1 , 2 ] , "x" : 1 } \n'),
        (b'{"messages":"a"}', b'{"messages":"a","x":1}'),
    ],
)
def test_edges_of_bodies(first, second):
    """The end of the common part, of the list and of the body are checked as in a whole body."""
    check_same("chat", [first, second, second, first])


@given(bodies_of_agents(ITEMS))
def test_digests_are_equal_for_equal_requests(bodies):
    """Two bodies have one digest just if they are the same JSON but for the order of keys and for streaming."""
    memory, found = RequestMemory(), {}
    for head, conversation, tail in bodies:
        value = head | tail | {"messages": conversation}
        kept = {key: value[key] for key in value if key not in ("stream", "stream_options")}
        body = memory.read("chat", "messages", json.dumps(value, indent=1).encode())
        memory.keep(body)
        found.setdefault(json.dumps(kept, sort_keys=True), set()).add(body.digest)
        reordered = dict(reversed(value.items())) | {"stream": True}
        found[json.dumps(kept, sort_keys=True)].add(
            memory.read("chat", "messages", json.dumps(reordered).encode()).digest
        )

    assert {1} == {len(digests) for digests in found.values()}
    assert len(found) == len({digest for digests in found.values() for digest in digests})


def read_or_refuse(dialect, source, memory):
    try:
        exchange = read_exchange(find_dialect(dialect), source, {}, memory)
    except CallRefusedError as error:
        return error.kind, error.message, error.param
    return exchange.call, getattr(exchange, "namespaces", None), getattr(exchange, "include_usage", None)


@given(st.sampled_from(sorted(DIALECTS)), st.data())
@example("responses", None)
def test_calls_are_read_as_if_alone(dialect, data):
    """Whatever the requests before, the call or the refusal is the same as for that request alone."""
    memory = RequestMemory()
    if data is None:  # reasoning joins the turn before, in a copy of it
        bodies = [({}, list(RESPONSES_ITEMS[:number]), {}) for number in range(1, len(RESPONSES_ITEMS))]
    else:
        bodies = data.draw(bodies_of_agents(st.sampled_from(DIALECTS[dialect])))
    for _, conversation, _ in bodies:
        tools = data.draw(st.sampled_from(TOOLS)) if data is not None else []
        body = {"max_tokens": 5, list_key(dialect): conversation, "tools": tools, "system": "You help."}
        source = json.dumps(body).encode()

        assert read_or_refuse(dialect, source, None) == read_or_refuse(dialect, source, memory)


@pytest.mark.parametrize("dialect", sorted(DIALECTS))
def test_messages_of_earlier_bodies_are_the_same_objects(dialect):
    """A request that continues another one has its messages and tools, and not copies of them."""
    memory, item = RequestMemory(), {"role": "user", "content": "Hi."}
    fields = {"max_tokens": 5, "tools": TOOLS[1], "system": "You help."}

    def read(*items):
        source = json.dumps(fields | {list_key(dialect): items}).encode()
        return read_exchange(find_dialect(dialect), source, {}, memory).call

    first, second = read(item, item), read(item, item, item)

    assert all(old is new for old, new in zip(first.messages, second.messages, strict=False))
    assert first.tools is second.tools


def test_memory_is_bounded():
    """A session keeps the bodies of its latest conversations alone, and none that is very large."""
    memory = RequestMemory()
    sources = [json.dumps({"messages": [{"role": "user", "content": str(number)}]}).encode() for number in range(9)]
    for source in sources:
        memory.keep(memory.read("chat", "messages", source))
    large = json.dumps({"messages": [{"role": "user", "content": "x" * 2**23}]}).encode()
    memory.keep(memory.read("chat", "messages", large))

    assert sum(map(len, sources[-4:])) >= memory.num_bytes > 0
