"""The token record: worked cases and the invariants as properties."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.errors import InvariantError, TrajectoryError
from turnwise.record.columns import DTYPES, Origin
from turnwise.record.invariants import check_sampled, check_trajectory
from turnwise.record.trajectory import Trajectory
from turnwise.types import FinishReason, GenerateResult
from turnwise_testing.inputs.strategies import Script, scripts, trajectories

COLUMNS = (
    "response_ids",
    "response_mask",
    "logprobs",
    "weight_versions",
    "origins",
    "position_ids",
    "block_start",
    "path_start",
)


def columns_of(trajectory: Trajectory) -> dict[str, list[float]]:
    return {name: getattr(trajectory, name).tolist() for name in COLUMNS}


def visible_set(trajectory: Trajectory, query: int) -> set[int]:
    return {key for key in range(len(trajectory)) if trajectory.visible(query, key)}


def damaged(trajectory: Trajectory, column: str, row: int, value: float) -> Trajectory:
    """Return a copy of a record with another value in a column."""
    columns = {name: trajectory._columns.view(name).copy() for name in DTYPES}
    columns[column][row] = value
    return Trajectory.from_columns(columns, list(trajectory.segments), trajectory.num_prompt_tokens)


def replayed_visibility(script: Script) -> list[set[int]]:
    """Derive the visibility of every token by replaying the script, without the two ints of the layout."""
    seen: list[set[int]] = []

    def take(tokens: int, context: set[int]) -> set[int]:
        for _ in range(tokens):
            context = context | {len(seen)}
            seen.append(context)
        return context

    context = take(len(script.prompt_ids), set())
    for step in script.steps:
        if hasattr(step, "paths"):
            ends = [take(sum(len(a.token_ids) for a in path), context) for path in step.paths]
            context = set().union(*ends)
        else:
            context = take(len(step.token_ids), context)
    return seen


class TestLinear:
    """A record without blocks."""

    def test_worked_example(self):
        """
        Masks, log-probabilities and versions follow from the origins.
        """
        t = Trajectory([5, 6])
        t.add_action([7, 8], [-0.5, -0.25], weight_version=3)
        t.add_observation([9])
        t.add_forced([10])
        t.add_action([11], [-1.0], weight_version=4)

        assert t.input_ids.tolist() == [5, 6, 7, 8, 9, 10, 11]
        assert t.prompt_ids.tolist() == [5, 6]
        assert t.response_mask.tolist() == [1, 1, 0, 0, 1]
        assert t.logprobs.tolist() == [-0.5, -0.25, 0.0, 0.0, -1.0]
        assert t.weight_versions.tolist() == [3, 3, -1, -1, 4]
        assert t.position_ids.tolist() == list(range(7))
        assert [s.origin for s in t.segments] == [Origin.ACTION, Origin.OBSERVATION, Origin.FORCED, Origin.ACTION]
        assert t.turns() == ((2, 4), (6, 7))

    def test_adjacent_actions_are_one_turn(self):
        """
        A turn that went on elsewhere after its replica died is one turn in two segments.
        """
        t = Trajectory([1])
        t.add_action([2], [-1.0], weight_version=0)
        t.add_action([3], [-1.0], weight_version=1)

        assert t.turns() == ((1, 3),)
        assert len(t.segments) == 2

    def test_versions_per_token(self):
        """
        A turn during which the weights changed carries a version per token.
        """
        t = Trajectory([1])
        t.add_action([2, 3], [-1.0, -1.0], weight_version=[4, 5])

        assert t.weight_versions.tolist() == [4, 5]

    def test_empty_appends_leave_nothing(self):
        """
        An empty generation is legal and changes nothing.
        """
        t = Trajectory([1])
        t.add_action([], [])
        t.add_observation([])

        assert t.segments == ()
        assert t.num_response_tokens == 0

    @pytest.mark.parametrize(
        ("ids", "logprobs", "version", "text"),
        [
            ([1, 2], [-1.0], 0, "2 token ids but 1 log-probabilities"),
            ([1], [float("nan")], 0, "log-probability 0 is not finite"),
            ([1, 2], [-1.0, float("-inf")], 0, "log-probability 1 is not finite"),
            ([1], [-1.0], -1, "at least 0"),
            ([1], [-1.0], [1, 2], "must be one int or 1 of them"),
            (np.array([-1], np.int32), [-1.0], 0, "negative"),
            ([-1], [-1.0], 0, "must be in"),
            ([[1]], [[-1.0]], 0, "one-dimensional"),
            ([1.5], [-1.0], 0, "must be integers"),
            ([2**31], [-1.0], 0, "must be in"),
        ],
    )
    def test_bad_actions_are_refused(self, ids, logprobs, version, text):
        """
        Values that cannot be trained on are refused at the append, which changes nothing.
        """
        t = Trajectory([1])
        with pytest.raises(TrajectoryError, match=text):
            t.add_action(ids, logprobs, version)

        assert len(t) == 1

    def test_views_are_read_only_and_stay(self):
        """
        Views of a record are read-only, and later appends do not change them.
        """
        t = Trajectory([1])
        t.add_action([2], [-1.0])
        early = t.response_ids
        for _ in range(5000):
            t.add_observation([3])

        assert early.tolist() == [2]
        for name in COLUMNS:
            with pytest.raises(ValueError, match="read-only"):
                getattr(t, name)[0] = 9


class TestMemory:
    """Rows that have no memory, and columns that have none."""

    def test_a_plain_record_has_memory_for_the_sampled_columns_of_its_response_only(self):
        """
        Many idle records must fit into memory, and a prompt is nearly all of an idle record.
        """
        t = Trajectory(np.arange(10_000))
        t.add_action([1] * 100, [-1.0] * 100, 2)
        t.add_observation([2] * 100)
        own = t._columns._arrays

        assert set(own) == {"token_ids", "logprobs", "origins", "weight_versions"}
        assert sum(array.nbytes for array in own.values()) < 100_000
        assert t._columns.view("position_ids").base is Trajectory(range(9_000))._columns.view("position_ids").base

    @given(trajectories(), st.data())
    def test_a_view_from_any_row_equals_the_part_of_the_whole(self, t, data):
        """
        Rows of a prompt without memory are read like others.
        """
        start = data.draw(st.integers(0, len(t)))
        for name in DTYPES:
            part = t._columns.view(name, start)
            assert part.dtype == DTYPES[name]
            assert not part.flags.writeable
            assert part.tolist() == t._columns.view(name).tolist()[start:]

    def test_a_block_gives_its_columns_memory(self):
        """
        Tokens before and after the block keep the positions that they had.
        """
        t = Trajectory([1, 2])
        t.add_forced([3])
        before = t.position_ids
        one, two = t.fork(2)
        one.add_forced([4, 5])
        two.add_forced([6])
        t.join([one, two])
        t.add_forced([7])

        assert before.tolist() == [0, 1, 2]
        assert t.position_ids.tolist() == [0, 1, 2, 3, 4, 3, 5]
        assert t.block_start.tolist() == [0, 0, 0, 3, 3, 3, 0]
        assert t.path_start.tolist() == [0, 0, 0, 3, 3, 5, 0]


class TestBlocks:
    """Forks and joins."""

    def test_three_paths_of_different_length(self):
        """
        Every path starts at one position; the token after the block follows the longest path.
        """
        t = Trajectory([1, 2])
        t.add_action([3], [-1.0])
        a, b, c = t.fork(3)
        a.add_forced([10])
        a.add_action([11, 12], [-1.0, -1.0])
        b.add_action([20], [-1.0])
        c.add_action([30, 31, 32, 33], [-1.0] * 4)
        t.join([a, b, c])
        t.add_forced([4])

        assert t.input_ids.tolist() == [1, 2, 3, 10, 11, 12, 20, 30, 31, 32, 33, 4]
        assert t.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 3, 3, 4, 5, 6, 7]
        assert t.block_start.tolist() == [0, 0, 0] + [3] * 8 + [0]
        assert t.path_start.tolist() == [0, 0, 0, 3, 3, 3, 6, 7, 7, 7, 7, 0]
        assert visible_set(t, 6) == {0, 1, 2, 6}
        assert visible_set(t, 10) == {0, 1, 2, 7, 8, 9, 10}
        assert visible_set(t, 11) == set(range(12))
        assert t.turns() == ((2, 3), (4, 6), (6, 7), (7, 11))

    def test_block_at_the_very_start(self):
        """
        With no prompt, paths start at position 0 and index 0.
        """
        t = Trajectory([])
        a, b = t.fork(2)
        a.add_action([1], [-1.0])
        b.add_action([2, 3], [-1.0, -1.0])
        t.join([a, b])
        t.add_forced([4])

        assert t.position_ids.tolist() == [0, 0, 1, 2]
        assert not t.visible(1, 0)
        check_trajectory(t)

    def test_paths_of_different_blocks_see_each_other(self):
        """
        Isolation ends with the block.
        """
        t = Trajectory([1])
        for _ in range(2):
            a, b = t.fork(2)
            a.add_action([2], [-1.0])
            b.add_action([3], [-1.0])
            t.join([a, b])

        assert visible_set(t, 3) == {0, 1, 2, 3}
        assert visible_set(t, 4) == {0, 1, 2, 4}

    def test_path_sees_the_trunk_and_itself(self):
        """
        A path's context is the context for sampling its next token.
        """
        t = Trajectory([1, 2])
        a, b = t.fork(2)
        a.add_action([3], [-1.0])
        b.add_action([4], [-1.0])

        assert a.input_ids.tolist() == [1, 2, 3]
        assert b.input_ids.tolist() == [1, 2, 4]
        assert b.position_ids.tolist() == [0, 1, 2]
        assert (len(b), b.own_ids.tolist(), b.num_response_tokens) == (1, [4], 1)

    def test_one_path_and_no_tokens(self):
        """
        A block of one path, and one of empty paths, are ordinary blocks.
        """
        t = Trajectory([1])
        t.join(t.fork(1))
        t.add_action([2], [-1.0])

        assert t.position_ids.tolist() == [0, 1]
        check_trajectory(t)

    def test_misuse_is_refused(self):
        """
        Forks do not nest, an open block takes no tokens, and join takes exactly its own paths.
        """
        t = Trajectory([1])
        with pytest.raises(TrajectoryError, match="no block is open"):
            t.join([])
        with pytest.raises(TrajectoryError, match="at least 1 path"):
            t.fork(0)
        a, b = t.fork(2)
        for call in (lambda: t.add_forced([1]), lambda: t.fork(2), lambda: t.truncated(1)):
            with pytest.raises(TrajectoryError, match="a block is open"):
                call()
        with pytest.raises(TrajectoryError, match="in their order"):
            t.join([b, a])
        with pytest.raises(TrajectoryError, match="nested"):
            a.fork(2)
        t.join([a, b])
        with pytest.raises(TrajectoryError, match="was joined"):
            a.add_forced([1])

    def test_close_keeps_what_open_paths_hold(self):
        """
        An episode that ends inside a block loses nothing.
        """
        t = Trajectory([1])
        a, _b = t.fork(2)
        a.add_action([2], [-1.0])
        t.close()
        t.close()

        assert t.response_ids.tolist() == [2]
        assert t.open_paths == ()


class TestProperties:
    """The invariants, on drawn records."""

    @given(trajectories())
    def test_check_passes(self, t):
        """
        The second derivation of mask, positions and layout agrees with the record.
        """
        check_trajectory(t)

    @given(scripts())
    def test_visibility_is_what_the_forks_say(self, script):
        """
        Two ints per token give exactly the visibility that a replay of the forks gives.
        """
        t = script.build()

        assert [visible_set(t, q) for q in range(len(t))] == replayed_visibility(script)

    @given(scripts())
    def test_position_is_one_more_than_the_largest_visible(self, script):
        """
        Positions equal the length of the longest visible chain.
        """
        t = script.build()
        positions = t.position_ids.tolist()
        expected = [
            1 + max((positions[k] for k in seen if k != q), default=-1)
            for q, seen in enumerate(replayed_visibility(script))
        ]

        assert positions == expected

    @given(trajectories())
    def test_visibility_is_transitive(self, t):
        """
        Visibility is transitive.
        """
        sets = [visible_set(t, q) for q in range(len(t))]

        assert all(sets[k] <= sets[q] for q in range(len(t)) for k in sets[q])

    @given(scripts(), st.integers(0, 40))
    def test_truncating_equals_slicing(self, script, budget):
        """
        Computing on a truncated record equals truncating the computed one, inside blocks too.
        """
        t = script.build()
        cut = t.truncated(budget)
        check_trajectory(cut)

        stop = t.num_prompt_tokens + budget
        for name in COLUMNS:
            whole = getattr(t, name)
            length = stop if len(whole) == len(t) else budget
            assert getattr(cut, name).tolist() == whole[:length].tolist()
        assert cut.input_ids.tolist() == t.input_ids[:stop].tolist()

    @given(scripts(), st.integers(0, 8))
    def test_a_longer_record_extends_a_shorter_one(self, script, num_steps):
        """
        Appending never changes recorded tokens.
        """
        short, long = script.build(num_steps), script.build()

        for name in COLUMNS:
            column = getattr(short, name)
            assert getattr(long, name)[: len(column)].tolist() == column.tolist()

    @given(trajectories())
    def test_saving_restores(self, t):
        """
        A record survives pickling and can be appended to afterwards like the first.
        """
        again = pickle.loads(pickle.dumps(t))
        for record in (t, again):
            record.add_action([1], [-1.0], 7)

        assert columns_of(again) == columns_of(t)
        assert again.segments == t.segments
        assert again.next_position == t.next_position
        check_trajectory(again)

    @given(scripts(max_steps=6))
    def test_mask_is_one_exactly_on_what_was_sampled(self, script):
        """
        The mask equals an independent count over the script.
        """

        def masks(step):
            if hasattr(step, "paths"):
                return [m for path in step.paths for append in path for m in masks(append)]
            return [int(step.kind == "action")] * len(step.token_ids)

        expected = [m for step in script.steps for m in masks(step)]
        assert script.build().response_mask.tolist() == expected


class TestChecks:
    """The run-time check finds every broken promise."""

    @pytest.mark.parametrize(
        ("column", "value", "text"),
        [
            ("origins", 2, "origins at token 3"),
            ("position_ids", 9, "position_ids at token 3"),
            ("block_start", 1, "block_start at token 3"),
            ("path_start", 1, "path_start at token 3"),
            ("weight_versions", -1, "weight versions"),
            ("logprobs", np.nan, "not finite"),
        ],
    )
    def test_damage_is_named(self, column, value, text):
        """
        A damaged column is named with the token.
        """
        t = Trajectory([1, 2])
        t.add_action([3, 4], [-1.0, -1.0])
        with pytest.raises(InvariantError, match=text):
            check_trajectory(damaged(t, column, 3, value))

    def test_observation_with_logprob_is_found(self):
        """
        Only sampled tokens have log-probabilities.
        """
        t = Trajectory([1])
        t.add_observation([2])
        with pytest.raises(InvariantError, match="was not sampled"):
            check_trajectory(damaged(t, "logprobs", 1, -1.0))

    def test_segments_that_do_not_tile_are_found(self):
        """
        A gap between segments is a broken record.
        """
        t = Trajectory([1])
        t.add_action([2, 3], [-1.0, -1.0])
        del t._segments[0]
        with pytest.raises(InvariantError, match="segments end at 1"):
            check_trajectory(t)

    def test_sampled_ids_stand_unchanged(self):
        """
        A record whose actions differ from the engine's answers is refused.
        """
        answer = GenerateResult(token_ids=[2, 3], logprobs=[-1.0, -2.0], finish_reason=FinishReason.STOP)
        t = Trajectory([1])
        t.add_action(answer.token_ids, answer.logprobs)
        check_sampled(t, [answer])
        check_sampled(t.truncated(1), [answer])
        other = Trajectory([1])
        other.add_action([2, 4], [-1.0, -2.0])
        with pytest.raises(InvariantError, match="token ids differ from the engine"):
            check_sampled(other, [answer])

    def test_sampled_paths_are_compared_as_a_collection(self):
        """
        Paths finish in any order; their tokens must still be the engine's.
        """
        answers = [GenerateResult(token_ids=[i], logprobs=[-1.0 * i], finish_reason=FinishReason.STOP) for i in (5, 4)]
        t = Trajectory([1])
        a, b = t.fork(2)
        a.add_action([4], [-4.0])
        b.add_action([5], [-5.0])
        t.join([a, b])
        check_sampled(t, answers)
        with pytest.raises(InvariantError, match="differ from the engine"):
            check_sampled(t, [answers[0], answers[0]])


def test_restoring_damaged_data_is_refused():
    """
    A saved record with a missing or short column is refused with its name.
    """
    saved = Trajectory([1]).to_dict()
    with pytest.raises(TrajectoryError, match="lacks logprobs"):
        Trajectory.from_dict({k: v for k, v in saved.items() if k != "logprobs"})
    with pytest.raises(TrajectoryError, match="differ in length"):
        Trajectory.from_dict(saved | {"logprobs": np.zeros(3, np.float32)})
