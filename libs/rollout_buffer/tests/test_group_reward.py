"""Group rewards: every episode of a call is delivered once, scored with the rest of its group, or failed with it."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from turnwise import EpisodeResult, SamplingParams, State, Status, Task, Trajectory, TrajectoryScore, TurnScore
from turnwise.episode.driver import EpisodeProgram
from turnwise.episode.setup import Limits
from turnwise.errors import EngineError, InfrastructureError, boundary
from turnwise.events.dispatch import Observers
from turnwise.events.observer import Observer
from turnwise.protocols import GroupCall
from turnwise.record.ended import EndedEpisode
from turnwise.record.spec import EpisodeSpec, UnfinishedEpisode
from turnwise.runtime.groups import GroupScoring
from turnwise.runtime.local import LocalRuntime
from turnwise.runtime.manager import RolloutManager
from turnwise.runtime.plan import RolloutPlan
from turnwise.runtime.worker import WorkerComponents
from turnwise_rollout_buffer import GroupProducer, GroupReward, GroupRewardConfig, TaskStream, TrajectoryBuffer
from turnwise_testing.engines.scripted import RandomPolicy, ScriptedEngine

GROUP_SIZE = 4


class OneTurn:
    """Samples once; some rollouts of some tasks fail."""

    async def step(self, episode):
        if episode.state == State.PENDING:
            episode.begin(np.frombuffer(episode.task.uid.encode(), np.uint8))
            return State.GENERATING
        if episode.rollout_n in episode.task.extra.get("fails", ()):
            raise RuntimeError("as asked")
        await episode.generate()
        return State.TERMINATED


class Length:
    """The number of response tokens."""

    def score(self, episode):
        return float(episode.trajectory.num_response_tokens)


class Rank(GroupReward):
    """The rank of each episode by its number of sampled tokens, plus 1; it remembers its groups."""

    def __init__(self, config=None):
        super().__init__(config or GroupRewardConfig())
        self.groups = []

    def score_group(self, episodes):
        self.groups.append([each.uid for each in episodes])
        lengths = [each.trajectories[0].num_response_tokens for each in episodes]
        return [1.0 + sorted(lengths).index(length) for length in lengths]


class AsyncRank(Rank):
    """The same, on the event loop."""

    async def score_group(self, episodes):
        await asyncio.sleep(0)
        return super().score_group(episodes)


class Answer(GroupReward):
    """Returns what a test gives for the task `odd`, and 1 for others."""

    def __init__(self, answer, **options):
        super().__init__(GroupRewardConfig(**options))
        self.answer = answer

    async def score_group(self, episodes):
        if episodes[0].task.uid != "odd":
            return [1.0] * len(episodes)
        answer = self.answer(episodes)
        return await answer if asyncio.iscoroutine(answer) else answer


class Seen(Observer):
    """Collects the ended episodes."""

    def __init__(self):
        self.rewards = Counter()

    def on_episode_finished(self, result):
        self.rewards[result.uid, result.reward] += 1


class Pace:
    """The seconds for each token of slow episodes, which a test sets to 0."""

    def __init__(self):
        self.slow_s = 1000.0

    def __call__(self, request, _index):
        return self.slow_s if request.group_id.startswith("slow") and request.sampling.seed % 2 else 0.0


def manager(group_reward, *, reward=None, observers=(), pace=None, **plan):
    engine = ScriptedEngine(policy=RandomPolicy(seed=1, end_token_id=255, mean_tokens=12), token_latency_s=pace or 0.0)
    dispatcher = Observers.of(observers)
    parts = WorkerComponents(
        engine=engine,
        programs={"one": EpisodeProgram(agent=OneTurn(), reward=reward)},
        limits=Limits(response_length=200),
        stop_token_ids=(255,),
        observers=dispatcher,
    )
    plan = {"n": GROUP_SIZE, "sampling": SamplingParams(max_tokens=40)} | plan
    made = RolloutPlan(default_agent="one", agents={"one": None}, **plan)
    groups = GroupScoring(group_reward, "group reward 'rank' of plugin 'test'", made, dispatcher, 5.0)
    return RolloutManager(LocalRuntime(engine, parts), made, dispatcher, groups=groups)


def task(uid, **extra):
    return Task(messages=({"role": "user", "content": "x"},), uid=uid, extra=extra)


def ranks(results):
    lengths = [each.trajectories[0].num_response_tokens for each in results]
    return [1.0 + sorted(lengths).index(length) for length in lengths]


@pytest.mark.parametrize("kind", [Rank, AsyncRank])
def test_each_group_is_scored_together(kind):
    """The reward sees each group once and whole; observers get each episode once, with the score of its group."""
    seen, reward = Seen(), kind()
    with manager(reward, reward=Length(), observers=[seen]) as running:
        results = running.rollout([task(uid) for uid in "abc"])

    assert [f"{uid}/{number}" for uid in "abc" for number in range(GROUP_SIZE)] == [r.uid for r in results]
    assert [[f"{uid}/{n}" for n in range(GROUP_SIZE)] for uid in "abc"] == sorted(map(sorted, reward.groups))
    for start in range(0, len(results), GROUP_SIZE):
        group = results[start : start + GROUP_SIZE]
        assert ranks(group) == [r.reward for r in group]
    assert [r.metrics.extra["episode_reward"] for r in results] == [
        float(r.trajectories[0].num_response_tokens) for r in results
    ]
    assert {r.metrics.extra["group_size"] for r in results} == {GROUP_SIZE}
    assert {(r.uid, r.reward): 1 for r in results} == seen.rewards


def test_failed_members_are_not_shown():
    """The others are scored without them."""
    reward = Rank()
    with manager(reward) as running:
        results = running.rollout([task("a", fails=[1])])

    assert [["a/0", "a/2", "a/3"]] == [sorted(group) for group in reward.groups]
    assert [None, "agent", None, None] == [r.fault and r.fault.owner for r in results]
    assert {3.0} == {r.metrics.extra["group_size"] for r in results if r.fault is None}


def test_too_few_members_fail():
    """Below `min_fraction` the reward is not asked, and the error has the numbers and the plugin."""
    reward = Rank(GroupRewardConfig(min_fraction=0.5))
    with manager(reward) as running:
        results = running.rollout([task("a", fails=[0, 1, 2]), task("b", fails=[0, 1])])

    few, enough = results[:GROUP_SIZE], results[GROUP_SIZE:]
    assert [["b/2", "b/3"]] == reward.groups
    assert {Status.FAILED} == {r.status for r in few}
    text = "group reward 'rank' of plugin 'test': 3 of 4 episodes of the group failed, min_fraction is 0.5"
    assert ("reward", "IncompleteGroup", text) == (few[3].fault.owner, few[3].fault.kind, few[3].fault.message)
    assert few[3].trajectories
    assert [None, None, *ranks(enough[2:])] == [r.reward for r in enough]


def raise_error(error):
    """Return a function that raises."""

    def answer(_episodes):
        raise error

    return answer


async def never():
    """Wait for ever."""
    await asyncio.Event().wait()


CASES = {
    "raises": (raise_error(KeyError("answer")), "reward", "KeyError", "'answer'"),
    "service down": (raise_error(InfrastructureError("judge is down")), "infra", "InfrastructureError", "judge"),
    "judge fails": (raise_error(EngineError("no memory")), "engine", "EngineError", "no memory"),
    "exits": (raise_error(SystemExit(3)), "reward", "SystemExit", "3"),
    "too few": (lambda _e: [1.0], "reward", "ValueError", "score_group returned 1 scores for 4 episodes"),
    "too many": (lambda e: [1.0] * (len(e) + 1), "reward", "ValueError", "score_group returned 5 scores for 4"),
    "no list": (lambda _e: 1.0, "reward", "TypeError", "score_group returned float, expected a list"),
    "text": (lambda e: "1" * len(e), "reward", "TypeError", "score_group returned str, expected a list"),
    "a text": (lambda e: ["1"] * len(e), "reward", "TypeError", "score_group returned '1' for episode odd/"),
    "none": (lambda e: [None] * len(e), "reward", "TypeError", "score_group returned None for episode odd/"),
    "nan": (lambda e: [float("nan")] * len(e), "reward", "ValueError", "which is not finite"),
    "another shape": (lambda e: [TurnScore(values=(1.0,) * 9)] * len(e), "reward", "TrajectoryError", "9 turn scores"),
    "hangs": (lambda _e: never(), "reward", "TimeoutError", "it took longer than 0.05 s"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_failing_reward_fails_its_group_alone(case):
    """All episodes of the group have one fault, on one line with the plugin; the other groups are scored."""
    answer, owner, kind, text = CASES[case]
    with manager(Answer(answer, deadline_s=0.05)) as running:
        results = running.rollout([task("even"), task("odd"), task("more")])

    by_uid = {uid: [r for r in results if r.task.uid == uid] for uid in ("even", "odd", "more")}
    assert {1.0} == {r.reward for r in (*by_uid["even"], *by_uid["more"])}
    assert {(owner, kind)} == {(r.fault.owner, r.fault.kind) for r in by_uid["odd"]}
    (message,) = {r.fault.message for r in by_uid["odd"]}
    assert message.startswith("group reward 'rank' of plugin 'test': ")
    assert text in message
    assert "\n" not in message
    assert all(r.trajectories and not r.scores for r in by_uid["odd"])


def test_a_score_of_any_form():
    """Numbers of numpy and scores of turns are accepted."""
    with manager(Answer(lambda e: [TurnScore(values=(2.0,)), *np.full(len(e) - 1, 0.5, np.float32)])) as running:
        assert [2.0, 0.5, 0.5, 0.5] == [r.reward for r in running.rollout([task("odd")])]


@pytest.mark.parametrize("submit_one_by_one", [False, True])
def test_a_task_feed(submit_one_by_one):
    """A group of an open call is scored when all its episodes are there, also if they are submitted one by one."""
    reward = Rank()
    with manager(reward) as running, running.open() as feed:
        for number in range(GROUP_SIZE) if submit_one_by_one else [None]:
            feed.submit(task("a"), rollout_n=number)
        feed.submit(task("b"))
        results = [result for _, result in zip(range(2 * GROUP_SIZE), feed, strict=False)]
        feed.submit(task("b"))
        results += [result for _, result in zip(range(GROUP_SIZE), feed, strict=False)]

    assert {GROUP_SIZE} == {len(group) for group in reward.groups}
    assert 3 == len(reward.groups)
    assert {"b/4", "b/5", "b/6", "b/7"} == set(reward.groups[-1])
    assert 3 * GROUP_SIZE == len({r.uid for r in results})


def test_a_short_group_is_scored_when_the_feed_closes():
    """A feed that closes before the group is whole does not wait for the rest."""
    reward = Rank()
    with manager(reward) as running, running.open() as feed:
        feed.submit(task("a"), rollout_n=0)
        feed.close()
        results = list(feed)

    assert [["a/0"]] == reward.groups
    assert [1.0] == [r.reward for r in results]


def test_an_interrupted_group_is_scored_when_it_has_ended():
    """The threshold of a call leaves all members of a group unfinished, and the next call scores them together."""
    pace, reward = Pace(), Rank()
    with manager(reward, pace=pace) as running:
        first = running.rollout([task("slow"), *(task(f"t{n}") for n in range(4))], min_fraction=0.8)
        unfinished = running.unfinished
        pace.slow_s = 0.0
        second = running.rollout([], resume=True)

    assert {f"slow/{n}" for n in range(GROUP_SIZE)} == {u.uid for u in unfinished} == {r.uid for r in second}
    assert any(isinstance(each, EndedEpisode) for each in unfinished)
    assert {f"t{n}/{number}" for n in range(4) for number in range(GROUP_SIZE)} == {r.uid for r in first}
    assert [f"slow/{n}" for n in range(GROUP_SIZE)] == reward.groups[-1]
    assert ranks(second) == [r.reward for r in second]


def test_a_part_of_a_group_that_is_resumed_has_no_score():
    """A call that resumes some members of a group leaves them unfinished; the call that has the last one scores all."""
    pace, reward = Pace(), Rank()
    with manager(reward, pace=pace) as running:
        running.rollout([task("slow"), *(task(f"t{n}") for n in range(4))], min_fraction=0.8)
        pace.slow_s = 0.0
        halves = running.unfinished[:2], running.unfinished[2:]
        parts = [running.rollout([], resume=half) for half in halves]
        whole = running.rollout([], resume=True)

    assert [[Status.ABORTED] * 2] * 2 == [[r.status for r in part] for part in parts]
    assert 1 == sum(uids[0].startswith("slow") for uids in reward.groups)
    assert ranks(whole) == [r.reward for r in whole]


@pytest.mark.parametrize("own", [None, 0.25])
def test_an_ended_member_is_what_it_was_before_its_group_was_scored(own):
    """A scored one has its own reward again, any other is unchanged; one that failed with its group must run again."""
    episode = evolve(ended(0, Status.COMPLETED), scores=() if own is None else (TrajectoryScore(value=own),))
    with manager(Rank()) as running:
        (scored,) = score([episode], Rank())
        again = running.groups.reward.unscored(scored)
    (failed,) = score([episode], Answer(raise_error(KeyError("x"))), uid="odd")

    assert 1.0 == scored.reward
    assert (own, episode.metrics) == (again.reward, evolve(again.metrics, reward_s=episode.metrics.reward_s))
    assert episode is Rank().unscored(episode)
    assert (Status.FAILED, None) == (failed.status, Rank().unscored(failed))


def score(members, reward, uid="a"):
    """Return the members of a group, scored."""
    members = [evolve(each, task=task(uid)) for each in members]

    async def ask(episodes, _seconds):
        with boundary("reward", "it"):
            answer = reward.score_group(episodes)
            return await answer if asyncio.iscoroutine(answer) else answer

    call = GroupCall(label="x", num_members=len, put=print, hold=print, ask=ask)
    return asyncio.run(reward.score_members(members, call))


def test_an_abort_loses_no_episode():
    """Every episode is delivered once. Ended episodes are scored, and no group fails for the interruption."""
    pace, reward = Pace(), Rank(GroupRewardConfig(min_fraction=1.0))
    with manager(reward, pace=pace) as running:
        episodes = running.iterate([task("slow"), task("a")])
        first = [next(episodes) for _ in range(GROUP_SIZE)]
        running.abort()
        rest = list(episodes)

    assert {"a"} == {r.task.uid for r in first}
    assert Counter(f"slow/{n}" for n in range(GROUP_SIZE)) == Counter(r.uid for r in rest)
    assert {Status.ABORTED, Status.COMPLETED, Status.TRUNCATED} >= {r.status for r in rest}
    assert all((r.reward is None) == (r.status is Status.ABORTED) for r in rest)


def test_a_producer_gets_whole_groups_with_scores():
    """Asynchronous training takes groups whose scores compare their episodes, also after pauses."""
    reward = Rank()
    with manager(reward) as running:
        buffer = TrajectoryBuffer(GROUP_SIZE, max_groups=4)
        stream = TaskStream([task(f"t{n}") for n in range(20)], seed=0)
        producer = GroupProducer(running, stream, buffer, 4, 2, lambda _episode: None)
        producer.start()
        taken = []
        for _ in range(5):
            taken += buffer.take(1, timeout_s=600)
            buffer.set_version(0)
            producer.notify()
            with producer.paused():
                pass
        producer.stop()

    assert {GROUP_SIZE} == {each.metrics.extra["group_size"] for group in taken for each in group.episodes}
    for group in taken:
        assert ranks(group.episodes) == [each.reward for each in group.episodes]


def ended(number, status):
    """Return an episode that has ended with a status; an aborted one can resume."""
    record = Trajectory(np.array([1, 2]))
    record.add_action(np.arange(3 + number), np.zeros(3 + number), 0)
    spec = EpisodeSpec(task=task("a"), agent_name="one", rollout_n=number)
    unfinished = UnfinishedEpisode(spec=spec) if status is Status.ABORTED else None
    return EpisodeResult(task=task("a"), rollout_n=number, status=status, trajectories=(record,), unfinished=unfinished)


@given(
    statuses=st.lists(st.sampled_from(list(Status)), min_size=1, max_size=8),
    min_fraction=st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]),
    order=st.randoms(use_true_random=False),
)
def test_any_mixture_of_ends(statuses, min_fraction, order):
    """Each member is delivered once, in any order of ends; it is scored if all have ended, and enough not failed."""
    reward = Rank(GroupRewardConfig(min_fraction=min_fraction))
    members = [(number, ended(number, status)) for number, status in enumerate(statuses)]
    order.shuffle(members)
    delivered, held = {}, {}

    async def ask(episodes, _seconds):
        return reward.score_group(episodes)

    async def run():
        put, hold = delivered.__setitem__, held.__setitem__
        call = GroupCall(label="x", num_members=lambda _key: len(statuses), put=put, hold=hold, ask=ask)
        async with reward.collect(call) as add:
            for number, result in members:
                add(number, result)

    asyncio.run(run())
    assert sorted([*delivered, *held]) == list(range(len(statuses)))
    if Status.ABORTED in statuses:
        assert held.keys() == {number for number, status in enumerate(statuses) if status is not Status.ABORTED}
        assert all(not result.scores for result in delivered.values())
        assert not reward.groups
        return
    is_scored = statuses.count(Status.FAILED) <= (1 - min_fraction) * len(statuses)
    for number, status in enumerate(statuses):
        result = delivered[number]
        if status is Status.FAILED:
            assert (status, ()) == (result.status, result.scores)
        elif is_scored:
            assert status is result.status
            assert result.reward >= 1.0
        else:
            assert ("IncompleteGroup", ()) == (result.fault.kind, result.scores)


def test_the_score_lies_on_the_last_trained_record():
    """All other records of the episode have a score of 0."""
    from turnwise.record.lineage import RecordLineage
    from turnwise_rollout_buffer.group_reward import scores_of

    one = ended(0, Status.COMPLETED)
    lineage = tuple(RecordLineage(trained=trained) for trained in (True, True, False))
    episode = evolve(one, trajectories=one.trajectories * 3, lineage=lineage)

    assert [tuple(TrajectoryScore(value=value) for value in (0.0, 3.0, 0.0))] == scores_of([episode], [3.0])


def test_a_failing_runtime_loses_no_episode():
    """The episodes that wait for their group are delivered as unfinished before the error of the runtime."""
    reward, held = Rank(), {}

    async def run():
        call = GroupCall(label="x", num_members=lambda _key: 2, put=print, hold=held.__setitem__, ask=None)
        async with reward.collect(call) as add:
            add(0, ended(0, Status.COMPLETED))
            raise EngineError("every replica is dead")

    with pytest.raises(EngineError):
        asyncio.run(run())
    assert [0] == list(held)
