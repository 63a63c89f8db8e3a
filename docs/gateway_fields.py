"""Builds the reference page about the fields of requests to the gateway, from the rules that its dialects use."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

from turnwise_gateway.dialects import DIALECTS
from turnwise_gateway.dialects.field_rules import EFFECTS

_NAMES: Final = {"chat": "Chat Completions", "messages": "Messages", "responses": "Responses"}
_INTRODUCTION: Final = """\
The effect of each field of a request to the [gateway](../../plugins/gateway/README.md), in the three dialects. Fields
that are not in the table are `ignored`, and `null` is the same as a missing field. A test sends each field of the table
to a session in each dialect."""


def gateway_fields_page() -> Iterator[str]:
    """Yield the lines of the page."""
    yield from ("# Fields of requests to the gateway", "", *_INTRODUCTION.splitlines(), "")
    yield from (f"- `{effect}`: {meaning}." for effect, meaning in EFFECTS.items())
    names = " | ".join(_NAMES[dialect.name] for dialect in DIALECTS)
    yield from ("", f"| field | {names} | counted as | values that change nothing |")
    yield "| --- " * (len(DIALECTS) + 3) + "|"
    rows = dict.fromkeys((rule.name, rule.form) for dialect in DIALECTS for rule in dialect.fields.rules)
    for name, form in rows:
        effects = [dialect.fields.effect_of(name, form) for dialect in DIALECTS]
        found = [rule for each in DIALECTS for rule in each.fields.rules if (rule.name, rule.form) == (name, form)]
        neutral = dict.fromkeys(json.dumps(value) for rule in found for value in rule.neutral)
        counted = found[0].counted
        cells = (
            f"`{name}`: {form}" if form else f"`{name}`",
            *effects,
            f"`{counted}`" if counted else "",
            ", ".join(f"`{value}`" for value in neutral),
        )
        yield f"| {' | '.join(cells)} |"
    yield ""
