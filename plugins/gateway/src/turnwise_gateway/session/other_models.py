"""The names of models in the calls of a session, and its calls for models that other servers have."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from attrs import define, field

from turnwise import Episode
from turnwise.record.outside_call import OutsideCall, shorten
from turnwise_gateway.calls import CallRefusedError, ForwardedCall
from turnwise_gateway.models import Endpoint, is_pattern
from turnwise_gateway.session.door import SessionDoor
from turnwise_gateway.session.options import SessionOptions

_FIRST_ERROR: Final = 400


@define(eq=False)
class ForwardedCalls:
    """
    See `turnwise_gateway.calls.OtherModels`.

    Attributes:
        options: of the session.
        door: of its calls.
        episode: that notes them.
        admit: counts a call, and refuses it when the session has made all its calls.
        count: adds to a metric.
        noted: the calls that were answered, in the order of their ends.
    """

    options: SessionOptions
    door: SessionDoor
    episode: Episode
    admit: Callable[[], None]
    count: Callable[[str, float], None]
    noted: list[OutsideCall] = field(factory=list, init=False)
    _running: dict[asyncio.Timeout, Callable[[], ForwardedCall]] = field(factory=dict, init=False)

    @property
    def names(self) -> tuple[str, ...]:
        own = (name for name in self.options.models if name != self.options.model and not is_pattern(name))
        return tuple(name for name in own if self.is_served(name))

    def is_served(self, model: str) -> bool:
        return self.options.knows_model(model) and self.options.find_model(model) != "refuse"

    @property
    def has_endpoints(self) -> bool:
        return self.options.has_endpoints

    def count_unlisted(self, name: str) -> None:
        """Count a call of the policy by a name that the options do not know."""
        if not self.options.knows_model(name):
            self.count("unlisted_model_calls", 1)

    def find_endpoint(self, model: str) -> Endpoint | None:
        found = self.options.find_model(model)
        return found if isinstance(found, Endpoint) else None

    @asynccontextmanager
    async def forwarding(self, describe: Callable[[], ForwardedCall]) -> AsyncIterator[None]:
        async with self.door.holding():
            with self.door.inside():  # an agent that waits for another model is not idle
                self.admit()
                try:
                    async with asyncio.timeout(None) as scope:  # without a deadline, until `end` sets one
                        self._running[scope] = describe
                        try:
                            yield
                        finally:
                            self._finish(scope)
                except TimeoutError as error:
                    if not scope.expired():
                        raise
                    raise CallRefusedError("session_closed", "the session has ended") from error

    def end(self) -> None:
        """Note all running calls as they are, and cancel them: another server may never answer."""
        now = asyncio.get_running_loop().time()
        for scope in list(self._running):
            # Noted here and not when the handler is cancelled, because the records of the episode may close before.
            self._finish(scope)
            scope.reschedule(now)

    def _finish(self, scope: asyncio.Timeout) -> None:
        if (describe := self._running.pop(scope, None)) is not None:
            self._note(describe())

    def _note(self, call: ForwardedCall) -> None:
        self.count("forwarded_calls", 1)
        self.count("forwarded_failures", call.status >= _FIRST_ERROR or call.status == 0)
        request, response = (shorten(text.decode("utf-8", "replace")) for text in (call.body, call.response))
        noted = OutsideCall(
            model=call.model,
            path=call.path,
            status=call.status,
            request=request,
            response=response,
            num_turns=len(self.episode.turn_records),
        )
        self.noted.append(noted)
        self.episode.note_outside_call(noted)
        self.door.tell(lambda each: each.on_forwarded(call))
