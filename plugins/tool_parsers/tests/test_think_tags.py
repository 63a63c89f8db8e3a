"""The reasoning parser `think_tags`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise import ReasoningParser, Resources
from turnwise.config.parts import Choice
from turnwise.config.resolve import build_part
from turnwise.plugin.host import load
from turnwise.types import PluginRecipe
from turnwise_tool_parsers.think_tags import ThinkTags, ThinkTagsConfig

words = st.text("ab c</>", max_size=12).map(str.strip)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Four.", ("", "Four.")),
        ("<think>\n2 + 2\n</think>\n\nFour.", ("2 + 2", "Four.")),
        (" <think>2 + 2", ("2 + 2", "")),
        ("2 + 2\n</think>\nFour.", ("2 + 2", "Four.")),
        ("<think></think>", ("", "")),
        ("a <think> b", ("", "a <think> b")),
        ("<think>a</think>b</think>c", ("a", "b</think>c")),
    ],
)
def test_examples(text, expected):
    """Complete, cut and missing reasoning, and a start tag that is in the prompt."""
    assert ThinkTags(ThinkTagsConfig()).split(text) == expected


@given(words, words)
def test_a_built_turn_splits_into_its_parts(reasoning, rest):
    """The registered parser, with other tags, finds what was put between them."""
    host = load(PluginRecipe(allow=("tool_parsers",)))
    choice = Choice("think_tags", {"start": "[T]", "end": "[/T]"})
    parser = build_part(host, "reasoning_parsers", choice, Resources(), path="reasoning_parser")

    assert isinstance(parser, ReasoningParser)
    assert parser.split(f"[T]{reasoning}[/T]\n{rest}") == (reasoning, rest)
