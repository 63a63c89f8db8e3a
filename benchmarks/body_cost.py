"""
Measures the CPU time of reading the body of a request, for bodies that continue an earlier one and for others.

    python benchmarks/body_cost.py [--runs 7]

The bodies are requests of Chat Completions with 20 tools; each message after the system prompt is a user's text, a turn
with a tool call, or a tool's result. `whole` reads a body in a session that knows none. `continued` reads one that has
two messages more than the one before, as an agent sends it. `edited` reads one whose system prompt has changed too, as
when it has the time in it. `json.loads` and `pydantic_core.from_json` parse the body and check nothing, and `strict`
parses it with the checks that the gateway needs. Figures are CPU milliseconds of the thread, medians (minimum to
maximum) of some runs; each run measures all variants in turn, so other work on the machine slows all of them.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from copy import copy
from typing import Any, Final

from measurement import describe_machine, format_spread

from turnwise_gateway.dialects import DIALECTS, RequestMemory, read_exchange
from turnwise_gateway.dialects.strict_json import read_json

CHAT: Final = DIALECTS[0]
SIZES: Final = {21: 500, 81: 900, 401: 1950}
"""Characters of each text, by the number of messages: bodies of 27, 107 and 1,007 KB."""
MIN_S: Final = 0.05
"""Least time of a figure; a reading is repeated until it has passed."""

Variant = Callable[[], object]


def build_body(num_messages: int, num_chars: int, system: str = "You help.") -> bytes:
    """Return a request with `num_messages`, of which all but the system prompt have a text of about `num_chars`."""
    text = 'The quick brown fox — it\'s "agile" — jumps\nover the lazy dog. '
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
    for number in range(1, num_messages):
        content = f"{number} {text * (num_chars // len(text))}"
        if number % 3 == 1:
            messages.append({"role": "user", "content": content})
        elif number % 3 == 2:
            function = {"name": "search", "arguments": json.dumps({"query": content})}
            call = {"id": f"call_{number}", "type": "function", "function": function}
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        else:
            messages.append({"role": "tool", "tool_call_id": f"call_{number - 1}", "content": content})
    tools = [build_tool(number) for number in range(20)]
    return json.dumps({"model": "m", "messages": messages, "tools": tools}).encode()


def build_tool(number: int) -> dict[str, Any]:
    """Return the schema of a tool of about 500 bytes."""
    names = [f"parameter_{index}" for index in range(4)]
    properties = {name: {"type": "string", "description": "It says what to look for. " * 2} for name in names}
    function = {"name": f"tool_{number}", "description": "It searches. " * 8}
    return {"type": "function", "function": function | {"parameters": {"type": "object", "properties": properties}}}


def list_variants(num_messages: int) -> tuple[int, dict[str, Variant]]:
    """Return the size of a body, and the ways to read it."""
    num_chars = SIZES[num_messages]
    body = build_body(num_messages, num_chars)
    before = build_body(num_messages - 2, num_chars)
    edited = build_body(num_messages, num_chars, "You help. It is 12:01.")
    memory = RequestMemory()
    read_exchange(CHAT, before, {}, memory)
    variants: dict[str, Variant] = {
        "json.loads": lambda: json.loads(body),
        "strict": lambda: read_json(body),
        "parsed, whole": lambda: RequestMemory().read(CHAT.name, CHAT.list_key, body),
        "parsed, continued": lambda: copy(memory).read(CHAT.name, CHAT.list_key, body),
        "parsed, edited": lambda: copy(memory).read(CHAT.name, CHAT.list_key, edited),
        "call, whole": lambda: read_exchange(CHAT, body, {}, RequestMemory()),
        "call, continued": lambda: read_exchange(CHAT, body, {}, copy(memory)),
        "call, edited": lambda: read_exchange(CHAT, edited, {}, copy(memory)),
    }
    try:
        from pydantic_core import from_json
    except ImportError:
        pass
    else:
        variants["pydantic_core"] = lambda: from_json(body)
    return len(body), variants


def measure(variant: Variant) -> float:
    """Return the CPU milliseconds of one reading."""
    number = 0
    started = time.thread_time()
    while (passed := time.thread_time() - started) < MIN_S:
        variant()
        number += 1
    return 1e3 * passed / number


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7, help="(default: %(default)s)")
    options = parser.parse_args()
    print(describe_machine())
    print(f"CPU milliseconds; median (min-max) of {options.runs} runs")
    for num_messages in SIZES:
        size, variants = list_variants(num_messages)
        gc.collect()
        found: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(options.runs):
            for name, variant in variants.items():
                found[name].append(measure(variant))
        print(f"\n{num_messages} messages, {size / 1e3:.0f} KB")
        for name, values in found.items():
            print(f"  {name:20s} {format_spread(values)}", flush=True)


if __name__ == "__main__":
    main()
