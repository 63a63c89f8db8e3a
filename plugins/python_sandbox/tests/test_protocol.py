"""Messages and frames survive everything, garbage included."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise_python_sandbox.box import messages
from turnwise_python_sandbox.box.frames import HEADER_BYTES, FrameError, FrameReader, frame
from turnwise_python_sandbox.box.messages import Began, Ended, GarbageError, Launch, Ready, Signal

whole = st.integers(min_value=0, max_value=2**53)
seconds = st.floats(min_value=0, max_value=1e9)
MESSAGES = st.one_of(
    st.builds(Launch, whole, seconds, whole, whole, whole, whole, st.booleans()),
    st.builds(Signal, whole, whole),
    st.builds(Ready, whole, st.lists(st.text(max_size=20), max_size=3).map(tuple)),
    st.builds(Began, whole),
    st.builds(
        Ended, whole, st.integers(-1, 65535), st.text(max_size=9), st.booleans(), seconds, seconds, whole, st.text()
    ),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=9,
)


@given(MESSAGES)
def test_messages_come_back_equal(message: messages.Message) -> None:
    """Encoding and decoding are inverse."""
    assert message == messages.decode(messages.encode(message))


@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
def test_garbage_is_called_garbage(datagram: bytes) -> None:
    """Whatever arrives is a message or a `GarbageError`, never anything else."""
    try:
        message = messages.decode(datagram)
    except GarbageError:
        return
    assert message == messages.decode(messages.encode(message))


@given(MESSAGES, st.data())
def test_values_of_another_type_are_garbage(message: messages.Message, data: st.DataObject) -> None:
    """A field with a value of another kind is found, so that it cannot fail later."""
    fields = list(message)
    index = data.draw(st.integers(0, len(fields) - 1))
    fields[index] = None
    with pytest.raises(GarbageError):
        messages.decode(json.dumps([type(message).__name__, *fields]).encode())


@given(st.lists(st.binary(max_size=300), max_size=8), st.data())
def test_frames_come_back_however_they_are_split(payloads: list[bytes], data: st.DataObject) -> None:
    """Any cut of the stream gives the same payloads in the same order."""
    stream = b"".join(map(frame, payloads))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    reader = FrameReader()
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]

    assert payloads == [payload for piece in pieces for payload in reader.feed(piece)]


@given(st.binary(max_size=300), st.integers(0, 50))
def test_a_reader_keeps_no_more_than_allowed(stream: bytes, limit: int) -> None:
    """Random bytes give payloads within the limit, or a `FrameError`."""
    try:
        payloads = list(FrameReader(limit).feed(stream))
    except FrameError:
        return
    assert all(len(payload) <= limit for payload in payloads)
    assert sum(len(payload) + HEADER_BYTES for payload in payloads) <= len(stream)


def test_a_frame_that_is_too_long_is_refused() -> None:
    """Neither side makes a frame that the other would not take."""
    with pytest.raises(FrameError, match="at most"):
        frame(bytes(messages.MAX_BYTES * 1024))
