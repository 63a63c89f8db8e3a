"""Turns under a grammar: their requests, their tokens in the record, and the scores of a record that has them."""

import numpy as np
import pytest
from episode_fakes import EOS, ScriptedAgent, TinyEngine, run
from hypothesis import given
from hypothesis import strategies as st

from turnwise import Capabilities, FinishReason, GenerateResult, SamplingParams, Status, Task
from turnwise.batch.expansion import expand
from turnwise.batch.rewards import ScoredRow, spread_reward
from turnwise.episode.requests import continue_request
from turnwise.record.columns import Origin
from turnwise.record.lineage import EpisodeRecord
from turnwise.record.result import EpisodeResult, token_scores
from turnwise.record.spec import EpisodeSpec, UnfinishedEpisode
from turnwise.record.step_results import RecordedTurn
from turnwise.record.trajectory import Trajectory
from turnwise.runtime.remote.contexts import ProvedPrefix
from turnwise.runtime.remote.wire import pack_requests, unpack_requests
from turnwise.types import GenerateRequest, Grammar, Placement, TrajectoryScore, TurnScore
from turnwise_result_files import load_unfinished, save_unfinished
from turnwise_testing.inputs.strategies import trajectories

GRAMMAR = 'start: "a"'
TASK = Task(messages=({"role": "user", "content": "hi"},), uid="t")


class GrammarEngine(TinyEngine):
    """An engine that claims to have grammars."""

    @property
    def capabilities(self):
        return Capabilities(grammars=True)


async def mixed(episode):
    """Sample a constrained turn, a free one, and a constrained one that is appended later."""
    record = episode.begin([1])
    await episode.generate(grammar=GRAMMAR)
    episode.observe([5])
    await episode.generate()
    episode.observe([5])
    episode.append(await episode.sample(grammar=GRAMMAR))
    branch = episode.branch(record, record.mark())
    episode.observe([6], record=branch)
    await episode.generate(record=branch)


def test_tokens_of_a_constrained_turn_are_sampled_and_not_trained():
    """They have log-probabilities and versions and count as a turn; in a branch they are replayed like all others."""
    engine = GrammarEngine()

    result = run(ScriptedAgent(mixed), engine)

    assert result.status is Status.COMPLETED, result.fault
    record, branch = result.trajectories
    assert [s.origin.name for s in record.segments] == [
        *("CONSTRAINED", "OBSERVATION", "ACTION", "OBSERVATION", "CONSTRAINED")
    ]
    assert record.response_mask.tolist() == [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0]
    assert record.logprobs.tolist() == [-0.5] * 3 + [0] + [-0.5] * 3 + [0] + [-0.5] * 3
    assert record.weight_versions.tolist() == [3, 3, 3, -1] * 2 + [3, 3, 3]
    assert record.turns() == ((1, 4), (5, 8), (9, 12))
    assert set(branch.origins.tolist()) == {Origin.REPLAYED, Origin.OBSERVATION, Origin.ACTION}
    assert branch.turns() == ((13, 16),)
    constrained = Grammar(text=GRAMMAR)
    assert [request.grammar for request in engine.requests] == [constrained, None, constrained, None]
    assert result.metrics.num_tokens["constrained"] == 6
    assert (result.metrics.num_turns, result.metrics.mask_ratio) == (4, 6 / 26)


def test_an_engine_without_grammars_gets_no_such_request():
    """It would ignore the grammar, and the turn would be trained wrongly or break a promise to the agent."""
    engine = TinyEngine()

    result = run(ScriptedAgent(mixed), engine)

    assert engine.requests == []
    assert "needs an engine with the capability grammars" in result.fault.message


def test_the_rest_of_an_interrupted_turn_goes_on_in_its_grammar():
    """The engine learns which ids of the context the grammar has read."""
    sampling = SamplingParams(max_tokens=9, stop_token_ids=(EOS,))
    request = GenerateRequest(
        request_id="r", trajectory_id="t", token_ids=[1, 1], sampling=sampling, grammar=Grammar(text=GRAMMAR)
    )
    saved = GenerateResult(token_ids=[7, 8], logprobs=[-1, -1], finish_reason=FinishReason.ABORT)

    rest = continue_request(request, saved)

    assert (rest.token_ids.tolist(), rest.grammar) == ([1, 1, 7, 8], Grammar(text=GRAMMAR, num_read=2))


@pytest.mark.parametrize("is_constrained", [True, False])
def test_a_saved_turn_stays_what_it_is(is_constrained, tmp_path):
    """A file of unfinished episodes says which turns were sampled under a grammar."""
    result = GenerateResult(token_ids=[7], logprobs=[-0.5], finish_reason=FinishReason.STOP)
    turn = RecordedTurn(position=(1, 1, -1, 1), result=result, is_constrained=is_constrained)
    spec = EpisodeSpec(task=TASK, agent_name="a")
    saved = UnfinishedEpisode(spec=spec, records=(EpisodeRecord(Trajectory([1])),), turns=(turn,))

    save_unfinished(tmp_path / "unfinished.jsonl", [saved])
    (again,) = load_unfinished(tmp_path / "unfinished.jsonl")

    assert again.turns[0].is_constrained is is_constrained


def test_requests_carry_their_grammars_to_other_processes():
    """One by one: requests without a grammar are in the same message."""
    grammars = [None, Grammar(text=GRAMMAR), Grammar(text="start: /b/", num_read=1)]
    requests = [
        GenerateRequest(request_id=str(n), trajectory_id="t", token_ids=[1, 2], sampling=SamplingParams(), grammar=each)
        for n, each in enumerate(grammars)
    ]

    message = pack_requests([(request, ProvedPrefix(0, b"")) for request in requests])

    assert [each.grammar for each in unpack_requests(message)] == grammars


@given(record=trajectories(), values=st.data())
def test_no_score_lies_on_a_constrained_token_if_any_token_is_trained(record, values):
    """Each score of a turn lies on a trained token, and all scores are there; the same in expanded rows."""
    turns = record.turns()
    numbers = values.draw(st.lists(st.integers(-4, 4), min_size=len(turns), max_size=len(turns)))
    score = TurnScore(values=tuple(map(float, numbers)))

    scores = token_scores(score, record)

    assert scores.sum() == sum(numbers)
    if record.response_mask.any():
        assert not scores[record.response_mask == 0].any()
        last = token_scores(TrajectoryScore(value=1.0, at=Placement.LAST_ACTION), record)
        assert np.flatnonzero(last).tolist() == [np.flatnonzero(record.response_mask)[-1]]
        rows = list(expand(record, score))
        assert sum(token_scores(part, row).sum() for row, part in rows) == sum(numbers)


def test_the_score_of_a_turn_stays_with_its_actions():
    """A free turn keeps its score; a constrained one gives it to the action before, or to the first turn with one."""
    record = Trajectory([1])
    for constrained in (True, False, True, True, False):
        record.add_action([7, EOS], [-1.0, -1.0], constrained=constrained)
        record.add_observation([5])

    scores = token_scores(TurnScore(values=(1.0, 2.0, 4.0, 8.0, 16.0)), record)

    assert {int(place): float(scores[place]) for place in np.flatnonzero(scores)} == {4: 15.0, 13: 16.0}


def test_an_episode_of_constrained_turns_keeps_its_reward():
    """No token is trained, and its row still has the reward, for the averages of its group."""
    record = Trajectory([1])
    record.add_action([7, EOS], [-1.0, -1.0], constrained=True)
    score = TrajectoryScore(value=3.0)
    result = EpisodeResult(task=TASK, status=Status.COMPLETED, trajectories=(record,), scores=(score,))

    (values,) = spread_reward(result, [ScoredRow(record, score, 0)], expanded=False)

    assert values.tolist() == [0.0, 3.0]
    assert result.trainable
