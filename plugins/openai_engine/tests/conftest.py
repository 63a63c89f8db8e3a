"""A small server for both protocols over real sockets, which fails on request."""

import asyncio
import json
import random
import threading
from types import SimpleNamespace

import pytest
from aiohttp import web

from turnwise.protocols import Resources
from turnwise_openai_engine.config import OpenAIConfig
from turnwise_openai_engine.engine import OpenAIEngine
from turnwise_testing.engines.scenarios import VOCAB_SIZE, run_scenario, simple_request


class FakeServer:
    """
    Serves pseudo-random ids, one per millisecond, which depend on the context, the sampled ids, and the seed.

    Attributes:
        faults: faults of the next generation requests, one for each; see `_start_request`.
        bodies: bodies of all generation requests.
        headers: headers of all generation requests.
        running: ids of requests in flight.
        healthy: the result of `/health`.
    """

    def __init__(self, ssl_context=None):
        self.faults, self.bodies, self.headers, self.running = [], [], [], {}
        self.aborted = []
        self._transports = set()
        self.healthy, self.key, self.models = True, None, [{"id": "tiny", "max_model_len": 256}]
        self.version = "default"
        self._ssl = ssl_context
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        self._ready.wait(60)

    @property
    def url(self):
        return f"{'https' if self._ssl else 'http'}://localhost:{self.port}"

    def stop(self):
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join(60)

    def _serve(self):
        with asyncio.Runner() as runner:
            runner.run(self._main())

    async def _main(self):
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(middlewares=[self._check_key])
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=self._ssl)
        await site.start()
        listening = site._server.sockets[0]
        self.port = listening.getsockname()[1]
        self._ready.set()
        await self._stopped.wait()
        # An accepted socket becomes a connection some turns of the loop later, and would never be closed after that.
        self._loop.remove_reader(listening.fileno())
        for _ in range(10):
            await asyncio.sleep(0)
        # Include connections without a request.
        self._transports |= {each.transport for each in runner.server.connections}
        await runner.cleanup()
        for transport in filter(None, self._transports):
            transport.abort()
        # Connections are closed by callbacks of the loop.
        await asyncio.sleep(0.05)

    @web.middleware
    async def _check_key(self, request, handler):
        self._transports.add(request.transport)
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.Response(status=401, text="no")
        return await handler(request)

    async def _health(self, _request):
        return web.Response(status=200 if self.healthy else 503)

    async def _models(self, _request):
        return web.json_response({"data": self.models})

    async def _abort(self, request):
        rid = (await request.json())["rid"]
        self.aborted.append(rid)
        for name, event in self.running.items():
            if name.startswith(rid):
                event.set()
        return web.Response()

    async def _start_request(self, request):
        """Record a request, and apply its fault."""
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(request.headers.copy())
        fault = self.faults.pop(0) if self.faults else ""
        if isinstance(fault, int):
            raise _http_error(fault)
        if fault == "slow":
            await asyncio.Event().wait()  # until the client leaves, however slow this process is
        return body, fault

    async def _completions(self, request):
        body, fault = await self._start_request(request)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        aborted = self.running[body["request_id"]] = asyncio.Event()
        try:
            ids = []
            async for token, ending in self._sample(body["prompt"], body, aborted):
                ids.append(token)
                if fault == "drop" and len(ids) == 3:
                    request.transport.abort()
                    return response
                if fault == "end" and len(ids) == 3:
                    return response
                if fault == "error" and len(ids) == 3:
                    await _event(response, {"error": {"message": "out of memory\nat 0x0", "code": 500}})
                    continue
                choice = {"index": 0, "text": "", "logprobs": {"token_logprobs": [-0.5]}, "token_ids": [token]}
                choice |= ending
                if fault == "no ids":
                    del choice["token_ids"]
                if fault == "no logprobs":
                    choice["logprobs"] = None
                await _event(response, {"choices": [choice]})
            usage = {"prompt_tokens": len(body["prompt"]), "prompt_tokens_details": {"cached_tokens": 4}}
            await _event(response, {"choices": [], "usage": usage})
            await response.write(b"data: not json\n\n" if fault == "no json" else b"data: [DONE]\n\n")
        finally:
            del self.running[body["request_id"]]
        return response

    async def _generate(self, request):
        body, fault = await self._start_request(request)
        rid, options = body["rid"], body["sampling_params"]
        if rid in self.running:
            return web.json_response({"error": {"message": f"Duplicate request ID detected: {rid}"}}, status=400)
        aborted = self.running[rid] = asyncio.Event()
        if fault == "drop":
            request.transport.abort()
            # The server does not notice, and continues to sample until the abort call.
            self._left = asyncio.ensure_future(self._forget(rid, aborted))
            return web.Response()
        try:
            ids, ending = [], {"finish_reason": "abort", "stop_reason": None}
            params = options | {"seed": options.get("sampling_seed"), "max_tokens": options.get("max_new_tokens", 200)}
            async for token, each in self._sample(body["input_ids"], params, aborted):
                ids, ending = [*ids, token], each or ending
        finally:
            del self.running[rid]
        if aborted.is_set():
            ending = {"finish_reason": "abort", "stop_reason": None}
        reason = {"type": ending["finish_reason"], "matched": ending["stop_reason"]}
        if fault == "refused":
            reason = {"type": "abort", "message": "too long", "status_code": 400}
        if fault == "error":
            reason = {"type": "abort", "message": "out of memory", "status_code": 500}
        half = len(ids) // 2
        meta = {
            "finish_reason": reason,
            "cached_tokens": 4,
            "weight_version": self.version,
            "output_token_logprobs": [[-0.5, each, None] for each in ids],
            "weight_versions": [
                {"version": "3", "start": 0, "end": half},
                {"version": "4", "start": half, "end": len(ids)},
            ]
            if self.version == "mixed"
            else [],
        }
        answer = {"output_ids": ids, "meta_info": meta}
        if fault == "no ids":
            answer = {"text": "hello", "meta_info": meta}
        return web.Response(text="<html>" if fault == "no json" else json.dumps(answer))

    async def _forget(self, rid, aborted):
        await aborted.wait()
        del self.running[rid]

    async def _sample(self, context, body, aborted):
        """Yield each id with the fields that end the response, if it is the last."""
        ids = []
        seed = body.get("seed") if body["temperature"] else None
        while not aborted.is_set():
            await asyncio.sleep(0.001)
            ids.append(random.Random(str((context, ids, seed))).randrange(VOCAB_SIZE))
            if ids[-1] in body["stop_token_ids"]:
                yield ids[-1], {"finish_reason": "stop", "stop_reason": ids[-1]}
                return
            if len(ids) == (body["max_tokens"] or 200):
                yield ids[-1], {"finish_reason": "length", "stop_reason": None}
                return
            yield ids[-1], {}


def _http_error(status):
    class Fault(web.HTTPException):
        status_code = status

    return Fault(text=f"fault {status}\nand more")


async def _event(response, value):
    await response.write(f"data: {json.dumps(value)}\n\n".encode())


@pytest.fixture
def make_server():
    """A function that starts servers, which stop with the test."""
    servers = []

    def make(**options):
        servers.append(FakeServer(**options))
        return servers[-1]

    yield make
    for server in servers:
        server.stop()


@pytest.fixture
def server(make_server):
    """One server."""
    return make_server()


@pytest.fixture(params=["vllm", "sglang"])
def protocol(request):
    """Each protocol in turn."""
    return request.param


@pytest.fixture
def serve():
    """A function that runs `scenario(engine)` on a started engine for some servers."""

    def run(scenario, *servers, **options):
        fast = {"backoff_s": 0.01, "health_interval_s": 0.05, "abort_timeout_s": 10.0, "read_timeout_s": 60.0}
        config = OpenAIConfig(**{"urls": [each.url for each in servers], "max_context": 256, **fast, **options})
        return run_scenario(OpenAIEngine(config, Resources()), scenario)

    return run


@pytest.fixture(scope="session")
def ask():
    """A function that returns a request of 16 tokens on 9 ids, unless told otherwise."""

    def make(request_id="a", token_ids=tuple(range(3, 12)), trajectory_id="t", **sampling):
        return simple_request(request_id, token_ids, trajectory_id, **sampling)

    return make


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    """Paths of a key and a self-signed certificate for localhost."""
    import shutil
    import subprocess

    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificate, is not installed")
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    command += f" -addext subjectAltName=DNS:localhost -keyout {key} -out {cert}"
    subprocess.run(command.split(), check=True, capture_output=True)
    return SimpleNamespace(key=key, cert=cert)
