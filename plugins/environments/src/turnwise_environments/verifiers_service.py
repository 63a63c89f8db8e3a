"""
Runs episodes of verifiers, each with a model that is a turnwise agent.

An episode of verifiers calls a model's API, and decides when. A turnwise agent takes turns, and calls the environment.
`Exchange` joins the two: verifiers reads from an endpoint on loopback, whose replies are the turns of the agent.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future, wait
from contextlib import AsyncExitStack
from functools import cache
from itertools import islice
from typing import Any, Final, TypeVar

import verifiers.v1 as vf
from aiohttp import web
from attrs import define, field

T = TypeVar("T")

_STOP_S: Final = 8.0
"""Seconds to wait for a service that nothing uses any more."""
_NO_KEY: Final = "TURNWISE_VERIFIERS_KEY"
"""An environment variable that nothing sets: the endpoint's secret is in its path."""


@define(eq=False)
class Exchange:
    """
    One episode of verifiers. Its methods run in the loop of its service.

    Attributes:
        session: the id of the trace that talks to the endpoint.
    """

    session: str = ""
    _inbox: asyncio.Queue[dict[str, Any] | vf.Episode | Exception] = field(factory=asyncio.Queue, init=False)
    _reply: asyncio.Future[web.Response] | None = field(default=None, init=False)
    _run: asyncio.Task[None] | None = field(default=None, init=False)

    def start(self, run: asyncio.Task[None]) -> None:
        """Remember the task that plays the episode."""
        self._run = run

    def put_end(self, end: vf.Episode | Exception) -> None:
        """Hand over the episode that has ended, or the exception that ended it."""
        self._inbox.put_nowait(end)

    async def ask(self, body: dict[str, Any], session: str) -> web.Response:
        """Hand over a request to the agent, and return the agent's reply."""
        if self._reply is not None or (self.session and session != self.session):
            return _refuse("the agent plays one conversation; give the other roles a separate model", "one_agent")
        self.session = session
        self._reply = asyncio.get_running_loop().create_future()
        self._inbox.put_nowait(body)
        try:
            return await self._reply
        finally:
            self._reply = None

    async def next(self) -> dict[str, Any] | vf.Episode:
        """Return the next request, or the episode when it has ended."""
        item = await self._inbox.get()
        if isinstance(item, Exception):
            raise item
        return item

    async def answer(self, message: Mapping[str, object], finish_reason: str) -> dict[str, Any] | vf.Episode:
        """Reply to the request that waits, and return the next one or the episode."""
        self._send(_stream(message, finish_reason))
        return await self.next()

    async def exhaust(self) -> dict[str, Any] | vf.Episode:
        """Reply that the context is full: verifiers then scores the conversation so far."""
        self._send(_refuse("the token budget of the episode is used up", "context_length_exceeded"))
        return await self.next()

    def stop(self) -> None:
        """End the episode, and its request."""
        if self._run is not None:
            self._run.cancel()
        if self._reply is not None:
            self._reply.cancel()

    def _send(self, response: web.Response) -> None:
        if self._reply is None or self._reply.done():
            raise RuntimeError("verifiers waits for no turn")
        self._reply.set_result(response)


class VerifiersService:
    """
    One environment of verifiers, with what its episodes share.

    It starts with the first episode and stops after the last one. All services run in one event loop, which stays until
    the process ends: verifiers keeps locks and programs that belong to their loop.
    """

    _services: Final[dict[str, VerifiersService]] = {}
    _lock: Final = threading.Lock()

    def __init__(self, config: vf.EnvConfig) -> None:
        self._config, self._num_users = config, 0
        self._exchanges: dict[str, Exchange] = {}
        self._tasks: list[vf.Task] = []
        self._ready: Future[None] = Future()
        self._stopped = asyncio.Event()
        self._loop = _find_loop()
        self._served = asyncio.run_coroutine_threadsafe(self._serve(), self._loop)
        self._served.add_done_callback(self._report)

    @classmethod
    def acquire(cls, config: vf.EnvConfig) -> VerifiersService:
        """Return the service of a config, which the caller must give back with `end`."""
        key = config.model_dump_json()
        with cls._lock:
            service = cls._services.get(key)
            if service is None:
                service = cls._services[key] = cls(config)
            service._num_users += 1
            return service

    def end(self, exchange: Exchange | None) -> None:
        """Give the service back, and end an episode; after the last one, wait until all programs have ended."""
        if exchange is not None:
            self._loop.call_soon_threadsafe(exchange.stop)
        with self._lock:
            self._num_users -= 1
            if self._num_users:
                return
            for key in [key for key, service in self._services.items() if service is self]:
                del self._services[key]
        self._loop.call_soon_threadsafe(self._stopped.set)
        wait((self._served,), _STOP_S)

    async def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop of the services."""
        try:
            await asyncio.shield(asyncio.wrap_future(self._ready))
        except BaseException:
            coroutine.close()
            raise
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    async def open(self, index: int) -> Exchange:
        """Start an episode of a task; `IndexError` where there is no such task."""
        if len(self._tasks) <= index:
            self._tasks = list(islice(self._env.taskset, index + 1))
        if index >= len(self._tasks):
            raise IndexError(f"the taskset has {len(self._tasks)} tasks, and no task {index}")
        key, exchange = secrets.token_urlsafe(16), Exchange()
        self._exchanges[key] = exchange
        exchange.start(self._group.create_task(self._play(key, exchange, self._tasks[index])))
        return exchange

    async def _play(self, key: str, exchange: Exchange, task: vf.Task) -> None:
        client = vf.EvalClientConfig(base_url=f"{self._url}/{key}/v1", api_key_var=_NO_KEY)
        try:
            episode = await self._env.run_episode(task, vf.ModelContext(model="turnwise", client=client))
        except Exception as error:  # noqa: BLE001 - raised where the agent waits for it
            exchange.put_end(error)
        else:
            exchange.put_end(episode)
        finally:
            del self._exchanges[key]

    async def _serve(self) -> None:
        async with AsyncExitStack() as stack:
            self._env = vf.load_environment(self._config)
            await stack.enter_async_context(self._env.serving())
            self._url = await self._listen(stack)
            self._group = await stack.enter_async_context(asyncio.TaskGroup())
            self._ready.set_result(None)
            await self._stopped.wait()
            for exchange in self._exchanges.values():
                exchange.stop()

    def _report(self, served: Future[None]) -> None:
        """Let the agents that wait know that the service did not start."""
        error = served.exception()
        if error is not None and not self._ready.done():
            self._ready.set_exception(error)

    async def _listen(self, stack: AsyncExitStack) -> str:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/{key}/v1/chat/completions", self._complete)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.0)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def _complete(self, request: web.Request) -> web.Response:
        exchange = self._exchanges.get(request.match_info["key"])
        if exchange is None:
            return web.Response(status=404)
        return await exchange.ask(await request.json(), request.headers.get("X-Session-ID", ""))


@cache
def _find_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all services, which runs in its own thread."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="verifiers", daemon=True).start()
    return loop


def _refuse(text: str, code: str) -> web.Response:
    return web.json_response({"error": {"message": text, "code": code, "type": "invalid_request_error"}}, status=400)


def _stream(message: Mapping[str, Any], finish_reason: str) -> web.Response:
    """Return a turn as the events of a chat completion, all at once: verifiers asks for a stream."""
    calls = [{"index": index, **call} for index, call in enumerate(message.get("tool_calls", ()))]
    delta = {**message, **({"tool_calls": calls} if calls else {})}
    common = {"id": "turn", "object": "chat.completion.chunk", "created": 0, "model": "turnwise"}
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    events = (
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": finish_reason}]},
        {"choices": [], "usage": usage},
    )
    lines = [f"data: {json.dumps(common | event)}\n\n" for event in events]
    return web.Response(text="".join([*lines, "data: [DONE]\n\n"]), content_type="text/event-stream")
