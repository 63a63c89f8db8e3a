"""An engine whose turns end when a test says so, and clients that leave before."""

import asyncio

from attrs import define, evolve, field

from turnwise import FinishReason

MARKED = {"headers": {"x-stainless-retry-count": "2"}}


@define(eq=False)
class GatedEngine:
    """Samples when a test says so; an aborted request returns the first half of its turn."""

    engine: object
    chat: object
    asked: list = field(factory=list)
    may_end: list = field(factory=list)
    changed: asyncio.Condition = field(factory=asyncio.Condition)
    opens: bool = False
    _aborted: set = field(factory=set)

    def __getattr__(self, name):
        return getattr(self.engine, name)

    async def generate(self, request):
        number = len(self.asked)
        self.asked.append(request)
        self.may_end.append(asyncio.Event())
        if self.opens:
            self.may_end[number].set()
        async with self.changed:
            self.changed.notify_all()
        await self.may_end[number].wait()
        result = await self.engine.generate(evolve(request, on_tokens=None))
        text = f"{number}: {'long ' * number}"
        ids = [*map(int, self.encode(text)), int(result.token_ids[-1])]
        half = len(ids) // 2 if request.request_id in self._aborted else len(ids)
        reason = FinishReason.ABORT if half < len(ids) else result.finish_reason
        changes = {"token_ids": ids[:half], "logprobs": [-1.0] * half, "finish_reason": reason}
        return evolve(result, **changes)

    async def abort(self, request_id):
        number = next(number for number, each in enumerate(self.asked) if each.request_id == request_id)
        if not self.may_end[number].is_set():
            self._aborted.add(request_id)
            self.may_end[number].set()

    async def wait_for_request(self, count):
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.asked) >= count)

    def let_go(self):
        """Let all turns end, now and later."""
        self.opens = True
        for event in self.may_end:
            event.set()

    def encode(self, text):
        return self.chat.tokenizer.encode(text)


async def leave(task):
    """Let the client of a call leave."""
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()


async def settle_loop():
    """Run all that does not wait for a test."""
    for _ in range(20):
        await asyncio.sleep(0)
