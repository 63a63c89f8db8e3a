"""Rows for TransferQueue have the rewards of their episode."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from attrs import evolve

from turnwise import ColumnSpec, EpisodeResult, Status, Task, Trajectory, TrajectoryScore
from turnwise.batch.rollout_batch import collate
from turnwise.errors import ConfigError
from turnwise.record.lineage import RecordLineage
from turnwise_moe_routes.shapes import RouteShape
from turnwise_verl_bridge.rows import count_turns, to_loop_outputs, to_queue_rows
from turnwise_verl_bridge.runs import build_task


@pytest.mark.parametrize(
    ("scores", "untrained", "expected"),
    [
        ((0.5,), (), [[0, 0.5, 0]]),
        ((1.0, 0.5), (), [[0, 0, 0], [0, 0.5, 1.0]]),
        ((0.0, 0.0), (), [[0, 0, 0], [0, 0, 0]]),
        ((1.0, 0.5, 0.25), (1,), [[0, 0, 0], [0, 0.75, 1.0]]),
        ((0.0, 0.5), (1,), [[0, 0.5, 0]]),
    ],
)
def test_the_last_row_has_the_reward_of_the_episode(scores, untrained, expected):
    """verl takes the reward of an episode from its last row, so this row has the scores of all records."""
    records = []
    for _ in scores:
        record = Trajectory([1, 2])
        record.add_action([3, 4], [-0.5, -0.5])
        record.add_observation([5])
        records.append(record)
    episode = EpisodeResult(
        task=Task(messages=({"role": "user", "content": "?"},), uid="t"),
        status=Status.COMPLETED,
        trajectories=tuple(records),
        scores=tuple(TrajectoryScore(value=score) for score in scores),
        lineage=tuple(RecordLineage(trained=number not in untrained) for number in range(len(scores))),
    )

    rows = to_queue_rows(collate([episode], pad_token_id=0), episode)

    assert expected == [row["rm_scores"].tolist() for row in rows]
    assert sum(scores) == rows[-1]["rm_scores"].sum()


def record_of(*blocks):
    """Return a record with sampled and observed tokens, in turns."""
    record = Trajectory([1, 2])
    for number, block in enumerate(blocks):
        if number % 2:
            record.add_observation(block)
        else:
            record.add_action(block, [-0.5] * len(block))
    return record


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [((), 1), (([3, 4],), 2), (([3], [4, 5], [6]), 4), (([3], [4]), 3), (([3], [4], [5], [6], [7, 8]), 6)],
)
def test_turns_are_counted_as_in_verl(blocks, expected):
    """verl's tool agent returns user turns + assistant turns + 1: 2 without tools, 4 after one round of them."""
    record = record_of(*blocks)
    if len(record.response_ids):
        episode = EpisodeResult(
            task=Task(messages=({"role": "user", "content": "?"},), uid="t"),
            status=Status.COMPLETED,
            trajectories=(record,),
            scores=(TrajectoryScore(value=1.0),),
            lineage=(RecordLineage(),),
        )
        assert [expected] == [row["num_turns"] for row in to_queue_rows(collate([episode], pad_token_id=0), episode)]
    assert expected == count_turns(record)


@pytest.mark.parametrize(
    ("fields", "agent"),
    [
        ({}, ""),
        ({"agent_name": "turnwise"}, ""),
        ({"agent_name": "tool_agent"}, "tool_agent"),
        ({"agent_name": "single_turn_agent"}, "single_turn"),
        ({"agent_name": None}, ""),
        ({"agent_name": "turnwise", "turnwise_agent": "torl"}, "torl"),
    ],
)
def test_a_row_names_its_agent(fields, agent):
    """`agent_name` has verl's meaning, and `turnwise_agent` replaces it where it names verl's loop."""
    assert agent == build_task({"raw_prompt": [{"role": "user", "content": "?"}], **fields}, "u").agent_name


RANK = ColumnSpec(name="rank", dtype="int16", shape=(2,), fill=-1)
TEACHER = ColumnSpec(name="teacher", dtype="float16", fill=float("nan"), tokens="all")
RANKS = [[1, 2], [3, 4], [-1, -1], [5, 6]]


def with_columns():
    """Return an episode of two records, each with a column that the other lacks."""
    records = (record_of([3, 4], [5], [6]).with_column(RANK, RANKS), record_of([7]).with_column(TEACHER, [0, 1, 2]))
    return EpisodeResult(
        task=Task(messages=({"role": "user", "content": "?"},), uid="t"),
        status=Status.COMPLETED,
        trajectories=records,
        scores=(TrajectoryScore(value=1.0),) * 2,
        lineage=(RecordLineage(),) * 2,
    )


def assert_columns(first, second):
    """Each record has its values, and the fill where it has no such column."""
    assert (RANKS, [[-1, -1]]) == (first["rank"].tolist(), second["rank"].tolist())
    assert [0, 1, 2] == second["teacher"].tolist()
    assert np.isnan(np.asarray(first["teacher"])).all()
    assert len(first["teacher"]) == 2 + 4


def test_open_columns_are_in_the_rows():
    """The bridge knows none of them; all rows have the same fields, which verl needs to put them into one tensor."""
    episode = with_columns()
    first, second = to_queue_rows(collate([episode], pad_token_id=0), episode)
    assert set(first) == set(second)
    assert_columns(first, second)


@pytest.mark.parametrize("name", ["multi_modal_inputs", "extra_fields"])
def test_a_column_with_a_name_of_verl(name):
    """It would replace what verl reads under this name."""
    record = record_of([3]).with_column(evolve(TEACHER, name=name), [0, 1, 2])
    episode = evolve(with_columns(), trajectories=(record, record))
    with pytest.raises(ConfigError, match=f"the column or field '{name}' has a name of verl's rows: choose another"):
        to_queue_rows(collate([episode], pad_token_id=0), episode)


def test_open_columns_are_in_the_outputs_of_loops(monkeypatch):
    """As one value of each row, because verl makes an array of every extra field."""
    fake = SimpleNamespace(AgentLoopMetrics=SimpleNamespace, AgentLoopOutput=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "verl.experimental.agent_loop.agent_loop", fake)
    for name in ("verl", "verl.experimental", "verl.experimental.agent_loop"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    columns = [each.extra_fields["turnwise_columns"] for each in to_loop_outputs(with_columns())]
    assert_columns(*columns)
    array = np.empty(2, dtype=object)
    array[:] = columns
    assert columns == array.tolist()
    (output,) = to_loop_outputs(with_routes([7, 8, 1, 2, 3, -1]))
    assert (6, 2, 1) == output.routed_experts.shape
    assert "turnwise_columns" not in output.extra_fields


def test_a_record_without_routes_beside_one_with():
    """verl would replay the expert 0 in it."""
    episode = with_routes([7, 8, 1, 2, 3, -1])
    both = evolve(
        episode,
        trajectories=(*episode.trajectories, record_of([7])),
        scores=episode.scores * 2,
        lineage=(RecordLineage(),) * 2,
    )
    with pytest.raises(ConfigError, match="token 0 of a record has no routed experts"):
        to_queue_rows(collate([both], pad_token_id=0), both)


def with_routes(routes):
    """Return an episode of two turns whose tokens have routes of one expert in two layers."""
    spec = RouteShape(num_layers=2, top_k=1, num_experts=9).column
    values = np.array([[[-1], [route]] for route in routes], np.int16)
    record = Trajectory([1, 2])
    record.add_action([3, 4], [-0.5] * 2, columns=[(spec, values[:4])])
    record.add_observation([5])
    record.add_action([6], [-0.5], columns=[(spec, values)])
    return EpisodeResult(
        task=Task(messages=({"role": "user", "content": "?"},), uid="t"),
        status=Status.COMPLETED,
        trajectories=(record,),
        scores=(TrajectoryScore(value=1.0),),
    )


def test_routes_have_the_form_of_verl():
    """Of all tokens; what no server has run and layers without experts have the expert 0."""
    episode = with_routes([7, 8, 1, 2, 3, -1])
    (row,) = to_queue_rows(collate([episode], pad_token_id=0), episode)
    assert [[0, 7], [0, 8], [0, 1], [0, 2], [0, 3], [0, 0]] == row["routed_experts"][:, :, 0].tolist()
    assert (6, 2, 1) == tuple(row["routed_experts"].shape)


def test_a_route_that_verl_would_miss():
    """verl would replay the expert 0 for a token whose route nobody knows."""
    episode = with_routes([7, -1, 1, 2, 3, -1])
    with pytest.raises(ConfigError, match="token 1 of a record has no routed experts, and verl replays those of all"):
        to_queue_rows(collate([episode], pad_token_id=0), episode)
