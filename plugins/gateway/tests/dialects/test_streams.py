"""A streamed reply, put together by the client's own library, equals the plain one, in whatever parts it comes."""

import json
import math

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from turnwise_gateway.calls import CallOfTool, Usage
from turnwise_gateway.dialects import find_dialect, read_exchange
from turnwise_gateway.dialects.exchange import list_parts
from turnwise_strict_json import read_arguments

TEXTS = st.text(max_size=30) | st.sampled_from(
    ["\r\n\r\ndata: [DONE]\n\n", "\u2028: ping", "</think>", " \n", "\x00é\U0001f600"]
)
NAMES = st.from_regex(r"[a-z_]{1,12}", fullmatch=True)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e9, 1e9) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(TEXTS, JSON, max_size=3).map(json.dumps)
MALFORMED = st.sampled_from(["", "{", "[]", '{"a": NaN}', '{"a": 1, "a": 2}', '{"a": 1e999}', '{"a": "\\ud800"}'])
MESSAGES = [{"role": "user", "content": "Hi."}]


@st.composite
def replies(draw, make_reply):
    """Replies with any mix of reasoning, text, calls, ends and log-probabilities."""
    arguments = draw(st.lists(OBJECTS | MALFORMED, max_size=3))
    calls = tuple(
        CallOfTool(id=f"call{number}", name=draw(NAMES), arguments=text) for number, text in enumerate(arguments)
    )
    content = draw(TEXTS)
    places = sorted(draw(st.lists(st.integers(0, len(content)), min_size=len(calls), max_size=len(calls))))
    if draw(st.booleans()):
        calls = tuple(evolve(call, place=place) for call, place in zip(calls, places, strict=True))
    tokens = draw(st.lists(st.tuples(TEXTS, st.floats(-50, 0, width=32) | st.just(-math.inf)), min_size=1, max_size=5))
    return make_reply(
        id=draw(st.from_regex(r"[a-z0-9]{1,9}", fullmatch=True)),
        content=content,
        reasoning=draw(TEXTS),
        tool_calls=calls,
        finish="tool_calls" if calls else draw(st.sampled_from(["stop", "length"])),
        stop=draw(st.none() | st.just("</s>")),
        usage=Usage(
            prompt_tokens=draw(st.integers(5, 99)), completion_tokens=len(tokens), cached_tokens=draw(st.integers(0, 5))
        ),
        token_ids=np.arange(len(tokens), dtype=np.int32),
        logprobs=np.array([value for _, value in tokens], np.float32),
        token_texts=tuple(text for text, _ in tokens),
        signature=draw(TEXTS),
        provenance=draw(st.just({}) | st.just({"session": "s-1", "record": 0})),
    )


@st.composite
def parts_of(draw, reply, *, calls=True):
    """A reply that grows, part after part; the arguments of a malformed call only as far as they are JSON."""
    whole = list_parts(reply)
    last = sum(len(part.text) + 1 for part in whole if calls or part.call is None)
    sizes = sorted(draw(st.lists(st.integers(0, last), max_size=5)))
    return [part for size in sizes if (part := cut_reply(reply, whole, size, calls=calls)) is not None]


def cut_reply(reply, whole, size, *, calls):
    """Return the start of a reply with this number of characters, where each call counts one more; None if empty."""
    texts, found = {"reasoning": "", "content": ""}, []
    for part in whole:
        if size <= 0 or (part.call and not calls):
            break
        if part.call is None:
            texts[part.kind] += part.text[:size]
            size -= len(part.text)
            continue
        is_open = size <= len(part.text) or read_arguments(part.text) is None
        most = size - 1 if read_arguments(part.text) is not None else min(size - 1, part.text.startswith("{"))
        place = len(texts["content"])
        found.append(evolve(part.call, arguments=part.text[:most], is_open=is_open, place=place))
        size = 0 if is_open else size - 1 - len(part.text)
    if not any((*texts.values(), found)):
        return None
    return evolve(reply, **texts, tool_calls=tuple(found), token_texts=())


@pytest.fixture(scope="module")
def openai_client(lasting_gateway):
    """OpenAI's client, with the session in its URL."""
    import openai

    with openai.OpenAI(base_url=f"{lasting_gateway.url}/v1", api_key=lasting_gateway.key, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def anthropic_client(lasting_gateway):
    """Anthropic's client, with the session in its URL."""
    import anthropic

    with anthropic.Anthropic(base_url=lasting_gateway.url, api_key=lasting_gateway.key, max_retries=0) as client:
        yield client


def plain_chat(completion):
    """The parts of a completion that a stream has to bring, extra fields of the message included."""
    choice = completion.choices[0].to_dict()
    kept = {key: choice["message"].get(key) for key in ("role", "content", "tool_calls", "reasoning_content")}
    for call in kept["tool_calls"] or []:
        call.pop("index", None)
        call["function"].pop("parsed_arguments", None)
    kept["tool_calls"] = kept["tool_calls"] or None
    return completion.id, kept, choice["finish_reason"], choice.get("logprobs"), completion.usage.to_dict()


@given(st.data())
def test_chat(lasting_gateway, openai_client, make_reply, data):
    """Chat Completions: message, calls, log-probabilities, end and usage."""
    import openai

    reply = data.draw(replies(make_reply))
    parts = data.draw(parts_of(reply))
    lasting_gateway.backend.script, lasting_gateway.backend.parts = lambda _call: reply, lambda _call: parts
    request = {"model": "tiny", "messages": MESSAGES, "logprobs": True}

    plain = openai_client.chat.completions.create(**request)
    with openai_client.chat.completions.stream(**request, stream_options={"include_usage": True}) as stream:
        try:
            streamed = stream.get_final_completion()
        except openai.LengthFinishReasonError as cut:
            streamed = cut.completion

    assert plain_chat(plain) == plain_chat(streamed)
    assert (plain.choices[0].message.content or "") == reply.content
    assert plain.usage.prompt_tokens == reply.usage.prompt_tokens
    assert [each.arguments for each in reply.tool_calls] == [
        each.function.arguments for each in plain.choices[0].message.tool_calls or []
    ]


@given(st.data())
def test_messages(lasting_gateway, anthropic_client, make_reply, data):
    """Messages: the whole message, thinking and its signature included."""
    reply = data.draw(replies(make_reply))
    parts = data.draw(parts_of(reply))
    lasting_gateway.backend.script, lasting_gateway.backend.parts = lambda _call: reply, lambda _call: parts
    request = {"model": "tiny", "messages": MESSAGES, "max_tokens": 9}

    plain = anthropic_client.messages.create(**request)
    with anthropic_client.messages.stream(**request) as stream:
        streamed = stream.get_final_message()

    assert plain.to_dict(exclude_none=True) == streamed.to_dict(exclude_none=True)
    usage = plain.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == reply.usage.prompt_tokens
    assert usage.output_tokens == reply.usage.completion_tokens


@given(st.data())
def test_responses(lasting_gateway, openai_client, make_reply, data):
    """Responses: the items of the last event, of the events before it, and of the deltas."""
    reply = data.draw(replies(make_reply))
    wants_logprobs = data.draw(st.booleans())
    parts = data.draw(parts_of(reply, calls=not wants_logprobs))
    lasting_gateway.backend.script, lasting_gateway.backend.parts = lambda _call: reply, lambda _call: parts
    include = ["message.output_text.logprobs"] if wants_logprobs else []
    request = {"model": "tiny", "input": "Hi.", "include": include}

    plain = openai_client.responses.create(**request).to_dict()
    with openai_client.responses.stream(**request) as stream:
        events = list(stream)

    last = events[-1].response.to_dict()
    done = [event.item.to_dict() for event in events if event.type == "response.output_item.done"]
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert list(range(len(events))) == [event.sequence_number for event in events]
    assert unparsed(plain["output"]) == unparsed(last["output"]) == unparsed(done)
    assert [plain[key] for key in ("status", "usage", "incomplete_details")] == [
        last[key] for key in ("status", "usage", "incomplete_details")
    ]
    assert "".join(texts) == reply.content
    arguments = {item["id"]: "" for item in done if item["type"] == "function_call"}
    for event in events:
        if event.type == "response.function_call_arguments.delta":
            arguments[event.item_id] += event.delta
    assert [each.arguments for each in reply.tool_calls] == list(arguments.values())
    assert_one_after_the_other(events)


def assert_one_after_the_other(events):
    """Check that an item ends before the next one begins."""
    kinds = [event.type for event in events if event.type.startswith("response.output_item.")]
    assert kinds == ["response.output_item.added", "response.output_item.done"] * (len(kinds) // 2)


@given(st.data())
def test_heartbeats_of_responses_are_events(make_reply, data):
    """At any time they are numbered events that have the items as far as they were sent, and the stream stays whole."""
    reply = data.draw(replies(make_reply))
    body = json.dumps({"model": "tiny", "input": "Hi.", "stream": True}).encode()
    exchange = read_exchange(find_dialect("responses"), body, {})
    written = exchange.write_heartbeat()
    for part in data.draw(parts_of(reply)):
        written += exchange.write_part(part)
        for _ in range(data.draw(st.integers(0, 2))):
            written += exchange.write_heartbeat()
    written += exchange.write_events(reply)

    events = [json.loads(each.partition("data: ")[2]) for each in written.decode().strip().split("\n\n")]
    assert list(range(len(events))) == [event["sequence_number"] for event in events]
    sent = {}
    for event in events:
        if event["type"].endswith(("text.delta", "arguments.delta")):
            sent[event["item_id"]] = sent.get(event["item_id"], "") + event["delta"]
        elif event["type"] == "response.in_progress":
            shown = {item["id"]: text_of(item) for item in event["response"]["output"]}
            assert shown == {name: sent.get(name, "") for name in shown}
            assert sent.keys() <= shown.keys()


def text_of(item):
    """Return the text of an item of Responses, or its arguments."""
    if item["type"] == "function_call":
        return item["arguments"]
    (part,) = item.get("content") or item["summary"]
    return part["text"]


def unparsed(items):
    """Items without what the client's library adds."""
    kept = [{key: value for key, value in item.items() if key != "parsed_arguments"} for item in items]
    for item in kept:
        if "content" in item:
            item["content"] = [{k: v for k, v in part.items() if k != "parsed"} for part in item["content"]]
    return kept
