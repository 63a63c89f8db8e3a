"""Concurrent requests with one context: it is prefilled once, even if the prefilling request ends early."""

import asyncio

import pytest

GROUP = [f"g{i}" for i in range(8)]


def test_a_group_prefills_its_prompt_once(tiny_model, serve, ask, together):
    """All but one find the two full pages in the cache."""
    results = serve(tiny_model, lambda engine: together(engine, [ask(name) for name in GROUP]))

    assert [0, *[32] * 7] == sorted(result.num_cached_tokens for result in results)
    assert [16] * 8 == [len(result.token_ids) for result in results]


@pytest.mark.parametrize("end", ["abort", "cancel"])
def test_the_prefilling_request_ends_early(tiny_model, serve, ask, left_over, end):
    """The others continue, and a waiting request that is aborted ends at once."""

    async def scenario(engine):
        async with asyncio.TaskGroup() as group:
            with engine._backend.paused():  # a fast decoder would have tokens of all before the abort
                tasks = [group.create_task(engine.generate(ask(name))) for name in GROUP]
                await asyncio.sleep(0)  # the first was sent, the others wait
                await engine.abort("g7")
                if end == "abort":
                    await engine.abort("g0")
                else:
                    tasks[0].cancel()
                await asyncio.sleep(0)  # both leave the decoder
        ended = [None if task.cancelled() else task.result() for task in tasks]
        return ended, engine.stats()["num_running"], left_over(engine)

    (first, *others, last), num_running, left = serve(tiny_model, scenario)
    assert first is None if end == "cancel" else first.finish_reason == "abort"
    assert [16] * 6 == [len(result.token_ids) for result in others]
    assert (0, "abort") == (len(last.token_ids), last.finish_reason)
    assert (0, {}) == (num_running, left)


def test_sleep_aborts_waiting_requests(tiny_model, serve, ask, together):
    """They are not sent to the manager afterwards."""

    async def scenario(engine):
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(engine.generate(ask(name, max_tokens=200))) for name in GROUP]
            await asyncio.sleep(0)
            await engine.sleep(1)
        await engine.wake_up()
        return [task.result() for task in tasks], await together(engine, [ask(name) for name in GROUP])

    ended, again = serve(tiny_model, scenario)
    assert {"abort"} == {result.finish_reason for result in ended}
    assert [16] * 8 == [len(result.token_ids) for result in again]
