"""An episode counts once, into however many rows its tokens are split."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_batches import advantages_of

from turnwise import EpisodeResult, Status, Task, Trajectory, TrajectoryScore
from turnwise.batch.rollout_batch import collate
from turnwise.layout import Objective
from turnwise_grpo_trainer.config import AlgorithmConfig, OptimizerConfig, PolicyConfig, TrainConfig
from turnwise_grpo_trainer.learner.learner import Learner
from turnwise_grpo_trainer.objective.advantages import compute_loss_mask

ESTIMATORS = ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "gae"]
MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


def make_records(seed, lengths, num_records):
    """
    Return the turns of an episode in records that see the same context: later records have earlier turns as prompt.

    Turn number i has `lengths[i]` sampled tokens, whose log-probabilities are unique in the episode.
    """
    rng = np.random.default_rng(seed)
    turns = [(rng.integers(0, 40, length), -rng.random(length).astype(np.float32)) for length in lengths]
    observations = [rng.integers(0, 40, 2) for _ in lengths]
    context, records = list(rng.integers(0, 40, 3)), []
    cuts = set(np.linspace(0, len(turns), num_records, endpoint=False).astype(int).tolist())
    for number, ((ids, logprobs), observed) in enumerate(zip(turns, observations, strict=True)):
        if number in cuts:
            records.append(Trajectory(context))
        records[-1].add_action(ids, logprobs)
        records[-1].add_observation(observed)
        context += [*ids, *observed]
    return tuple(records)


def make_episode(number, records, reward, *, uid="t", status=Status.COMPLETED, scores=None):
    """Return an episode whose last record has the reward; None leaves it unscored."""
    if scores is None and reward is not None:
        scores = (*(TrajectoryScore(value=0.0) for _ in records[1:]), TrajectoryScore(value=reward))
    return EpisodeResult(
        task=Task(messages=({"role": "user", "content": "?"},), uid=uid),
        rollout_n=number,
        status=status,
        trajectories=records,
        scores=scores or (),
    )


def compute_gradient(spec, batch, algorithm):
    """Return the flattened gradient of one update of the policy."""
    config = TrainConfig(
        algorithm=algorithm,
        optimizer=OptimizerConfig(lr=1e-3, grad_clip=None),
        policy=PolicyConfig(device="cpu", max_tokens_per_micro_batch=10_000),
    )
    torch.manual_seed(0)  # the critic's head
    learner = Learner.load(config, spec, temperature=1.0, response_length=64, device=torch.device("cpu"))
    seen = []
    learner.policy.optimizer.register_step_pre_hook(
        lambda *_: seen.append(torch.cat([p.grad.flatten() for p in learner.policy.model.parameters()]).clone())
    )
    learner.update(batch, step=1, version=0)
    return seen


def make_batch(num_records, rewards=(1.0, 0.0, 0.5, 0.0)):
    """Return a group in which the first and the third episode have as many records; tokens do not depend on it."""
    episodes = [
        make_episode(number, make_records(number, [2] * 9 if number == 0 else [3, 1, 2], count), reward)
        for number, (reward, count) in enumerate(zip(rewards, (num_records, 1, min(num_records, 3), 1), strict=True))
    ]
    return collate(episodes, pad_token_id=0)


@pytest.mark.many_cases
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_gradient_of_nine_records_is_that_of_one(spec, estimator, mode):
    """For equal tokens, an episode of nine records has the gradient of one with a single record."""
    algorithm = AlgorithmConfig(adv_estimator=estimator, loss_agg_mode=mode, tis_imp_ratio_cap=None, entropy_coeff=0.01)
    one, nine = make_batch(1), make_batch(9)
    assert (4, 14) == (len(one), len(nine))

    (expected,), (actual,) = (compute_gradient(spec, batch, algorithm) for batch in (one, nine))

    scale = expected.abs().max()
    assert scale > 1e-4
    torch.testing.assert_close(actual / scale, expected / scale, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "algorithm",
    [
        AlgorithmConfig(ppo_mini_batch_size=2),
        AlgorithmConfig(kl_loss_coef=0.1, use_kl_in_reward=True, adv_estimator="rloo"),
    ],
    ids=["mini-batches of two episodes", "KL in the reward"],
)
def test_steps_of_nine_records_are_those_of_one(spec, algorithm):
    """A mini-batch counts episodes and splits none; the KL of all records belongs to the episode's reward."""
    expected, actual = (compute_gradient(spec, make_batch(count), algorithm) for count in (1, 9))

    assert len(expected) == len(actual) == (2 if algorithm.ppo_mini_batch_size else 1)
    scale = expected[0].abs().max()
    torch.testing.assert_close(actual[0] / scale, expected[0] / scale, rtol=0, atol=1e-4)


def test_rows_as_sequences(spec):
    """With `loss_sequence: row`, as in verl, an episode with more rows weighs more in the `seq-mean` modes."""
    algorithm = AlgorithmConfig(loss_agg_mode="seq-mean-token-mean", loss_sequence="row")

    (one,), (nine,) = (compute_gradient(spec, make_batch(count), algorithm) for count in (1, 9))

    assert (one - nine).abs().max() > 0.1 * one.abs().max()


# Baselines

EPISODES = st.lists(
    st.fixed_dictionaries(
        {
            "uid": st.sampled_from("ab"),
            "reward": st.none() | st.integers(-3, 3).map(float),
            "status": st.sampled_from([Status.COMPLETED, Status.TRUNCATED, Status.FAILED]),
            "lengths": st.lists(st.integers(1, 3), min_size=0, max_size=4),
        }
    ),
    min_size=1,
    max_size=7,
)


def build(cases, counts):
    """Return the batch of some cases, each with a number of records; without turns there is an empty record."""
    episodes = []
    for number, (case, count) in enumerate(zip(cases, counts, strict=True)):
        records = make_records(number, case["lengths"], count) if case["lengths"] else (Trajectory([1, 2]),)
        episodes.append(make_episode(number, records, case["reward"], uid=case["uid"], status=case["status"]))
    return collate(episodes, pad_token_id=0)


def estimate(batch, estimator):
    """Return the advantages of each episode's tokens in order, by its number; each token's value is its logprob."""
    config = AlgorithmConfig(adv_estimator=estimator)
    mask = compute_loss_mask(batch)
    result = advantages_of(batch, config, mask=mask, values=batch.rollout_log_probs * mask)
    tokens = {number: [] for number in batch.column("rollout_n")}
    for row, number in enumerate(batch.column("rollout_n")):
        tokens[number] += result.values[row][batch.response_mask[row].bool()].tolist()
    return tokens


def expected_advantage(case, cases, estimator):
    """Return the advantage of an episode by the formula of the estimator, in numpy, from episodes and not from rows."""
    valid = [other for other in cases if other["reward"] is not None and other["status"] is not Status.FAILED]
    group = [other for other in valid if other["uid"] == case["uid"]]
    if not any(other is case for other in group) or len(group) < 2:
        return 0.0
    rewards = np.array([other["reward"] for other in group])
    if estimator == "rloo":
        return case["reward"] - np.mean([other["reward"] for other in group if other is not case])
    centred = case["reward"] - rewards.mean()
    return centred / (rewards.std(ddof=1) + 1e-6) if estimator == "grpo" else centred


@settings(max_examples=40, deadline=None)
@given(cases=EPISODES, data=st.data(), estimator=st.sampled_from(["grpo", "dr_grpo", "rloo"]))
def test_baselines_are_over_episodes(cases, data, estimator):
    """The advantage of each token is that of its episode, also where an episode of the group has no response token."""
    counts = [data.draw(st.integers(1, max(1, len(case["lengths"])))) for case in cases]

    tokens = estimate(build(cases, counts), estimator)

    for number, case in enumerate(cases):
        advantage = expected_advantage(case, cases, estimator)
        assert [advantage] * sum(case["lengths"]) == pytest.approx(tokens[number], abs=1e-4)


@settings(max_examples=40, deadline=None)
@given(cases=EPISODES, data=st.data(), estimator=st.sampled_from(ESTIMATORS))
def test_splitting_an_episode_changes_no_advantage(cases, data, estimator):
    """More records for some episodes change neither their own advantages nor those of the others."""
    counts = [data.draw(st.integers(1, max(1, len(case["lengths"])))) for case in cases]

    whole, split = (estimate(build(cases, each), estimator) for each in ([1] * len(cases), counts))

    for number in whole:
        assert whole[number] == pytest.approx(split[number], abs=1e-3)


def test_expanded_paths_have_the_advantage_of_the_exact_row():
    """A path that is trained in its own row adds nothing to the baseline; the rows are no steps in time."""

    def forked(objective):
        record = Trajectory([1])
        paths = record.fork(3)
        for number, path in enumerate(paths):
            path.add_action([number], [-0.5])
        record.join(paths)
        record.add_action([5], [-0.5])
        right = EpisodeResult(
            task=Task(messages=({"role": "user", "content": "?"},), uid="t"),
            status=Status.COMPLETED,
            trajectories=(record,),
            scores=(TrajectoryScore(value=1.0),),
            objective=objective,
        )
        wrong = [make_episode(number, make_records(number, [2], 1), 0.0) for number in (1, 2, 3)]
        return collate([right, *wrong], pad_token_id=0)

    exact, expanded = forked(Objective.EXACT), forked(Objective.EXPANDED)
    assert (4, 6) == (len(exact), len(expanded))

    for estimator in ("grpo", "dr_grpo", "rloo"):
        first, second = estimate(exact, estimator), estimate(expanded, estimator)
        assert set(first[0]) == set(second[0])
        assert first[1] == second[1]
    returns = advantages_of(
        expanded,
        AlgorithmConfig(adv_estimator="gae", norm_adv=False, lam=1.0),
        mask=compute_loss_mask(expanded),
        values=torch.zeros(expanded.response_mask.shape),
    ).returns
    assert {0.0, 1.0} == set(returns[expanded.response_mask.bool()].tolist())


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_score_of_a_record_without_response(estimator):
    """The score of a record that ended before its first token still counts for the episode's other records."""

    def make(records, *scores):
        scores = tuple(TrajectoryScore(value=score) for score in scores)
        others = [make_episode(number, make_records(number, [2], 1), 0.0) for number in (1, 2)]
        return collate([make_episode(0, records, None, scores=scores), *others], pad_token_id=0)

    records = make_records(0, [2, 1], 2)

    with_score, on_last = make((*records, Trajectory([1])), 0.0, 0.0, 1.0), make(records, 0.0, 1.0)

    expected, actual = (estimate(batch, estimator) for batch in (on_last, with_score))
    assert [expected[number] == pytest.approx(actual[number]) for number in expected] == [True] * 3
