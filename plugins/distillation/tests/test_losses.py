"""
Gradients of the losses equal those of dense references in float64.

A reference has the whole distributions of policy and teacher over the vocabulary, in numpy, and its derivatives by the
logits are written by hand. torch differentiates the loss from the logits.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from turnwise_distillation.config import ReverseKlConfig, TopkKlConfig
from turnwise_distillation.losses import ReverseKl, TopkKl

VOCABULARY = 7
LOGIT = st.floats(-3, 3)
ROW = st.lists(LOGIT, min_size=VOCABULARY, max_size=VOCABULARY)
TOKEN = st.fixed_dictionaries(
    {
        "policy": ROW,
        "teacher": ROW,
        "sampled": st.integers(0, VOCABULARY - 1),
        "moved": st.floats(-0.5, 0.5),
        "advantage": st.floats(-2, 2),
    }
)
TOKENS = st.lists(TOKEN, min_size=1, max_size=6)
WEIGHTS = st.tuples(st.floats(0.1, 3), st.sampled_from([0.0, 0.5, 2.0]))


def log_softmax(logits):
    """Return log-probabilities of a row of logits."""
    shifted = np.asarray(logits, np.float64) - np.max(logits)
    return shifted - np.log(np.exp(shifted).sum())


def slope_of_log_prob(logits, token):
    """Return the derivative of a token's log-probability by the logits."""
    return np.eye(VOCABULARY)[token] - np.exp(log_softmax(logits))


def clipped_slope(ratio, advantage, config):
    """Return the derivative of PPO's clipped loss by the log-probability."""
    low, high = 1 - config.clip_ratio_low, 1 + config.clip_ratio_high
    stopped = (advantage > 0 and ratio > high) or (advantage < 0 and ratio < low)
    return 0.0 if stopped else -advantage * ratio


def gradient(loss, tokens, ids=None, weights=None):
    """Return (M, V) the gradient of the loss by the logits, by torch in float64, and its (M,) values."""
    logits = torch.tensor([each["policy"] for each in tokens], dtype=torch.float64, requires_grad=True)
    log_probs = logits.log_softmax(-1)
    sampled = torch.tensor([each["sampled"] for each in tokens])[:, None]
    own = log_probs.gather(-1, sampled)[:, 0]
    teacher = torch.tensor(np.array([log_softmax(each["teacher"]) for each in tokens]))
    given = {
        "log_probs": own,
        "old_log_probs": own.detach() + torch.tensor([each["moved"] for each in tokens], dtype=torch.float64),
        "rollout_log_probs": own.detach(),
        "advantages": torch.tensor([each["advantage"] for each in tokens], dtype=torch.float64),
        "rows": torch.zeros(len(tokens), dtype=torch.int64),
        "columns": {"teacher_logprobs": teacher.gather(-1, sampled)[:, 0]},
    }
    if ids is not None:
        given["columns"] = {"teacher_topk_ids": ids, "teacher_topk_logprobs": teacher.gather(-1, ids)}
        given["id_log_probs"] = log_probs.gather(-1, ids)
    losses, values = loss.compute(**given)
    total = losses.sum() if weights is None else (losses * torch.from_numpy(weights)).sum()
    (found,) = torch.autograd.grad(total, logits)
    return found.numpy(), values


def assert_equal(expected, found):
    """Both agree within 1e-9."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)


@given(tokens=TOKENS, weights=WEIGHTS)
def test_reverse_kl_of_sampled_tokens(tokens, weights):
    """PPO's clipped loss on the reward's advantage minus the token's divergence has the same gradient."""
    config = ReverseKlConfig(weight=weights[0], reward_weight=weights[1])
    found, values = gradient(ReverseKl(config), tokens)

    expected, divergences = [], []
    for each in tokens:
        at = each["sampled"]
        divergence = log_softmax(each["policy"])[at] - log_softmax(each["teacher"])[at]
        advantage = config.reward_weight * each["advantage"] - config.weight * divergence
        slope = clipped_slope(np.exp(-each["moved"]), advantage, config)
        expected.append(slope * slope_of_log_prob(each["policy"], at))
        divergences.append(divergence)
    assert_equal(np.array(expected), found)
    assert_equal(divergences, values["teacher_kl"].numpy())


@given(policy=ROW, teacher=ROW)
def test_reverse_kl_is_unbiased(policy, teacher):
    """The mean over all tokens, weighed by the policy that sampled them, is the gradient of the KL."""
    ours, theirs = log_softmax(policy), log_softmax(teacher)
    each = {"policy": policy, "teacher": teacher, "moved": 0.0, "advantage": 0.0}
    tokens = [{**each, "sampled": token} for token in range(VOCABULARY)]
    found, _ = gradient(ReverseKl(ReverseKlConfig()), tokens, weights=np.exp(ours))

    difference = ours - theirs
    kl = (np.exp(ours) * difference).sum()
    assert_equal(np.exp(ours) * (difference - kl), found.sum(0))


@given(
    tokens=TOKENS,
    weights=WEIGHTS,
    top_k=st.integers(1, VOCABULARY - 1),
    direction=st.sampled_from(["reverse", "forward"]),
)
def test_topk_kl(tokens, weights, top_k, direction):
    """The gradient is that of the KL of the distributions in which the other ids are one outcome."""
    config = TopkKlConfig(weight=weights[0], reward_weight=weights[1], direction=direction)
    teachers = [log_softmax(each["teacher"]) for each in tokens]
    ids = np.array([np.argsort(-each, kind="stable")[:top_k] for each in teachers])
    found, values = gradient(TopkKl(config), tokens, torch.from_numpy(ids))

    for row, each in enumerate(tokens):
        ours, theirs = np.exp(log_softmax(each["policy"])), np.exp(teachers[row])
        groups = [[token] for token in ids[row]] + [[token for token in range(VOCABULARY) if token not in ids[row]]]
        join = np.array([[float(token in group) for token in range(VOCABULARY)] for group in groups])
        p, q = join @ ours, join @ theirs
        if direction == "reverse":
            kl, slope = (p * np.log(p / q)).sum(), np.log(p / q) + 1
        else:
            kl, slope = (q * np.log(q / p)).sum(), -q / p
        by_probability = slope @ join
        expected = config.weight * ours * (by_probability - (ours * by_probability).sum())
        clipped = clipped_slope(np.exp(-each["moved"]), each["advantage"], config)
        expected = expected + config.reward_weight * clipped * slope_of_log_prob(each["policy"], each["sampled"])
        assert_equal(expected, found[row])
        assert_equal(kl, values["topk_kl"][row].item())


@given(policy=ROW, teacher=ROW, direction=st.sampled_from(["reverse", "forward"]))
def test_all_ids_give_the_whole_kl(policy, teacher, direction):
    """With as many ids as the vocabulary has, the value is the KL of the distributions; fewer give at most as much."""
    loss, token = TopkKl(TopkKlConfig(direction=direction)), {"moved": 0.0, "advantage": 0.0, "sampled": 0}
    order = torch.from_numpy(np.argsort(-log_softmax(teacher), kind="stable").copy())[None]
    found = [
        gradient(loss, [{**token, "policy": policy, "teacher": teacher}], order[:, :top_k])[1]["topk_kl"].item()
        for top_k in range(1, VOCABULARY + 1)
    ]

    one, other = (policy, teacher) if direction == "reverse" else (teacher, policy)
    first, second = log_softmax(one), log_softmax(other)
    assert (np.exp(first) * (first - second)).sum() == pytest.approx(found[-1], abs=1e-9)
    assert all(less <= more + 1e-9 for less, more in pairwise(found))


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_certain_teachers_have_finite_gradients(direction):
    """A teacher or a policy whose ids have the whole probability leaves nothing for the rest: no nan in float32."""
    sure = torch.tensor([[0.0, -40.0, -41.0]])
    policy = torch.tensor([[30.0, 0.0, 0.0, -30.0]], requires_grad=True)
    found = policy.log_softmax(-1)
    losses, _ = TopkKl(TopkKlConfig(direction=direction)).compute(
        log_probs=found[:, 0],
        old_log_probs=found[:, 0].detach(),
        advantages=torch.ones(1),
        columns={"teacher_topk_ids": torch.tensor([[0, 1, 2]]), "teacher_topk_logprobs": sure},
        id_log_probs=found[:, :3],
    )
    losses.sum().backward()

    assert losses.isfinite().all()
    assert policy.grad.isfinite().all()
