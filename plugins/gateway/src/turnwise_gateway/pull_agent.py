"""The agent `external` with `pull`: an agent that runs elsewhere leases the episode, and scores it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack

from attrs import define, evolve, field

from turnwise import Episode, Resources, State
from turnwise.errors import InfrastructureError
from turnwise_gateway.agent import build_parts
from turnwise_gateway.config import ExternalConfig
from turnwise_gateway.host import ServerHost
from turnwise_gateway.pool.store import PoolResult
from turnwise_gateway.pool.store import State as RolloutState
from turnwise_gateway.program import ProgramFailedError
from turnwise_gateway.pull import Attempt, Offer, PullHost
from turnwise_gateway.pull_options import PullOptions
from turnwise_gateway.session.session import SessionParts
from turnwise_gateway.watch import wait_for_agent


@define(eq=False)
class PullAgent:
    """
    Lets an outside agent run each episode. One object serves many episodes at once.

    Args:
        config: the rules of the sessions.
        options: of the control port.
        resources: the chat template, and perhaps a tool parser and a reasoning parser.

    Raises:
        ConfigError: the run has no chat template.
    """

    config: ExternalConfig
    options: PullOptions
    resources: Resources
    parts: SessionParts = field(init=False)
    _host: ServerHost = field(init=False)
    _pull: PullHost = field(init=False)
    _servers: AsyncExitStack = field(factory=AsyncExitStack, init=False)

    resumable = False

    def __attrs_post_init__(self) -> None:
        self.parts = build_parts(self.config, self.resources)
        self._host = ServerHost(self.config.model)
        self._pull = PullHost(self.config.model, self.options)

    async def open(self) -> dict[str, str]:
        server = await self._servers.enter_async_context(self._host.serve())
        desk = await self._servers.enter_async_context(self._pull.serve())
        return {"agents": server.url, "control": desk.pool.site.url}

    async def close(self) -> None:
        await self._servers.aclose()

    async def step(self, episode: Episode) -> State:
        async with (
            self._host.serve() as server,
            self._pull.serve() as desk,
            asyncio.TaskGroup() as calls,
            desk.offer(episode, self.parts, server, calls, self.config.keep_requests) as offer,
        ):
            result, attempt, num_earlier = await self._wait(offer)
        if result.state is RolloutState.DEAD:
            if result.owner == "infra":
                raise InfrastructureError(result.reason)
            raise ProgramFailedError(result.reason)
        if attempt.session.num_calls == 0:  # a score of nothing
            raise ProgramFailedError("the agent ended without a call of the model")
        num_records = len(attempt.session.book.records)
        note_score(episode, result.score, result.metrics, num_records=num_records, num_earlier=num_earlier)
        return State.TERMINATED

    async def _wait(self, offer: Offer) -> tuple[PoolResult, Attempt, int]:
        """Return the result of an episode, its last attempt, and the number of records of the earlier ones."""
        limits = evolve(self.config, idle_s=self.options.score_s)
        num_earlier = 0
        while True:
            attempt = await offer.attempts.get()
            is_last = True
            try:
                await wait_for_agent(attempt.wait(), attempt.session, limits)
                result = await offer.result()
                is_last = result is not None
            finally:
                attempt.leased.end()
                attempt.close(is_trained=is_last)
            if result is not None:
                return result, attempt, num_earlier
            num_earlier += len(attempt.session.book.records)
            offer.episode.record_metric("gateway/lost_attempts", 1)


def note_score(
    episode: Episode, score: object, metrics: Mapping[str, float], *, num_records: int, num_earlier: int = 0
) -> None:
    """
    Note score and metrics that were reported from outside, for the reward `reported`.

    Args:
        episode: that has ended.
        score: in the form that `ScoreBoard.reported` describes; None for none.
        metrics: numbers for the logs.
        num_records: records of the last attempt; the last ones may have no turn and so no score.
        num_earlier: records of attempts before the last one, which have no score.
    """
    if isinstance(score, Mapping) and "records" in score:
        values = [*score["records"], *[0.0] * num_records][:num_records]
        score = {"records": [0.0] * num_earlier + values}
    if score is not None:
        episode.memory["reported_score"] = score
    for name, value in metrics.items():
        episode.record_metric(f"agent/{name}", value)
