"""Coalescing: messages that are due close together become one, and none waits for long."""

import asyncio
import itertools
import selectors

from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.runtime.remote.coalescing import Coalescer


class SkippingSelector(selectors.DefaultSelector):
    """Advances its clock by each timeout, without waiting."""

    now_s = 0.0

    def select(self, timeout=None):
        """Return the ready events."""
        self.now_s += timeout or 0.0
        return super().select(0)


class SkippingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock is the sum of all timeouts."""

    def __init__(self):
        self._clock = SkippingSelector()
        super().__init__(self._clock)

    def time(self):
        """Return the sum of the timeouts in seconds."""
        return self._clock.now_s


def run(body):
    """Run a coroutine without waiting."""
    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        return runner.run(body())


@settings(max_examples=60)
@given(st.lists(st.floats(0, 0.05), max_size=30), st.floats(0, 0.04))
def test_messages_are_at_least_a_gap_apart_and_nothing_waits_longer(pauses, gap_s):
    """Everything is sent once, in order, after at most `gap_s`, in messages at least `gap_s` apart."""

    async def body():
        loop = asyncio.get_running_loop()
        box, sent = [], []

        def send():
            sent.append((loop.time(), box.copy()))
            box.clear()

        coalescer = Coalescer(send, gap_s)
        for pause in pauses:
            await asyncio.sleep(pause)
            box.append(loop.time())
            coalescer.schedule()
        await asyncio.sleep(1)
        return box, sent

    box, sent = run(body)
    ready = [at for _when, items in sent for at in items]
    assert not box
    assert len(ready) == len(pauses)
    assert ready == sorted(ready)
    assert all(0 <= when - at <= gap_s + 1e-9 for when, items in sent for at in items)
    assert all(items for _when, items in sent)
    assert all(b - a >= gap_s - 1e-9 for (a, _), (b, _) in itertools.pairwise(sent))


def test_a_flush_replaces_a_scheduled_message():
    """Flushing sends at once, cancels the scheduled call and starts a new gap."""

    async def body():
        sent = []
        coalescer = Coalescer(lambda: sent.append(asyncio.get_running_loop().time()), 0.5)
        coalescer.schedule()
        coalescer.flush()
        coalescer.schedule()
        await asyncio.sleep(2)
        return [at - sent[0] for at in sent]

    assert run(body) == [0, 0.5]
