"""Tests of `turnwise.runtime.result_wire`."""

import pickle

import numpy as np
from attrs import asdict, evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.episode_spec import EpisodeSpec, UnfinishedEpisode
from turnwise.record import DTYPES
from turnwise.result import EpisodeResult
from turnwise.runtime.result_wire import pack_episodes, unpack_episodes
from turnwise.testing.strategies import trajectories
from turnwise.trajectory import Trajectory
from turnwise.types import EpisodeMetrics, Fault, Status, Task, TokenScore, TrajectoryScore, TurnScore

few = settings(max_examples=25, deadline=None)


def score_of(record, number):
    """A score of each kind, by turns."""
    kinds = (
        TrajectoryScore(value=number / 2, extra={"a": 1.0}),
        TurnScore(values=tuple(float(i) for i in range(len(record.turns())))),
        TokenScore(values=tuple(map(float, record.response_mask))),
    )
    return kinds[number % 3]


@st.composite
def results(draw):
    """Episodes of every status, with none or several records, some with a block open in what they go on from."""
    task = Task(messages=({"role": "user", "content": "a"},), uid=f"t{draw(st.integers(0, 3))}", extra={"level": 2})
    records = draw(st.lists(trajectories(), max_size=3))
    unfinished = None
    if draw(st.booleans()):
        began = draw(trajectories())
        began.fork(2)[0].add_action([7], [-0.5], 1)
        unfinished = UnfinishedEpisode(spec=EpisodeSpec(task=task, agent_name="a"), trajectories=(began,))
    return EpisodeResult(
        task=task,
        rollout_n=draw(st.integers(0, 3)),
        global_step=3,
        agent_name="a",
        status=draw(st.sampled_from(list(Status))),
        fault=draw(st.none() | st.just(Fault(owner="tool", kind="E", message="m", traceback="l1\nl2"))),
        trajectories=tuple(records),
        scores=tuple(score_of(record, i) for i, record in enumerate(records)) if draw(st.booleans()) else (),
        messages=(*task.messages, {"role": "assistant", "content": "b", "tool_calls": [{"id": "1"}]}),
        metrics=EpisodeMetrics(total_s=1.5, num_tokens={"action": 3}, extra={"x": 0.25}),
        unfinished=unfinished,
    )


def plain(value):
    """A result as nested plain values that compare, records as all that is saved of them."""
    if isinstance(value, Trajectory):
        saved = value.to_dict()
        arrays = {name: (saved[name].dtype.str, saved[name].tolist()) for name in DTYPES}
        rest = {name: repr(saved[name]) for name in saved.keys() - arrays.keys()}
        return {**arrays, **rest, "next": value.next_position, "segments": value.segments}
    return asdict(value, value_serializer=lambda _owner, _field, each: serialized(each))


def laid_out(record):
    """A record without the numbers of its blocks: one of empty paths alone is counted only where it was made."""
    segments = [(s.origin, s.start, s.stop, s.path) for s in record.segments]
    return {name: value for name, value in plain(record).items() if name != "segments"} | {"places": segments}


def serialized(value):
    if isinstance(value, Trajectory):
        return plain(value)
    if isinstance(value, tuple) and value and isinstance(value[0], Trajectory):
        return tuple(map(plain, value))
    return value


def carried(finished):
    """What comes out at the other end; the arrays are read-only there, as Ray hands them out."""
    buffers = []
    data = pickle.dumps(pack_episodes(finished), protocol=5, buffer_callback=buffers.append)
    return list(unpack_episodes(pickle.loads(data, buffers=[bytes(each.raw()) for each in buffers])))


def linear(num_tokens=5):
    record = Trajectory([1, 2])
    record.add_action(range(3, 3 + num_tokens), [-0.5] * num_tokens, 4)
    record.add_observation([9])
    return record


def episode(*records, **columns):
    task = Task(messages=({"role": "user", "content": "a"},), uid="t")
    return EpisodeResult(task=task, **{"status": Status.COMPLETED, "trajectories": records, **columns})


class TestResultWire:
    """Episodes on their way from a worker to the driver."""

    @few
    @given(st.lists(results(), max_size=5))
    def test_what_arrives_is_what_was_sent(self, episodes):
        """Every value, every array and its type, whatever the records hold, in the same order."""
        finished = list(zip(range(7, 7 + len(episodes)), episodes, strict=True))
        arrived = carried(finished)
        assert [(number, plain(result)) for number, result in finished] == [
            (number, plain(result)) for number, result in arrived
        ]

    @few
    @given(st.lists(trajectories(), min_size=1, max_size=4))
    def test_records_that_arrived_go_on(self, records):
        """What is appended, truncated or forked afterwards is as if the record had never travelled."""
        ((_number, arrived),) = carried([(0, episode(*records))])
        for ours, theirs in zip(records, arrived.trajectories, strict=True):
            for record in (ours, theirs):
                record.add_action([5, 6], [-0.25, -0.5], 8)
                paths = record.fork(2)
                paths[1].add_forced([3])
                record.join(paths)
                record.add_observation([1])
            assert laid_out(ours) == laid_out(theirs)
            assert laid_out(ours.truncated(2)) == laid_out(theirs.truncated(2))

    def test_appending_to_one_record_leaves_the_others(self):
        """Records that arrived together share no memory that anybody writes to."""
        arrived = [result for _number, result in carried([(i, episode(linear(3 + i))) for i in range(3)])]
        before = [plain(result) for result in arrived[1:]]
        arrived[0].trajectories[0].add_action([50] * 2000, [-1.0] * 2000, 1)
        assert before == [plain(result) for result in arrived[1:]]

    def test_what_arrived_does_not_hold_the_message(self):
        """An episode that is kept keeps no token of the others, nor the store that the message came through."""
        message = pack_episodes([(i, episode(linear(50))) for i in range(4)])
        sent = (message.token_ids, message.logprobs, message.weight_versions)
        for _number, result in unpack_episodes(message):
            (record,) = result.trajectories
            held = (record.input_ids, record.logprobs, record.weight_versions, record.origins)
            assert not any(np.shares_memory(a, b) for a in held for b in sent)

    def test_the_number_of_arrays_does_not_grow(self):
        """Many episodes are as many arrays as one is, and the bytes are those of ids and log-probabilities."""
        counts = []
        for count in (1, 40):
            buffers = []
            message = pack_episodes([(i, episode(linear(1000))) for i in range(count)])
            pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
            counts.append(len(buffers))
            num_bytes = sum(len(each.raw()) for each in buffers)
            assert num_bytes < 13 * 1003 * count
        assert counts[0] == counts[1]

    def test_a_broken_record_arrives_broken(self):
        """What failed its check is not mended on the way: who looks for the fault must see it."""
        record = linear()
        record._columns._arrays["position_ids"][3] = 77
        ((_number, arrived),) = carried([(0, episode(record, status=Status.FAILED))])
        assert arrived.trajectories[0].position_ids[3] == 77

    def test_results_are_not_changed(self):
        """Packing leaves what it packs as it is: who is told of the episode in the worker goes on reading it."""
        result = episode(linear(), scores=(TrajectoryScore(value=1.0),))
        before = plain(result)
        carried([(0, result), (1, evolve(result, rollout_n=1))])
        assert before == plain(result)

    def test_nothing(self):
        """A message without episodes: the events of those that run travel alone."""
        assert carried([]) == []
