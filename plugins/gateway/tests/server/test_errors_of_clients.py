"""Each refusal ends the vendors' libraries at their first call, with an error that they understand."""

import pytest

MESSAGES = [{"role": "user", "content": "Hi."}]
KINDS = ("session_closed", "budget_exhausted", "context_length_exceeded", "unsupported", "invalid")


@pytest.fixture
def call(gateway):
    """Calls the gateway in a dialect with the vendor's library and its own retries."""
    import anthropic
    import openai

    with (
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.key) as of_openai,
        anthropic.Anthropic(base_url=gateway.url, api_key=gateway.key) as of_anthropic,
    ):

        def run(dialect, stream):
            if dialect == "chat":
                return of_openai.chat.completions.create(model="tiny", messages=MESSAGES, stream=stream)
            if dialect == "responses":
                return of_openai.responses.create(model="tiny", input=MESSAGES, stream=stream)
            return of_anthropic.messages.create(model="tiny", messages=MESSAGES, max_tokens=9, stream=stream)

        yield run


@pytest.mark.many_cases
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", ["chat", "messages", "responses"])
@pytest.mark.parametrize("kind", KINDS)
def test_refusals_end_clients(gateway, refused, call, dialect, stream, kind):
    """A refused call raises the error of a bad request, and the client makes no other."""
    import anthropic
    import openai

    gateway.backend.script = lambda _call: refused(kind, "No.", param="stop", num_tokens=5000, max_tokens=4096)

    with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)) as failure:
        call(dialect, stream)

    assert 1 == len(gateway.backend.calls)
    assert "false" == failure.value.response.headers["x-should-retry"]
    if dialect == "messages" and kind == "context_length_exceeded":
        assert "prompt is too long: 5000 tokens > 4096 maximum" == failure.value.body["error"]["message"]
    elif dialect == "messages":
        assert failure.value.body["error"]["type"] == "invalid_request_error"
    else:
        codes = {"unsupported": "unsupported_parameter", "invalid": "invalid_value"}
        assert codes.get(kind, kind) == failure.value.code
        assert "stop" == failure.value.param


@pytest.mark.parametrize("dialect", ["chat", "messages", "responses"])
def test_engine_failure_is_tried_again(gateway, refused, make_reply, call, dialect):
    """A failed engine is a 500, after which the client's own retry gets the reply."""
    results = [refused("engine", "The engine failed."), make_reply()]
    gateway.backend.script = lambda _call: results.pop(0)

    call(dialect, False)

    first, second = gateway.backend.calls
    assert first.digest == second.digest
    assert ["0", "1"] == [each.headers["x-stainless-retry-count"] for each in (first, second)]


@pytest.mark.parametrize(("asked", "told"), [(0, "1"), (7, "7"), (999, "120")])
def test_overload_says_when_to_come_back(gateway, refused, asked, told):
    """Overload is a 429 with a wait that clients respect: none waits longer than 120 seconds."""
    import openai

    gateway.backend.script = lambda _call: refused("overloaded", "Wait.", retry_after_s=asked)

    with (
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.key, max_retries=0) as client,
        pytest.raises(openai.RateLimitError) as failure,
    ):
        client.chat.completions.create(model="tiny", messages=MESSAGES)

    assert told == failure.value.response.headers["retry-after"]
    assert "x-should-retry" not in failure.value.response.headers


def test_calls_above_the_bound_are_overload(serve):
    """With as many calls in flight as allowed, the next one gets 429, and one after them is served."""
    import openai

    gateway = serve(max_in_flight=1, retry_after_s=3, heartbeat_s=0.02)
    gateway.hold()
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.key, max_retries=0) as client:
        first = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        assert gateway.backend.arrived.wait(60)
        with pytest.raises(openai.RateLimitError) as failure:
            client.chat.completions.create(model="tiny", messages=MESSAGES)
        gateway.let_go()
        assert "Hello." == "".join(each.choices[0].delta.content or "" for each in first)
        assert "confirmed" == gateway.backend.outcome()
        assert "Hello." == client.chat.completions.create(model="tiny", messages=MESSAGES).choices[0].message.content

    assert "3" == failure.value.response.headers["retry-after"]


def test_count_tokens(gateway):
    """The number of tokens of a prompt needs no `max_tokens`."""
    import anthropic

    with anthropic.Anthropic(base_url=gateway.url, api_key=gateway.key) as client:
        count = client.messages.count_tokens(model="tiny", messages=MESSAGES)

    assert 42 == count.input_tokens
    assert gateway.backend.calls[0].max_tokens is None
