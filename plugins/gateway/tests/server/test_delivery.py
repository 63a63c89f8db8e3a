"""A turn counts when the client has it; half a reply never passes for a whole one."""

import asyncio
import http.client
import json
import socket
import struct

import pytest

MESSAGES = [{"role": "user", "content": "Hi."}]
PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
HEARTBEATS = {"chat": b": ping\n\n", "messages": b"event: ping\n", "responses": b"event: response.in_progress\n"}


def body_of(dialect, stream):
    body = {"model": "tiny", "stream": stream, "max_tokens": 9}
    return body | ({"input": MESSAGES} if dialect == "responses" else {"messages": MESSAGES})


def headers_of(gateway):
    return {"Authorization": f"Bearer {gateway.key}"}


def post(gateway, dialect, stream=True, headers=None):
    """Send a call and return its connection, before the response."""
    connection = http.client.HTTPConnection("127.0.0.1", gateway.server.port, timeout=600)
    headers = {**headers_of(gateway), **(headers or {})}
    connection.request("POST", f"/s/s-1{PATHS[dialect]}", json.dumps(body_of(dialect, stream)), headers)
    return connection


@pytest.fixture
def open_stream():
    """Opens streams over raw sockets, and closes them after the test."""
    opened = []

    def start(gateway, dialect):
        opened.append(post(gateway, dialect))
        return opened[-1].sock

    yield start
    for each in opened:
        each.close()


def read_until(stream, text, count=1):
    """Read raw bytes until a text has come some times."""
    found = b""
    while found.count(text) < count:
        part = stream.recv(65536)
        assert part, found
        found += part
    return found


def is_whole(found, stream):
    """Return whether raw bytes are a whole response."""
    return b"Hello." in found and found.endswith(b"\r\n0\r\n\r\n" if stream else b"}")


def read_to_end(stream):
    """Read raw bytes until the server closes the connection."""
    found = b""
    while part := stream.recv(65536):
        found += part
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", PATHS)
def test_read_replies_are_confirmed(gateway, dialect, stream):
    """An answer that the client has read is confirmed, once."""
    connection = post(gateway, dialect, stream)
    assert b"Hello." in connection.getresponse().read()
    connection.close()

    assert "confirmed" == gateway.backend.outcome()
    assert gateway.backend.outcomes.empty()


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", PATHS)
def test_clients_that_leave_after_the_last_byte_have_the_reply(gateway, busy_server, dialect, stream, closes):
    """A client that reads all and leaves has the turn, also if the server is late to notice it."""
    connection = post(gateway, dialect, stream, {"Connection": "close"} if closes else {})
    found = b""
    while not is_whole(found, stream):
        found += connection.sock.recv(65536)
    connection.close()

    assert "confirmed" == gateway.backend.outcome()
    assert gateway.backend.outcomes.empty()


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", PATHS)
def test_a_response_that_was_not_read_is_lost(gateway, request, dialect, stream, busy):
    """All bytes have left, and the client ends without reading them: the turn counts, and a repetition gets it."""
    if busy:
        request.getfixturevalue("busy_server")
    connection = post(gateway, dialect, stream)
    while not is_whole(connection.sock.recv(65536, socket.MSG_PEEK), stream):
        pass
    connection.close()

    assert ["confirmed", "lost"] == [gateway.backend.outcome() for _ in range(2)]


def test_a_connection_that_goes_on_has_lost_nothing(gateway):
    """A client that sends its next request has read the response before, also if the connection breaks then."""
    connection = post(gateway, "chat", stream=False)
    assert b"Hello." in connection.getresponse().read()
    assert "confirmed" == gateway.backend.outcome()
    gateway.hold()
    connection.request("POST", f"/s/s-1{PATHS['chat']}", json.dumps(body_of("chat", False)), headers_of(gateway))
    assert gateway.backend.arrived.wait(10)
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # breaks it
    connection.close()

    assert "cancelled" == gateway.backend.outcome()
    assert gateway.backend.outcomes.empty()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", PATHS)
def test_client_that_leaves_cancels_its_call(gateway, dialect, stream):
    """When the client has gone, the session's call is cancelled, and no answer is confirmed."""
    gateway.hold()
    connection = post(gateway, dialect, stream)
    assert gateway.backend.arrived.wait(60)
    connection.close()

    assert "cancelled" == gateway.backend.outcome()
    gateway.let_go()
    assert gateway.backend.outcomes.empty()


def test_unread_reply_is_released(serve, make_reply):
    """A client that leaves in the middle of a long reply has no turn: the answer is released."""
    gateway = serve()
    gateway.backend.script = lambda _call: make_reply(content="x" * 30_000_000)
    connection = post(gateway, "chat")
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    assert connection.sock.recv(100).startswith(b"HTTP/1.1 200")
    assert gateway.backend.outcomes.empty()
    connection.close()

    assert "released" == gateway.backend.outcome()
    assert gateway.backend.outcomes.empty()


def test_client_that_does_not_read_is_left(serve, make_reply):
    """A client that takes no bytes loses its connection at the deadline, and the answer is released."""
    gateway = serve(send_s=0.1)
    gateway.backend.script = lambda _call: make_reply(content="x" * 30_000_000)
    connection = post(gateway, "chat")

    assert "released" == gateway.backend.outcome()
    connection.close()


def test_stopped_server_cancels_its_calls(gateway):
    """A server that stops leaves no call behind."""
    gateway.hold()
    connection = post(gateway, "chat", stream=False)
    assert gateway.backend.arrived.wait(60)
    gateway.stop()

    assert "cancelled" == gateway.backend.outcome()
    connection.close()


@pytest.mark.parametrize("dialect", PATHS)
def test_heartbeats(serve, open_stream, dialect):
    """A stream that waits has the heartbeats of its dialect, and then the whole reply."""
    gateway = serve(heartbeat_s=0.02)
    gateway.hold()
    stream = open_stream(gateway, dialect)
    assert b"Hello." not in read_until(stream, HEARTBEATS[dialect], 3)
    gateway.let_go()

    assert b"Hello." in read_until(stream, b"\r\n0\r\n\r\n")
    assert "confirmed" == gateway.backend.outcome()


def test_client_that_leaves_between_heartbeats_cancels_its_call(serve, open_stream):
    """A stream that was opened by heartbeats ends with its client as well."""
    gateway = serve(heartbeat_s=0.02)
    gateway.hold()
    stream = open_stream(gateway, "chat")
    read_until(stream, HEARTBEATS["chat"])
    stream.close()

    assert "cancelled" == gateway.backend.outcome()


@pytest.mark.parametrize("kind", ["engine", "budget_exhausted", "bug", "cancelled"])
@pytest.mark.parametrize("dialect", PATHS)
def test_failed_stream_has_no_clean_end(serve, refused, open_stream, dialect, kind):
    """A failure after the first byte is an error event, and the connection breaks without the last chunk."""
    gateway = serve(heartbeat_s=0.02)
    gateway.hold()
    errors = {"bug": RuntimeError("secret"), "cancelled": asyncio.CancelledError()}
    gateway.backend.script = lambda _call: errors.get(kind) or refused(kind, "It is over.")
    stream = open_stream(gateway, dialect)
    read_until(stream, HEARTBEATS[dialect])
    gateway.let_go()

    text = read_to_end(stream).decode()
    assert '"error":{' in text
    assert "secret" not in text
    assert not any(end in text for end in ("[DONE]", "message_stop", "response.completed", "\r\n0\r\n"))


@pytest.mark.parametrize("dialect", PATHS)
def test_parts_come_before_the_end(serve, make_reply, open_stream, dialect):
    """A client reads the start of a reply while the rest is sampled, and then the rest."""
    gateway = serve()
    gateway.hold()
    gateway.backend.parts = lambda _call: [make_reply(content="Hel")]
    stream = open_stream(gateway, dialect)
    assert b'"Hel"' in read_until(stream, b'"Hel"')
    gateway.let_go()

    assert b'"lo."' in read_until(stream, b"\r\n0\r\n\r\n")
    assert "confirmed" == gateway.backend.outcome()


@pytest.mark.parametrize("dialect", PATHS)
def test_client_that_leaves_after_a_part_cancels_its_call(serve, make_reply, open_stream, dialect):
    """A part is no delivery."""
    gateway = serve()
    gateway.hold()
    gateway.backend.parts = lambda _call: [make_reply(content="Hel")]
    stream = open_stream(gateway, dialect)
    read_until(stream, b'"Hel"')
    stream.close()

    assert "cancelled" == gateway.backend.outcome()


@pytest.mark.many_cases(3)
@pytest.mark.parametrize("dialect", PATHS)
@pytest.mark.parametrize("parts", [("Help",), ("Hel", "He"), ("Hello.", "Hello. It")])
def test_reply_that_does_not_begin_with_its_parts_has_no_clean_end(serve, make_reply, open_stream, dialect, parts):
    """The stream breaks, and the answer waits for a retry."""
    gateway = serve(delta_s=0)
    gateway.backend.parts = lambda _call: [make_reply(content=text) for text in parts]
    text = read_to_end(open_stream(gateway, dialect)).decode()

    assert '"error":{' in text
    assert not any(end in text for end in ("[DONE]", "message_stop", "response.completed", "\r\n0\r\n"))
    assert "released" == gateway.backend.outcome()


def test_part_that_cannot_be_read_is_left_out(serve, make_reply, open_stream):
    """The reply comes when it is whole."""
    gateway = serve()

    def fail():
        raise RuntimeError("no text")

    def parts(call):
        call.partial_reply.read = fail
        call.partial_reply.changed.set()
        return ()

    gateway.backend.parts, gateway.backend.delay_s = parts, 0.1

    assert b"Hello." in read_until(open_stream(gateway, "chat"), b"\r\n0\r\n\r\n")
    assert "confirmed" == gateway.backend.outcome()


@pytest.mark.parametrize("dialect", PATHS)
def test_heartbeats_while_text_is_held_back(serve, open_stream, dialect):
    """A reply that grows and shows nothing has heartbeats, too."""
    gateway = serve(heartbeat_s=0.02, delta_s=0.001)
    gateway.hold()
    gateway.backend.parts = lambda _call: [None] * 200
    stream = open_stream(gateway, dialect)
    assert b"Hello." not in read_until(stream, HEARTBEATS[dialect], 3)
    gateway.let_go()

    assert b"Hello." in read_until(stream, b"\r\n0\r\n\r\n")


def read_chat(client):
    with client.chat.completions.stream(model="tiny", messages=MESSAGES) as stream:
        return stream.get_final_completion()


def read_responses(client):
    with client.responses.stream(model="tiny", input=MESSAGES) as stream:
        return stream.get_final_response()


def read_messages(client):
    with client.messages.stream(model="tiny", max_tokens=9, messages=MESSAGES) as stream:
        return stream.get_final_message()


@pytest.mark.parametrize("read", [read_chat, read_responses, read_messages])
def test_clients_take_no_half_reply(serve, refused, read):
    """The vendors' libraries raise an error for a stream that failed, and do not call again."""
    import anthropic
    import openai

    gateway = serve(heartbeat_s=0.02)
    gateway.backend.delay_s = 0.2
    gateway.backend.script = lambda _call: refused("engine", "The engine failed.")
    with (
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.key) as openai_client,
        anthropic.Anthropic(base_url=gateway.url, api_key=gateway.key) as anthropic_client,
    ):
        client = anthropic_client if read is read_messages else openai_client
        with pytest.raises((openai.APIError, anthropic.APIError)):
            read(client)

    assert 1 == len(gateway.backend.calls)
