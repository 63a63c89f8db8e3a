"""Captured output: the limit for both streams together, the pipes, the text."""

from __future__ import annotations

import os

from hypothesis import given
from hypothesis import strategies as st

from turnwise_python_sandbox.output import READ_BYTES, CapturedOutput, OutputPipes

CHUNKS = st.lists(st.tuples(st.sampled_from(["stdout", "stderr"]), st.binary(max_size=60)), max_size=12)


def capture(limit: int, chunks: list[tuple[str, bytes]]) -> CapturedOutput:
    """Add chunks to an output with a limit."""
    output = CapturedOutput(limit)
    for stream, data in chunks:
        output.add(stream, data)
    return output


@given(st.integers(0, 200), CHUNKS)
def test_the_limit_is_exact(limit: int, chunks: list[tuple[str, bytes]]) -> None:
    """The size is the smaller of limit and total, and only a total above the limit is truncated."""
    output = capture(limit, chunks)
    total = sum(len(data) for _, data in chunks)

    assert output.size == min(limit, total)
    assert output.truncated is (total > limit)


@given(st.integers(0, 200), CHUNKS)
def test_the_first_bytes_are_kept(limit: int, chunks: list[tuple[str, bytes]]) -> None:
    """The kept bytes of both streams are the first to arrive."""
    output = capture(limit, chunks)
    arrived = [(stream, byte) for stream, data in chunks for byte in data][:limit]

    for stream in ("stdout", "stderr"):
        expected = bytes(byte for each, byte in arrived if each == stream)
        assert expected.decode("utf-8", "replace") == output.text(stream)


def test_a_character_cut_in_the_middle_is_replaced() -> None:
    """A limit inside a UTF-8 character leaves a replacement character, and no error."""
    assert "ab\ufffd" == capture(4, [("stdout", "ab\u6f22".encode())]).text("stdout")


def test_a_limit_of_zero_allows_silence() -> None:
    """Without output even a limit of 0 bytes is not exceeded; one byte exceeds it."""
    assert not capture(0, [("stdout", b"")]).truncated
    assert capture(0, [("stderr", b"x")]).truncated


def test_pipes_keep_the_streams_apart() -> None:
    """Standard output comes first among the write ends, and each pipe feeds its own stream."""
    pipes, output = OutputPipes(), CapturedOutput(100)
    stdout, stderr = pipes.open()
    os.write(stdout, b"out")
    os.write(stderr, b"err")
    for fd in pipes:
        assert pipes.read(fd, output)

    assert ("out", "err") == (output.text("stdout"), output.text("stderr"))
    for fd in (stdout, stderr):
        os.close(fd)
    pipes.close()


def test_reading_does_not_block() -> None:
    """An empty pipe is read as nothing, and a closed one as the end."""
    pipes, output = OutputPipes(), CapturedOutput(100)
    write_ends = pipes.open()
    assert [True, True] == [pipes.read(fd, output) for fd in pipes]
    for fd in write_ends:
        os.close(fd)
    assert [False, False] == [pipes.read(fd, output) for fd in pipes]
    pipes.close()

    assert output.size == 0


def test_draining_takes_everything_that_is_there() -> None:
    """`drain` reads in several steps what one read does not return, and leaves an open pipe open."""
    pipes, output = OutputPipes(), CapturedOutput(10**6)
    stdout, stderr = pipes.open()
    half = READ_BYTES // 2
    for _ in range(2):
        os.write(stdout, b"o" * half)
    os.write(stderr, b"e")
    pipes.drain(output)
    os.write(stdout, b"later")
    pipes.drain(output)

    assert ("o" * 2 * half + "later", "e") == (output.text("stdout"), output.text("stderr"))
    for fd in (stdout, stderr):
        os.close(fd)
    pipes.close()


def test_draining_stops_at_the_limit() -> None:
    """A pipe that holds more than the limit is not read to its end."""
    pipes, output = OutputPipes(), CapturedOutput(10)
    stdout, stderr = pipes.open()
    os.write(stdout, b"x" * 20)
    pipes.drain(output)
    os.write(stderr, b"never read")
    pipes.drain(output)

    assert (10, True, "") == (output.size, output.truncated, output.text("stderr"))
    for fd in (stdout, stderr):
        os.close(fd)
    pipes.close()


def test_closed_pipes_are_gone() -> None:
    """`close_fd` removes one pipe, `close` all of them, and a second `close` does nothing."""
    pipes = OutputPipes()
    write_ends = pipes.open()
    first, second = pipes
    pipes.close_fd(first)
    assert [second] == list(pipes)
    assert first not in pipes
    pipes.close()
    pipes.close()

    assert [] == list(pipes)
    for fd in write_ends:
        os.close(fd)
