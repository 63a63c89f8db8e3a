"""Requests in three dialects become one form of calls; every field is honoured, refused by name or counted."""

import json

import pytest
from real_requests import TOOLS

from turnwise_gateway.calls import CallOfTool, CallRefusedError, Constraint
from turnwise_gateway.dialects import RequestMemory, find_dialect, read_exchange

USER = {"role": "user", "content": "Hi."}
PARAMETERS = {"type": "object", "properties": {"x": {"type": "number"}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}
DIALECTS = ("chat", "messages", "responses")
ASKED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": each, "type": "function", "function": {"name": "add", "arguments": "{}"}} for each in "ab"],
}
"""A turn with the calls `a` and `b`."""
RESULT = {"role": "tool", "content": "5"}


def read(dialect, headers=None, **body):
    """The call of a request with one message of the user, with some fields changed."""
    fixed = {"model": "tiny"} | ({"input": [USER]} if dialect == "responses" else {"messages": [USER]})
    fixed |= {"max_tokens": 9} if dialect == "messages" else {}
    return read_exchange(find_dialect(dialect), json.dumps(fixed | body).encode(), headers or {}).call


def refusal(dialect, **body):
    """The error of a refused request."""
    with pytest.raises(CallRefusedError) as refused:
        read(dialect, **body)
    return refused.value


@pytest.mark.parametrize("dialect", DIALECTS)
def test_simple_request(dialect):
    """The least request is a call with one message, and nothing else."""
    call = read(dialect)

    assert dialect == call.dialect
    assert (USER,) == call.messages
    assert ((), "auto", (), {}, False, False, "tiny", ()) == (
        call.tools,
        call.tool_choice,
        call.stop,
        call.requested_sampling,
        call.logprobs,
        call.stream,
        call.model,
        call.ignored,
    )
    assert (9 if dialect == "messages" else None) == call.max_tokens


@pytest.mark.parametrize(
    ("dialect", "body", "expected"),
    [
        ("chat", {"max_tokens": 5}, {"max_tokens": 5}),
        ("chat", {"max_tokens": 5, "max_completion_tokens": 7}, {"max_tokens": 7}),
        ("chat", {"stop": "a"}, {"stop": ("a",)}),
        ("chat", {"stop": ["a", "b"]}, {"stop": ("a", "b")}),
        (
            "chat",
            {"temperature": 0.5, "top_p": 1, "seed": 3},
            {"requested_sampling": {"temperature": 0.5, "top_p": 1.0, "seed": 3}},
        ),
        ("chat", {"logprobs": True}, {"logprobs": True}),
        ("chat", {"stream": True}, {"stream": True}),
        ("chat", {"tools": [TOOL]}, {"tools": (TOOL,)}),
        ("chat", {"tool_choice": "required"}, {"tool_choice": "required"}),
        ("chat", {"tool_choice": "none"}, {"tool_choice": "none"}),
        ("messages", {"stop_sequences": ["a"]}, {"stop": ("a",)}),
        ("messages", {"top_k": 5}, {"requested_sampling": {"top_k": 5}}),
        ("messages", {"tool_choice": {"type": "any"}}, {"tool_choice": "required"}),
        ("messages", {"tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
        (
            "messages",
            {"tools": [{"name": "add", "description": "Adds.", "input_schema": PARAMETERS, "cache_control": {}}]},
            {"tools": (TOOL,)},
        ),
        ("responses", {"max_output_tokens": 5}, {"max_tokens": 5}),
        ("responses", {"include": ["message.output_text.logprobs"]}, {"logprobs": True}),
        ("responses", {"tool_choice": "required"}, {"tool_choice": "required"}),
        (
            "responses",
            {"tools": [{"type": "function", "name": "add", "description": "Adds.", "parameters": PARAMETERS}]},
            {"tools": (TOOL,)},
        ),
        ("responses", {"input": "Hi."}, {"messages": (USER,)}),
        ("responses", {"text": {"format": {"type": "text"}}, "background": False}, {}),
    ],
)
def test_honoured_fields(dialect, body, expected):
    """A field that a session serves is in the call, and nothing is counted as ignored but `text`."""
    call = read(dialect, **body)

    assert expected == {name: getattr(call, name) for name in expected}
    assert () == call.ignored


@pytest.mark.parametrize(
    ("dialect", "body", "param"),
    [
        ("chat", {"tool_choice": {"type": "custom", "custom": {"name": "add"}}}, "tool_choice"),
        ("chat", {"tool_choice": "maybe"}, "tool_choice"),
        ("chat", {"response_format": {"type": "structural_tag"}}, "response_format"),
        ("messages", {"tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice"),
        ("messages", {"output_config": {"format": {"type": "regex"}}}, "output_config.format"),
        ("messages", {"messages": [USER, {"role": "assistant", "content": "I"}]}, "messages"),
        ("responses", {"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ("responses", {"previous_response_id": "resp_1"}, "previous_response_id"),
        *(
            ("messages", {"tools": [{"name": "a"}, {"type": kind, "name": "b"}]}, "tools[1]")
            for kind in ("bash_20250124", "text_editor_20250728", "computer_20250124", "memory_20250818")
        ),
        ("responses", {"conversation": "conv_1"}, "conversation"),
        ("responses", {"prompt": {"id": "p"}}, "prompt"),
        ("responses", {"background": True}, "background"),
        ("responses", {"text": {"format": {"type": "grammar"}}}, "text.format"),
        ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        (
            "chat",
            {"messages": [USER, {"role": "user", "content": [{"type": "text", "text": ""}, {"type": "file"}]}]},
            "messages[1].content[1]",
        ),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        (
            "messages",
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}],
                    }
                ]
            },
            "messages[0].content[0].content[0]",
        ),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
    ],
)
def test_unsupported_requests_are_refused(dialect, body, param):
    """The error names the field, or the place of a part that is no text."""
    error = refusal(dialect, **body)

    assert ("unsupported", param) == (error.kind, error.param)
    assert param in error.message


@pytest.mark.parametrize(
    ("dialect", "body", "param"),
    [
        ("chat", {"messages": []}, "messages"),
        ("chat", {"messages": "Hi."}, "messages"),
        ("chat", {"messages": ["Hi."]}, "messages[0]"),
        ("chat", {"messages": [{"content": "Hi."}]}, "messages[0].role"),
        ("chat", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ("chat", {"messages": [{"role": "tool", "content": "5"}]}, "messages[0].tool_call_id"),
        ("chat", {"messages": [ASKED, RESULT]}, "messages"),
        ("chat", {"messages": [ASKED, RESULT, USER]}, "messages[2]"),
        ("chat", {"messages": [ASKED, RESULT, RESULT, RESULT]}, "messages[3].tool_call_id"),
        ("chat", {"messages": [ASKED, USER, RESULT]}, "messages[2].tool_call_id"),
        ("chat", {"messages": [ASKED, RESULT, RESULT | {"tool_call_id": "a"}]}, "messages[2].tool_call_id"),
        ("chat", {"messages": [ASKED, RESULT | {"tool_call_id": 5}]}, "messages[1].tool_call_id"),
        (
            "chat",
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]},
            "messages[0].tool_calls[0].function",
        ),
        ("chat", {"max_tokens": 0}, "max_tokens"),
        ("chat", {"max_tokens": True}, "max_tokens"),
        ("chat", {"max_tokens": 1.5}, "max_tokens"),
        ("chat", {"max_tokens": "5"}, "max_tokens"),
        ("chat", {"temperature": -1}, "temperature"),
        ("chat", {"temperature": True}, "temperature"),
        ("chat", {"top_p": 1.1}, "top_p"),
        ("chat", {"seed": 2**70}, "seed"),
        ("chat", {"stop": [""]}, "stop"),
        ("chat", {"stop": 5}, "stop"),
        ("chat", {"stream": "yes"}, "stream"),
        ("chat", {"stream_options": 5}, "stream_options"),
        ("chat", {"tools": {}}, "tools"),
        ("chat", {"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ("chat", {"tool_choice": 5}, "tool_choice"),
        ("chat", {"tool_choice": {"type": "function"}, "tools": [TOOL]}, "tool_choice.function"),
        ("chat", {"tool_choice": {"type": "function", "function": {"name": "sub"}}, "tools": [TOOL]}, "tool_choice"),
        ("chat", {"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        (
            "chat",
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
            "tool_choice.allowed_tools.tools",
        ),
        ("chat", {"response_format": "json"}, "response_format"),
        ("chat", {"response_format": {}}, "response_format.type"),
        ("chat", {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ("chat", {"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ("chat", {"chat_template_kwargs": []}, "chat_template_kwargs"),
        ("chat", {"enable_thinking": "no"}, "enable_thinking"),
        ("messages", {"tool_choice": {"type": "tool", "name": "add"}}, "tool_choice"),
        ("messages", {"output_format": {}}, "output_format.type"),
        ("responses", {"text": {"format": {"type": "json_schema", "schema": 5}}}, "text.format.schema"),
        ("messages", {"max_tokens": None}, "max_tokens"),
        ("messages", {"messages": None}, "messages"),
        ("messages", {"messages": [{"role": "tool", "content": ""}]}, "messages[0].role"),
        ("messages", {"system": 5}, "system"),
        ("responses", {"input": None}, "input"),
        ("responses", {"input": [{"role": "robot", "content": ""}]}, "input[0].role"),
        (
            "responses",
            {"input": [{"type": "reasoning", "encrypted_content": "turnwise:%"}]},
            "input[0].encrypted_content",
        ),
    ],
)
def test_wrong_requests_are_refused(dialect, body, param):
    """A field of a wrong type or value is refused by its path."""
    error = refusal(dialect, **body)

    assert ("invalid", param) == (error.kind, error.param)
    assert param in error.message


@pytest.mark.parametrize(
    ("dialect", "body", "ignored"),
    [
        (
            "chat",
            {"user": "a", "metadata": {}, "unheard_of": 1, "store": None},
            ("metadata", "unheard_of", "user"),
        ),
        ("chat", {"tools": [{"type": "custom", "custom": {"name": "a"}}, TOOL]}, ("tools.custom",)),
        ("chat", {"tools": [{"type": "function", "function": {"name": "a", "strict": True}}]}, ("tools.strict",)),
        ("chat", {"messages": [USER | {"name": "Ann"}]}, ("messages.name",)),
        (
            "messages",
            {"thinking": {"type": "enabled"}, "output_config": {"effort": "low"}},
            ("output_config", "thinking"),
        ),
        *(
            ("messages", {"tools": [{"type": kind, "name": "a"}]}, (f"tools.{kind}",))
            for kind in ("web_search_20250305", "web_fetch_20250910", "code_execution_20250825")
        ),
        ("responses", {"store": False, "truncation": "auto"}, ("truncation",)),
        ("responses", {"text": {"verbosity": "low"}}, ("text.verbosity",)),
        ("chat", {"tool_choice": {"type": "auto", "unheard_of": 1}}, ("tool_choice.unheard_of",)),
        ("chat", {"stream_options": {"include_obfuscation": False}}, ("stream_options.include_obfuscation",)),
        (
            "responses",
            {"tools": [{"type": "web_search"}, {"type": "custom", "name": "a"}]},
            ("tools.custom", "tools.web_search"),
        ),
        ("responses", {"input": [{"type": "reasoning", "encrypted_content": "gAAA"}, USER]}, ("input.reasoning",)),
    ],
)
def test_other_fields_are_counted(dialect, body, ignored):
    """Fields without effect, unknown ones and tools of servers are accepted and counted."""
    assert ignored == read(dialect, **body).ignored


SCHEMA = {"type": "object", "properties": {"answer": {"type": "integer"}}}
ONE = {
    "chat": {"type": "function", "function": {"name": "add"}},
    "messages": {"type": "tool", "name": "add"},
    "responses": {"type": "function", "name": "add"},
}
SOME = {
    "chat": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [ONE["chat"]]}},
    "responses": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}, ONE["responses"]]},
}
MATH = [{"type": "namespace", "name": "math", "tools": [{"type": "function", "name": "add"}]}]


@pytest.mark.parametrize(
    ("dialect", "body", "constraint"),
    [
        ("chat", {"response_format": {"type": "json_object"}}, Constraint(kind="json_object", param="response_format")),
        (
            "chat",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
            Constraint(kind="json_schema", param="response_format", schema=SCHEMA),
        ),
        (
            "messages",
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            Constraint(kind="json_schema", param="output_config.format", schema=SCHEMA),
        ),
        (
            "messages",
            {"output_format": {"type": "json_schema", "schema": SCHEMA}},
            Constraint(kind="json_schema", param="output_format", schema=SCHEMA),
        ),
        (
            "responses",
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
            Constraint(kind="json_schema", param="text.format", schema=SCHEMA),
        ),
        (
            "responses",
            {"text": {"format": {"type": "json_object"}}},
            Constraint(kind="json_object", param="text.format"),
        ),
        *(
            (
                name,
                {"tools": TOOLS[name], "tool_choice": ONE[name]},
                Constraint(kind="named", param="tool_choice", tools=("add",)),
            )
            for name in DIALECTS
        ),
        *(
            (
                name,
                {"tools": TOOLS[name], "tool_choice": SOME[name]},
                Constraint(kind="allowed", param="tool_choice", tools=("add",), may_answer=name == "responses"),
            )
            for name in SOME
        ),
        (
            "responses",
            {"tools": MATH, "tool_choice": ONE["responses"]},
            Constraint(kind="named", param="tool_choice", tools=("add",)),
        ),
        ("chat", {"tool_choice": "required"}, Constraint(kind="required", param="tool_choice")),
        ("chat", {"parallel_tool_calls": False}, Constraint(kind="one_call", param="parallel_tool_calls")),
        (
            "messages",
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            Constraint(kind="one_call", param="tool_choice.disable_parallel_tool_use"),
        ),
    ],
)
def test_forms_of_the_turn_are_constraints(dialect, body, constraint):
    """A format, a tool by name and the like are read with their schema and names, and are not ignored."""
    call = read(dialect, **body)

    assert ((constraint,), ()) == (call.constraints, call.ignored)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_client_cannot_invent_names_without_end(dialect):
    """Of the names of ignored fields some short ones are kept, and the others have one name together."""
    ignored = read(dialect, **{f"x{number:04d}": 1 for number in range(1000)}, **{"y" * 65: 1}).ignored

    assert len(ignored) == 33
    assert {"other", "x0000"} <= set(ignored)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_long_name_of_a_model_is_refused(dialect):
    """Every event of a stream repeats it."""
    assert refusal(dialect, model="m" * 257).param == "model"


@pytest.mark.parametrize(("dialect", "key"), [("chat", "stop"), ("messages", "stop_sequences")])
@pytest.mark.parametrize("value", [["x"] * 65, ["x" * 257]])
def test_stop_strings_are_few_and_short(dialect, key, value):
    """Each is looked for in every token."""
    assert refusal(dialect, **{key: value}).param == key


def test_stream_is_not_in_the_digest():
    """The digest leaves out how the reply is sent and the order of keys; everything else changes it."""
    digest = read("chat", max_tokens=5, user="a").digest

    assert digest == read("chat", user="a", stream=True, stream_options={"include_usage": True}, max_tokens=5).digest
    assert digest != read("chat", max_tokens=6, user="a").digest
    assert digest != read("chat", max_tokens=5, user="b").digest
    assert read("chat", max_tokens=9).digest != read("messages").digest


@pytest.mark.parametrize(
    ("headers", "key"),
    [({}, ""), ({"Idempotency-Key": "a"}, "a"), ({"X-Stainless-Retry-Count": "1"}, "")],
)
def test_keys_of_requests(headers, key):
    """A key names a request; a count of retries does not, because it does not tell which request comes again."""
    assert key == read("chat", headers).key


def test_chat_messages():
    """Messages keep their roles, texts, reasoning, calls and ids, and lose every other key."""
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"x":  1.0}'}}
    sent = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "Hi."},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "Hm.",
            "tool_calls": [call | {"index": 0}],
            "refusal": None,
            "audio": None,
        },
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "1"}]},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}],
            "tool_calls": [],
        },
    ]

    assert [
        {"role": "system", "content": "a\nb"},
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "assistant", "content": "cd"},
    ] == list(read("chat", messages=sent).messages)


@pytest.mark.parametrize(
    ("results", "ids"),
    [
        ([RESULT, RESULT], "ab"),
        ([RESULT | {"tool_call_id": "b"}, RESULT], "ba"),
        ([RESULT, RESULT | {"tool_call_id": "b"}], "ab"),
        ([RESULT | {"id": "x", "name": "add"}, RESULT | {"tool_call_id": ""}], "ab"),
    ],
)
def test_results_without_an_id_answer_the_calls_in_order(results, ids):
    """Qwen-Agent sends no id with a result: exactly the calls of the turn before, in order, are answered."""
    for end in ([], [USER], [USER, ASKED, RESULT, RESULT]):
        call = read("chat", messages=[USER, ASKED, *results, *end])

        found = [message["tool_call_id"] for message in call.messages if message["role"] == "tool"]
        assert [*ids, *("ab" if len(end) > 1 else "")] == found
        assert ("messages.tool_call_id",) == call.ignored


def test_results_without_an_id_are_the_same_in_a_longer_body():
    """A body that continues another one is read from there on, with the same calls and the same checks."""
    memory = RequestMemory()

    def read_next(*messages):
        body = json.dumps({"model": "tiny", "messages": [USER, ASKED, *messages]}).encode()
        return read_exchange(find_dialect("chat"), body, {}, memory).call.messages

    assert "ab" == "".join(message.get("tool_call_id", "") for message in read_next(RESULT, RESULT))
    with pytest.raises(CallRefusedError):
        read_next(RESULT, RESULT, RESULT)
    with pytest.raises(CallRefusedError):
        read_next(RESULT, USER)
    assert "abab" == "".join(m.get("tool_call_id", "") for m in read_next(RESULT, RESULT, ASKED, RESULT, RESULT))


def test_messages_messages():
    """Blocks become messages; lines about billing are dropped, and results of failed calls say so."""
    text = {"type": "text", "text": "One.", "cache_control": {"type": "ephemeral"}}
    sent = [
        {"role": "user", "content": [text, {"type": "text", "text": "Two."}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I add."},
                {"type": "tool_use", "id": "a", "name": "add", "input": {"x": "é"}},
                {"type": "tool_use", "id": "b", "name": "add", "input": {"INVALID_JSON": "{oops"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "1"}]},
                {"type": "tool_result", "tool_use_id": "b", "content": "no JSON", "is_error": True},
                {"type": "text", "text": "Go on."},
            ],
        },
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c", "is_error": True, "content": "error: x"}],
        },
    ]
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=2;"},
        {"type": "text", "text": "You help."},
    ]

    call = read("messages", messages=sent, system=system)

    calls = [
        {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"x": "é"}'}},
        {"id": "b", "type": "function", "function": {"name": "add", "arguments": "{oops"}},
    ]
    assert [
        {"role": "system", "content": "You help."},
        {"role": "user", "content": "One.\nTwo."},
        {"role": "assistant", "content": "I add.", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": "Error: no JSON"},
        {"role": "user", "content": "Go on."},
        {"role": "system", "content": "Be brief."},
        {"role": "tool", "tool_call_id": "c", "content": "error: x"},
    ] == list(call.messages)
    assert ("messages.redacted_thinking",) == call.ignored


def test_responses_messages():
    """The items of one turn become one message; a namespace becomes the prefix of a name."""
    sent = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "a"}]},
        {"role": "user", "content": "Hi."},
        {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "Hm."}], "content": None},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I add."}]},
        {"type": "function_call", "call_id": "a", "name": "add", "namespace": "math", "arguments": "{}"},
        {"type": "function_call", "call_id": "b", "name": "stop", "arguments": ""},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "1"}]},
        {"type": "function_call_output", "call_id": "b", "output": "2"},
        {"type": "message", "role": "assistant", "content": "<think>\nSo.\n</think>"},
        {"type": "message", "role": "assistant", "content": "Done."},
        {"type": "reasoning", "summary": [], "encrypted_content": "turnwise:TmV4dC4="},
        {"type": "function_call", "call_id": "c", "name": "stop", "arguments": "{}"},
    ]

    def call(call_id, name, arguments="{}"):
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    assert [
        {"role": "system", "content": "You help."},
        {"role": "system", "content": "a"},
        {"role": "user", "content": "Hi."},
        {
            "role": "assistant",
            "content": "I add.",
            "reasoning_content": "Hm.",
            "tool_calls": [call("a", "math__add"), call("b", "stop", "")],
        },
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": "2"},
        {"role": "assistant", "content": "<think>\nSo.\n</think>\nDone."},
        {"role": "assistant", "content": "", "reasoning_content": "Next.", "tool_calls": [call("c", "stop")]},
    ] == list(read("responses", input=sent, instructions="You help.").messages)


def test_namespaces_come_back(make_reply):
    """A tool of a namespace is called by its own name and that of its namespace, in plain and streamed replies."""

    def call(call_id, name):
        return CallOfTool(id=call_id, name=name, arguments="{}")

    inner = [{"type": "function", "name": "add", "parameters": {}}, {"name": "sub"}]
    tools = [{"type": "namespace", "name": "math", "description": "Sums.", "tools": inner}]
    body = {"input": "Hi.", "tools": tools}
    exchange = read_exchange(find_dialect("responses"), json.dumps(body).encode(), {})

    assert ["math__add", "math__sub"] == [tool["function"]["name"] for tool in exchange.call.tools]
    reply = make_reply(content="", tool_calls=(call("a", "math__sub"), call("b", "math__x")), finish="tool_calls")
    items = exchange.write_reply(reply)["output"]
    assert [("math", "sub"), (None, "math__x")] == [(item.get("namespace"), item["name"]) for item in items]
    assert b'"namespace":"math"' in exchange.write_events(reply)


def test_count_needs_no_max_tokens():
    """A request for a number of tokens may leave out `max_tokens`."""
    body = json.dumps({"messages": [USER], "tools": [{"name": "add", "input_schema": {}}]}).encode()

    assert 1 == len(read_exchange(find_dialect("messages"), body, {}, is_question=True).call.tools)


def test_messages_between_agents_of_codex():
    """Codex writes the header of a message in one part, and in another the text, which its own server encrypts."""
    parts = [
        {"type": "input_text", "text": "Message Type: NEW_TASK\nPayload:\n"},
        {"type": "encrypted_content", "encrypted_content": "Tell the first line."},
    ]
    item = {"type": "agent_message", "author": "/root", "recipient": "/root/part", "content": parts}

    call = read("responses", input=[USER, item])

    assert (
        USER,
        {"role": "user", "content": "Message Type: NEW_TASK\nPayload:\nTell the first line."},
    ) == call.messages
    item = {"type": "agent_message", "content": [{"type": "input_image", "image_url": "data:"}]}
    assert "input[0].content[0]" == refusal("responses", input=[item]).param
