"""Strategies of calls and contents, from which a renderer makes the turn of a model."""

import json
import keyword
import re

from hypothesis import strategies as st

XML = ("qwen3_coder", "glm45", "glm47")
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,12}", fullmatch=True).filter(lambda name: not keyword.iskeyword(name))
DOTTED = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,12}[A-Za-z0-9]", fullmatch=True)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
TAGS_OF_XML = re.compile(r"</?(parameter|function|tool_call|arg_key|arg_value|think)")
CONTENTS = st.sampled_from(["", "Let me see.\n", "Grüße, 世界 🌍 \n", "a < b, [1, 2] and {}\n", "<think>Hm.</think>\n"])


def no_tags(value):
    """Return whether a value can be written in XML, which has no way to write a tag as text."""
    return not TAGS_OF_XML.search(json.dumps(value, ensure_ascii=False))


def calls_of(turn):
    """Return a strategy of one to three calls with distinct names that a format can write."""
    keys = NAMES if turn in ("llama4_pythonic", *XML) else st.text(max_size=8)
    values = VALUES.filter(no_tags) if turn in XML else VALUES
    call = st.tuples(DOTTED, st.dictionaries(keys, values, max_size=4))
    return st.lists(call, min_size=1, max_size=3, unique_by=lambda each: each[0])
