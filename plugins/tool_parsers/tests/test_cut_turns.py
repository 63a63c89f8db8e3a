"""A turn that a limit cuts has no call that the whole turn lacks, also where its texts quote calls."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_turns import XML

ARGUMENTS = st.sampled_from([{}, {"a": 1}, {"a": [True, None]}, {"a": "b"}])
WORDS = st.sampled_from(["", "x", " and ", "\n", '"', "'"])


def good(calls):
    return [(call.name, call.arguments) for call in calls if not call.error]


@pytest.mark.many_cases
@given(st.data())
def test_calls_that_a_cut_text_quotes_do_not_run(turn, render, parser_for, resources_of, data):
    """The text is unfinished, and so is its call."""
    if turn in XML:
        pytest.skip("XML formats cannot write their tags as text")
    words = [data.draw(WORDS) for _ in range(3)]
    inner = render(turn, "", [("inner", data.draw(ARGUMENTS))])
    calls = [("outer", {"text": inner.join(words), "more": [inner]}), ("second", {"text": inner})]
    parser = parser_for(turn, resources_of(*calls))
    text = render(turn, "", calls)

    assert calls == good(parser.parse_text(text)[1])
    for cut in range(len(text)):
        found = good(parser.parse_text(text[:cut])[1])
        assert calls[: len(found)] == found, text[:cut]
