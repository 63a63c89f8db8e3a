"""What becomes of requests when servers fail, and where they go when they do not."""

import asyncio
import logging
import ssl
from collections import Counter

import pytest

from turnwise.errors import EngineError, InfrastructureError
from turnwise.protocols import Resources
from turnwise.types import FinishReason
from turnwise_openai_engine import OpenAIConfig, OpenAIEngine
from turnwise_openai_engine.servers import Servers


async def failure_of(awaitable, kind=EngineError):
    with pytest.raises(kind) as caught:
        await awaitable
    assert "\n" not in str(caught.value)
    return str(caught.value)


async def becomes(condition):
    """Wait until something holds that nobody announces."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - see above
            await asyncio.sleep(0.005)


def one(request):
    async def scenario(engine):
        return await engine.generate(request)

    return scenario


@pytest.mark.parametrize("fault", [500, 502, 503, 429, "drop", "error"])
def test_a_request_is_sent_again(server, serve, ask, protocol, fault):
    """Whatever fails on the way, the answer is whole, from the start, and what a server that never fails gives."""
    undisturbed = serve(one(ask(seed=3)), server, protocol=protocol)
    server.faults = [fault, fault]

    result = serve(one(ask(seed=3)), server, protocol=protocol)

    assert undisturbed.token_ids.tolist() == result.token_ids.tolist()
    assert (16, FinishReason.LENGTH) == (len(result.logprobs), result.finish_reason)
    assert 1 + 3 == len(server.bodies)
    assert {} == server.running


def test_an_attempt_that_is_sent_again_has_the_id_that_it_had(server, serve, ask, protocol):
    """A server or proxy can tell that it is the same; what an attempt left behind was ended first."""
    server.faults = ["drop", 503]

    serve(one(ask()), server, protocol=protocol)

    key = "request_id" if protocol == "vllm" else "rid"
    assert 1 == len({body[key] for body in server.bodies})
    assert 3 == len(server.bodies)
    assert {headers["X-Request-Id"] for headers in server.headers} == {server.bodies[0][key]}


def test_a_stream_that_ends_in_the_middle_is_no_answer(server, serve, ask):
    """The connection is closed in good order, but the answer is not whole."""
    server.faults = ["end"]

    assert 16 == len(serve(one(ask()), server).token_ids)
    assert 2 == len(server.bodies)


def test_attempts_come_to_an_end(server, serve, ask, protocol):
    """Then it is the infrastructure's fault, and never the model's."""
    server.faults = [503] * 10

    async def scenario(engine):
        return await failure_of(engine.generate(ask()), InfrastructureError)

    text = serve(scenario, server, protocol=protocol, retries=2)

    assert text.startswith("request 'a' failed 3 times, at last: http://localhost:")
    assert text.endswith("answered 503: fault 503")


def test_a_slow_server_is_given_up(make_server, serve, ask, protocol):
    """After `read_timeout_s` without a word another one is asked."""
    servers = [make_server(), make_server()]
    for each in servers:
        each.faults = ["slow"]

    async def scenario(engine):
        return await engine.generate(ask()), engine.stats()["num_retries"]

    result, num_retries = serve(scenario, *servers, protocol=protocol, read_timeout_s=0.2)

    assert (16, 2) == (len(result.token_ids), num_retries)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (400, "answered 400: fault 400"),
        (404, "answered 404: fault 404"),
        (401, "answered 401: it wants a key; name its environment variable in api_key_env"),
        ("no ids", "the server returned no token ids: it may be too old, or another kind of server"),
    ],
)
def test_what_would_fail_again_is_not_sent_again(server, serve, ask, protocol, fault, message):
    """One line that says what the server did, at once, and the engine lives on."""
    server.faults = [fault]

    async def scenario(engine):
        text = await failure_of(engine.generate(ask()))
        return text, len((await engine.generate(ask())).token_ids)

    text, num_tokens = serve(scenario, server, protocol=protocol)

    assert text.endswith(message)
    assert (16, 2) == (num_tokens, len(server.bodies))


@pytest.mark.parametrize(
    ("protocol", "fault", "message"),
    [
        ("vllm", "no json", "the server's answer is no JSON: b'not json'"),
        ("vllm", "no logprobs", "the server returned 1 token ids and no log-probability for each of them"),
        ("sglang", "no json", "the server's answer is no JSON: b'<html>'"),
        ("sglang", "refused", "the server refused the request: too long"),
    ],
)
def test_bad_answers_say_so(server, serve, ask, protocol, fault, message):
    """Each in one line."""
    server.faults = [fault]

    async def scenario(engine):
        return await failure_of(engine.generate(ask()))

    assert message == serve(scenario, server, protocol=protocol)


def test_a_trajectory_stays_on_its_server(make_server, serve, ask, protocol):
    """Also its paths; others are spread."""
    servers = [make_server() for _ in range(3)]

    async def scenario(engine):
        async with asyncio.TaskGroup() as group:
            for i in range(30):
                name = f"t{i % 6}" + ("/path" if i % 2 else "")
                group.create_task(engine.generate(ask(str(i), [1 + i % 6, 2], name)))

    serve(scenario, *servers, protocol=protocol)

    key = "prompt" if protocol == "vllm" else "input_ids"
    seen = [Counter(body[key][0] for body in each.bodies) for each in servers]
    assert dict.fromkeys(range(1, 7), 5) == {k: v for counter in seen for k, v in counter.items()}
    assert [2, 2, 2] == [len(counter) for counter in seen]


def test_a_dead_server_is_left_and_found_again(make_server, serve, ask, protocol):
    """Its trajectories go on elsewhere; when it is well it is used again."""
    servers = [make_server(), make_server()]

    async def scenario(engine):
        await engine.generate(ask("0", trajectory_id="t0"))
        home = next(each for each in servers if each.bodies)
        home.healthy = False
        await becomes(lambda: engine.stats()["num_healthy"] == 1)
        await engine.generate(ask("1", trajectory_id="t0"))
        moved = [len(each.bodies) for each in servers]
        home.healthy = True
        await becomes(lambda: engine.stats()["num_healthy"] == 2)
        return moved, engine.stats()["num_retries"]

    assert ([1, 1], 0) == serve(scenario, *servers, protocol=protocol)


def test_a_server_that_goes_away_costs_nothing(make_server, serve, ask, protocol):
    """Requests in flight to it are answered by the other."""
    servers = [make_server(), make_server()]

    async def scenario(engine):
        async with asyncio.TaskGroup() as group:
            requests = [ask(str(i), trajectory_id=f"t{i}", max_tokens=100) for i in range(10)]
            tasks = [group.create_task(engine.generate(each)) for each in requests]
            await asyncio.sleep(0.05)
            await asyncio.to_thread(servers[0].stop)
        return [len(task.result().token_ids) for task in tasks]

    assert [100] * 10 == serve(scenario, *servers, protocol=protocol)


def test_no_server_at_all(serve, server):
    """The start says so, of each."""
    server.healthy = False

    with pytest.raises(EngineError, match=r"no server is well: .*/health answered 503: .*; http://localhost:1"):
        serve(None, server, urls=[server.url, "http://localhost:1"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "large"}, "does not serve 'large'; it has tiny"),
        ({"max_context": 512}, "max_context is 512, but http://localhost:.* serves 'tiny' with 256"),
        ({"api_key_env": "NO_SUCH_KEY"}, "the environment variable 'NO_SUCH_KEY', which api_key_env names, is not set"),
        ({"ca_file": "/no/such.pem"}, "cannot read the certificates in '/no/such.pem'"),
    ],
)
def test_starts_that_cannot_work(server, serve, options, message):
    """One line, before any request."""
    with pytest.raises(EngineError, match=message):
        serve(None, server, **options)


def test_several_models_need_a_name(server, serve, ask):
    """None is guessed."""
    server.models.append({"id": "other"})

    with pytest.raises(EngineError, match="serves several models: set model; it has other, tiny"):
        serve(None, server)
    serve(one(ask()), server, model="other")
    assert "other" == server.bodies[0]["model"]


def test_a_key_is_sent_and_never_told(server, serve, ask, monkeypatch, caplog, capsys, protocol):
    """Not in errors, logs, stats or the config; a wrong one is told from a server that is down."""
    server.key = "sesame-4711"
    monkeypatch.setenv("MY_KEY", "sesame-4711")
    caplog.set_level(logging.DEBUG)

    async def scenario(engine):
        num_tokens = len((await engine.generate(ask())).token_ids)
        server.key = "another-12"
        return num_tokens, await failure_of(engine.generate(ask())), repr(engine._config), str(engine.stats())

    num_tokens, *told = serve(scenario, server, protocol=protocol, api_key_env="MY_KEY")
    with pytest.raises(EngineError, match=r"no server is well: .*/health answered 401: it wants a key") as caught:
        serve(None, server, protocol=protocol, api_key_env="MY_KEY")

    assert (16, True) == (num_tokens, "answered 401: it wants a key" in told[0])
    assert "sesame-4711" not in " ".join([*told, str(caught.value), caplog.text, *capsys.readouterr()])


def test_certificates(make_server, serve, ask, certificate):
    """A certificate that nobody signed is refused, unless it is named, or none is checked."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.cert, certificate.key)
    secure = make_server(ssl_context=context)

    with pytest.raises(EngineError, match="failed: no certificate that is trusted"):
        serve(None, secure)
    assert 16 == len(serve(one(ask()), secure, ca_file=certificate.cert).token_ids)
    assert 16 == len(serve(one(ask()), secure, verify=False).token_ids)


def test_what_a_server_tells_besides(server, serve, ask, protocol):
    """Cached tokens from both, and weight versions from SGLang."""
    server.version = "7"

    result = serve(one(ask()), server, protocol=protocol)

    assert (4, 7 if protocol == "sglang" else 0) == (result.num_cached_tokens, result.weight_version)


def test_tokens_of_several_weights(server, serve, ask):
    """One version for each token."""
    server.version = "mixed"

    result = serve(one(ask()), server, protocol="sglang")

    assert [3] * 8 + [4] * 8 == result.weight_version.tolist()


def test_a_cancelled_request_ends_on_the_server(server, serve, ask, protocol):
    """Its slot there is free again."""

    async def scenario(engine):
        async with asyncio.TaskGroup() as group:
            task = group.create_task(engine.generate(ask(max_tokens=200)))
            await becomes(lambda: server.running)
            task.cancel()
        await becomes(lambda: not server.running)
        return task.cancelled()

    assert serve(scenario, server, protocol=protocol)


def test_what_belongs_to_others_is_refused(server, serve):
    """Weights and memory of the servers."""

    async def scenario(engine):
        calls = [engine.sleep(1), engine.wake_up(), engine.update_weights([], 3)]
        return [await failure_of(each) for each in calls]

    assert all(text.endswith("the servers belong to somebody else") for text in serve(scenario, server))


def test_starting_twice_is_refused(server, serve):
    """Nor is it started again after it was stopped."""

    async def scenario(engine):
        again = await failure_of(engine.start())
        await engine.stop()
        return again, await failure_of(engine.start())

    assert ("the openai engine has been started already", "the openai engine was stopped") == serve(scenario, server)


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        ([], "'urls' must name one server at least"),
        ("localhost:8000", "'urls' must be such as http://host:8000"),
        (["http://a:1", "http://a:1/"], "'urls' must name each server once"),
        ("http://me:secret@a:1", "'urls' must hold no password"),
    ],
)
def test_bad_urls_are_refused(urls, message):
    """Before anything is looked up."""
    with pytest.raises(ValueError, match=message):
        OpenAIConfig(urls=urls)


def test_a_server_without_a_context_limit_is_not_asked_for_one(server, serve, ask):
    """The capability says that it is not known."""
    assert OpenAIEngine(OpenAIConfig(urls=server.url), Resources()).capabilities.max_context is None
    assert 300 == len(serve(one(ask(max_tokens=300)), server, max_context=None).token_ids)


def test_the_least_busy_server_is_chosen():
    """By context tokens, and of those that have not just failed."""
    servers = Servers.of(["http://a", "http://b", "http://c"])
    a, b, c = servers.all
    a.num_tokens, b.num_tokens, c.healthy = 5, 3, False

    assert b is servers.choose("x")
    b.num_tokens = 9
    assert b is servers.choose("x/1")
    assert a is servers.choose("y")
    assert a is servers.choose("x", avoid=[b])
    assert a is servers.choose("x", avoid=[a, b])
    a.healthy = b.healthy = False
    assert c is servers.choose("z", avoid=[a, b])
