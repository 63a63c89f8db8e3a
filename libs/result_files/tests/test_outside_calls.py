"""Calls to other models: they are in the files, and are read as messages and a text, whatever they hold."""

import json

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from turnwise import EpisodeResult, Status, Task
from turnwise.record.outside_call import MAX_CHARACTERS, OutsideCall, shorten
from turnwise_result_files import TrajectoryWriter, read_results
from turnwise_result_files.atif import add_outside_calls, build_document
from turnwise_result_files.outside_calls import read_answer, read_messages

TEXTS = st.text(max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda each: (
        st.lists(each, max_size=3)
        | st.dictionaries(st.sampled_from(["messages", "role", "content", "text", "choices", "delta", "input"]), each)
    ),
    max_leaves=12,
)
BODIES = (
    TEXTS
    | JSON.map(json.dumps)
    | st.lists(JSON, max_size=3).map(lambda events: "".join(f"data: {json.dumps(each)}\n\n" for each in events))
)
CALLS = st.builds(
    OutsideCall,
    model=TEXTS,
    path=TEXTS,
    status=st.integers(0, 599),
    request=BODIES,
    response=BODIES,
    num_turns=st.integers(0, 9),
)


def call(request=None, response=""):
    return OutsideCall(model="judge", request=json.dumps(request), response=response)


@given(calls=st.lists(CALLS, max_size=3), suffix=st.sampled_from([".parquet", ".jsonl"]))
def test_a_file_has_the_calls(tmp_path_factory, calls, suffix):
    """Every row of an episode has them; texts that UTF-8 does not have are escaped."""
    result = EpisodeResult(task=Task(messages=(), uid="u"), status=Status.COMPLETED, outside_calls=tuple(calls))
    file = tmp_path_factory.mktemp("calls") / f"trajectories{suffix}"

    with TrajectoryWriter(file) as writer:
        writer.write(result)

    (read,) = read_results(file)
    assert tuple(calls) == read.outside_calls


@given(called=CALLS)
def test_any_body_is_read(called):
    """Bodies of no known form are shown whole, and a document of ATIF holds them as they were sent."""
    messages, answer = read_messages(called), read_answer(called)

    assert messages or json.loads(called.request)
    assert all(isinstance(each["role"], str) and isinstance(each["content"], str) for each in messages)
    assert answer or not called.response
    document = add_outside_calls(build_document("e", {}, [], totals=(0, 0, 0)), [called])
    (exported,) = document["subagent_trajectories"]
    assert (called.request, called.response) == (exported["extra"]["request"], exported["extra"]["response"])
    assert len(messages) + 1 == len(exported["steps"])


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"messages": [{"role": "system", "content": "Judge."}, {"role": "user", "content": "Hm?"}]}, None),
        ({"system": "Judge.", "messages": [{"role": "user", "content": [{"type": "text", "text": "Hm?"}]}]}, None),
        ({"instructions": "Judge.", "input": "Hm?"}, None),
        ({"instructions": "Judge.", "input": [{"role": "user", "content": [{"text": "Hm?"}]}]}, None),
        ({"prompt": "Hm?"}, [{"role": "user", "content": '{"prompt": "Hm?"}'}]),
    ],
)
def test_requests_of_each_api(body, expected):
    """The prompt of the system is the first message."""
    usual = [{"role": "system", "content": "Judge."}, {"role": "user", "content": "Hm?"}]

    assert (expected or usual) == read_messages(call(body))


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ('{"choices": [{"message": {"content": "Yes."}}]}', "Yes."),
        ('{"content": [{"type": "text", "text": "Yes."}]}', "Yes."),
        ('{"output": [{"type": "reasoning"}, {"content": [{"text": "Yes."}]}]}', "Yes."),
        (
            'data: {"choices": [{"delta": {"content": "Ye"}}]}\n\ndata: {"choices": [{"delta": {"content": "s."}}]}',
            "Yes.",
        ),
        ('data: {"delta": {"type": "text_delta", "text": "Yes."}}\n\ndata: [DONE]', "Yes."),
        ('data: {"type": "response.output_text.delta", "delta": "Yes."}', "Yes."),
        ('{"error": {"message": "no"}}', '{"error": {"message": "no"}}'),
        ("", ""),
    ],
)
def test_responses_of_each_api(response, expected):
    """An error is shown whole."""
    assert expected == read_answer(call(response=response))


def test_a_long_body_is_cut_and_says_so():
    """A judge that gets long conversations does not fill the files."""
    text = shorten("x" * (MAX_CHARACTERS + 1_234))

    assert text.startswith("x" * MAX_CHARACTERS)
    assert text.endswith("x… and 1,234 characters more")
    assert "x" == shorten("x")
    assert read_messages(evolve(call(), request=text)) == [{"role": "user", "content": text}]
