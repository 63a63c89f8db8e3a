"""What comes up close together leaves as one message, and nothing waits longer than it must."""

import asyncio
import itertools
import selectors

from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.runtime.coalescing import Coalescer


class SkippingSelector(selectors.DefaultSelector):
    """Does not wait: the clock moves by what it was asked to wait."""

    now_s = 0.0

    def select(self, timeout=None):
        """Return what is ready."""
        self.now_s += timeout or 0.0
        return super().select(0)


class SkippingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock shows only what was waited for."""

    def __init__(self):
        self._clock = SkippingSelector()
        super().__init__(self._clock)

    def time(self):
        """Return seconds waited so far."""
        return self._clock.now_s


def run(body):
    """Run a coroutine in no time."""
    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        return runner.run(body())


@settings(max_examples=60)
@given(st.lists(st.floats(0, 0.05), max_size=30), st.floats(0, 0.04))
def test_messages_keep_their_distance_and_nothing_waits_longer_than_it(pauses, gap_s):
    """Everything leaves once, in order, after at most `gap_s`, in messages at least `gap_s` apart."""

    async def body():
        loop = asyncio.get_running_loop()
        box, left = [], []

        def send():
            left.append((loop.time(), box.copy()))
            box.clear()

        coalescer = Coalescer(send, gap_s)
        for pause in pauses:
            await asyncio.sleep(pause)
            box.append(loop.time())
            coalescer.schedule()
        await asyncio.sleep(1)
        return box, left

    box, left = run(body)
    came = [at for _when, held in left for at in held]
    assert not box
    assert len(came) == len(pauses)
    assert came == sorted(came)
    assert all(0 <= when - at <= gap_s + 1e-9 for when, held in left for at in held)
    assert all(held for _when, held in left)
    assert all(b - a >= gap_s - 1e-9 for (a, _), (b, _) in itertools.pairwise(left))


def test_what_is_sent_now_does_not_leave_again():
    """Sending at once takes the place of what was scheduled, and the gap begins with it."""

    async def body():
        sent = []
        coalescer = Coalescer(lambda: sent.append(asyncio.get_running_loop().time()), 0.5)
        coalescer.schedule()
        coalescer.now()
        coalescer.schedule()
        await asyncio.sleep(2)
        return [at - sent[0] for at in sent]

    assert run(body) == [0, 0.5]
