"""The selector loop: actions from other threads, callbacks of files, and its end."""

from __future__ import annotations

import os
import threading

import pytest

from turnwise_python_sandbox.selector_loop import SelectorLoop


@pytest.fixture
def loop():
    """A loop that the test runs itself."""
    made = SelectorLoop()
    yield made
    made.close()


def test_a_posted_action_wakes_the_loop(loop: SelectorLoop) -> None:
    """A loop that waits without a timeout runs an action that another thread posts."""
    seen = []
    poster = threading.Thread(target=lambda: loop.post(lambda: seen.append(threading.current_thread())))
    poster.start()
    loop.run_once(None)
    poster.join()

    assert [threading.current_thread()] == seen


def test_actions_run_in_the_order_of_their_posts(loop: SelectorLoop) -> None:
    """One round runs all posted actions, oldest first."""
    seen: list[int] = []
    for number in range(100):
        loop.post(lambda number=number: seen.append(number))
    loop.run_once(None)

    assert list(range(100)) == seen


def test_an_action_may_post_another(loop: SelectorLoop) -> None:
    """An action that is posted by an action runs in the same round."""
    seen: list[str] = []
    loop.post(lambda: loop.post(lambda: seen.append("inner")))
    loop.run_once(None)

    assert ["inner"] == seen


def test_more_posts_than_the_wakeup_socket_holds(loop: SelectorLoop) -> None:
    """Posting never blocks and loses nothing, even if the loop does not run for a long time."""
    seen: list[int] = []
    for number in range(50_000):
        loop.post(lambda number=number: seen.append(number))
    loop.run_once(None)

    assert len(seen) == 50_000
    loop.post(lambda: seen.append(-1))
    loop.run_once(None)
    assert seen[-1] == -1


def test_every_post_of_many_threads_runs(loop: SelectorLoop) -> None:
    """Actions that threads post while the loop runs are run exactly once."""
    counts = [0] * 8

    def increment(index: int) -> None:
        counts[index] += 1

    def post_many(index: int) -> None:
        for _ in range(500):
            loop.post(lambda: increment(index))

    threads = [threading.Thread(target=post_many, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    while sum(counts) < 8 * 500:
        loop.run_once(None)
    for thread in threads:
        thread.join()

    assert [500] * 8 == counts


def test_a_readable_file_is_called_back(loop: SelectorLoop) -> None:
    """The callback runs in each round in which the file is readable, until it is unregistered."""
    read_end, write_end = os.pipe()
    rounds = []
    loop.register(read_end, lambda: rounds.append(1))
    loop.run_once(0)
    assert rounds == []
    os.write(write_end, b"x")
    for _ in range(2):
        loop.run_once(None)
    loop.unregister(read_end)
    loop.run_once(0)

    assert rounds == [1, 1]
    with pytest.raises(KeyError):
        loop.unregister(read_end)
    os.close(read_end)
    os.close(write_end)


def test_callbacks_run_before_actions(loop: SelectorLoop) -> None:
    """An action sees the effects of every message that had arrived before its round."""
    read_end, write_end = os.pipe()
    seen: list[str] = []
    loop.register(read_end, lambda: seen.append("callback"))
    loop.post(lambda: seen.append("action"))
    os.write(write_end, b"x")
    loop.run_once(None)

    assert ["callback", "action"] == seen
    os.close(read_end)
    os.close(write_end)


def test_the_loop_survives_an_action_that_raises(loop: SelectorLoop) -> None:
    """The exception reaches the caller of `run_once`, and the later actions run in the next round."""
    seen: list[int] = []
    loop.post(lambda: 1 // 0)
    loop.post(lambda: seen.append(1))
    with pytest.raises(ZeroDivisionError):
        loop.run_once(None)
    loop.run_once(0)

    assert [1] == seen


def test_posting_to_a_closed_loop_does_nothing() -> None:
    """A late `kill` or `close` of another thread is no error."""
    closed, seen = SelectorLoop(), []
    closed.close()
    closed.post(lambda: seen.append(1))

    assert [] == seen
