"""Requirements of every reasoning parser, as plain functions without pytest; a check takes a `ReasoningProbe`."""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen

from turnwise.protocols import ReasoningParser
from turnwise_testing.checks.check import Check, register
from turnwise_testing.checks.part import PartChecks
from turnwise_testing.probes.engine import expect, expect_equal

TEXTS = (
    "",
    "The answer is 42.",
    "<think>17 + 25</think>It is 42.",
    "<think>never closed",
    "</think>never opened",
    "<think></think>",
    "Grüße, 世界 🌍\n\n<b>1 < 2</b>",
)
"""Turns of a model, with and without common tags, cut anywhere."""


@frozen(kw_only=True)
class ReasoningProbe:
    """
    The probe of a reasoning parser.

    Attributes:
        make_parser: builds it, as the registered factory does.
        examples: turns, each with its reasoning and the rest of the text.
    """

    make_parser: Callable[[], ReasoningParser]
    examples: tuple[tuple[str, str, str], ...] = ()


REASONING_CHECKS: dict[str, Check] = {}
"""Every check by the name of its function without `check_`."""
REASONING_PARSERS = PartChecks(
    checks=REASONING_CHECKS,
    probe=lambda part: ReasoningProbe(make_parser=part.make, examples=part.examples),
    examples="(turn, reasoning, rest)",
)
_check = register(REASONING_CHECKS)


@_check
def check_fulfils_the_protocol(probe: ReasoningProbe) -> None:
    """The factory returns an object with the method of a reasoning parser."""
    expect(isinstance(probe.make_parser(), ReasoningParser), "it is no ReasoningParser: it has no method `split`")


@_check
def check_examples_are_split(probe: ReasoningProbe) -> str | None:
    """Each example gives its reasoning and its text."""
    for text, reasoning, rest in probe.examples:
        expect_equal(probe.make_parser().split(text), (reasoning, rest), f"the parts of {text!r}")
    return None if probe.examples else "no turns are known: a ReasoningParserSuite has them in its fixture `examples`"


@_check
def check_any_text_has_an_answer(probe: ReasoningProbe) -> None:
    """Every prefix of every turn gives two texts, the same ones each time, and invents no character."""
    parser = probe.make_parser()
    for text in (*TEXTS, *(example[0] for example in probe.examples)):
        for stop in range(len(text) + 1):
            parts = parser.split(text[:stop])
            expect(len(parts) == 2 and all(isinstance(part, str) for part in parts), f"split returned {parts!r}")
            expect_equal(parser.split(text[:stop]), parts, f"the parts of {text[:stop]!r} again")
            expect(all(part in text for part in parts), f"{parts!r} are no parts of {text!r}")
