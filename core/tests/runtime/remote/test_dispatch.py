"""Dispatch of episodes: each is delivered exactly once, whatever dies or is interrupted."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise import EpisodeResult, Status, Task, Trajectory
from turnwise.record.spec import EpisodeSpec, UnfinishedEpisode
from turnwise.runtime.remote.dispatch import EpisodeDispatcher


def make_spec(number):
    return EpisodeSpec(task=Task(messages=({"role": "user", "content": "x"},), uid=str(number)), agent_name="a")


def make_specs(count):
    return [make_spec(number) for number in range(count)]


def finish(spec):
    return EpisodeResult(task=spec.task, status=Status.COMPLETED)


def do_nothing():
    pass


@settings(max_examples=200)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("acquire"), st.integers(0, 2), st.integers(1, 4)),
            st.tuples(st.just("complete"), st.integers(0, 2), st.integers(0, 3)),
            st.tuples(st.just("requeue"), st.integers(0, 2), st.just(0)),
            st.tuples(st.just("interrupt"), st.integers(0, 11), st.integers(0, 11)),
        ),
        max_size=40,
    )
)
def test_each_episode_is_delivered_once(events):
    """Workers acquire, finish and die, and episodes are interrupted, in any order: one delivery each, and one end."""
    dispatcher, delivered, ends, held = EpisodeDispatcher(max_kills=2), Counter(), [], {0: {}, 1: {}, 2: {}}
    keys = dispatcher.submit(make_specs(12), lambda n, _: delivered.update([n]), lambda: ends.append(True))
    for event, one, two in events:
        if event == "acquire":
            held[one] |= dict(dispatcher.acquire(one, two))
        elif event == "complete" and held[one]:
            key = sorted(held[one])[min(two, len(held[one]) - 1)]
            dispatcher.complete(one, key, finish(held[one].pop(key)))
        elif event == "requeue":
            dispatcher.requeue(one, "killed")
            held[one] = {}
        elif event == "interrupt":
            to_end = dispatcher.interrupt(keys[min(one, two) : max(one, two)])
            assert all(set(keys_of_worker) <= set(held[worker]) for worker, keys_of_worker in to_end.items())
    assert max(delivered.values(), default=0) <= 1
    for worker in held:
        dispatcher.requeue(worker, "killed")
    dispatcher.fail_all("the end")

    assert delivered == Counter(range(12))
    assert ends == [True]
    assert dispatcher.keys == []


def test_a_second_result_is_dropped():
    """A result of an episode that was delivered before changes nothing."""
    dispatcher, results = EpisodeDispatcher(), []
    dispatcher.submit(make_specs(1), lambda _, result: results.append(result), do_nothing)
    ((key, spec),) = dispatcher.acquire(0, 1)
    for _ in range(2):
        dispatcher.complete(0, key, finish(spec))

    assert len(results) == 1


def test_interrupted_episodes_are_aborted():
    """Waiting episodes are delivered as aborted at once, held ones when their worker dies; both can be resumed."""
    dispatcher, results = EpisodeDispatcher(), {}
    keys = dispatcher.submit(make_specs(4), results.__setitem__, do_nothing)
    dispatcher.acquire(0, 2)

    assert dispatcher.interrupt(keys[1:]) == {0: [keys[1]]}
    assert {number: result.status for number, result in results.items()} == {2: Status.ABORTED, 3: Status.ABORTED}
    dispatcher.requeue(0, "killed")
    assert results[1].status is Status.ABORTED
    assert all(not result.unfinished.started for result in results.values())
    assert dispatcher.num_retried == 1


def test_a_resumed_episode_keeps_its_record_when_its_worker_dies():
    """It runs again from its saved state, and the result of its failure has the record so far."""
    record = Trajectory([1])
    record.add_action([2], [-1.0])
    resumed = UnfinishedEpisode(spec=make_spec(0), trajectories=(record,), num_steps=1).resumed_spec
    dispatcher, results = EpisodeDispatcher(max_kills=1), {}
    dispatcher.submit([resumed], results.__setitem__, do_nothing)
    dispatcher.acquire(0, 1)
    dispatcher.requeue(0, "killed")

    assert (results[0].status, results[0].fault.kind) == (Status.FAILED, "PoisonedEpisode")
    assert results[0].trajectories[0].input_ids.tolist() == [1, 2]
    assert dispatcher.num_quarantined == 1


@settings(max_examples=200)
@given(
    killers=st.sets(st.integers(0, 29), max_size=5),
    windows=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    order=st.randoms(use_true_random=False),
)
def test_only_episodes_that_kill_workers_fail(killers, windows, order):
    """Episodes that ran beside a killer finish, whatever the windows of the workers and the order of the episodes."""
    dispatcher, results = EpisodeDispatcher(), {}
    dispatcher.submit(make_specs(30), results.__setitem__, do_nothing)
    held = [{} for _ in windows]
    for _ in range(2000):
        if not dispatcher.keys:
            break
        worker = order.randrange(len(windows))
        held[worker] |= dict(dispatcher.acquire(worker, windows[worker]))
        if held[worker]:
            key = order.choice(sorted(held[worker]))
            if int(held[worker][key].task.uid) in killers:
                dispatcher.requeue(worker, "killed")
                held[worker] = {}
            else:
                dispatcher.complete(worker, key, finish(held[worker].pop(key)))

    assert {number for number, result in results.items() if result.status is Status.FAILED} == killers
    assert len(results) == 30
    assert dispatcher.num_quarantined == len(killers)


def test_a_quarantined_episode_has_its_worker_to_itself():
    """Its worker first finishes its other episodes, and other workers continue meanwhile."""
    dispatcher, results = EpisodeDispatcher(max_kills=1), {}
    dispatcher.submit(make_specs(4), results.__setitem__, do_nothing)
    dispatcher.acquire(0, 2)
    dispatcher.acquire(1, 1)
    dispatcher.requeue(0, "killed")

    assert dispatcher.acquire(1, 4) == []  # it will run the quarantined two, and holds another
    assert [key for key, _ in dispatcher.acquire(0, 4)] == [3]
    dispatcher.complete(1, 2, finish(make_spec(2)))
    assert [key for key, _ in dispatcher.acquire(1, 4)] == [0]
    assert dispatcher.acquire(1, 4) == []
    dispatcher.requeue(1, "killed again")
    assert (results[0].status, results[0].fault.kind) == (Status.FAILED, "PoisonedEpisode")
    assert "2 workers died" in results[0].fault.message
    dispatcher.complete(0, 3, finish(make_spec(3)))
    assert [key for key, _ in dispatcher.acquire(0, 4)] == [1]
    assert dispatcher.interrupt([1]) == {0: [1]}
