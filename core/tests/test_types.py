"""Values that the types of the framework refuse."""

import pickle

import pytest

from turnwise.errors import TrajectoryError
from turnwise.record.result import token_scores
from turnwise.record.trajectory import Trajectory
from turnwise.types import (
    FinishReason,
    GenerateResult,
    Placement,
    SamplingParams,
    Task,
    TokenScore,
    TrajectoryScore,
    TurnScore,
)

USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("messages", "uid", "expected"),
    [("hi", "a", "'messages' must be"), (USER, "a", "'messages' must be"), ((USER,), "", "uid"), ((USER,), 3, "'uid'")],
)
def test_a_malformed_task_is_refused(messages, uid, expected):
    """A text in place of messages would be read as a list of letters, and an empty uid joins groups."""
    with pytest.raises((TypeError, ValueError), match=expected):
        Task(messages=messages, uid=uid)


@pytest.mark.parametrize("at", ["middle", None, 0])
def test_a_score_in_an_unknown_place_is_refused(at):
    """When it is made: written to a file, it would make the file unreadable."""
    with pytest.raises(ValueError, match="not a valid Placement"):
        TrajectoryScore(value=1.0, at=at)
    assert TrajectoryScore(value=1.0, at=str(Placement.LAST_TOKEN)).at is Placement.LAST_TOKEN


@pytest.mark.parametrize(
    ("token_ids", "logprobs", "expected"),
    [
        ([1, 2], [-0.5], "2 token ids but 1 log-probabilities"),
        ([1], [[-0.5]], r"one-dimensional, got shape \(1, 1\)"),
        ([[1]], [-0.5], "one-dimensional"),
    ],
)
def test_an_answer_whose_arrays_disagree_is_refused(token_ids, logprobs, expected):
    """An engine cannot return tokens without their log-probabilities."""
    with pytest.raises(ValueError, match=expected):
        GenerateResult(token_ids=token_ids, logprobs=logprobs, finish_reason=FinishReason.STOP)


@pytest.mark.parametrize("top_k", [0, -2])
def test_no_number_of_tokens_to_sample_from_is_refused(top_k):
    """-1 means all of them."""
    with pytest.raises(ValueError, match=f"'top_k' must be -1 \\(all\\) or at least 1: {top_k}"):
        SamplingParams(top_k=top_k)


@pytest.mark.parametrize(
    ("score", "expected"),
    [
        (TokenScore(values=(1.0,)), "1 token scores for 3 response tokens"),
        (TokenScore(values=(0.0, 0.0, 1.0)), "not 0 on a token that the policy did not sample"),
        (TurnScore(values=(1.0, 2.0)), "2 turn scores for 1 turns"),
    ],
)
def test_a_score_that_does_not_fit_its_record_is_refused(score, expected):
    """It would train other tokens than it scores."""
    record = Trajectory([1])
    record.add_action([2, 3], [-0.5, -0.5])
    record.add_observation([4])
    with pytest.raises(TrajectoryError, match=expected):
        token_scores(score, record)


@pytest.mark.parametrize("reason", list(FinishReason))
def test_a_finish_reason_answers_all_questions(reason):
    """It survives files and pipes, and a request that goes on is neither cut nor stopped."""
    assert [reason, reason] == [FinishReason(reason.value), pickle.loads(pickle.dumps(reason))]
    assert [bool, bool, bool] == [type(each) for each in (reason.is_final, reason.is_cut, reason.has_stop)]
    assert reason.is_final >= reason.is_cut + reason.has_stop
