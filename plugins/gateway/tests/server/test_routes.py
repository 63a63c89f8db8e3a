"""Paths of the agents' port: models by name, and errors that show the right base URL."""

import json
import urllib.error
import urllib.request
from urllib.parse import quote

import pytest


def fetch(gateway, method, path, headers=()):
    """Send a request; return its status and its JSON."""
    values = {"Authorization": f"Bearer {gateway.key}", **dict(headers)}
    body = b"{}" if method == "POST" else None
    sent = urllib.request.Request(gateway.server.url() + path, body, values, method=method)
    try:
        with urllib.request.urlopen(sent, timeout=60) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


@pytest.mark.parametrize("root", ["", "/s/s-1"])
@pytest.mark.parametrize("name", ["tiny", "Qwen/Qwen3-8B", "ä b?"])
def test_the_model_by_its_name(gateway, root, name):
    """Clients that look the model up before they call it find that of the run, and no other."""
    gateway.directory._model = name
    listed = fetch(gateway, "GET", f"{root}/v1/models")[1]["data"]

    for path in {quote(name), quote(name, safe="")}:
        assert (200, listed[0]) == fetch(gateway, "GET", f"{root}/v1/models/{path}")
    status, body = fetch(gateway, "GET", f"{root}/v1/models/gpt-5")
    assert (404, "not_found") == (status, body["error"]["code"])
    assert "'gpt-5'" in body["error"]["message"]
    assert repr(name) in body["error"]["message"]
    assert 401 == fetch(gateway, "GET", f"{root}/v1/models/tiny", {"Authorization": "Bearer wrong"})[0]
    assert 404 == fetch(gateway, "POST", f"{root}/v1/models/tiny")[0]


@pytest.mark.parametrize("root", ["", "/s/s-1"])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/v1/chat/completions"),
        ("POST", "/chat/completions"),
        ("POST", "/v1/v1/messages"),
        ("POST", "/messages"),
        ("POST", "/responses"),
        ("GET", "/v1/chat/completions"),
        ("POST", "/v1/embeddings"),
        ("GET", "/v1/responses/resp_1"),
    ],
)
def test_a_wrong_path_is_shown_the_base_urls(gateway, root, method, path):
    """A base URL with `/v1` twice, or without it, is the most common mistake: the error says which one is right."""
    status, body = fetch(gateway, method, root + path)

    assert 404 == status
    message = body["error"]["message"]
    base = gateway.server.url() + root
    assert f"{method} {root}{path}:" in message
    assert f"{base}/v1 for clients of OpenAI's APIs" in message
    assert f"{base} for those of Anthropic's" in message


def test_a_long_path_is_cut(gateway):
    """An error repeats no text without end."""
    status, body = fetch(gateway, "GET", "/x" * 2000)

    assert 404 == status
    assert len(body["error"]["message"]) < 500


@pytest.mark.parametrize("text", ["9" * 5000, "-" + "9" * 5000])
@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
def test_a_long_integer_is_named(gateway, path, text):
    """The error says that the integer is too long, and gives no advice about Python."""
    body = b'{"model": "tiny", "seed": ' + text.encode() + b"}"
    headers = {"Authorization": f"Bearer {gateway.key}"}
    sent = urllib.request.Request(f"{gateway.url}/v1/{path}", body, headers)

    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(sent, timeout=60)

    message = json.loads(refused.value.read())["error"]["message"]
    assert (400, True) == (refused.value.code, "an integer has more than 4300 digits" in message)
    assert "sys." not in message
