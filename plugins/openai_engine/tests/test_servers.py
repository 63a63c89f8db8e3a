"""Retries after server failures, routing, errors and keys."""

import asyncio
import gc
import logging
import ssl
from collections import Counter

import pytest
from attrs import evolve

from turnwise.errors import ConfigError, EngineError, InfrastructureError
from turnwise.protocols import ModelSpec, Resources
from turnwise.types import FinishReason
from turnwise_openai_engine.config import OpenAIConfig
from turnwise_openai_engine.engine import OpenAIEngine
from turnwise_openai_engine.servers import Servers
from turnwise_testing.engines.scenarios import abort_when_heard, failure_of


async def error_text(awaitable, kind=EngineError):
    return str(await failure_of(awaitable, kind))


async def wait_until(condition):
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - neither engine nor server has an event for it
            await asyncio.sleep(0.005)


def one(request):
    async def scenario(engine):
        return await engine.generate(request)

    return scenario


def test_a_listener_hears_ids_before_the_end(server, serve, ask):
    """The first ids are heard while the others are sampled, and the result begins with them."""
    heard, result = serve(lambda engine: abort_when_heard(engine, ask(max_tokens=200)), server, protocol="vllm")

    assert FinishReason.ABORT == result.finish_reason
    assert heard
    assert heard == result.token_ids.tolist()[: len(heard)]


@pytest.mark.many_cases
@pytest.mark.parametrize("fault", [500, 502, 503, 429, "drop", "error"])
def test_a_failed_request_is_retried(server, serve, ask, protocol, fault):
    """After any server failure the result is the same as from a server that never fails."""
    undisturbed = serve(one(ask(seed=3)), server, protocol=protocol)
    server.faults = [fault, fault]

    async def scenario(engine):
        result = await engine.generate(ask(seed=3))
        await wait_until(lambda: not server.running)  # a handler ends after its last byte is read
        return result

    result = serve(scenario, server, protocol=protocol)

    assert undisturbed.token_ids.tolist() == result.token_ids.tolist()
    assert (16, FinishReason.LENGTH) == (len(result.logprobs), result.finish_reason)
    assert 1 + 3 == len(server.bodies)


def test_a_retry_is_not_heard(server, serve, ask):
    """A retry may sample other ids, so a listener hears the first attempt alone."""
    heard = []
    server.faults = ["end"]  # after two ids

    result = serve(one(evolve(ask(seed=3), on_tokens=heard.extend)), server, protocol="vllm")

    assert 16 == len(result.token_ids)
    assert heard == result.token_ids.tolist()[:2]


def test_a_retry_has_the_same_id(server, serve, ask, protocol):
    """Servers and proxies can recognise a retry; the failed attempt was ended first."""
    server.faults = ["drop", 503]

    serve(one(ask()), server, protocol=protocol)

    key = "request_id" if protocol == "vllm" else "rid"
    assert 1 == len({body[key] for body in server.bodies})
    assert 3 == len(server.bodies)
    assert {headers["X-Request-Id"] for headers in server.headers} == {server.bodies[0][key]}


def test_an_incomplete_stream_is_retried(server, serve, ask):
    """The connection is closed properly, but the response is incomplete."""
    server.faults = ["end"]

    assert 16 == len(serve(one(ask()), server).token_ids)
    assert 2 == len(server.bodies)


def test_retries_are_limited(server, serve, ask, protocol):
    """After the last one the error is an `InfrastructureError`."""
    server.faults = [503] * 10

    async def scenario(engine):
        return await error_text(engine.generate(ask()), InfrastructureError)

    text = serve(scenario, server, protocol=protocol, retries=2)

    assert text.startswith("request 'a' failed 3 times; last error: http://localhost:")
    assert text.endswith("returned status 503: fault 503")


def test_a_slow_server_is_a_failure(make_server, serve, ask, protocol):
    """After `read_timeout_s` without data another server is tried."""
    servers = [make_server(), make_server()]
    for each in servers:
        each.faults = ["slow"]

    async def scenario(engine):
        return await engine.generate(ask()), engine.stats()["num_retries"]

    result, num_retries = serve(scenario, *servers, protocol=protocol, read_timeout_s=0.2, retries=50)

    assert 16 == len(result.token_ids)
    assert num_retries >= 2  # a busy machine may make a healthy server slow too


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (400, "returned status 400: fault 400"),
        (404, "returned status 404: fault 404"),
        (401, "returned status 401: it needs a key; set api_key_env to the environment variable with the key"),
        ("no ids", "the server returned no token ids: it may be too old, or not a vLLM or SGLang server"),
    ],
)
def test_permanent_errors_are_not_retried(server, serve, ask, protocol, fault, message):
    """The error is raised at once, in one line."""
    server.faults = [fault]

    async def scenario(engine):
        text = await error_text(engine.generate(ask()))
        return text, len((await engine.generate(ask())).token_ids)

    text, num_tokens = serve(scenario, server, protocol=protocol)

    assert text.endswith(message)
    assert (16, 2) == (num_tokens, len(server.bodies))


@pytest.mark.parametrize(
    ("protocol", "fault", "message"),
    [
        ("vllm", "no json", "the server's response is not JSON: b'not json'"),
        ("vllm", "no logprobs", "the server returned 1 token ids, but not one log-probability for each"),
        ("sglang", "no json", "the server's response is not JSON: b'<html>'"),
        ("sglang", "refused", "the server refused the request: too long"),
    ],
)
def test_unusable_responses(server, serve, ask, protocol, fault, message):
    """Each has a one-line error."""
    server.faults = [fault]

    async def scenario(engine):
        return await error_text(engine.generate(ask()))

    assert message == serve(scenario, server, protocol=protocol)


def test_a_trajectory_stays_on_its_server(make_server, serve, ask, protocol):
    """Its paths stay there too; other trajectories are spread over the servers."""
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


def test_an_unhealthy_server_is_avoided_until_it_recovers(make_server, serve, ask, protocol):
    """Its trajectories continue on another server meanwhile."""
    servers = [make_server(), make_server()]

    async def scenario(engine):
        await engine.generate(ask("0", trajectory_id="t0"))
        first = next(each for each in servers if each.bodies)
        first.healthy = False
        await wait_until(lambda: engine.stats()["num_healthy"] == 1)
        await engine.generate(ask("1", trajectory_id="t0"))
        moved = [len(each.bodies) for each in servers]
        first.healthy = True
        await wait_until(lambda: engine.stats()["num_healthy"] == 2)
        return moved, engine.stats()["num_retries"]

    assert ([1, 1], 0) == serve(scenario, *servers, protocol=protocol)


def test_a_stopped_server_loses_no_request(make_server, serve, ask, protocol):
    """Requests in flight to it are retried on the other."""
    servers = [make_server(), make_server()]

    async def scenario(engine):
        async with asyncio.TaskGroup() as group:
            requests = [ask(str(i), trajectory_id=f"t{i}", max_tokens=100) for i in range(10)]
            tasks = [group.create_task(engine.generate(each)) for each in requests]
            await asyncio.sleep(0.05)
            await asyncio.to_thread(servers[0].stop)
        return [len(task.result().token_ids) for task in tasks]

    assert [100] * 10 == serve(scenario, *servers, protocol=protocol)


def test_no_healthy_server(serve, server):
    """The start fails with the problem of each server."""
    server.healthy = False

    with pytest.raises(
        EngineError, match=r"no server is healthy: .*/health returned status 503: .*; http://localhost:1"
    ):
        serve(None, server, urls=[server.url, "http://localhost:1"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "large"}, "does not serve 'large'; it has tiny"),
        ({"max_context": 512}, "max_context is 512, but http://localhost:.* serves 'tiny' with 256"),
        ({"api_key_env": "NO_SUCH_KEY"}, "the environment variable 'NO_SUCH_KEY', named by api_key_env, is not set"),
        ({"ca_file": "/no/such.pem"}, "cannot read the certificates in '/no/such.pem'"),
    ],
)
def test_failing_starts(server, serve, options, message):
    """The error comes before any request."""
    with pytest.raises(ConfigError, match=message):
        serve(None, server, **options)


def test_several_models_need_a_name(server, serve, ask):
    """The engine does not guess one."""
    server.models.append({"id": "other"})

    with pytest.raises(ConfigError, match="serves several models: set model; it has other, tiny"):
        serve(None, server)
    serve(one(ask()), server, model="other")
    assert "other" == server.bodies[0]["model"]


def test_a_key_is_sent_but_never_logged(server, serve, ask, monkeypatch, caplog, capsys, protocol):
    """It is not in errors, logs, stats or the config; a wrong key has an error text that names api_key_env."""
    server.key = "sesame-4711"
    monkeypatch.setenv("MY_KEY", "sesame-4711")
    caplog.set_level(logging.DEBUG)

    async def scenario(engine):
        num_tokens = len((await engine.generate(ask())).token_ids)
        server.key = "another-12"
        return num_tokens, await error_text(engine.generate(ask())), repr(engine._config), str(engine.stats())

    num_tokens, *texts = serve(scenario, server, protocol=protocol, api_key_env="MY_KEY")
    with pytest.raises(EngineError, match=r"no server is healthy: .* status 401: it needs a key") as caught:
        serve(None, server, protocol=protocol, api_key_env="MY_KEY")

    assert (16, True) == (num_tokens, "returned status 401: it needs a key" in texts[0])
    assert "sesame-4711" not in " ".join([*texts, str(caught.value), caplog.text, *capsys.readouterr()])


# asyncio of Python 3.11 leaves the socket of a handshake that is cancelled before its first pass to the collector.
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_certificates(make_server, serve, ask, certificate):
    """A self-signed certificate is refused, unless `ca_file` contains it or `verify` is false."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.cert, certificate.key)
    secure = make_server(ssl_context=context)

    with pytest.raises(EngineError, match="failed: untrusted certificate"):
        serve(None, secure)
    assert 16 == len(serve(one(ask()), secure, ca_file=certificate.cert).token_ids)
    assert 16 == len(serve(one(ask()), secure, verify=False).token_ids)
    gc.collect()


def test_cached_tokens_and_versions(server, serve, ask, protocol):
    """Both servers report cached tokens, and SGLang also weight versions."""
    server.version = "7"

    result = serve(one(ask()), server, protocol=protocol)

    assert (4, 7 if protocol == "sglang" else 0) == (result.num_cached_tokens, result.weight_version)


def test_several_versions(server, serve, ask):
    """Each token has its version."""
    server.version = "mixed"

    result = serve(one(ask()), server, protocol="sglang")

    assert [3] * 8 + [4] * 8 == result.weight_version.tolist()


def test_a_cancelled_request_ends_on_the_server(server, serve, ask, protocol):
    """The slot there is free again."""

    async def scenario(engine):
        async with asyncio.TaskGroup() as group:
            task = group.create_task(engine.generate(ask(max_tokens=200)))
            await wait_until(lambda: server.running)
            task.cancel()
        await wait_until(lambda: not server.running)
        return task.cancelled()

    assert serve(scenario, server, protocol=protocol)


def test_weights_and_memory_are_refused(server, serve):
    """They belong to the servers."""

    async def scenario(engine):
        calls = [engine.sleep(1), engine.wake_up(), engine.update_weights([], 3)]
        return [await error_text(each) for each in calls]

    assert all(text.endswith("it does not control the servers") for text in serve(scenario, server))


def test_starting_twice_is_refused(server, serve):
    """An engine starts once, and not again after a stop."""

    async def scenario(engine):
        again = await error_text(engine.start())
        await engine.stop()
        return again, await error_text(engine.start())

    assert ("the openai engine has been started already", "the openai engine was stopped") == serve(scenario, server)


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        ([], "'urls' must contain at least one server"),
        ("localhost:8000", "'urls' must have the form http://host:8000, got 'localhost:8000'"),
        (["http://a:1", "http://a:1/"], "'urls' must contain each server once"),
        ("http://me:secret@a:1", "'urls' must not contain a password: use api_key_env"),
    ],
)
def test_bad_urls_are_refused(urls, message):
    """The config is checked before any connection."""
    with pytest.raises(ValueError, match=message):
        OpenAIConfig(urls=urls)


def test_the_vocabulary_is_that_of_the_runs_model(server, tmp_path):
    """It is unknown if the run names no model."""
    (tmp_path / "config.json").write_text('{"vocab_size": 512}')
    with_model = Resources(model=ModelSpec(path=tmp_path))
    engines = [OpenAIEngine(OpenAIConfig(urls=server.url), each) for each in (with_model, Resources())]
    assert [512, None] == [engine.capabilities.vocab_size for engine in engines]


def test_without_a_limit_the_servers_decide(server, serve, ask):
    """`max_context` None is not checked here."""
    assert OpenAIEngine(OpenAIConfig(urls=server.url), Resources()).capabilities.max_context is None
    assert 300 == len(serve(one(ask(max_tokens=300)), server, max_context=None).token_ids)


def test_the_least_busy_server_is_chosen():
    """The load is in context tokens; servers that have just failed the request are avoided."""
    servers = Servers.from_urls(["http://a", "http://b", "http://c"])
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


@pytest.mark.filterwarnings("error")
def test_an_abort_may_come_before_the_first_step(server, serve, ask):
    """The request has not been sent, so nothing is left of it: no request, no unawaited coroutine."""

    async def scenario(engine):
        async with asyncio.TaskGroup() as group:
            generating = group.create_task(engine.generate(ask()))
            await asyncio.sleep(0)  # `generate` has created the task of its attempts, which has not run
            await engine.abort("a")
        return generating.result()

    result = serve(scenario, server)
    gc.collect()

    assert (0, FinishReason.ABORT) == (len(result.token_ids), result.finish_reason)
    assert [] == server.bodies
