"""Layouts: positions and visibility by independent derivations, worked cases, cuts, and the way over the wire."""

import asyncio

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.layout import Layout, visible_keys
from turnwise.record.invariants import check_trajectory, expected_layout
from turnwise.record.trajectory import Trajectory
from turnwise.runtime.remote.contexts import ProvedPrefix
from turnwise.runtime.remote.replica_server import ReplicaServer
from turnwise.runtime.remote.wire import pack_requests, unpack_requests
from turnwise.types import GenerateRequest, SamplingParams
from turnwise_testing.engines.scripted import SCRIPTED_CAPABILITIES, ScriptedEngine
from turnwise_testing.inputs.strategies import scripts, trajectories
from turnwise_testing.references.dense import predecessors, visibility


def forked(*lengths, prompt=2, after=2):
    """Return a record with one block of paths of these lengths."""
    trajectory = Trajectory(np.arange(prompt))
    add_block(trajectory, *lengths)
    trajectory.add_forced(np.arange(after))
    return trajectory


def add_block(trajectory, *lengths):
    """Fork, give each path its tokens, and join."""
    paths = trajectory.fork(len(lengths))
    for path, length in zip(paths, lengths, strict=True):
        path.add_forced(np.arange(length))
    trajectory.join(paths)


def columns_of(trajectory):
    """Return the layout of a record as lists."""
    names = ("position_ids", "block_start", "path_start")
    return [getattr(trajectory, name).tolist() for name in names]


WORKED = [
    (forked(3), [0, 1, 2, 3, 4, 5, 6], [0, 0, 2, 2, 2, 0, 0], [0, 0, 2, 2, 2, 0, 0]),
    (forked(2, 1), [0, 1, 2, 3, 2, 4, 5], [0, 0, 2, 2, 2, 0, 0], [0, 0, 2, 2, 4, 0, 0]),
    (forked(1, 2, 1), [0, 1, 2, 2, 3, 2, 4, 5], [0, 0, 2, 2, 2, 2, 0, 0], [0, 0, 2, 3, 3, 5, 0, 0]),
    (forked(0, 2, 0), [0, 1, 2, 3, 4, 5], [0, 0, 2, 2, 0, 0], [0, 0, 2, 2, 0, 0]),
    (forked(0, 0), [0, 1, 2, 3], [0, 0, 0, 0], [0, 0, 0, 0]),
    (forked(1, 1, prompt=0), [0, 0, 1, 2], [0, 0, 0, 0], [0, 1, 0, 0]),
    (forked(*range(1, 9), after=1), None, None, None),
]


@pytest.mark.parametrize(("trajectory", "positions", "block_start", "path_start"), WORKED)
def test_worked_cases(trajectory, positions, block_start, path_start):
    """One path, several, empty ones, a block at the start, eight paths: written down by hand."""
    if positions is None:
        positions = [0, 1, *(2 + i for length in range(1, 9) for i in range(length)), 10]
        block_start = [0, 0, *[2] * 36, 0]
        path_start = [0, 0, *(2 + sum(range(1, n)) for n in range(1, 9) for _ in range(n)), 0]

    assert [positions, block_start, path_start] == columns_of(trajectory)


def test_two_blocks_in_a_row():
    """The second block starts after the longest path of the first, and its paths see all of that."""
    trajectory = Trajectory([1])
    add_block(trajectory, 1, 3)
    add_block(trajectory, 2, 1)
    trajectory.add_forced([9])

    assert [0, 1, 1, 2, 3, 4, 5, 4, 6] == trajectory.position_ids.tolist()
    seen = visibility(trajectory).astype(int).tolist()
    assert [1, 1, 0, 0, 0, 0, 0, 0, 0] == seen[1]
    assert [1, 0, 1, 1, 1, 0, 0, 0, 0] == seen[4]
    assert [1, 1, 1, 1, 1, 0, 0, 1, 0] == seen[7]
    assert [1] * 9 == seen[8]
    assert ((1, 1, 2), (1, 2, 5), (5, 5, 7), (5, 7, 8)) == trajectory.layout.paths


@settings(deadline=None, max_examples=40)
@given(trajectories())
def test_three_derivations_agree(trajectory):
    """The record as it grew, its segments, and the layout that travels say the same of every token."""
    derived = [column.tolist() for column in trajectory.layout.columns(len(trajectory))]
    from_segments = expected_layout(trajectory.num_prompt_tokens, trajectory.segments)

    assert columns_of(trajectory) == derived == [column.tolist() for column in from_segments]


@settings(deadline=None, max_examples=40)
@given(trajectories())
def test_a_position_is_one_more_than_the_largest_seen(trajectory):
    """Positions follow from visibility alone."""
    seen = visibility(trajectory)
    np.fill_diagonal(seen, val=False)
    largest = np.where(seen, trajectory.position_ids, -1).max(1, initial=-1)

    assert (largest + 1).tolist() == trajectory.position_ids.tolist()


@settings(deadline=None, max_examples=40)
@given(trajectories())
def test_visibility_is_transitive(trajectory):
    """Who sees a token sees all that the token sees, so nothing leaks from one path to another by a third token."""
    seen = visibility(trajectory).astype(np.float32)

    assert not ((seen @ seen > 0) & (seen == 0)).any()


@settings(deadline=None, max_examples=40)
@given(trajectories())
def test_visibility_is_what_the_record_says(trajectory):
    """The matrix, and the record's own answer for a pair of tokens."""
    size = len(trajectory)

    expected = [[trajectory.visible(query, key) for key in range(size)] for query in range(size)]
    assert expected == visibility(trajectory).tolist()


@settings(deadline=None, max_examples=40)
@given(scripts(), st.data())
def test_cutting_and_computing_commute(script, data):
    """At every budget the truncated record is sound and equals the whole record on its tokens."""
    trajectory = script.build()
    budget = data.draw(st.integers(0, trajectory.num_response_tokens))
    cut = trajectory.truncated(budget)
    check_trajectory(cut)

    assert [column[: len(cut)] for column in columns_of(trajectory)] == columns_of(cut)
    assert columns_of(cut) == [column.tolist() for column in cut.layout.columns(len(cut))]
    whole = visibility(trajectory)[: len(cut), : len(cut)]
    assert (whole == visibility(cut)).all()


def test_a_cut_at_every_budget_keeps_paths_apart():
    """Two blocks of three paths, cut at every token."""
    trajectory = forked(3, 1, 4)
    add_block(trajectory, 2, 5, 1)
    trajectory.add_forced([1])
    whole = visibility(trajectory)
    for budget in range(trajectory.num_response_tokens + 1):
        cut = trajectory.truncated(budget)
        assert (whole[: len(cut), : len(cut)] == visibility(cut)).all()


def test_a_path_is_asked_for_as_if_the_trajectory_went_on():
    """The layout of an open path is the layout of the blocks before it."""
    trajectory = forked(2, 1)
    (first, _second) = trajectory.fork(2)
    first.add_forced([5])

    assert trajectory.layout == first.layout
    positions, _, _ = first.layout.columns(len(first.input_ids))
    assert first.position_ids.tolist() == positions.tolist()


def test_first_tokens_of_paths_follow_the_fork():
    """Where the logits of a token come from."""
    assert [-1, 0, 1, 2, 1, 4, 5] == predecessors(forked(2, 1)).tolist()


@pytest.mark.parametrize(
    "paths",
    [
        ((2, 3, 4),),
        ((2, 2, 2),),
        ((2, 2, 4), (2, 5, 6)),
        ((2, 2, 4), (3, 3, 5)),
        ((-1, -1, 2),),
        ((2, 2, 4), (2, 4, 3)),
    ],
)
def test_impossible_layouts_are_refused(paths):
    """A first path that does not start its block, an empty one, a gap, an overlap, a negative index, a reversed one."""
    with pytest.raises(ValueError, match="does not follow"):
        Layout(paths)


def test_a_layout_longer_than_its_context_is_refused():
    """A path that ends behind the last token."""
    with pytest.raises(ValueError, match="ends at 4, after 3 tokens"):
        Layout(((2, 2, 4),)).columns(3)


def test_visible_keys_of_some_queries():
    """Rows of the whole matrix."""
    trajectory = forked(2, 2)
    rows = visible_keys(trajectory.block_start, trajectory.path_start, [4, 6])

    assert visibility(trajectory)[[4, 6]].tolist() == rows.tolist()


def test_a_replica_hands_the_layout_on():
    """A packed request unpacks to the same request."""
    layout = Layout(((1, 1, 2), (1, 2, 4)))
    engine = ScriptedEngine(capabilities=evolve(SCRIPTED_CAPABILITIES, layouts=True))
    request = GenerateRequest(
        request_id="r", trajectory_id="t", token_ids=range(5), sampling=SamplingParams(max_tokens=1), layout=layout
    )

    async def serve():
        await engine.start()
        server = ReplicaServer(engine)
        server.connect(0, lambda _message: None)
        async with asyncio.TaskGroup() as group:
            server.receive(0, pack_requests([(request, ProvedPrefix())]), group)

    asyncio.run(serve())
    assert [layout] == [each.layout for each in engine.requests]


def test_layouts_travel_with_requests():
    """A layout comes out at the replica as it went in, and none stays none."""
    layouts = [Layout(((1, 1, 2), (1, 2, 4))), None, Layout()]
    requests = [
        GenerateRequest(
            request_id=str(i), trajectory_id="t", token_ids=range(5), sampling=SamplingParams(max_tokens=1), layout=each
        )
        for i, each in enumerate(layouts)
    ]

    message = pack_requests([(request, ProvedPrefix(3, b"proof")) for request in requests])
    assert layouts == [request.layout for request in unpack_requests(message)]
