"""
Calls whose clients have left before there was a turn.

The tokens of a call that nobody reads are in no record, so they are counted: if clients leave long turns, the model
learns from short ones alone. With the option `finish_left_calls` the sampling continues, and the turn waits for a retry
that its library has marked: an equal request without the mark may be another sample of the prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from attrs import define, field

from turnwise import GenerateResult
from turnwise_gateway.calls import ModelCall
from turnwise_gateway.session.delivery import SharedCall
from turnwise_gateway.session.door import SessionDoor
from turnwise_gateway.session.records import OpenRecord

MAX_LEFT: Final = 16
"""
Most left calls of a session that continue, or wait for their retry.

A client that never marks its retries would otherwise fill the engine with turns that no client fetches.
"""


@define(eq=False)
class LeftCalls:
    """
    The left calls of a session.

    Attributes:
        finishes: whether their sampling continues.
        door: of the session; its listeners are told.
        count: adds to a metric of the session.
        ending: samplings that were told to end, and have not ended yet.
    """

    finishes: bool
    door: SessionDoor
    count: Callable[[str, float], None]
    ending: set[asyncio.Task[None]] = field(factory=set, init=False)
    _sampling: dict[SharedCall, asyncio.Future[None]] = field(factory=dict, init=False)

    def leave(self, call: ModelCall, shared: SharedCall, record: OpenRecord) -> None:
        """End the sampling of a call that its last client has left, unless it continues."""
        if shared in self._sampling and self.finishes:  # its retry has left, too
            return
        if not self.finishes or len(self._sampling) >= MAX_LEFT:
            shared.cancel()
            return
        self._sampling[shared] = sampling = asyncio.get_running_loop().create_future()
        if call.outlive is not None:
            call.outlive(sampling)
        self.door.tell(lambda each: each.on_kept(shared.number, record.trajectory))

    def end(self, task: asyncio.Task[None]) -> None:
        """End the sampling of a call, in a task."""
        self.ending.add(task)
        task.add_done_callback(self.ending.discard)
        if not task.cancelling():  # a second time would keep the first from hearing what was sampled
            task.cancel()

    async def wait_for_request(self, shared: SharedCall, result: GenerateResult) -> None:
        """Keep the result of a call until a request waits for it."""
        self._end_sampling(shared)
        try:
            await shared.wait_for_request()
        except asyncio.CancelledError:
            self.count_part(result)
            raise

    def remove(self, shared: SharedCall) -> None:
        """Forget a call that has its retry, or has ended."""
        self._end_sampling(shared)
        self._sampling.pop(shared, None)

    def count_part(self, result: GenerateResult) -> None:
        """Count the tokens of a call that nobody will read."""
        self.count("left_tokens", len(result.token_ids))

    def _end_sampling(self, shared: SharedCall) -> None:
        sampling = self._sampling.get(shared)
        if sampling is not None and not sampling.done():
            sampling.set_result(None)
