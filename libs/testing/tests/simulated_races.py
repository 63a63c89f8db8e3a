"""Small scenarios with a planted fault each, and the same code without it."""

import asyncio
import queue
import random
import threading
import time


class _Scenario:
    """Runs the same code undisturbed and disturbed; both must return the same."""

    def __init__(self, rng: random.Random) -> None:
        del rng

    def compare(self, undisturbed, disturbed):
        assert undisturbed == disturbed, f"{undisturbed} became {disturbed}"


class LostUpdate(_Scenario):
    """Two tasks read a number, wait, and write it back."""

    lock = None

    def run(self, faults):
        total = 0
        lock = self.lock() if self.lock else None

        async def add():
            nonlocal total
            if lock is not None:
                await lock.acquire()
            before = total
            await asyncio.sleep(0.001 if faults is None else faults.random())
            total = before + 1
            if lock is not None:
                lock.release()

        async def main():
            await add()
            async with asyncio.TaskGroup() as group:
                for _ in range(1 if faults is None else 2):
                    group.create_task(add())
            return total if faults is None else total - 1

        return asyncio.run(main())


class LostUpdateMended(LostUpdate):
    """The same under a lock."""

    lock = asyncio.Lock


class LostWakeUp(_Scenario):
    """A thread looks for an item and then waits for a notification, which may come in between."""

    keeps_lock = False

    def run(self, faults):
        changed, items = threading.Condition(), []

        def put():
            with changed:
                items.append(1)
                changed.notify_all()

        thread = threading.Thread(target=put)
        thread.start()
        if self.keeps_lock:
            with changed:
                changed.wait_for(lambda: items)
        else:
            with changed:
                is_there = bool(items)
            with changed:
                if not is_there:
                    changed.wait()
        thread.join()
        return items


class LostWakeUpMended(LostWakeUp):
    """One lock is held from the look to the wait."""

    keeps_lock = True


class Deadlock(_Scenario):
    """Two threads take two locks in different orders."""

    orders = ((0, 1), (1, 0))

    def run(self, faults):
        locks, seen = (threading.Lock(), threading.Lock()), []

        def take(order):
            with locks[order[0]], locks[order[1]]:
                seen.append(1)

        threads = [threading.Thread(target=take, args=(order,)) for order in self.orders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return len(seen)


class DeadlockMended(Deadlock):
    """Both take them in the same order."""

    orders = ((0, 1), (0, 1))


class AbandonedThread(_Scenario):
    """A cancelled call leaves its thread running, which writes after the next call."""

    waits = False

    def run(self, faults):
        served = []

        def write(version, seconds):
            time.sleep(seconds)
            served.append(version)

        async def update(version, seconds):
            work = asyncio.ensure_future(asyncio.to_thread(write, version, seconds))
            try:
                await asyncio.shield(work)
            except asyncio.CancelledError:
                if self.waits:
                    await work
                raise

        async def main():
            async with asyncio.TaskGroup() as group:
                first = group.create_task(update(1, 0.0 if faults is None else faults.random()))
                await asyncio.sleep(1.0 if faults is None else faults.random())
                first.cancel()
            await update(2, 0.0 if faults is None else faults.random())
            await asyncio.sleep(10)

        asyncio.run(main())
        return served[-1:]


class AbandonedThreadMended(AbandonedThread):
    """The cancelled call waits for its thread."""

    waits = True


class CheckThenAct(_Scenario):
    """Two threads check that a queue has an item, and then take it."""

    looks_first = True

    def run(self, faults):
        items, taken = queue.SimpleQueue(), []
        items.put(1)

        def take():
            try:
                if not self.looks_first or not items.empty():
                    taken.append(items.get(timeout=None if self.looks_first else 1.0))
            except queue.Empty:
                pass

        threads = [threading.Thread(target=take) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return taken


class CheckThenActMended(CheckThenAct):
    """They take an item without the check."""

    looks_first = False


class Spin(_Scenario):
    """Seed 1 never ends and never waits."""

    def __init__(self, rng):
        self.spins = round(rng.random(), 3) == 0.842  # the first number that seed 1 draws

    def run(self, faults):
        while self.spins:
            pass
        return 0
