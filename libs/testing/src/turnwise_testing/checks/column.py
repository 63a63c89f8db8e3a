"""
Requirements of every open column, as plain functions without pytest.

A check takes a `ColumnProbe`. Hypothesis draws records and the values of their tokens, and each check takes them
through something that happens to records: forks and joins, cuts, branches, an interrupt, batches, messages and files.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal

import numpy as np
from attrs import evolve, frozen
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from turnwise import ColumnSpec, EpisodeResult, FinishReason, GenerateResult, Status, Task, Trajectory
from turnwise.protocols import ReplicaLoad
from turnwise.record.column_specs import check_open
from turnwise.record.columns import is_in_turn
from turnwise.record.invariants import check_trajectory
from turnwise.record.lineage import EpisodeRecord
from turnwise.record.spec import EpisodeSpec, UnfinishedEpisode
from turnwise.record.step_results import RecordedTurn
from turnwise.runtime.remote.result_wire import pack_episodes, unpack_episodes
from turnwise.runtime.remote.wire import pack_results, unpack_results
from turnwise_testing.checks.check import Check, register
from turnwise_testing.checks.part import PartChecks
from turnwise_testing.probes.engine import expect, expect_equal

Values = NDArray[Any]
_MAX_TOKENS: Final = 4


@frozen(kw_only=True)
class ColumnProbe:
    """
    The probe of a column.

    Attributes:
        make_column: returns the declaration, as the registered factory does.
        numbers: of the values; None draws any of the type.
        max_examples: records of each check.
    """

    make_column: Callable[[], ColumnSpec]
    numbers: st.SearchStrategy[Any] | None = None
    max_examples: int = 20

    def for_each(self, check: Callable[[ColumnSpec, Trajectory], None]) -> None:
        """Call a function with records that have the column."""
        spec = self.make_column()

        @settings(max_examples=self.max_examples, deadline=None, database=None, suppress_health_check=[*HealthCheck])
        @given(_records(spec, self.numbers))
        def run(record: Trajectory) -> None:
            check(spec, record)

        run()


COLUMN_CHECKS: dict[str, Check] = {}
"""Every check by the name of its function without `check_`."""
COLUMNS = PartChecks(
    checks=COLUMN_CHECKS,
    probe=lambda part: ColumnProbe(make_column=part.make, numbers=part.examples[0] if part.examples else None),
)
_check = register(COLUMN_CHECKS)


def _numbers(spec: ColumnSpec) -> st.SearchStrategy[Any]:
    dtype = np.dtype(spec.dtype)
    if dtype.kind == "b":
        return st.booleans()
    if dtype.kind == "f":
        widths: dict[int, Literal[16, 32, 64]] = {2: 16, 4: 32, 8: 64}
        return st.floats(width=widths[dtype.itemsize], allow_nan=False)
    return st.integers(int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))


@st.composite
def _records(draw: st.DrawFn, spec: ColumnSpec, numbers: st.SearchStrategy[Any] | None) -> Trajectory:
    """Draw a record with turns, observations, forced text and perhaps a block of paths."""
    numbers = _numbers(spec) if numbers is None else numbers

    def values(count: int) -> Values:
        size = count * int(np.prod(spec.shape))
        flat = draw(st.lists(numbers, min_size=size, max_size=size))
        return np.array(flat, spec.dtype).reshape(count, *spec.shape)

    def grow(target: Any) -> None:
        for kind in draw(st.lists(st.sampled_from(["act", "act", "plain", "observe", "force"]), max_size=4)):
            count = draw(st.integers(1, _MAX_TOKENS))
            if kind == "observe":
                target.add_observation(range(count))
            elif kind == "force":
                target.add_forced(range(count))
            else:
                gives = kind == "act" and spec.tokens != "none"
                target.add_action(range(count), [-0.5] * count, columns=[(spec, values(count))] if gives else ())

    record = Trajectory(range(draw(st.integers(0, _MAX_TOKENS))))
    grow(record)
    if draw(st.booleans()):
        paths = record.fork(draw(st.integers(1, 3)))
        for path in paths:
            grow(path)
        record.join(paths)
        grow(record)
    if spec.tokens == "none":
        record = record.with_column(spec, values(record.num_response_tokens))
    return record


def _column(record: Trajectory, spec: ColumnSpec) -> Values:
    """Return the values of a record, the fill where it has no column."""
    if spec.name in record.columns:
        return record.column(spec.name)
    return spec.filled(record.num_response_tokens if spec.of_responses else len(record))


def _expect_same(actual: Values, expected: Values, text: str) -> None:
    expect(
        actual.dtype == expected.dtype and actual.shape == expected.shape and actual.tobytes() == expected.tobytes(),
        f"{text}: the values are {actual.tolist()}, expected {expected.tolist()}",
    )


def _result(record: Trajectory) -> EpisodeResult:
    task = Task(messages=({"role": "user", "content": "hi"},), uid="t")
    return EpisodeResult(task=task, status=Status.COMPLETED, trajectories=(record,), agent_name="a")


@_check
def check_is_a_declaration(probe: ColumnProbe) -> None:
    """The factory returns a `ColumnSpec`, the same each time, whose name is free; a file gives it back."""
    spec = probe.make_column()
    expect(isinstance(spec, ColumnSpec), f"the factory returned {type(spec).__name__}, expected a ColumnSpec")
    check_open(spec)
    expect_equal(probe.make_column(), spec, "the second declaration")
    expect_equal(ColumnSpec.from_dict(json.loads(json.dumps(spec.to_dict()))), spec, "the declaration from a file")


@_check
def check_fill_is_no_value(probe: ColumnProbe) -> None:
    """Tokens without a value have the fill, in the type of the column."""
    spec = probe.make_column()
    filled = spec.filled(2)
    expect_equal((filled.shape, filled.dtype.name), ((2, *spec.shape), spec.dtype), "the shape and type of the fill")
    expect(bool(spec.is_fill(filled).all()), f"the fill {spec.fill} is not equal to itself in the type {spec.dtype}")


@_check
def check_truncation(probe: ColumnProbe) -> None:
    """A cut keeps the values of the tokens that remain."""

    def run(spec: ColumnSpec, record: Trajectory) -> None:
        whole = _column(record, spec)
        for budget in range(record.num_response_tokens + 1):
            kept = budget + (0 if spec.of_responses else record.num_prompt_tokens)
            cut = record.truncated(budget)
            check_trajectory(cut)
            _expect_same(_column(cut, spec), whole[:kept], f"after a cut to {budget} response tokens")

    probe.for_each(run)


@_check
def check_branch(probe: ColumnProbe) -> None:
    """A branched record keeps the values of replayed tokens, or has the fill there, as declared."""

    def run(spec: ColumnSpec, record: Trajectory) -> None:
        expected = _column(record, spec).copy()
        if spec.on_branch == "fill":
            turns = np.concatenate([np.zeros(len(record) - len(record.origins), bool), is_in_turn(record.origins)])
            expected[turns[len(turns) - len(expected) :]] = spec.fill
        branch = record.branched(record.mark())
        check_trajectory(branch)
        _expect_same(_column(branch, spec), expected, "after a branch")

    probe.for_each(run)


@_check
def check_join(probe: ColumnProbe) -> None:
    """Paths keep their values in their order, also when the block was open in a saved record."""

    def run(spec: ColumnSpec, record: Trajectory) -> None:
        own = _column(record, spec)[-record.num_response_tokens :] if record.num_response_tokens else spec.filled(0)
        sampled = [own[start:stop] for start, stop in _runs(record)]
        joined, given = Trajectory([1]), spec.tokens != "none"
        paths = joined.fork(len(sampled) or 1)
        for path, values in zip(paths, sampled, strict=False):
            columns = [(spec, values)] if given else ()
            path.add_action(range(len(values)), [-0.5] * len(values), columns=columns)
        restored = pickle.loads(pickle.dumps(joined))
        for each in (joined, restored):
            each.join(each.open_paths)
            if given:
                expected = np.concatenate([spec.filled(0 if spec.of_responses else 1), *sampled])
                _expect_same(_column(each, spec), expected, "after a join")

    probe.for_each(run)


def _runs(record: Trajectory) -> list[tuple[int, int]]:
    prompt = record.num_prompt_tokens
    return [(start - prompt, stop - prompt) for start, stop in record.turns()]


def _answer(spec: ColumnSpec, values: Values, reason: FinishReason) -> GenerateResult:
    """Return an engine's answer whose tokens have the values."""
    count = len(values)
    return GenerateResult(
        token_ids=range(count), logprobs=[-0.5] * count, finish_reason=reason, columns={spec.name: values}
    )


@_check
def check_wire(probe: ColumnProbe) -> None:
    """Answers of replicas and episodes of workers arrive unchanged."""

    def run(spec: ColumnSpec, record: Trajectory) -> None:
        values = _column(record, spec)[-3:]
        answer = _answer(spec, values, FinishReason.STOP)
        packed = pack_results([("a", answer), ("b", evolve(answer, columns=None))], load=ReplicaLoad())
        first, second = unpack_results(pickle.loads(pickle.dumps(packed)))
        _expect_same(np.asarray((first[1].columns or {})[spec.name]), values, "of an answer on the wire")
        expect_equal(second[1].columns, None, "the columns of an answer without any")
        sent = pickle.loads(pickle.dumps(pack_episodes([(0, _result(record))])))
        ((_number, result),) = unpack_episodes(sent)
        expect_equal(result.trajectories[0].columns, record.columns, "the columns of an episode on the wire")
        _expect_same(_column(result.trajectories[0], spec), _column(record, spec), "of an episode on the wire")

    probe.for_each(run)


@_check
def check_resume(probe: ColumnProbe) -> None:
    """An interrupted episode has its values after a file: of its records, and of a turn that was cut."""
    from turnwise_result_files import load_unfinished, save_unfinished

    def run(spec: ColumnSpec, record: Trajectory) -> None:
        values = _column(record, spec)[-2:]
        cut = _answer(spec, values, FinishReason.ABORT)
        position = (1, len(record), -1, len(record))
        task = Task(messages=({"role": "user", "content": "hi"},), uid="t")
        episode = UnfinishedEpisode(
            spec=EpisodeSpec(task=task, agent_name="a"),
            records=(EpisodeRecord(record),),
            turns=(RecordedTurn(position=position, result=cut),),
        )
        with TemporaryDirectory() as folder:
            save_unfinished(Path(folder) / "unfinished.jsonl", [episode])
            (again,) = load_unfinished(Path(folder) / "unfinished.jsonl")
        _expect_same(_column(again.trajectories[0], spec), _column(record, spec), "of a record after a resume")
        _expect_same(np.asarray((again.turns[0].result.columns or {})[spec.name]), values, "of a turn after a resume")

    probe.for_each(run)


@_check
def check_file(probe: ColumnProbe) -> None:
    """A file of episodes gives the values back."""
    from turnwise_result_files import TrajectoryWriter, read_results

    def run(spec: ColumnSpec, record: Trajectory) -> None:
        with TemporaryDirectory() as folder:
            with TrajectoryWriter(Path(folder) / "trajectories.parquet") as writer:
                writer.write(_result(record))
            (again,) = read_results(Path(folder) / "trajectories.parquet")
        expect_equal(again.trajectories[0].columns, record.columns, "the columns of a file")
        _expect_same(_column(again.trajectories[0], spec), _column(record, spec), "from a file")

    probe.for_each(run)


@_check
def check_padding_and_packing(probe: ColumnProbe) -> None:
    """In batches real tokens keep their values, and pads hold the fill."""
    from turnwise.batch.packed_batch import collate_packed
    from turnwise.batch.rollout_batch import RolloutBatch, collate

    def run(spec: ColumnSpec, record: Trajectory) -> None:
        results = [_result(record), _result(Trajectory([1, 2])), _result(record)]
        if spec.name not in record.columns:
            return
        expected = [_column(each.trajectories[0], spec) for each in results]
        packed = collate_packed(results, pad_token_id=0)
        for values, row in zip(expected, packed.split(packed.fields[spec.name]), strict=True):
            _expect_same(row.numpy(), values, "in a packed batch")
        batch = collate(results, pad_token_id=0, prompt_length=record.num_prompt_tokens + 3)
        for each in (batch, RolloutBatch.from_packed(batch.packed(), prompt_length=batch.prompt_length)):
            for number, values in enumerate(expected):
                real = each.attention_mask[number].bool()
                real = real[each.prompt_length :] if spec.of_responses else real
                field = each.fields[spec.name][number]
                _expect_same(field[real].numpy(), values, "in a padded batch")
                expect(bool(spec.is_fill(field[~real].numpy()).all()), "a pad of a padded batch is not the fill")

    probe.for_each(run)
