"""Tests of episodes with several open records."""

import asyncio

import numpy as np
import pytest
from attrs import evolve
from episode_fakes import EOS, LookTool, ScriptedAgent, TinyEngine, run

from turnwise import Capabilities, FinishReason, GenerateResult, Status, Task
from turnwise.episode.setup import Limits
from turnwise.errors import DataError, DeadlineExceeded, TrajectoryError
from turnwise.record.columns import Origin
from turnwise.record.lineage import EpisodeRecord, RecordLineage
from turnwise.record.result import total_score
from turnwise.record.spec import EpisodeSpec, UnfinishedEpisode
from turnwise.record.step_results import RecordedTurn
from turnwise.record.trajectory import Trajectory
from turnwise.types import TrajectoryScore, TurnScore
from turnwise_reported_reward import ReportedReward
from turnwise_result_files import load_unfinished, save_unfinished


def run_script(script, engine=None, **options):
    """Run an episode of one step; a failure of the step is raised here."""
    result = run(ScriptedAgent(script), engine, **options)
    assert result.status is not Status.FAILED, result.fault.traceback
    return result


class TestSeveralRecords:
    """Opening, continuing, branching and describing records."""

    def test_an_earlier_record_goes_on(self):
        """A second `begin` leaves the first record open, and both keep their own samples, names and budgets."""
        engine = TinyEngine()

        async def script(episode):
            first = episode.begin([1, 1])
            second = episode.begin([2])
            await episode.generate(record=first)
            episode.observe([5], record=first)
            await episode.generate()
            await episode.generate(record=first)
            assert (episode.trajectory, episode.remaining(first), episode.remaining_tokens) == (second, 3, 7)
            assert episode.turn_records == (0, 1, 0)

        result = run_script(script, engine, limits=Limits(response_length=10))

        assert result.status is Status.COMPLETED
        assert [t.response_ids.tolist() for t in result.trajectories] == [[7, 8, EOS, 5, 7, 8, EOS], [7, 8, EOS]]
        names = [request.trajectory_id for request in engine.requests]
        assert (names[0] == names[2], names[1]) == (True, f"{names[0]}/1")
        assert result.lineage == ()

    def test_a_branch_replays_and_trains_nothing_twice(self):
        """A branch has the ids, log-probabilities and versions of its parent with mask 0."""

        async def script(episode):
            first = episode.begin([1])
            await episode.generate()
            mark = first.mark()
            episode.observe([5])
            await episode.generate()
            other = episode.branch(first, mark)
            episode.observe([6])
            await episode.generate()
            episode.describe_record(other, kind="sibling", label="retry", trained=False)
            episode.branch(other, other.mark())

        first, other, last = (result := run_script(script)).trajectories

        assert other.response_ids.tolist() == [7, 8, EOS, 6, 7, 8, EOS]
        assert other.response_mask.tolist() == [0, 0, 0, 0, 1, 1, 1]
        assert [s.origin for s in other.segments] == [Origin.REPLAYED, Origin.OBSERVATION, Origin.ACTION]
        assert not last.response_mask.any()
        assert last.logprobs.tolist() == first.logprobs.tolist()
        assert last.weight_versions.tolist() == [3, 3, 3, -1, 3, 3, 3]
        assert result.lineage == (
            RecordLineage(),
            RecordLineage(parent=0, num_shared_tokens=4, kind="sibling", label="retry", trained=False),
            RecordLineage(parent=1, num_shared_tokens=8),
        )
        assert result.metrics.num_tokens == {"prompt": 3, "action": 9, "observation": 3, "forced": 0, "replayed": 9}

    def test_misuse_is_named(self):
        """A foreign record, a closed one, a wrong mark and a wrong parent are refused by name."""

        async def script(episode):
            first = episode.begin([1])
            second = episode.begin([2])
            mark = first.mark()
            await episode.generate(record=first)
            with pytest.raises(TrajectoryError, match="another episode"):
                episode.observe([1], record=first.truncated(1))
            with pytest.raises(TrajectoryError, match="its own marks"):
                episode.branch(second, first.mark())
            with pytest.raises(TrajectoryError, match="record 0 cannot be the parent of record 0"):
                episode.describe_record(first, parent=first)
            branch = episode.branch(first, mark)
            with pytest.raises(TrajectoryError, match="record 1 cannot be the parent of record 2"):
                episode.describe_record(branch, parent=second)
            episode.close_record(first)
            with pytest.raises(TrajectoryError, match="closed"):
                episode.observe([1], record=first)

        assert run_script(script).status is Status.COMPLETED

    def test_limits_hold_over_all_records(self):
        """The number of records and of sampled tokens, dropped ones included, end an episode as truncated."""

        async def open_many(episode):
            for _ in range(3):
                episode.begin([1])

        async def sample_many(episode):
            first, second = episode.begin([1]), episode.begin([2])
            await episode.generate(record=first)
            await episode.sample(record=second)
            assert (await episode.generate(record=second)).token_ids.tolist() == [7]
            await episode.generate(record=first)

        for script, limits in ((open_many, Limits(max_records=2)), (sample_many, Limits(max_sampled_tokens=7))):
            assert run_script(script, limits=limits).status is Status.TRUNCATED


class TestSamples:
    """`sample` and `append`."""

    def test_a_dropped_sample_leaves_no_token(self):
        """A record can be sampled again, with another seed; results fit only the record as it was."""
        engine = TinyEngine()

        async def script(episode):
            first, second = episode.begin([1]), episode.begin([1])
            dropped = await episode.sample(record=first)
            kept = await episode.sample(record=first)
            for result, record in ((dropped, second), (evolve(dropped), first)):
                with pytest.raises(TrajectoryError, match="was not sampled for this record"):
                    episode.append(result, record=record)
            episode.append(kept, record=first)
            with pytest.raises(TrajectoryError, match="has changed since"):
                episode.append(dropped, record=first)

        first, second = run_script(script, engine).trajectories

        assert (first.response_ids.tolist(), len(second)) == ([7, 8, EOS], 1)
        seeds = [request.sampling.seed for request in engine.requests]
        assert len(set(seeds)) == 2

    def test_stop_strings_need_a_capability(self):
        """They reach an engine that supports them, and no other."""
        engine = StringEngine()

        async def script(episode):
            episode.begin([1])
            await episode.sample(stop=("x",), stop_token_ids=(9,))

        run_script(script, engine)
        fault = run(ScriptedAgent(script)).fault

        assert (engine.requests[0].sampling.stop, engine.requests[0].sampling.stop_token_ids) == (("x",), (EOS, 9))
        assert (fault.kind, "stop_strings" in fault.message) == ("ConfigError", True)

    def test_records_of_one_name_differ(self):
        """A name replaces the number of the record in seeds, and equal names still give unequal seeds."""
        engine = TinyEngine()

        async def script(episode):
            for name in ("a", "b", "a"):
                record = episode.begin([1], seed_name=name)
                await episode.generate(record=record)

        async def reordered(episode):
            for name in ("b", "a", "a"):
                await episode.generate(record=episode.begin([1], seed_name=name))

        run_script(script, engine)
        run_script(reordered, engine)

        seeds = [request.sampling.seed for request in engine.requests]
        assert len(set(seeds[:3])) == 3
        assert sorted(seeds[:3]) == sorted(seeds[3:])

    def test_named_records_do_not_change_the_seeds_of_others(self):
        """A record without a name has the same seeds whether named records start before it or after it."""

        def seeds(*names):
            engine = TinyEngine()

            async def script(episode):
                for name in names:
                    await episode.generate(record=episode.begin([1], seed_name=name))

            run_script(script, engine)
            return [request.sampling.seed for request in engine.requests]

        assert seeds("", "a", "") == [seeds("a", "", "")[1], seeds("a")[0], seeds("", "")[1]]

    def test_one_request_at_a_time_on_a_record(self):
        """A second request on the same record is refused; another record continues meanwhile."""

        async def script(episode):
            first, second = episode.begin([1]), episode.begin([2])
            async with asyncio.TaskGroup() as group:
                for record in (first, second):
                    group.create_task(episode.generate(record=record))
                await asyncio.sleep(0)
                with pytest.raises(TrajectoryError, match="in flight already"):
                    await episode.generate(record=first)

        assert run_script(script, SlowEngine()).metrics.num_turns == 2

    def test_cancelling_a_sample_aborts_its_request(self):
        """The engine is told, nothing is recorded, and the record can be sampled again with the same seed."""
        engine = TinyEngine(hangs=True)

        async def script(episode):
            record = episode.begin([1])
            async with asyncio.TaskGroup() as group:
                task = group.create_task(episode.sample())
                await asyncio.sleep(0)
                assert len(engine.requests) == 1
                task.cancel()
            engine.hangs = False
            episode.append(await episode.sample(), record=record)

        result = run_script(script, engine)

        assert engine.aborted == {engine.requests[0].request_id}
        assert engine.requests[0].sampling == engine.requests[1].sampling
        assert (result.metrics.num_turns, result.metrics.num_tokens["action"]) == (1, 3)

    @pytest.mark.parametrize("leaves", [False, True])
    def test_an_end_after_a_late_request_is_the_engines(self, leaves):
        """A request that the engine ends is an abort, also when an earlier one was late and returned, or was left."""

        class Engine(SlowEngine):
            ends = False

            async def generate(self, request):
                result = await super().generate(request)
                return evolve(result, finish_reason=FinishReason.ABORT) if self.ends else result

        engine = Engine(hangs_on=1)

        async def script(episode):
            first, second = episode.begin([1]), episode.begin([2])
            late = asyncio.ensure_future(episode.sample(record=first))
            while not engine.aborted:
                await episode.sample(record=second)
            if leaves:
                late.cancel()
            await asyncio.wait({late})
            assert late.cancelled() or isinstance(late.exception(), DeadlineExceeded)
            engine.ends = True
            await episode.sample(record=second)

        result = run_script(script, engine, limits=Limits(turn_s=0.5))

        assert (Status.ABORTED, "the engine ended the request") == (result.status, result.fault.message)

    def test_a_late_request_is_late_though_another_began_later(self):
        """A turn that takes too long times the episode out, whatever other records do."""
        engine = SlowEngine(hangs_on=1)

        async def script(episode):
            first, second = episode.begin([1]), episode.begin([2])
            async with asyncio.TaskGroup() as group:
                group.create_task(episode.generate(record=first))
                for _ in range(100):
                    await episode.sample(record=second)

        assert run_script(script, engine, limits=Limits(turn_s=0.05)).status is Status.TIMED_OUT


class StringEngine(TinyEngine):
    """Supports stop strings."""

    @property
    def capabilities(self):
        return Capabilities(stop_strings=True)


class SlowEngine(TinyEngine):
    """Waits a moment before each answer, and hangs on one prompt until it is told to abort."""

    def __init__(self, hangs_on=-1):
        super().__init__()
        self.hangs_on = hangs_on

    async def generate(self, request):
        await asyncio.sleep(0.005)
        while request.token_ids[0] == self.hangs_on:
            await asyncio.sleep(0.001)
            if request.request_id in self.aborted:
                return self.answer([7], FinishReason.ABORT)
        return await super().generate(request)


class TestReportedReward:
    """The reward `reported`."""

    @staticmethod
    async def play(episode):
        """Make two records with three turns, the last record untrained."""
        first, second = episode.begin([1]), episode.begin([2])
        await episode.generate(record=second)
        await episode.generate(record=first)
        episode.observe([5], record=second)
        await episode.generate(record=second)
        episode.describe_record(second, kind="auxiliary", trained=False)

    @pytest.mark.parametrize(
        ("reported", "expected"),
        [
            (None, ()),
            (2, (TrajectoryScore(value=2.0), TrajectoryScore(value=0.0))),
            ({"records": [1, 0.5]}, (TrajectoryScore(value=1.0), TrajectoryScore(value=0.5))),
            ({"turns": [1, 2, 3]}, (TurnScore(values=(2.0,)), TurnScore(values=(1.0, 3.0)))),
        ],
    )
    def test_scores_go_to_their_records(self, reported, expected):
        """A number is the episode's reward; turns are in the order of the appends; nothing reported is no score."""

        async def script(episode):
            await self.play(episode)
            episode.memory["reported_score"] = reported

        result = run_script(script, reward=ReportedReward())

        assert (result.status, result.scores) == (Status.COMPLETED, expected)
        assert result.reward == (None if reported is None else sum(map(total_score, expected)))

    @pytest.mark.parametrize(
        ("reported", "complaint"),
        [
            (float("nan"), "not finite"),
            ({"turns": [1, 2, float("inf")]}, "not finite"),
            ({"turns": [1]}, "1 scores were reported for 3 turns"),
            ({"records": [1, True]}, "not a number"),
            ("1", "not a number"),
            ({"turns": [], "records": []}, "must be a number, or have one list"),
        ],
    )
    def test_wrong_scores_fail_the_episode(self, reported, complaint):
        """The fault belongs to the reward and names the value."""

        async def script(episode):
            await self.play(episode)
            episode.memory["reported_score"] = reported

        fault = run(ScriptedAgent(script), reward=ReportedReward()).fault

        assert fault.owner == "reward"
        assert complaint in fault.message


@pytest.mark.parametrize(("position", "fits"), [((1, 2, -1, 2), False), ((2, 2, -1, 2), True), ((2, 1, -1, 1), False)])
def test_a_saved_turn_must_have_a_place(position, fits, tmp_path):
    """A turn of a closed record, or before the end of an open one, would be lost silently."""
    records = (EpisodeRecord(Trajectory([1, 1])), EpisodeRecord(Trajectory([2, 2]), lineage=RecordLineage(label="b")))
    records[0].close()
    result = GenerateResult(token_ids=[7], logprobs=[-0.5], finish_reason=FinishReason.STOP)
    task = Task(messages=({"role": "user", "content": "hi"},), uid="t")
    saved = UnfinishedEpisode(
        spec=EpisodeSpec(task=task, agent_name="a"),
        records=records,
        turns=(RecordedTurn(position=position, result=result),),
    )
    save_unfinished(tmp_path / "unfinished.jsonl", [saved])

    if not fits:
        with pytest.raises(DataError, match="does not fit 2 records"):
            load_unfinished(tmp_path / "unfinished.jsonl")
        return
    (again,) = load_unfinished(tmp_path / "unfinished.jsonl")
    assert [(record.is_open, record.lineage) for record in again.records] == [
        (False, None),
        (True, RecordLineage(label="b")),
    ]


def test_an_agent_that_cannot_resume_starts_again():
    """An interrupted episode of it is kept as one that has not started, and its tools are released."""
    engine, tool = TinyEngine(), LookTool(None)

    class Outside(ScriptedAgent):
        resumable = False

    async def script(episode):
        episode.begin(np.array([1]))
        await episode.generate()
        episode.abort()
        await episode.generate()

    result = run(Outside(script), engine, tools={"look": tool})

    assert (result.status, result.unfinished.started) == (Status.ABORTED, False)
    assert result.unfinished.resumed_spec.unfinished is None
    assert result.trajectories[0].num_response_tokens == 3
