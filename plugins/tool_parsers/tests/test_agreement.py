"""
The parsers of vLLM and SGLang read hand-written turns and rendered ones alike; tables say where they do not, and why.

The turns are fixed: engines misread rare ones, mostly in streams, and generated turns would find another of them after
each change of this repository. `test_round_trip.py` has properties of our own parsers.

A turn with a malformed call agrees when the engine returns no call either. An entry of a table must be true.
"""

import re

import pytest
from engine_parsers import SglangParser, VllmParser, has_engine

CALLS = (
    ("", [("add", {})]),
    ("", [("add", {"a": 1, "b": 2})]),
    ("Let me see.\n", [("add", {"a": -7, "b": 2.5})]),
    ("", [("search", {"query": 'a quote " and a backslash \\', "exact": True})]),
    ("Grüße, 世界 🌍 \n", [("search", {"query": "Grüße\n世界 🌍", "page": None})]),
    ("", [("search", {"query": ""}), ("add", {"a": 0})]),
    ("", [("get_weather", {"city": "Ulm"}), ("add", {"a": 1}), ("search", {"query": "two  spaces, and a comma"})]),
    ("", [("plot", {"points": [[1, 2], [3, 4]], "style": {"colour": "red", "marks": []}})]),
    ("<think>Hm.</think>\n", [("plot", {"points": [], "title": "it's"})]),
    ("a < b\n", [("run_2", {"limit": 12345678901, "ratio": 1e-7, "nested": {"a": {"b": [None, False]}}})]),
)
"""Turns of a model: content, and names with arguments of calls."""
WAYS = ("read", "read_stream")
DIFFERS = {
    ("vllm", "read", "mistral_v11"): "the call's id becomes a part of its name",
    ("vllm", "read", "phi4"): "calls between tags are not found",
    ("vllm", "read_stream", "llama3_json"): "a call without arguments gets no arguments",
    ("vllm", "read_stream", "mistral_v11"): "the call's id becomes a part of its name",
    ("vllm", "read_stream", "mistral_v13"): "a call without arguments gets half of them",
    ("vllm", "read_stream", "phi4"): "no stream",
    ("vllm", "read_stream", "phi4_functools"): "no stream",
    ("sglang", "read", "gpt_oss_role"): "calls of this form are not found",
    ("sglang", "read", "mistral_v11"): "calls with ids are not found",
    ("sglang", "read_stream", "gpt_oss"): "its stream needs the end of the turn",
    ("sglang", "read_stream", "gpt_oss_role"): "calls of this form are not found",
    ("sglang", "read_stream", "mistral_v11"): "calls with ids are not found",
}
"""Renderers whose simplest call an engine reads in another way."""


def is_plain_pythonic(content, calls):
    """Return whether a turn has calls only, and names of tools and arguments are letters, then digits and letters."""
    names = [name for call in calls for name in (call[0], *call[1])]
    return not content and all(re.fullmatch(r"[A-Za-z]\w*", name) for name in names)


def is_streamed_pythonic(content, calls):
    """Return whether a plain turn has no number with an exponent, which vLLM's stream changes."""
    return is_plain_pythonic(content, calls) and not re.search(r"\de[+-]?\d", str(calls))


def is_positive_pythonic(content, calls):
    """Return whether a plain turn has no negative number, which SGLang does not read."""
    return is_plain_pythonic(content, calls) and not re.search(r"-\d", str(calls))


LIMITS = {
    ("vllm", "read", "llama3_json"): lambda content, _calls: "{" not in content,
    ("vllm", "read", "llama4_pythonic"): is_plain_pythonic,
    ("vllm", "read_stream", "llama4_pythonic"): is_streamed_pythonic,
    ("vllm", "read_stream", "granite"): lambda _content, calls: "None" not in str(calls),
    ("vllm", "read", "phi4_functools"): lambda _content, calls: "]" not in str(calls)[1:-1],
    ("sglang", "read", "gpt_oss"): lambda _content, calls: all(name.isidentifier() for name, _arguments in calls),
    ("sglang", "read", "llama4_pythonic"): is_positive_pythonic,
    ("sglang", "read_stream", "llama4_pythonic"): is_positive_pythonic,
    ("sglang", "read_stream", "mistral"): lambda _content, calls: len(calls) == 1,
}
"""Turns that an engine reads alike, for formats of which it reads others in another way."""
MISSING = {
    "vllm": {
        "gpt_oss": "vLLM reads gpt-oss by token ids of a vocabulary that has to be downloaded",
        "gpt_oss_role": "vLLM reads gpt-oss by token ids of a vocabulary that has to be downloaded",
    },
    "sglang": dict.fromkeys(("granite", "phi4", "phi4_functools"), "SGLang has no parser of this format"),
}

vllm = pytest.mark.vllm
sglang = pytest.mark.sglang
with_vllm = pytest.mark.skipif(not has_engine("vllm"), reason="vLLM is not installed in this environment")
with_sglang = pytest.mark.skipif(not has_engine("sglang"), reason="SGLang is not installed in this environment")
ENGINES = [
    pytest.param("vllm", VllmParser, marks=[vllm, with_vllm], id="vllm"),
    pytest.param("sglang", SglangParser, marks=[sglang, with_sglang], id="sglang"),
]
for_engines = pytest.mark.parametrize(("engine", "make_parser"), ENGINES)


@for_engines
@pytest.mark.filterwarnings("ignore")
def test_hand_written_turns(engine, make_parser, case, hand_written_tools):
    """Names and arguments are equal, or differ where the case has its reason."""
    if case["format"] in MISSING[engine]:
        pytest.skip(MISSING[engine][case["format"]])
    name = case.get("engine_parser", {}).get(engine, case["format"])
    expected = [tuple(call) for call in case["calls"]]

    found = make_parser(name, case["text"], list(hand_written_tools.values())).read()

    if engine in case.get("differs", {}):
        assert expected != found, "the engine agrees by now: remove the reason from the table"
    else:
        assert expected == found


@for_engines
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore")
def test_rendered_turns(engine, make_parser, way, turn, render, parser_for, resources_of):
    """The engine finds the calls that our parser finds, whole and token by token."""
    if turn in MISSING[engine]:
        pytest.skip(MISSING[engine][turn])
    key = (engine, way, turn)
    may_differ = LIMITS.get(key, lambda _content, _calls: True)
    for content, calls in CALLS[:1] if key in DIFFERS else [each for each in CALLS if may_differ(*each)]:
        text, resources = render(turn, content, calls), resources_of(*calls)
        schemas = [tool.schema for tool in resources.tools.values()]
        ours = [(call.name, call.arguments) for call in parser_for(turn, resources).parse_text(text)[1]]

        theirs = getattr(make_parser(turn, text, schemas), way)()

        assert calls == ours
        if key in DIFFERS:
            assert calls != theirs, "the engine agrees by now: remove the reason from the table"
        else:
            assert calls == theirs
