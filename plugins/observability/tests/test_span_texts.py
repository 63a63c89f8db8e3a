"""Texts on spans: which messages belong to which span, and what odd ones do."""

import json

import pytest

from turnwise.events.observer import EpisodeStarted, ToolFinished, TurnFinished
from turnwise.record.result import EpisodeResult
from turnwise.types import FinishReason, Status, Task
from turnwise_observability.config import OtelConfig
from turnwise_observability.span_texts import SpanTexts
from turnwise_observability.timeline import EpisodeTimeline

PROMPT = {"role": "user", "content": "2 + 3?"}


def timeline(messages, num_calls, given=(PROMPT,)):
    """Return an ended episode with turns of one second, each followed by this number of tool calls."""
    task = Task(messages=given, uid="t")
    made = EpisodeTimeline(EpisodeStarted(uid="t/0", task=task, agent_name="a", key="k"))
    for number, calls in enumerate(num_calls):
        tokens = {"num_context_tokens": 1, "num_new_tokens": 1, "num_cached_tokens": 0}
        turn = {"uid": "t/0", "finish_reason": FinishReason.STOP, "seconds": 1.0, "started_at": 2.0 * number}
        made.turns.append(TurnFinished(**turn, **tokens))
        for index in range(calls):
            at = 2.0 * number + 1.1 + index / 10
            tool = {"tool": "add", "seconds": 0.1, "error": False, "num_characters": 1}
            made.tools.append(ToolFinished(uid="t/0", started_at=at, **tool))
    made.result = EpisodeResult(task=task, status=Status.COMPLETED, messages=tuple(messages))
    return made


def call(number):
    """Return a call of a message."""
    return {"id": f"c{number}", "function": {"name": "add", "arguments": {"a": number}}}


def contents(messages):
    """Return role and text of each message of an attribute."""
    return [(each["role"], [part.get("content") for part in each["parts"]]) for each in json.loads(messages)]


def test_each_span_has_the_texts_of_its_turn():
    """A generate call has the messages since the last turn and its answer, and a tool call has its own texts."""
    messages = [
        PROMPT,
        {"role": "assistant", "content": "I add.", "tool_calls": [call(1), call(2)]},
        {"role": "tool", "content": "one", "tool_call_id": "c1"},
        {"role": "tool", "content": "two", "tool_call_id": "c2"},
        {"role": "assistant", "content": "5"},
    ]
    texts = SpanTexts(100).of(timeline(messages, [2, 0]))

    assert contents(texts.episode["gen_ai.input.messages"]) == [("user", ["2 + 3?"])]
    assert contents(texts.episode["gen_ai.output.messages"]) == [("assistant", ["5"])]
    first, second = texts.turns
    (answer,) = json.loads(first.generate["gen_ai.output.messages"])
    made = {"type": "tool_call", "id": "c2", "name": "add", "arguments": '{"a": 2}'}
    assert answer["parts"][2] == made
    assert [each["gen_ai.tool.call.result"] for each in first.tools] == ["one", "two"]
    assert [each["gen_ai.tool.call.arguments"] for each in first.tools] == ['{"a": 1}', '{"a": 2}']
    given = json.loads(second.generate["gen_ai.input.messages"])
    assert [each["parts"] for each in given] == [
        [{"type": "tool_call_response", "id": "c1", "response": "one"}],
        [{"type": "tool_call_response", "id": "c2", "response": "two"}],
    ]


def test_answers_of_the_prompt_are_no_turns():
    """An example conversation in the task belongs to the input."""
    given = (PROMPT, {"role": "assistant", "content": "5"}, {"role": "user", "content": "1 + 1?"})
    texts = SpanTexts(100).of(timeline([*given, {"role": "assistant", "content": "2"}], [0], given))

    assert len(texts.turns) == 1
    assert [role for role, _text in contents(texts.turns[0].generate["gen_ai.input.messages"])] == [
        "user",
        "assistant",
        "user",
    ]


def test_turns_without_a_message_each_leave_all_texts_on_the_episode():
    """A message of two generate calls, or a resumed episode: no span gets a text of another one."""
    messages = [PROMPT, {"role": "assistant", "content": "5"}]
    texts = SpanTexts(100).of(timeline(messages, [0, 0]))

    assert texts.turns == ()
    assert contents(texts.episode["gen_ai.output.messages"]) == [("assistant", ["5"])]


def test_calls_that_differ_in_number_have_no_texts():
    """A result that the agent left out would shift the ones after it."""
    answer = {"role": "assistant", "content": "", "tool_calls": [call(1)]}
    texts = SpanTexts(100).of(timeline([PROMPT, answer], [2]))

    assert texts.turns[0].tools == [{}, {}]


def test_long_and_odd_texts():
    """A long text is cut, and the JSON stays valid; a picture has its type alone; a surrogate can be sent."""
    picture = {"type": "image_url", "image_url": {"url": "data:..."}}
    user = {"role": "user", "content": [{"type": "text", "text": "x" * 50}, picture]}
    texts = SpanTexts(10).of(timeline([user, {"role": "assistant", "content": "\udcff"}], [0], (user,)))

    (message,) = json.loads(texts.episode["gen_ai.input.messages"])
    cut = {"type": "text", "content": "xxxxxxxxxx[40 characters cut]"}
    assert message["parts"] == [cut, {"type": "image_url"}]
    assert contents(texts.episode["gen_ai.output.messages"]) == [("assistant", ["?"])]


def test_an_episode_that_did_not_end_has_no_texts():
    """Its conversation never arrives."""
    made = timeline([], [0])
    made.result = None

    assert SpanTexts(10).of(made).episode == {}


def test_the_limit_is_checked():
    """A limit of no characters is an error of the config."""
    with pytest.raises(ValueError, match="text_limit"):
        OtelConfig(text_limit=0)
