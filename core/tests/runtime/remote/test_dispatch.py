"""Dispatch of episodes: each is delivered exactly once, whatever dies or is interrupted."""

from collections import Counter

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise import EpisodeResult, Status, Task, Trajectory
from turnwise.record.lineage import EpisodeRecord
from turnwise.record.spec import EpisodeSpec, UnfinishedEpisode
from turnwise.runtime.remote.dispatch import EpisodeDispatcher
from turnwise.types import Fault


def make_spec(number):
    return EpisodeSpec(task=Task(messages=({"role": "user", "content": "x"},), uid=str(number)), agent_name="a")


def make_specs(count):
    return [make_spec(number) for number in range(count)]


def finish(spec):
    return EpisodeResult(task=spec.task, status=Status.COMPLETED)


@settings(max_examples=200)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("acquire"), st.integers(0, 2), st.integers(1, 4)),
            st.tuples(st.just("complete"), st.integers(0, 2), st.integers(0, 3)),
            st.tuples(st.just("requeue"), st.integers(0, 2), st.integers(1, 4)),
            st.tuples(st.just("interrupt"), st.integers(0, 11), st.integers(0, 11)),
        ),
        max_size=40,
    )
)
def test_each_episode_is_delivered_once(events):
    """Workers acquire, finish and die, and episodes are interrupted, in any order: one delivery each."""
    dispatcher, delivered, held = EpisodeDispatcher(max_kills=2), Counter(), {0: {}, 1: {}, 2: {}}

    def deliver(number, _result):
        delivered.update([number])

    keys = dispatcher.submit(enumerate(evolve(spec, tries=2) for spec in make_specs(12)), deliver)
    for event, one, two in events:
        if event == "acquire":
            held[one] |= dict(dispatcher.acquire(one, two))
        elif event == "complete" and held[one]:
            key = sorted(held[one])[min(two, len(held[one]) - 1)]
            spec = held[one].pop(key)
            dispatcher.complete(one, key, lose(spec) if two == 0 else finish(spec))
        elif event == "requeue":
            dispatcher.requeue(one, "killed", two)
            held[one] = {}
        elif event == "interrupt":
            to_end = dispatcher.interrupt(keys[min(one, two) : max(one, two)])
            assert all(set(keys_of_worker) <= set(held[worker]) for worker, keys_of_worker in to_end.items())
    assert max(delivered.values(), default=0) <= 1
    for worker in held:
        dispatcher.requeue(worker, "killed", 4)
    dispatcher.fail_all("the end")

    assert delivered == Counter(range(12))
    assert dispatcher.keys == dispatcher.keys_of(deliver) == []


def lose(spec, kind="LostResourceError"):
    return EpisodeResult(task=spec.task, status=Status.FAILED, fault=Fault(owner="infra", kind=kind, message="gone"))


def test_an_episode_that_lost_something_is_the_next_one():
    """Any worker may take it, until its tries are over; no worker is to blame."""
    dispatcher, results = EpisodeDispatcher(), {}
    specs = [evolve(spec, tries=2) for spec in make_specs(3)]
    dispatcher.submit(enumerate(specs), results.__setitem__)
    ((key, spec),) = dispatcher.acquire(0, 1)

    assert dispatcher.complete(0, key, lose(spec))
    ((again, spec),) = dispatcher.acquire(1, 1)
    assert (again, spec.num_losses, spec.tries, results) == (key, 1, 1, {})
    assert not dispatcher.complete(1, key, lose(spec))

    assert (results[0].status, dispatcher.num_retried, dispatcher.count_held(0)) == (Status.FAILED, 1, 0)
    ((key, spec),) = dispatcher.acquire(0, 1)
    assert not dispatcher.complete(0, key, lose(spec, "InfrastructureError"))
    assert results[1].status is Status.FAILED


def test_an_interrupted_episode_that_lost_something_does_not_run_again():
    """It can be resumed, as if its worker had died."""
    dispatcher, results = EpisodeDispatcher(), {}
    keys = dispatcher.submit([(0, evolve(make_spec(0), tries=2))], results.__setitem__)
    ((key, spec),) = dispatcher.acquire(0, 1)
    dispatcher.interrupt(keys)

    assert not dispatcher.complete(0, key, lose(spec))
    assert (results[0].status, results[0].unfinished.started) == (Status.ABORTED, False)


def test_a_second_result_is_dropped():
    """A result of an episode that was delivered before changes nothing."""
    dispatcher, results = EpisodeDispatcher(), []
    dispatcher.submit(enumerate(make_specs(1)), lambda _, result: results.append(result))
    ((key, spec),) = dispatcher.acquire(0, 1)
    for _ in range(2):
        dispatcher.complete(0, key, finish(spec))

    assert len(results) == 1


def test_interrupted_episodes_are_aborted():
    """Waiting episodes are delivered as aborted at once, held ones when their worker dies; both can be resumed."""
    dispatcher, results = EpisodeDispatcher(), {}
    keys = dispatcher.submit(enumerate(make_specs(4)), results.__setitem__)
    dispatcher.acquire(0, 2)

    assert dispatcher.interrupt(keys[1:]) == {0: [keys[1]]}
    assert {number: result.status for number, result in results.items()} == {2: Status.ABORTED, 3: Status.ABORTED}
    dispatcher.requeue(0, "killed", 4)
    assert results[1].status is Status.ABORTED
    assert all(not result.unfinished.started for result in results.values())
    assert dispatcher.num_retried == 1


def test_a_resumed_episode_keeps_its_record_when_its_worker_dies():
    """It runs again from its saved state, and the result of its failure has the record so far."""
    record = Trajectory([1])
    record.add_action([2], [-1.0])
    resumed = UnfinishedEpisode(spec=make_spec(0), records=(EpisodeRecord(record),), num_steps=1).resumed_spec
    dispatcher, results = EpisodeDispatcher(max_kills=1), {}
    dispatcher.submit([(0, resumed)], results.__setitem__)
    for _ in range(2):  # only the second time it is a suspect, which runs alone to be tested
        assert not results
        dispatcher.acquire(0, 1)
        dispatcher.requeue(0, "killed", 4)

    assert (results[0].status, results[0].fault.kind) == (Status.FAILED, "PoisonedEpisode")
    assert results[0].trajectories[0].input_ids.tolist() == [1, 2]
    assert dispatcher.num_quarantined == 1


def num_divisions(num_suspects):
    """Return the deaths after which one suspect is alone and dead, if each death leaves a quarter."""
    return 1 if num_suspects <= 4 else 1 + num_divisions(-(-num_suspects // 4))


class Cluster:
    """
    Workers that run a dispatcher's episodes in rounds: in each, every running episode ends or kills its worker.

    Attributes:
        slots: most episodes that a worker runs at once; it starts them in order.
        killers: numbers of the episodes that kill their worker.
        runs: times that each episode was started.
        rounds: number of running episodes in each round.
        deaths: of workers.
    """

    def __init__(self, num_episodes, *, workers, window=512, slots=512, killers=(), order=None):
        self.dispatcher, self.results = EpisodeDispatcher(), {}
        self.dispatcher.submit(enumerate(make_specs(num_episodes)), self.results.__setitem__)
        self.held = {worker: {} for worker in range(workers)}
        self.window, self.slots, self.killers, self.order = window, slots, set(killers), order
        self.runs, self.rounds, self.deaths = Counter(), [], 0
        self.share()

    def acquire(self, worker, limit):
        self.held[worker] |= dict(self.dispatcher.acquire(worker, limit))

    def share(self):
        share = self.dispatcher.even_share(list(self.held))
        for worker in self.held:
            self.acquire(worker, min(share, self.window))

    def running(self, worker):
        return list(self.held[worker])[: self.slots]

    def kill(self, *workers):
        """Kill workers at the same time: each death is only known after the episodes of the one before were shared."""
        for worker in workers:
            self.deaths += 1
            self.runs.update(self.running(worker))
            self.held[worker] = {}
            self.dispatcher.requeue(worker, "killed", self.slots)
            self.share()

    def run(self):
        """Run until every episode is delivered."""
        while self.dispatcher.keys:
            running = {worker: self.running(worker) for worker in self.held}
            self.rounds.append(sum(map(len, running.values())))
            assert self.rounds[-1], "episodes wait, and every worker is idle"
            for worker, keys in running.items():
                ended = self.order.sample(keys, len(keys)) if self.order else keys
                for key in ended:
                    if key in self.killers:
                        self.kill(worker)
                        break
                    self.runs[key] += 1
                    self.dispatcher.complete(worker, key, finish(self.held[worker].pop(key)))
            for worker in self.held:
                self.acquire(worker, self.window)
        return self

    @property
    def failed(self):
        return {number for number, result in self.results.items() if result.status is Status.FAILED}


@settings(max_examples=100)
@given(
    num_episodes=st.integers(1, 200),
    killers=st.sets(st.integers(0, 199), max_size=5),
    workers=st.integers(1, 4),
    window=st.integers(1, 64),
    slots=st.integers(1, 32),
    order=st.randoms(use_true_random=False),
)
def test_killers_fail_and_cost_the_others_little(num_episodes, killers, workers, window, slots, order):
    """
    Exactly the episodes that kill workers fail, in any order of events. Each costs two deaths and one per division, and
    a round without a death leaves no worker idle that could run an episode.
    """
    killers = {killer for killer in killers if killer < num_episodes}
    cluster = Cluster(num_episodes, workers=workers, window=window, slots=slots, killers=killers, order=order).run()
    divisions = num_divisions(min(window, slots))

    assert cluster.failed == killers
    assert len(cluster.results) == num_episodes
    assert cluster.dispatcher.num_quarantined == len(killers)
    assert cluster.deaths <= len(killers) * (2 + divisions)
    # All episodes of a run could share a worker's deaths; each death costs an episode at most one more run.
    assert max(cluster.runs.values()) <= 1 + len(killers) * (2 + divisions)
    # A killer costs a round for each of its deaths, one for each of the other three groups if there is one worker, and
    # a round in which workers finish their ordinary episodes.
    undisturbed = -(-num_episodes // (workers * min(window, slots)))
    assert len(cluster.rounds) <= 2 * undisturbed + workers + 5 * cluster.deaths


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_a_worker_lost_twice_costs_four_groups(workers):
    """512 episodes whose worker was lost twice run again side by side, in at most ten rounds and without a failure."""
    cluster = Cluster(512, workers=workers)
    cluster.kill(0)
    cluster.kill(*[worker for worker in cluster.held if cluster.held[worker]])
    cluster.run()

    assert cluster.failed == set()
    assert len(cluster.rounds) <= 10
    assert max(cluster.rounds) >= 128
    assert max(cluster.runs.values()) <= 4


@pytest.mark.parametrize("killer", [0, 255, 511])
def test_a_killer_among_512_is_found_with_five_more_deaths(killer):
    """Group testing finds it on two workers; no other episode fails, and none runs more than seven times again."""
    cluster = Cluster(512, workers=2, killers=[killer]).run()

    assert cluster.failed == {killer}
    assert cluster.deaths <= 2 + 5
    assert all(runs <= 1 + 2 + 5 for runs in cluster.runs.values())
    assert len(cluster.rounds) <= 2 + 2 * 5


def test_only_started_episodes_become_suspects():
    """A worker that runs 4 of its 100 episodes is lost twice: 4 of them are tested, and 96 run as usual."""
    cluster = Cluster(100, workers=1, slots=4)
    cluster.kill(0)
    cluster.kill(0)

    assert sorted([*cluster.held[0], *cluster.dispatcher._quarantine.keys]) == [0, 1, 2, 3]
    assert len(cluster.dispatcher._pending) == 96


def test_episodes_of_a_dead_worker_are_shared():
    """They go to all live workers in even parts, whatever these hold already."""
    cluster = Cluster(64, workers=4)
    cluster.held.pop(0)
    cluster.dispatcher.requeue(0, "killed", 512)
    cluster.share()

    assert sorted(len(held) for held in cluster.held.values()) == [20, 22, 22]


def test_an_episode_that_was_alone_by_chance_is_tested_first():
    """Two workers of one node died one after the other, and the second had nothing else: the episode is innocent."""
    dispatcher, results = EpisodeDispatcher(), {}
    dispatcher.submit(enumerate(make_specs(1)), results.__setitem__)
    for worker in (0, 1):
        dispatcher.acquire(worker, 1)
        assert not dispatcher.requeue(worker, "its node died", 4)
    ((key, spec),) = dispatcher.acquire(2, 1)
    dispatcher.complete(2, key, finish(spec))

    assert results[0].status is Status.COMPLETED
    assert dispatcher.num_quarantined == 0


def test_suspects_have_their_workers_to_themselves():
    """A worker first finishes its other episodes, other workers continue meanwhile, and groups run side by side."""
    dispatcher, results = EpisodeDispatcher(max_kills=1), {}
    dispatcher.submit(enumerate(make_specs(7)), results.__setitem__)
    dispatcher.acquire(0, 2)
    dispatcher.acquire(1, 1)
    dispatcher.acquire(2, 1)
    assert not dispatcher.requeue(0, "killed", 4)

    assert dispatcher.acquire(1, 4) == []  # it will test one half, and holds another episode
    assert [key for key, _ in dispatcher.acquire(0, 4)] == [0]
    assert [key for key, _ in dispatcher.acquire(2, 2)] == [4]  # one group waits, and one worker will test it
    dispatcher.complete(1, 2, finish(make_spec(2)))
    assert [key for key, _ in dispatcher.acquire(1, 4)] == [1]
    assert dispatcher.acquire(0, 4) == dispatcher.acquire(1, 4) == []
    assert dispatcher.requeue(1, "killed again", 4)
    assert (results[1].status, results[1].fault.kind) == (Status.FAILED, "PoisonedEpisode")
    assert "2 workers died" in results[1].fault.message
    dispatcher.complete(0, 0, finish(make_spec(0)))
    assert [key for key, _ in dispatcher.acquire(0, 4)] == [5, 6]


def test_an_interrupted_episode_that_ran_beside_another_is_suspect_too():
    """The other one does not fail in its place: it was not alone on the dead worker."""
    dispatcher, results = EpisodeDispatcher(max_kills=1), {}
    keys = dispatcher.submit(enumerate(make_specs(2)), results.__setitem__)
    dispatcher.acquire(0, 2)
    dispatcher.interrupt(keys[:1])
    dispatcher.requeue(0, "killed", 2)

    assert {number: result.status for number, result in results.items()} == {0: Status.ABORTED}
    assert [key for key, _ in dispatcher.acquire(0, 2)] == [1]


def test_waiting_suspects_can_be_interrupted():
    """They are delivered as aborted at once, and no worker waits for them any longer."""
    dispatcher, results = EpisodeDispatcher(max_kills=1), {}
    keys = dispatcher.submit(enumerate(make_specs(3)), results.__setitem__)
    dispatcher.acquire(0, 2)
    dispatcher.requeue(0, "killed", 2)
    dispatcher.interrupt(keys[:2])

    assert {number: result.status for number, result in results.items()} == {0: Status.ABORTED, 1: Status.ABORTED}
    assert [key for key, _ in dispatcher.acquire(0, 2)] == [2]


def test_a_worker_that_left_blames_no_episode():
    """Its episodes run again without a count, and suspects that it tested are tested again, alone."""
    dispatcher, delivered = EpisodeDispatcher(max_kills=1), []
    dispatcher.submit(enumerate(make_specs(3)), lambda number, _result: delivered.append(number))
    for worker in range(4):
        assert 3 == len(dispatcher.acquire(worker, 4))
        assert dispatcher.count_held(worker)
        assert not dispatcher.requeue(worker, "its node is removed", 4, moved=True)
        assert not dispatcher.count_held(worker)
    dispatcher.acquire(0, 4)
    dispatcher.requeue(0, "killed", 4)
    for worker in range(4):
        (tested,) = dispatcher.acquire(worker, 4)
        dispatcher.requeue(worker, "its node is removed", 4, moved=True)
        assert 0 == dispatcher.num_quarantined
    assert [tested] == dispatcher.acquire(5, 4)
    assert [] == delivered
