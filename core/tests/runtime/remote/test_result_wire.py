"""Wire format of finished episodes: exact values, few arrays, and no shared memory."""

import pickle

import numpy as np
from attrs import asdict, evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.record.columns import DTYPES
from turnwise.record.lineage import EpisodeRecord, RecordLineage
from turnwise.record.result import EpisodeResult
from turnwise.record.spec import EpisodeSpec, UnfinishedEpisode
from turnwise.record.trajectory import Trajectory
from turnwise.runtime.remote.result_wire import pack_episodes, unpack_episodes
from turnwise.types import EpisodeMetrics, Fault, Status, Task, TokenScore, TrajectoryScore, TurnScore
from turnwise_testing.inputs.strategies import trajectories

few = settings(max_examples=25, deadline=None)


def score_of(record, number):
    """Return a score; its kind depends on the number."""
    kinds = (
        TrajectoryScore(value=number / 2, extra={"a": 1.0}),
        TurnScore(values=tuple(float(i) for i in range(len(record.turns())))),
        TokenScore(values=tuple(map(float, record.response_mask))),
    )
    return kinds[number % 3]


@st.composite
def results(draw):
    """Episodes of every status, with none or several records, some unfinished within a block."""
    task = Task(messages=({"role": "user", "content": "a"},), uid=f"t{draw(st.integers(0, 3))}", extra={"level": 2})
    records = draw(st.lists(trajectories(), max_size=3))
    unfinished = None
    if draw(st.booleans()):
        began = draw(trajectories())
        began.fork(2)[0].add_action([7], [-0.5], 1)
        unfinished = UnfinishedEpisode(spec=EpisodeSpec(task=task, agent_name="a"), records=(EpisodeRecord(began),))
    return EpisodeResult(
        task=task,
        rollout_n=draw(st.integers(0, 3)),
        global_step=3,
        agent_name="a",
        status=draw(st.sampled_from(list(Status))),
        fault=draw(st.none() | st.just(Fault(owner="tool", kind="E", message="m", traceback="l1\nl2"))),
        trajectories=tuple(records),
        scores=tuple(score_of(record, i) for i, record in enumerate(records)) if draw(st.booleans()) else (),
        lineage=tuple(RecordLineage(label=f"{i}") for i in range(len(records))) if draw(st.booleans()) else (),
        messages=(*task.messages, {"role": "assistant", "content": "b", "tool_calls": [{"id": "1"}]}),
        metrics=EpisodeMetrics(total_s=1.5, num_tokens={"action": 3}, extra={"x": 0.25}),
        unfinished=unfinished,
    )


def plain(value):
    """Return a result as nested plain values, with all saved columns of its records, so that results compare."""
    if isinstance(value, Trajectory):
        saved = value.to_dict()
        arrays = {name: (saved[name].dtype.str, saved[name].tolist()) for name in DTYPES}
        rest = {name: repr(saved[name]) for name in saved.keys() - arrays.keys()}
        return {**arrays, **rest, "next": value.next_position, "segments": value.segments}
    return asdict(value, value_serializer=lambda _owner, _field, each: to_plain(each))


def laid_out(record):
    """Return a record without block numbers: only the original process numbers a block of empty paths."""
    segments = [(s.origin, s.start, s.stop, s.path) for s in record.segments]
    return {name: value for name, value in plain(record).items() if name != "segments"} | {"places": segments}


def to_plain(value):
    if isinstance(value, Trajectory):
        return plain(value)
    if isinstance(value, tuple) and value and isinstance(value[0], Trajectory):
        return tuple(map(plain, value))
    return value


def send_and_receive(finished):
    """Return unpacked episodes after pickling, with read-only arrays as Ray provides them."""
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
    """Episodes that travel from a worker to the driver."""

    @few
    @given(st.lists(results(), max_size=5))
    def test_results_are_unchanged(self, episodes):
        """Every value, and every array with its dtype, is equal after the journey, in the same order."""
        finished = list(zip(range(7, 7 + len(episodes)), episodes, strict=True))
        arrived = send_and_receive(finished)
        assert [(number, plain(result)) for number, result in finished] == [
            (number, plain(result)) for number, result in arrived
        ]

    @few
    @given(st.lists(trajectories(), min_size=1, max_size=4))
    def test_received_records_can_be_extended(self, records):
        """Appending, truncating and forking have the same effect as on the original record."""
        ((_number, arrived),) = send_and_receive([(0, episode(*records))])
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
        """Records of one message share no memory that is ever written."""
        arrived = [result for _number, result in send_and_receive([(i, episode(linear(3 + i))) for i in range(3)])]
        before = [plain(result) for result in arrived[1:]]
        arrived[0].trajectories[0].add_action([50] * 2000, [-1.0] * 2000, 1)
        assert before == [plain(result) for result in arrived[1:]]

    def test_received_records_do_not_keep_the_message(self):
        """A kept episode keeps alive neither the tokens of others nor the memory of the message."""
        message = pack_episodes([(i, episode(linear(50))) for i in range(4)])
        sent = (message.token_ids, message.logprobs, message.weight_versions)
        for _number, result in unpack_episodes(message):
            (record,) = result.trajectories
            held = (record.input_ids, record.logprobs, record.weight_versions, record.origins)
            assert not any(np.shares_memory(a, b) for a in held for b in sent)

    def test_the_number_of_arrays_does_not_grow(self):
        """Many episodes need as many arrays as one, and only bytes for ids, versions and log-probabilities."""
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
        """A record that failed its check is not repaired, so that its fault can be found."""
        record = linear()
        record._columns._arrays["position_ids"] = np.array([*range(3), 77, *range(4, len(record))], np.int32)
        ((_number, arrived),) = send_and_receive([(0, episode(record, status=Status.FAILED))])
        assert arrived.trajectories[0].position_ids[3] == 77

    def test_packing_does_not_change_results(self):
        """Observers in the worker may still read an episode that was packed."""
        result = episode(linear(), scores=(TrajectoryScore(value=1.0),))
        before = plain(result)
        send_and_receive([(0, result), (1, evolve(result, rollout_n=1))])
        assert before == plain(result)

    def test_an_empty_message(self):
        """A message may have no episodes: then only events travel."""
        assert send_and_receive([]) == []
