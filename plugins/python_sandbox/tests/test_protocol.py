"""Messages and frames between the supervisor, the fork servers and the sessions."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise_python_sandbox.box import messages
from turnwise_python_sandbox.box.frames import HEADER_BYTES, MAX_PAYLOAD_BYTES, FrameError, FrameReader, encode_frame
from turnwise_python_sandbox.box.messages import Exited, Launch, MessageError, Ready, Signal, Started

whole = st.integers(min_value=0, max_value=2**53)
seconds = st.floats(min_value=0, max_value=1e9)
MESSAGES = st.one_of(
    st.builds(Launch, whole, seconds, whole, whole, whole, whole, st.booleans()),
    st.builds(Signal, whole, whole),
    st.builds(Ready, whole, st.lists(st.text(max_size=20), max_size=3).map(tuple)),
    st.builds(Started, whole),
    st.builds(
        Exited, whole, st.integers(-1, 65535), st.text(max_size=9), st.booleans(), seconds, seconds, whole, st.text()
    ),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=9,
)


@given(MESSAGES)
def test_messages_come_back_equal(message: messages.Message) -> None:
    """Decoding an encoded message returns an equal message."""
    assert message == messages.decode(messages.encode(message))


@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_datagram_is_a_message_or_an_error(datagram: bytes) -> None:
    """Decoding returns a message or raises `MessageError`, whatever the bytes."""
    try:
        message = messages.decode(datagram)
    except MessageError:
        return
    assert message == messages.decode(messages.encode(message))


@given(MESSAGES, st.data())
def test_values_of_another_type_are_refused(message: messages.Message, data: st.DataObject) -> None:
    """A field of the wrong type raises `MessageError` when it is decoded, not later."""
    fields = list(message)
    index = data.draw(st.integers(0, len(fields) - 1))
    fields[index] = None
    with pytest.raises(MessageError):
        messages.decode(json.dumps([type(message).__name__, *fields]).encode())


@given(st.lists(st.binary(max_size=300), max_size=8), st.data())
def test_frames_survive_any_split(payloads: list[bytes], data: st.DataObject) -> None:
    """A reader yields the same payloads in the same order, wherever the stream is cut."""
    stream = b"".join(map(encode_frame, payloads))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    reader = FrameReader()
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]

    assert payloads == [payload for piece in pieces for payload in reader.feed(piece)]


@given(st.binary(max_size=300), st.integers(0, 50))
def test_payloads_stay_within_the_limit(stream: bytes, limit: int) -> None:
    """Random bytes yield payloads within the limit or raise `FrameError`."""
    try:
        payloads = list(FrameReader(limit).feed(stream))
    except FrameError:
        return
    assert all(len(payload) <= limit for payload in payloads)
    assert sum(len(payload) + HEADER_BYTES for payload in payloads) <= len(stream)


def test_an_oversized_payload_is_refused() -> None:
    """Encoding refuses a payload that the other side would refuse."""
    with pytest.raises(FrameError, match="at most"):
        encode_frame(bytes(messages.MAX_DATAGRAM_BYTES * 1024))


@given(st.binary(min_size=1, max_size=300), st.data())
def test_a_truncated_frame_yields_nothing(payload: bytes, data: st.DataObject) -> None:
    """Without its last byte a frame is incomplete; the byte completes it."""
    stream = encode_frame(payload)
    cut = data.draw(st.integers(0, len(stream) - 1))
    reader = FrameReader()

    assert [] == list(reader.feed(stream[:cut]))
    assert [payload] == list(reader.feed(stream[cut:]))


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_a_header_alone_decides_about_the_length(length: int, limit: int) -> None:
    """A frame above the limit raises before any byte of its payload has arrived; one at the limit does not."""
    reader, header = FrameReader(limit), length.to_bytes(HEADER_BYTES, "big")
    if length <= limit:
        assert ([b""] if length == 0 else []) == list(reader.feed(header))
        return
    with pytest.raises(FrameError, match=f"frame announces {length} bytes, but at most {limit} are allowed"):
        list(reader.feed(header))


def test_complete_frames_before_a_bad_one_are_yielded() -> None:
    """An oversized frame does not take back the payloads before it."""
    reader = FrameReader(5)
    payloads = reader.feed(encode_frame(b"good") + encode_frame(b"too long"))

    assert b"good" == next(payloads)
    with pytest.raises(FrameError):
        next(payloads)


def test_the_longest_payload_can_be_sent_and_received() -> None:
    """The limits of both sides are the same."""
    payload = bytes(MAX_PAYLOAD_BYTES)

    assert [payload] == list(FrameReader().feed(encode_frame(payload)))


@pytest.mark.parametrize(
    "message",
    [
        ["Launch", 1, 1.0, 1, 1, 1, 1],
        ["Launch", 1, 1.0, 1, 1, 1, 1, True, 1],
        ["Launch", 1, 1.0, 1, 1, 1, 1, 1],
        ["Launch", True, 1.0, 1, 1, 1, 1, True],
        ["Launch", 1, float("nan"), 1, 1, 1, 1, True],
        ["Launch", 1, float("inf"), 1, 1, 1, 1, True],
        ["Launch", 1.5, 1.0, 1, 1, 1, 1, True],
        ["Ready", 1, "abc"],
        ["Ready", 1, [1]],
        ["Ready", 1, [["nested"]]],
        ["Signal", 1, "9"],
        ["Started"],
        ["Message", 1],
        [None, 1],
        [["Started"], 1],
        {"Started": 1},
        "Started",
        None,
    ],
)
def test_each_kind_of_invalid_message_is_refused(message: object) -> None:
    """Missing and additional fields, booleans as numbers, infinite numbers, unknown kinds."""
    with pytest.raises(MessageError, match="invalid message"):
        messages.decode(json.dumps(message).encode())


def test_deep_nesting_is_refused() -> None:
    """A datagram that is nested deeper than the parser allows is a `MessageError`, no `RecursionError`."""
    with pytest.raises(MessageError, match="invalid message"):
        messages.decode(b"[" * messages.MAX_DATAGRAM_BYTES)


def test_the_error_shows_only_the_start_of_a_datagram() -> None:
    """The text of an error stays short, however long the datagram."""
    with pytest.raises(MessageError) as caught:
        messages.decode(b"x" * messages.MAX_DATAGRAM_BYTES)

    assert len(str(caught.value)) < 200


@given(MESSAGES)
def test_messages_fit_into_a_datagram(message: messages.Message) -> None:
    """With texts of usual length every message is far below the limit of a datagram."""
    assert len(messages.encode(message)) < messages.MAX_DATAGRAM_BYTES // 10
