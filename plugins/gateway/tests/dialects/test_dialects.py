"""The table of dialects."""

from typing import get_args

import pytest

from turnwise_gateway.calls import CallRefusedError, Finish
from turnwise_gateway.dialects import DIALECTS, find_dialect, keep_headers
from turnwise_gateway.server.routes import find_route, guess_dialect


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda each: each.name)
def test_a_dialect_is_complete(dialect):
    """It is found by its name and by its path, has a word for every end of a turn, and describes errors."""
    error = dialect.describe_error(CallRefusedError("invalid", "it is wrong"))

    assert dialect is find_dialect(dialect.name)
    route = find_route("POST", f"/s/s-1/{dialect.path}", "http://127.0.0.1:1")
    assert ("call", dialect, "s-1") == (route.action, route.dialect, route.session_id)
    assert set(get_args(Finish)) == dialect.finishes.keys()
    assert "it is wrong" == error["error"]["message"]


def test_no_two_dialects_share_a_name_or_a_path():
    """Otherwise one of them would be out of reach."""
    paths = [path for each in DIALECTS for path in (each.path, *each.questions)]

    assert len(DIALECTS) == len({each.name for each in DIALECTS})
    assert len(paths) == len(set(paths))


@pytest.mark.parametrize(
    ("path", "headers", "name"),
    [
        ("/v1/chat/completions", {}, "chat"),
        ("/v1/messages/batches", {}, "messages"),
        ("/messages", {}, "messages"),
        ("/responses", {}, "responses"),
        ("/v1/responses", {"anthropic-version": "2023-06-01"}, "messages"),
        ("/", {}, "chat"),
    ],
)
def test_an_error_without_a_route_has_the_clients_words(path, headers, name):
    """A header of a vendor decides, then the path, and then the first dialect."""
    assert name == guess_dialect(path, headers).name


@pytest.mark.parametrize(
    "name", ["Authorization", "Proxy-Authorization", "Cookie", "X-Api-Key", "api-key", "X-Goog-Api-Key", "X-Auth-Token"]
)
def test_headers_with_keys_are_dropped(name: str) -> None:
    """Files of requests have the other headers, such as those that name a sub-agent or the request."""
    kept = {"idempotency-key": "a", "x-claude-code-agent-id": "b", "x-stainless-retry-count": "1"}

    assert kept == keep_headers({**kept, name: "secret"})
