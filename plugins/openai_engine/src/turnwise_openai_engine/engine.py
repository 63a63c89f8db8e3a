"""
External servers as one engine: each request goes to one of them, and to another if that one fails.

A retry has the same id and samples from the start, so with a seed it gives the same tokens. An attempt that may still
run on a server is ended first.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any
from uuid import uuid4

import aiohttp
import structlog
from attrs import define, field

from turnwise.errors import ConfigError, EngineError, InfrastructureError
from turnwise.protocols import Resources
from turnwise.protocols.weights import TAGS
from turnwise.types import Capabilities, GenerateRequest, GenerateResult
from turnwise_engine_support.model_directory import model_vocab_size
from turnwise_engine_support.requests import check_context, check_not_in_flight, num_new_tokens
from turnwise_engine_support.results import RequestCounters
from turnwise_openai_engine.client import health_problem, list_models, make_session, post_json
from turnwise_openai_engine.config import OpenAIConfig
from turnwise_openai_engine.dialects import Dialect, SglangDialect, VllmDialect
from turnwise_openai_engine.output import Output, ServerFailure
from turnwise_openai_engine.servers import Server, Servers

_MAX_BACKOFF_S = 30.0
_NOT_OURS = "it does not control the servers"


@define(eq=False)
class _Pending:
    """A request in flight, with its latest attempt and the task of the attempts."""

    request: GenerateRequest
    task: asyncio.Task[Any] | None = None
    output: Output = field(factory=Output)
    server: Server | None = None
    wire_id: str = field(factory=lambda: uuid4().hex)
    aborted: bool = False


class OpenAIEngine:
    """
    External vLLM or SGLang servers.

    Args:
        config: the options.
        resources: the directory of its `model`, if there is one, says how many ids the model of the servers has.
    """

    def __init__(self, config: OpenAIConfig, resources: Resources) -> None:
        self._config = config
        self._vocab_size = model_vocab_size(resources.model.path)
        self._servers = Servers.from_urls(config.urls)
        self._session: aiohttp.ClientSession | None = None
        self._dialect: Dialect | None = None
        self._watching: asyncio.Task[None] | None = None
        self._ended = ""
        self._pending: dict[str, _Pending] = {}
        self._counters = RequestCounters()
        self._num_retries = 0

    @property
    def capabilities(self) -> Capabilities:
        kind: Dialect = SglangDialect() if self._config.protocol == "sglang" else VllmDialect("")
        # No weight updates and no sleep: weights and memory belong to the servers.
        return Capabilities(
            seeds=True,
            abort=True,
            stop_strings=True,
            max_context=self._config.max_context,
            vocab_size=self._vocab_size,
            sampling_options=kind.sampling_options,
        )

    async def start(self) -> None:
        """Check all servers; `EngineError` if none is healthy, or if they do not serve the configured model."""
        if self._session is not None or self._ended:
            raise EngineError(f"the openai engine {self._ended or 'has been started already'}")
        self._session = make_session(self._config)
        try:
            await self._require_healthy_server(self._session)
            self._dialect = await self._choose_dialect(self._session)
        except BaseException:
            session, self._session = self._session, None
            await session.close()
            raise
        self._watching = asyncio.get_running_loop().create_task(self._watch(self._session))

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """
        Sample a continuation on one of the servers.

        Log-probabilities are as the server reports them, and 0 for greedy requests. The README says how to start a
        server so that they are of the sampling distribution.

        Raises:
            EngineError: a server refused the request, or its response cannot be used.
            InfrastructureError: every attempt failed.
        """
        dialect, session = self._started_parts()
        max_tokens = self._check_request(request)
        pending = self._pending[request.request_id] = _Pending(request)
        try:
            outcome = await self._run_attempts(pending, partial(self._attempts, pending, session, dialect, max_tokens))
        finally:
            del self._pending[request.request_id]
        if isinstance(outcome, Exception) and not pending.aborted:
            raise outcome
        result = pending.output.result(request, aborted=pending.aborted)
        self._counters.count(result)
        return result

    async def abort(self, request_id: str) -> None:
        pending = self._pending.get(request_id)
        if pending is None or pending.aborted:
            return
        pending.aborted = True
        if not await self._end_on_server(pending) and pending.task is not None:
            pending.task.cancel()

    async def sleep(self, level: int) -> None:
        raise EngineError(f"the openai engine cannot sleep (level {level}): {_NOT_OURS}")

    async def wake_up(self, tags: Iterable[str] = TAGS) -> None:
        raise EngineError(f"the openai engine cannot wake up {' and '.join(tags)}: {_NOT_OURS}")

    async def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        raise EngineError(f"the openai engine cannot load weights (version {version}): {_NOT_OURS}")

    def stats(self) -> Mapping[str, float]:
        """Return `num_running`, `num_context_tokens` of these, `num_healthy` servers, and totals."""
        return {
            **self._counters.stats([each.request for each in self._pending.values()]),
            "num_retries": self._num_retries,
            "num_healthy": sum(server.healthy for server in self._servers.all),
        }

    async def stop(self) -> None:
        self._ended = self._ended or "was stopped"
        if self._watching is not None:
            self._watching.cancel()
        for request_id in list(self._pending):
            await self.abort(request_id)
        tasks = [pending.task for pending in self._pending.values() if pending.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=self._config.abort_timeout_s)
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _started_parts(self) -> tuple[Dialect, aiohttp.ClientSession]:
        if self._session is None or self._dialect is None or self._ended:
            raise EngineError(f"the openai engine {self._ended or 'has not been started'}")
        return self._dialect, self._session

    def _check_request(self, request: GenerateRequest) -> int | None:
        """Return the most tokens to sample, or None if only the servers know; `EngineError` for a bad request."""
        max_context = self._config.max_context
        check_context(request, max_context=max_context)
        check_not_in_flight(request, self._pending)
        return request.sampling.max_tokens if max_context is None else num_new_tokens(request, max_context)

    async def _run_attempts(
        self, pending: _Pending, attempts: Callable[[], Coroutine[Any, Any, None]]
    ) -> Exception | None:
        """Run the attempts in a task, which `abort` can cancel without the caller, and return their error."""

        async def outcome() -> Exception | None:
            try:
                # Called here, because an abort can cancel this task before its first step: a coroutine that was
                # made outside would then never be awaited.
                await attempts()
            except (EngineError, InfrastructureError) as error:
                return error
            return None

        async with asyncio.TaskGroup() as group:
            pending.task = group.create_task(outcome())
        return None if pending.task.cancelled() else pending.task.result()

    async def _attempts(
        self, pending: _Pending, session: aiohttp.ClientSession, dialect: Dialect, max_tokens: int | None
    ) -> None:
        failed: list[Server] = []
        for number in range(self._config.retries + 1):
            server = self._servers.choose(pending.request.trajectory_id, avoid=failed)
            # A retry may sample other ids than the listener has heard, so it hears no more.
            pending.output = Output(on_tokens=None if number else pending.request.on_tokens)
            pending.server = server
            try:
                await self._attempt(pending, server, session, dialect, max_tokens)
            except ServerFailure as error:
                server.num_failures += 1
                failed.append(server)
                if pending.aborted:
                    return
                if number == self._config.retries:
                    text = f"request {pending.request.request_id!r} failed {number + 1} times; last error: {error}"
                    raise InfrastructureError(text) from error
                structlog.get_logger().warning("request retried", reason=str(error), attempt=number + 1)
            else:
                return
            self._num_retries += 1
            await self._end_on_server(pending)
            if len(failed) % len(self._servers.all) == 0:
                # All servers have failed once more. Otherwise the next server is tried at once.
                await asyncio.sleep(min(self._config.backoff_s * 2**number, _MAX_BACKOFF_S))

    async def _attempt(
        self,
        pending: _Pending,
        server: Server,
        session: aiohttp.ClientSession,
        dialect: Dialect,
        max_tokens: int | None,
    ) -> None:
        num_tokens = len(pending.request.token_ids)
        server.num_requests += 1
        server.num_tokens += num_tokens
        try:
            body = dialect.body(pending.request, pending.wire_id, max_tokens)
            async with post_json(session, f"{server.url}{dialect.path}", body, pending.wire_id) as lines:
                await dialect.read(lines, pending.output)
        finally:
            server.num_requests -= 1
            server.num_tokens -= num_tokens

    async def _end_on_server(self, pending: _Pending) -> bool:
        """Ask the server to end a request, if its protocol has such a call; return whether it has responded."""
        call = self._dialect.abort(pending.wire_id) if self._dialect is not None else None
        if call is None or pending.server is None or self._session is None:
            return False
        path, body = call
        try:
            async with asyncio.timeout(self._config.abort_timeout_s):
                async with post_json(self._session, f"{pending.server.url}{path}", body, pending.wire_id):
                    pass
                if pending.aborted and pending.task is not None:
                    await asyncio.wait([pending.task])
        except (EngineError, InfrastructureError, TimeoutError):
            return False
        return True

    async def _require_healthy_server(self, session: aiohttp.ClientSession) -> None:
        reasons = await self._check_health(session)
        if not any(server.healthy for server in self._servers.all):
            raise EngineError(f"no server is healthy: {'; '.join(reasons)}")

    async def _check_health(self, session: aiohttp.ClientSession) -> list[str]:
        """Update the health of all servers, and return the problems."""
        async with asyncio.TaskGroup() as group:
            timeout_s = self._config.connect_timeout_s
            checks = [group.create_task(health_problem(session, each.url, timeout_s)) for each in self._servers.all]
        for server, check in zip(self._servers.all, checks, strict=True):
            reason = check.result()
            if bool(reason) == server.healthy:
                structlog.get_logger().info("server", url=server.url, healthy=not reason, reason=reason)
            server.healthy = not reason
        return [check.result() for check in checks if check.result()]

    async def _watch(self, session: aiohttp.ClientSession) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                await asyncio.sleep(self._config.health_interval_s)
                await self._check_health(session)

    async def _choose_dialect(self, session: aiohttp.ClientSession) -> Dialect:
        if self._config.protocol == "sglang":
            return SglangDialect()
        url = next(server.url for server in self._servers.all if server.healthy)
        models = {model["id"]: model for model in await list_models(session, url)}
        name = self._config.model or (next(iter(models)) if len(models) == 1 else None)
        if name not in models:
            problem = "serves several models: set model" if name is None else f"does not serve {name!r}"
            raise ConfigError(f"{url} {problem}; it has {', '.join(sorted(models)) or 'none'}")
        limit, wanted = models[name].get("max_model_len"), self._config.max_context
        if isinstance(limit, int) and wanted is not None and limit < wanted:
            raise ConfigError(f"max_context is {wanted}, but {url} serves {name!r} with {limit}")
        return VllmDialect(str(name))
