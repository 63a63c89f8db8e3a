"""
Servers as one engine: each request goes to one of them, and to another when that one fails.

A request that is sent again carries the id that it had, and samples from the start: with a seed it then gives the same.
What an attempt left behind on a server is ended first.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from typing import Any
from uuid import uuid4

import aiohttp
import structlog
from attrs import define, field

from turnwise.errors import EngineError, InfrastructureError
from turnwise.protocols import Resources
from turnwise.types import Capabilities, GenerateRequest, GenerateResult
from turnwise_openai_engine.answers import Answer, ServerFailure
from turnwise_openai_engine.client import is_healthy, make_session, posted, served_models
from turnwise_openai_engine.config import OpenAIConfig
from turnwise_openai_engine.dialects import Dialect, SglangDialect, VllmDialect
from turnwise_openai_engine.servers import Server, Servers

_LONGEST_BACKOFF_S = 30.0


@define(eq=False)
class _Pending:
    """A request in flight: its latest attempt, and the task that makes it."""

    request: GenerateRequest
    task: asyncio.Task[Any] | None = None
    answer: Answer = field(factory=Answer)
    server: Server | None = None
    wire_id: str = field(factory=lambda: uuid4().hex)
    aborted: bool = False


class OpenAIEngine:
    """
    vLLM or SGLang servers that somebody else runs.

    Args:
        config: its options.
        resources: not used: which model it is, is the servers' business.
    """

    def __init__(self, config: OpenAIConfig, resources: Resources) -> None:
        self._config = config
        self._servers = Servers.of(config.urls)
        self._session: aiohttp.ClientSession | None = None
        self._dialect: Dialect | None = None
        self._watching: asyncio.Task[None] | None = None
        self._ended = ""
        self._pending: dict[str, _Pending] = {}
        self._totals = {"num_requests": 0, "num_sampled_tokens": 0, "num_cached_tokens": 0, "num_retries": 0}

    @property
    def capabilities(self) -> Capabilities:
        """What both kinds of servers do; their weights and memory are not ours to change."""
        return Capabilities(seeds=True, abort=True, stop_strings=True, max_context=self._config.max_context)

    async def start(self) -> None:
        """Look at every server; `EngineError` when none is well, or what they serve is not what the config says."""
        if self._session is not None or self._ended:
            raise EngineError(f"the openai engine {self._ended or 'has been started already'}")
        self._session = make_session(self._config)
        try:
            await self._find_one_well(self._session)
            self._dialect = await self._choose_dialect(self._session)
        except BaseException:
            session, self._session = self._session, None
            await session.close()
            raise
        self._watching = asyncio.get_running_loop().create_task(self._watch(self._session))

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """
        Sample a continuation on one of the servers.

        Log-probabilities are what the server tells, and 0 for greedy requests; see the README for how a server must be
        started for them to be those of the distribution drawn from.

        Raises:
            EngineError: a server refused the request or answered what cannot be used.
            InfrastructureError: every attempt failed.
        """
        dialect, session = self._serving()
        max_tokens = self._admit(request)
        pending = self._pending[request.request_id] = _Pending(request)
        try:
            outcome = await self._owned(pending, self._attempts(pending, session, dialect, max_tokens))
        finally:
            del self._pending[request.request_id]
        if isinstance(outcome, Exception) and not pending.aborted:
            raise outcome
        result = pending.answer.result(request, aborted=pending.aborted)
        self._count(result)
        return result

    async def abort(self, request_id: str) -> None:
        """End a request with the tokens that have come back; unknown ids are ignored."""
        pending = self._pending.get(request_id)
        if pending is None or pending.aborted:
            return
        pending.aborted = True
        if not await self._told_to_end(pending) and pending.task is not None:
            pending.task.cancel()

    async def sleep(self, level: int) -> None:
        """Raise `EngineError`: the servers' memory belongs to who runs them."""
        raise EngineError(f"the openai engine cannot sleep (level {level}): the servers belong to somebody else")

    async def wake_up(self, tags: Iterable[str] = ("weights", "kv_cache")) -> None:
        """Raise `EngineError`: the servers' memory belongs to who runs them."""
        raise EngineError(f"the openai engine cannot wake up {', '.join(tags)}: the servers belong to somebody else")

    async def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Raise `EngineError`: the servers' weights belong to who runs them."""
        raise EngineError(f"the openai engine cannot load weights {version}: the servers belong to somebody else")

    def stats(self) -> Mapping[str, float]:
        """Return `num_running`, `num_context_tokens` of these, `num_healthy` servers, and totals since the start."""
        return {
            "num_running": len(self._pending),
            "num_context_tokens": sum(len(each.request.token_ids) for each in self._pending.values()),
            "num_healthy": sum(server.healthy for server in self._servers.all),
            **self._totals,
        }

    async def stop(self) -> None:
        """End requests in flight with `abort`, and close all connections. Harmless at any time."""
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

    def _serving(self) -> tuple[Dialect, aiohttp.ClientSession]:
        if self._session is None or self._dialect is None or self._ended:
            raise EngineError(f"the openai engine {self._ended or 'has not been started'}")
        return self._dialect, self._session

    def _admit(self, request: GenerateRequest) -> int | None:
        """Return how many tokens may be sampled, None when only the servers know; `EngineError` for a bad request."""
        num_context, max_context = len(request.token_ids), self._config.max_context
        if num_context == 0:
            raise EngineError(f"request {request.request_id!r} has an empty context")
        if request.request_id in self._pending:
            raise EngineError(f"request {request.request_id!r} is in flight already")
        if max_context is None:
            return request.sampling.max_tokens
        if num_context >= max_context:
            raise EngineError(
                f"request {request.request_id!r} has a context of {num_context} tokens: max_context is {max_context},"
                " output included"
            )
        room = max_context - num_context
        return min(request.sampling.max_tokens or room, room)

    async def _owned(self, pending: _Pending, attempts: Any) -> Exception | None:
        """Run the attempts so that `abort` can end them without ending the caller; return what went wrong."""

        async def outcome() -> Exception | None:
            try:
                await attempts
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
            pending.answer, pending.server = Answer(), server
            try:
                await self._attempt(pending, server, session, dialect, max_tokens)
            except ServerFailure as error:
                server.num_failures += 1
                failed.append(server)
                if pending.aborted:
                    return
                if number == self._config.retries:
                    text = f"request {pending.request.request_id!r} failed {number + 1} times, at last: {error}"
                    raise InfrastructureError(text) from error
                structlog.get_logger().warning("request sent again", reason=str(error), attempt=number + 1)
            else:
                return
            self._totals["num_retries"] += 1
            await self._told_to_end(pending)
            if len(failed) % len(self._servers.all) == 0:
                # Every server has had its turn; another one is asked at once.
                await asyncio.sleep(min(self._config.backoff_s * 2**number, _LONGEST_BACKOFF_S))

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
            async with posted(session, f"{server.url}{dialect.path}", body, pending.wire_id) as lines:
                await dialect.read(lines, pending.answer)
        finally:
            server.num_requests -= 1
            server.num_tokens -= num_tokens

    async def _told_to_end(self, pending: _Pending) -> bool:
        """Tell the server to end a request, if that is how its kind does it; return whether it will answer."""
        call = self._dialect.abort(pending.wire_id) if self._dialect is not None else None
        if call is None or pending.server is None or self._session is None:
            return False
        path, body = call
        try:
            async with asyncio.timeout(self._config.abort_timeout_s):
                async with posted(self._session, f"{pending.server.url}{path}", body, pending.wire_id):
                    pass
                if pending.aborted and pending.task is not None:
                    await asyncio.wait([pending.task])
        except (EngineError, InfrastructureError, TimeoutError):
            return False
        return True

    async def _find_one_well(self, session: aiohttp.ClientSession) -> None:
        reasons = await self._look_at_all(session)
        if not any(server.healthy for server in self._servers.all):
            raise EngineError(f"no server is well: {'; '.join(reasons)}")

    async def _look_at_all(self, session: aiohttp.ClientSession) -> list[str]:
        """Note which servers are well; return why others are not."""
        async with asyncio.TaskGroup() as group:
            timeout_s = self._config.connect_timeout_s
            looks = [group.create_task(is_healthy(session, each.url, timeout_s)) for each in self._servers.all]
        for server, look in zip(self._servers.all, looks, strict=True):
            reason = look.result()
            if bool(reason) == server.healthy:
                structlog.get_logger().info("server", url=server.url, healthy=not reason, reason=reason)
            server.healthy = not reason
        return [look.result() for look in looks if look.result()]

    async def _watch(self, session: aiohttp.ClientSession) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                await asyncio.sleep(self._config.health_interval_s)
                await self._look_at_all(session)

    async def _choose_dialect(self, session: aiohttp.ClientSession) -> Dialect:
        if self._config.protocol == "sglang":
            return SglangDialect()
        url = next(server.url for server in self._servers.all if server.healthy)
        models = {model["id"]: model for model in await served_models(session, url)}
        name = self._config.model or (next(iter(models)) if len(models) == 1 else None)
        if name not in models:
            which = "serves several models: set model" if name is None else f"does not serve {name!r}"
            raise EngineError(f"{url} {which}; it has {', '.join(sorted(models)) or 'none'}")
        limit, wanted = models[name].get("max_model_len"), self._config.max_context
        if isinstance(limit, int) and wanted is not None and limit < wanted:
            raise EngineError(f"max_context is {wanted}, but {url} serves {name!r} with {limit}")
        return VllmDialect(str(name))

    def _count(self, result: GenerateResult) -> None:
        self._totals["num_requests"] += 1
        self._totals["num_sampled_tokens"] += len(result.token_ids)
        self._totals["num_cached_tokens"] += result.num_cached_tokens
