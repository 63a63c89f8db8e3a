"""Large calls of real Ray actors arrive later than small ones that were sent after them."""

import asyncio

import pytest
from ray_blueprint import ScriptedBlueprint
from ray_runs import ON_RAY, make_manager, make_tasks

from turnwise import Status, Task

pytestmark = [*ON_RAY, pytest.mark.usefixtures("ray_cluster")]
LARGE = "x" * 300_000
"""Ray sends arguments above 100 KB through its object store."""


def test_ray_starts_a_small_call_before_a_large_one_and_numbers_order_them():
    """The promise of Ray that the numbers replace: without them, a small call overtakes."""
    import ray

    from turnwise.runtime.remote.actor_calls import OrderedActor, OrderedCalls, in_order, post

    class Diary(OrderedActor):
        def __init__(self):
            self.notes = []

        async def write(self, text):
            self.notes.append(text[:5])

        @in_order
        async def write_in_order(self, text):
            self.notes.append(text[:5])

        async def take_notes(self, count):
            notes, self.notes = self.notes, []
            assert len(notes) == count
            return notes

    actor = ray.remote(num_cpus=0)(Diary).remote()
    ray.get(actor.take_notes.remote(0))
    texts = [text for number in range(20) for text in (f"L{number:03} {LARGE}", f"s{number:03} ")]

    ray.get([actor.write.remote(text) for text in texts])
    unordered = ray.get(actor.take_notes.remote(40))
    calls = OrderedCalls()
    ray.get([calls.ask(actor.write_in_order, text) for text in texts])
    ordered = ray.get(actor.take_notes.remote(40))

    assert sorted(unordered) == sorted(ordered)
    assert [text[:5] for text in texts] == ordered != unordered
    for text in texts:
        calls.post(actor.write_in_order, text)
    ray.get(calls.ask(actor.write_in_order, "last "))
    assert [text[:5] for text in texts] == ray.get(actor.take_notes.remote(41))[:-1]
    post(actor.write, "a")
    ray.kill(actor)


@pytest.mark.slow
def test_an_abort_ends_large_episodes_that_are_on_their_way():
    """Each would run to its end if the abort reached its worker first and was lost."""
    tasks = [Task(messages=task.messages, uid=task.uid, extra={"text": LARGE}) for task in make_tasks(24)]
    with make_manager(ScriptedBlueprint(token_latency_s=0.01)) as manager:
        dispatcher, workers = manager.runtime.dispatcher, manager.runtime.workers

        async def abort_when_submitted():
            for _ in range(10_000):
                if sum(map(dispatcher.count_held, (0, 1))) == len(tasks):
                    break
                await asyncio.sleep(0)
            workers.abort()

        for _ in range(3):
            finished = manager.iterate(tasks)
            manager.call(abort_when_submitted())
            assert [Status.ABORTED] * len(tasks) == [result.status for result in finished]
        assert {Status.COMPLETED, Status.TRUNCATED} >= {result.status for result in manager.rollout(tasks[:4])}
