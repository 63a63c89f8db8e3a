"""
The conformance suite of gateways: servers that answer unmodified agents in three dialects.

It needs nothing but a base URL and a key, so any gateway can run it.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import pytest

DIALECTS: Final = ("chat", "messages", "responses")
_PATHS: Final = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
_LAST_EVENTS: Final = {
    "chat": "data: [DONE]\n\n",
    "messages": 'event: message_stop\ndata: {"type":"message_stop"}\n\n',
    "responses": "event: response.completed\n",
}


class GatewayEndpoint(NamedTuple):
    """A gateway with a session whose model answers every call with one text and no tool call."""

    url: str
    """Without `/v1`; it may have a path."""
    key: str


class GatewayResponse(NamedTuple):
    """A response to a request of the suite."""

    status: int
    headers: Mapping[str, str]
    text: str


def send_request(
    endpoint: GatewayEndpoint, method: str, path: str, body: bytes | None = None, key: str | None = None
) -> GatewayResponse:
    """Send one request to a gateway over a new connection; `key` replaces the endpoint's key."""
    parts = urlsplit(endpoint.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    try:
        headers = {"Authorization": f"Bearer {endpoint.key if key is None else key}"}
        connection.request(method, parts.path + path, body, headers | {"Content-Type": "application/json"})
        response = connection.getresponse()
        names = {name.lower(): value for name, value in response.getheaders()}
        return GatewayResponse(response.status, names, response.read().decode("utf-8"))
    finally:
        connection.close()


def write_call(dialect: str, **changes: object) -> bytes:
    """Return the body of a call with one message of the user, with some fields changed."""
    message = [{"role": "user", "content": "Hi."}]
    body: dict[str, object] = {"model": "tiny"}
    body |= {"input": message} if dialect == "responses" else {"messages": message}
    body |= {"max_tokens": 64} if dialect == "messages" else {}
    return json.dumps(body | changes).encode("utf-8")


def write_second_call(dialect: str, reply: str) -> bytes:
    """Return the body of a call that sends back a plain response and asks once more, with the fields of clients."""
    body = json.loads(reply)
    question = {"role": "user", "content": "And now?"}
    first = {"role": "user", "content": "Hi."}
    if dialect == "chat":
        # Clients send back the message with further keys of their libraries.
        turn = body["choices"][0]["message"] | {"parsed": None, "index": 0}
        return write_call(dialect, messages=[first, turn, question])
    if dialect == "messages":
        blocks = [block | {"cache_control": {"type": "ephemeral"}} for block in body["content"]]
        return write_call(dialect, messages=[first, {"role": "assistant", "content": blocks}, question])
    return write_call(dialect, input=[first, *body["output"], question])


def read_text(dialect: str, body: str) -> str:
    """Return the text of a plain response."""
    reply = json.loads(body)
    if dialect == "chat":
        return str(reply["choices"][0]["message"]["content"])
    if dialect == "messages":
        return "".join(block["text"] for block in reply["content"] if block["type"] == "text")
    parts = [part for item in reply["output"] if item["type"] == "message" for part in item["content"]]
    return "".join(part["text"] for part in parts)


def read_streamed_text(dialect: str, body: str) -> str:
    """Return the text in the deltas of a stream."""
    lines = [line.removeprefix("data: ") for line in body.split("\n") if line.startswith("data: {")]
    events = [json.loads(line) for line in lines]
    if dialect == "chat":
        deltas = [choice["delta"] for event in events for choice in event["choices"]]
        return "".join(delta.get("content") or "" for delta in deltas)
    if dialect == "messages":
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        return "".join(delta.get("text", "") for delta in deltas)
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")


class GatewaySuite:
    """
    The conformance suite of gateways. A gateway's whole file::

        class TestAcme(GatewaySuite):
            @pytest.fixture
            def endpoint(self):
                with start_acme() as acme:
                    yield GatewayEndpoint(acme.url, acme.key)

    Must be overridden: the fixture `endpoint`.
    """

    @pytest.fixture
    def endpoint(self) -> GatewayEndpoint:
        """A running gateway; must be overridden."""
        raise NotImplementedError("override the fixture 'endpoint' with the URL and key of a running gateway")

    @pytest.mark.parametrize("dialect", DIALECTS)
    def test_stream_has_the_text_of_the_plain_reply(self, endpoint: GatewayEndpoint, dialect: str) -> None:
        """A streamed reply has the text of the plain one, and ends with the last event of its dialect."""
        plain = send_request(endpoint, "POST", _PATHS[dialect], write_call(dialect))
        streamed = send_request(endpoint, "POST", _PATHS[dialect], write_call(dialect, stream=True))

        assert (200, 200) == (plain.status, streamed.status), plain.text
        assert "application/json" in plain.headers["content-type"]
        assert "text/event-stream" in streamed.headers["content-type"]
        assert read_text(dialect, plain.text) == read_streamed_text(dialect, streamed.text) != ""
        last = streamed.text[streamed.text.rstrip("\n").rfind("\n\n") + 2 :]
        assert last.startswith(_LAST_EVENTS[dialect])

    @pytest.mark.parametrize("dialect", DIALECTS)
    def test_echo_is_accepted(self, endpoint: GatewayEndpoint, dialect: str) -> None:
        """A reply may be sent back as clients do, with all its fields and further ones."""
        first = send_request(endpoint, "POST", _PATHS[dialect], write_call(dialect))
        second = send_request(endpoint, "POST", _PATHS[dialect], write_second_call(dialect, first.text))

        assert 200 == second.status, second.text
        assert "" != read_text(dialect, second.text)

    @pytest.mark.parametrize("dialect", DIALECTS)
    @pytest.mark.parametrize("key", ["", "wrong", "k\xe9y"])
    def test_wrong_keys_are_refused(self, endpoint: GatewayEndpoint, dialect: str, key: str) -> None:
        """A wrong key, also one that is not ASCII, ends with 401 and an error in the dialect."""
        response = send_request(endpoint, "POST", _PATHS[dialect], write_call(dialect), key=key)

        assert 401 == response.status
        error = json.loads(response.text)
        assert "authentication_error" == error["error"]["type"]
        assert ("error" if dialect == "messages" else None) == error.get("type")

    @pytest.mark.parametrize("dialect", DIALECTS)
    @pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"a":NaN}', b'{"a":1,"a":1}', b'{"a":"\\ud800"}', b'"\xff"'])
    def test_json_is_strict(self, endpoint: GatewayEndpoint, dialect: str, body: bytes) -> None:
        """A body that is no strict JSON object is refused with 400, which ends a client's attempts."""
        response = send_request(endpoint, "POST", _PATHS[dialect], body)

        assert 400 == response.status
        assert "invalid_request_error" == json.loads(response.text)["error"]["type"]

    @pytest.mark.parametrize("dialect", DIALECTS)
    @pytest.mark.parametrize(
        ("name", "value"),
        [("n", 2), ("frequency_penalty", 0.5), ("logit_bias", {"1": 5}), ("tool_choice", {"type": "x"})],
    )
    def test_unsupported_fields_are_named(
        self, endpoint: GatewayEndpoint, dialect: str, name: str, value: object
    ) -> None:
        """A field that would change the sampled tokens is refused with 400 and its name."""
        response = send_request(endpoint, "POST", _PATHS[dialect], write_call(dialect, **{name: value}))

        assert 400 == response.status
        assert name in json.loads(response.text)["error"]["message"]

    def test_base_url_answers(self, endpoint: GatewayEndpoint) -> None:
        """Clients may ask for the base URL before their first call."""
        assert [200, 200] == [send_request(endpoint, method, "").status for method in ("GET", "HEAD")]

    def test_other_routes_do_not_exist(self, endpoint: GatewayEndpoint) -> None:
        """Every other route, and another method of a route, is not found."""
        requests = [("POST", "/v1/completions"), ("GET", "/v1/messages"), ("GET", "/sessions"), ("POST", "/v1/models")]

        assert [404] * len(requests) == [send_request(endpoint, *request).status for request in requests]

    def test_model_is_listed(self, endpoint: GatewayEndpoint) -> None:
        """The list of models has one entry."""
        assert 1 == len(json.loads(send_request(endpoint, "GET", "/v1/models").text)["data"])
