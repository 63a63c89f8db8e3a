"""An engine that gives recorded turns again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from attrs import define, field

from turnwise.errors import EngineError
from turnwise.protocols.weights import TAGS, Weight
from turnwise.types import Capabilities, GenerateRequest, GenerateResult
from turnwise_gateway.replay.request_file import digest_context


@define(eq=False)
class RecordedTurn:
    """
    A turn that the engine gives once it is allowed to.

    Attributes:
        call: number of the request that it was sampled for.
        context: number and digest of the tokens before it.
        result: of the recorded engine.
        allowed: set when the recording has come to it.
    """

    call: int
    context: tuple[int, str]
    result: GenerateResult
    allowed: asyncio.Event = field(factory=asyncio.Event)


@define(eq=False)
class RecordedEngine:
    """
    An `Engine` that answers a context with the turn that was recorded for it; for any other context it waits.

    Attributes:
        turns: to give, in the order of the calls; a request takes its turn out.
        unknown: requests that wait because no turn was recorded for them.
        capabilities: of the engine that was recorded.
    """

    turns: list[RecordedTurn] = field(factory=list)
    unknown: list[asyncio.Future[GenerateResult]] = field(factory=list)
    capabilities: Capabilities = field(factory=Capabilities)

    async def start(self) -> None:
        """Do nothing."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        context = len(request.token_ids), digest_context(request.token_ids)
        turn = next((each for each in self.turns if each.context == context), None)
        if turn is None:
            waiting: asyncio.Future[GenerateResult] = asyncio.get_running_loop().create_future()
            self.unknown.append(waiting)
            try:
                return await waiting
            finally:
                self.unknown.remove(waiting)
        self.turns.remove(turn)
        try:
            await turn.allowed.wait()
        except asyncio.CancelledError:
            self.turns.insert(0, turn)  # it was another request's, such as that of a retry
            raise
        return turn.result

    def fail_unknown(self) -> None:
        """Fail the oldest request that waits."""
        if self.unknown:
            self.unknown[0].set_exception(EngineError("the engine failed when the session was recorded"))

    async def abort(self, request_id: str) -> None:
        """Do nothing: requests end by their cancellation."""

    async def sleep(self, level: int) -> None:
        """Refuse: there is no memory to free."""
        raise EngineError(f"a recorded engine has no sleep level {level}")

    async def wake_up(self, tags: Iterable[str] = TAGS) -> None:
        """Do nothing."""

    async def update_weights(self, weights: Iterable[Weight], version: int) -> None:
        """Refuse: there are no weights."""
        raise EngineError(f"a recorded engine has no weights to update to version {version}")

    def stats(self) -> Mapping[str, float]:
        return {"num_running": 0}

    async def stop(self) -> None:
        """Fail the requests that wait."""
        for waiting in list(self.unknown):
            if not waiting.done():
                waiting.set_exception(EngineError("the engine was stopped"))
