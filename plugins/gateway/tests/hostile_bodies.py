"""Bodies that are as costly to answer as their bytes allow, each with the route that it is for."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

from attrs import frozen

PATHS: Final = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
COUNT_PATH: Final = "/v1/messages/count_tokens"
MIB: Final = 1024 * 1024
USER: Final = {"role": "user", "content": "Question 0?"}


@frozen
class Hostile:
    """
    A request.

    Attributes:
        name: of the case.
        path: of the route.
        build: makes the body.
    """

    name: str
    path: str
    build: Callable[[], bytes]


def _dump(**fields: Any) -> Callable[[], bytes]:
    return lambda: json.dumps({"model": "m", "max_tokens": 9, **fields}).encode()


def _with_raw(raw: bytes, num_bytes: int, fields: dict[str, Any]) -> Callable[[], bytes]:
    """Return a body with an ignored field that is a list of one value, many times."""
    head = json.dumps({"model": "m", "max_tokens": 9, **fields}).encode()
    return lambda: head[:-1] + b',"x":[' + b",".join([raw] * (num_bytes // (len(raw) + 1))) + b"]}"


def _conversation(dialect: str, messages: list[Any]) -> dict[str, Any]:
    return {"input" if dialect == "responses" else "messages": messages}


def _tool(dialect: str, number: int) -> dict[str, Any]:
    function = {"name": f"t{number}", "parameters": {"type": "object", "properties": {}}}
    if dialect == "chat":
        return {"type": "function", "function": function}
    if dialect == "messages":
        return {"name": f"t{number}", "input_schema": function["parameters"]}
    return {"type": "function", **function}


def _list_cases() -> list[Hostile]:
    cases = []
    for dialect, path in PATHS.items():

        def add(name: str, build: Callable[[], bytes], dialect: str = dialect, path: str = path) -> None:
            cases.append(Hostile(f"{dialect}: {name}", path, build))

        one = _conversation(dialect, [USER])
        for size in (1, 31):
            text = {"role": "user", "content": "word " * (size * MIB // 5 - 100)}
            add(f"{size} MiB of text", _dump(**_conversation(dialect, [text])))
            for name, raw in (("lists", b"[]"), ("objects", b'{"a":1}'), ("texts", b'""'), ("numbers", b"1e5")):
                add(f"{size} MiB of {name} in an ignored field", _with_raw(raw, size * MIB - 1000, one))
        add("one word of 1 MiB", _dump(**_conversation(dialect, [{"role": "user", "content": "a" * (MIB - 200)}])))
        add("9,000 messages", _dump(**_conversation(dialect, [{"role": "user", "content": "a"}] * 9000)))
        add("8,000 tools", _dump(**one, tools=[_tool(dialect, number) for number in range(8000)]))
        add("900 KB of one tool", _dump(**one, tools=[{**_tool(dialect, 1), "description": "word " * 180_000}]))
    results = [{"type": "tool_result", "tool_use_id": "a", "content": "b"}] * 12_000
    cases.append(
        Hostile("messages: 12,000 results", PATHS["messages"], _dump(messages=[{"role": "user", "content": results}]))
    )
    parts = [{"type": "text", "text": "a"}] * 20_000
    cases.append(Hostile("chat: 20,000 parts", PATHS["chat"], _dump(messages=[{"role": "user", "content": parts}])))
    for size in (1, 31):
        text = "word " * (size * MIB // 5 - 100)
        cases.append(
            Hostile(f"count: {size} MiB of text", COUNT_PATH, _dump(messages=[{"role": "user", "content": text}]))
        )
    return cases


HOSTILE: Final = tuple(_list_cases())
