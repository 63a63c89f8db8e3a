"""Random bodies of requests: right ones in which some values are replaced, left out, doubled or nested."""

from __future__ import annotations

import copy
import json
from typing import Any, Final

from attrs import frozen
from hypothesis import strategies as st

NAMED: Final = ("{lease}", "{session}")
"""Stands in a path for the id of a lease or a session that there is."""
TOOL: Final = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}}
CALL: Final = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CHAT: Final = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "Be good."},
        {"role": "user", "content": [{"type": "text", "text": "Question 0?"}]},
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "a1b2c3d4e", "content": "2"},
        {"role": "user", "content": "And?"},
    ],
    "tools": [{"type": "function", "function": TOOL}],
    "tool_choice": "auto",
    "max_tokens": 9,
    "stop": ["x"],
    "temperature": 1.0,
    "logprobs": True,
    "stream": False,
    "stream_options": {"include_usage": True},
    "response_format": {"type": "text"},
}
MESSAGES: Final = {
    "model": "m",
    "max_tokens": 9,
    "system": [{"type": "text", "text": "Be good."}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Question 0?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "text", "text": "I add."},
                {"type": "tool_use", "id": "a1b2c3d4e", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "a1b2c3d4e", "content": "2", "is_error": True}],
        },
    ],
    "tools": [{"name": "add", "description": "Add.", "input_schema": TOOL["parameters"]}],
    "tool_choice": {"type": "auto"},
    "stop_sequences": ["x"],
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "metadata": {"user_id": "u"},
}
RESPONSES: Final = {
    "model": "m",
    "instructions": "Be good.",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Question 0?"}]},
        {
            "type": "reasoning",
            "id": "r",
            "summary": [{"type": "summary_text", "text": "Hm."}],
            "encrypted_content": "e",
        },
        {"type": "function_call", "call_id": "a1b2c3d4e", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "a1b2c3d4e", "output": "2"},
    ],
    "tools": [{"type": "function", **TOOL}],
    "include": ["reasoning.encrypted_content"],
    "max_output_tokens": 9,
    "text": {"format": {"type": "text"}},
    "reasoning": {"effort": "low"},
}
MCP: Final = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "tools/call",
    "params": {"name": "add", "arguments": {"a": 1, "b": 2}},
}
TASK: Final = {
    "messages": [{"role": "user", "content": "Question 0?"}],
    "uid": "t",
    "agent_name": "external",
    "ground_truth": "2",
    "sample_index": 3,
    "extra_info": {"index": 3},
}
LEASE: Final = {
    "id": "1-0-1",
    "worker": "w",
    "uid": "u",
    "attempt": 1,
    "global_step": 0,
    "rollout_n": 0,
    "fence": 1,
    "content": {},
    "until": 1.0,
}
SCORE: Final = {"id": "s", "score": 0.5, "record": 0, "turn": 0, "metrics": {"tests": 3}}
AGENTS: Final[dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": MESSAGES,
    "/v1/responses": RESPONSES,
    "/mcp": MCP,
}
PULL: Final[dict[str, Any]] = {
    "/tasks/lease": {"worker": "w", "wait_s": 0},
    "/leases/{lease}/heartbeat": {"fence": 1},
    "/leases/{lease}/complete": {"fence": 1, "score": 0.5, "metrics": {"tests": 3}},
    "/leases/{lease}/fail": {"fence": 1, "reason": "oh", "owner": "agent"},
    "/sessions/{lease}/score": SCORE,
    "/workers/open": LEASE,
}
SERVING: Final[dict[str, Any]] = {
    "/sessions": {"task": TASK},
    "/sessions/{session}/score": SCORE,
    "/sessions/{session}/fail": {"reason": "oh", "owner": "agent"},
}


@frozen
class RawBody:
    """A value as it is written into a body, such as a number that Python's JSON would not write."""

    text: str


def _nest(depth: int, kind: str) -> RawBody:
    return RawBody("[" * depth + "]" * depth if kind == "list" else '{"a":' * depth + "1" + "}" * depth)


_NUMBERS = st.sampled_from(
    ["1e308", "-1e308", "1e400", "9" * 400, "-" + "9" * 400, "9" * 5000, "0." + "0" * 400 + "1", "-0.0", "1.5", "1E5"]
    + [str(2**number + more) for number in (31, 32, 53, 63, 64, 128, 1024) for more in (-1, 0, 1)]
    + ["0", "-1", "NaN", "Infinity", "-Infinity", "1_0", "01", "+1", "0x1", "1."]
).map(RawBody)
_TEXTS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        ["", " ", "\0", "\u202e", "\ufeff", "<|im_end|>", "a" * 300, "..", "../x", "{}", "[[", '{"a"', "%s", "{0}"]
    ),
    st.sampled_from([*(f'"\\u{code}"' for code in ("d800", "dfff", "0000", "ffff")), '"\\x"', '"\n"']).map(RawBody),
    st.sampled_from([100, 500, 5000]).map(lambda depth: "[" * depth + "]" * depth),
    st.sampled_from([100, 500, 5000]).map(lambda depth: '{"a":' * depth + "1" + "}" * depth),
)
_DEPTHS = st.builds(_nest, st.sampled_from([10, 90, 99, 100, 101, 500, 5000]), st.sampled_from(["list", "object"]))
_PARTS = st.sampled_from(
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}},
        {"type": "input_image", "image_url": "x"},
        {"type": "text", "text": None},
        {"type": "text"},
        {"type": 1},
        {},
    ]
)
_LEAVES = st.one_of(st.none(), st.booleans(), _NUMBERS, _TEXTS, _DEPTHS, _PARTS)
VALUES = st.recursive(
    _LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5) | st.sampled_from(list(CHAT)), inner, max_size=3)
    ),
    max_leaves=6,
)


def write(value: Any) -> str:
    """Return JSON, or something like it: raw values are written as they are."""
    if isinstance(value, RawBody):
        return value.text
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{write(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(write, value)) + "]"
    return json.dumps(value)


def _list_places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of each value inside of a value."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        found += _list_places(each, (*path, key))
    return found


def _change(value: Any, path: tuple[Any, ...], how: str, new: Any) -> None:
    *before, last = path
    for key in before:
        value = value[key]
    if how == "replace":
        value[last] = new
    elif how == "remove":
        del value[last]
    elif how == "wrap":
        value[last] = [value[last]] if isinstance(new, bool) else {"a": value[last]}
    elif isinstance(value, list):
        value.insert(last, new)
    else:
        value[f"x{len(value)}" if not isinstance(new, str) else new] = new


@st.composite
def bodies(draw: st.DrawFn, right: Any) -> bytes:
    """Return a strategy of bodies that are like a right one."""
    if draw(st.integers(0, 9)) == 0:
        return draw(
            st.one_of(st.binary(max_size=40), VALUES.map(lambda value: write(value).encode("utf-8", "replace")))
        )
    value = json.loads(json.dumps(right))
    for _ in range(draw(st.integers(0, 3))):
        if places := _list_places(value):
            how = draw(st.sampled_from(["replace", "replace", "replace", "remove", "wrap", "insert"]))
            new = copy.deepcopy(draw(VALUES))  # a later change may go into it
            _change(value, draw(st.sampled_from(places)), how, new)
    return write(value).encode("utf-8", "replace")


@st.composite
def requests(draw: st.DrawFn, routes: dict[str, Any]) -> tuple[str, bytes]:
    """Return a strategy of paths and bodies."""
    path = draw(st.sampled_from(sorted(routes)))
    return path, draw(bodies(routes[path]))
