"""
The losses and advantages of verl 0.9.1 on the same rows: equal values, and equal gradients.

verl's functions need neither a GPU nor its trainer. Its virtual environment is described in the README of verl_bridge.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed here: see plugins/verl_bridge/README.md")

from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig

from turnwise_grpo_trainer.objective import advantages as ours
from turnwise_grpo_trainer.objective.loss_options import CispoConfig, ClipConfig, DualClipConfig, GspoConfig
from turnwise_grpo_trainer.objective.losses import importance_weights, kl_estimate, token_weights, value_loss
from turnwise_grpo_trainer.objective.registered_losses import CispoLoss, ClippedLoss, DualClipLoss, GspoLoss

pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("ignore")]

NUM_ROWS, NUM_COLUMNS, CAP = 8, 13, 1.3
GROUPS = torch.arange(NUM_ROWS) // 4
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


@pytest.fixture(params=range(3))
def rows(request):
    """Random rows with observations in the middle and pads at the end; the last row has no token in the loss."""
    random = torch.Generator().manual_seed(request.param)

    def noise(*shape):
        return torch.randn(*shape, generator=random)

    mask = (torch.rand(NUM_ROWS, NUM_COLUMNS, generator=random) < 0.7).long()
    mask *= torch.arange(NUM_COLUMNS) < torch.randint(4, NUM_COLUMNS + 1, (NUM_ROWS, 1), generator=random)
    mask[:, 0], mask[-1] = 1, 0
    log_probs = -noise(NUM_ROWS, NUM_COLUMNS).abs()
    shape = NUM_ROWS, NUM_COLUMNS
    return {
        "mask": mask,
        "log_probs": log_probs,
        "old": log_probs + 0.4 * noise(*shape),
        "rollout": log_probs + 0.4 * noise(*shape),
        "advantages": noise(NUM_ROWS, 1).expand(shape),
        "values": noise(*shape),
        "returns": noise(*shape),
    }


def actor_config(**options):
    """Return verl's config of an actor; its loss has a dual clip, which is out of reach unless it is asked for."""
    return ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **{"clip_ratio_c": 1e6, **options})


def our_loss(loss, rows, mode, log_probs):
    """Return the weighted sum of our losses of the tokens in the loss."""
    inside = rows["mask"].bool()
    index = inside.nonzero()[:, 0]
    losses, _ = loss.compute(
        log_probs=log_probs[inside],
        old_log_probs=rows["old"][inside],
        rollout_log_probs=rows["rollout"][inside],
        advantages=rows["advantages"][inside],
        rows=index,
    )
    corrected = losses * rows["weights"][inside]
    return (token_weights(index, mode, response_length=NUM_COLUMNS) * corrected).sum()


def verl_loss(name, rows, mode, log_probs, config):
    """Return verl's loss."""
    loss, _ = core_algos.get_policy_loss_fn(name)(
        rows["old"], log_probs, rows["advantages"], rows["mask"], mode, config, rows["weights"]
    )
    return loss


DAPO = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
DUAL = {**DAPO, "clip_ratio_c": 1.2}
GSPO = {"clip_ratio_low": 0.01, "clip_ratio_high": 0.02}
CASES = {
    "clip": (ClippedLoss(ClipConfig(**DAPO)), "vanilla", DAPO),
    "dual_clip": (DualClipLoss(DualClipConfig(**DUAL)), "vanilla", DUAL),
    "gspo": (GspoLoss(GspoConfig(**GSPO)), "gspo", GSPO),
    "cispo": (CispoLoss(CispoConfig(**DAPO)), "cispo", DAPO),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_policy_losses(rows, case, mode):
    """
    Value and gradient of each loss agree, in each mode of aggregation, with truncated importance weights.

    GSPO gets weights of rows. With weights of tokens the gradients would differ: verl's is that of the paper's
    GSPO-token, in which a token's weight stays with the token, and ours that of the product of weight and s.
    """
    loss, name, options = CASES[case]
    weights = importance_weights(rows["old"], rows["rollout"], CAP)
    rows["weights"] = weights.mean(1, keepdim=True).expand_as(weights) if case == "gspo" else weights
    mine, theirs = (rows["log_probs"].clone().requires_grad_() for _ in range(2))
    one = our_loss(loss, rows, mode, mine)
    other = verl_loss(name, rows, mode, theirs, actor_config(**options))

    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    gradients = [torch.autograd.grad(each, each_input)[0] for each, each_input in ((one, mine), (other, theirs))]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)
    assert gradients[0].abs().max() > 1e-4


def outcomes(rows):
    """Return a reward for each row, and verl's token-level rewards: the reward on the last token of the mask."""
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.5, 0.25, 0.0, 0.0])
    tokens = torch.zeros(NUM_ROWS, NUM_COLUMNS)
    for row in range(NUM_ROWS):
        places = rows["mask"][row].nonzero()
        tokens[row, int(places.max()) if len(places) else 0] = rewards[row]
    return rewards, tokens


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_group_advantages(rows, name):
    """Advantages against a group's baseline agree."""
    rewards, tokens = outcomes(rows)
    valid = torch.ones(NUM_ROWS, dtype=torch.bool)
    if name == "rloo":
        mine = ours.rloo(rewards, GROUPS, valid)
        theirs, _ = core_algos.compute_rloo_outcome_advantage(tokens, rows["mask"], np.array(GROUPS))
    else:
        by_std = name == "grpo"
        mine = ours.grpo(rewards, GROUPS, valid, norm_adv_by_std=by_std)
        theirs, _ = core_algos.compute_grpo_outcome_advantage(
            tokens, rows["mask"], np.array(GROUPS), norm_adv_by_std_in_grpo=by_std
        )

    torch.testing.assert_close(mine[:, None] * rows["mask"], theirs, rtol=1e-5, atol=1e-6)


def test_reinforce_plus_plus(rows):
    """Discounted and normalised returns agree: observations are no time steps."""
    _, tokens = outcomes(rows)
    theirs, _ = core_algos.compute_reinforce_plus_plus_outcome_advantage(
        tokens, rows["mask"], config=AlgoConfig(gamma=0.9)
    )

    mine = ours.reinforce_plus_plus(tokens, rows["mask"], 0.9)
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_gae(rows):
    """Advantages and the critic's targets agree on the tokens in the loss."""
    _, tokens = outcomes(rows)
    mask = rows["mask"]
    theirs, returns = core_algos.compute_gae_advantage_return(tokens, rows["values"], mask, 0.9, 0.8)

    advantages, targets = ours.gae(tokens, rows["values"], mask, gamma=0.9, lam=0.8)

    torch.testing.assert_close(ours.whiten(advantages, mask), theirs * mask, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(targets, returns * mask, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl(rows, kind):
    """Estimates of the KL to a reference agree."""
    mine, theirs = (each(rows["log_probs"], rows["old"], kind) for each in (kl_estimate, core_algos.kl_penalty))
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_value_loss(rows):
    """The clipped loss of a critic agrees."""
    inside = rows["mask"].bool()
    predicted = rows["values"] + 0.3 * rows["log_probs"]
    losses = value_loss(predicted[inside], rows["values"][inside], rows["returns"][inside], 0.2)
    theirs, _ = core_algos.compute_value_loss(predicted, rows["returns"], rows["values"], rows["mask"], 0.2)

    torch.testing.assert_close(losses.mean(), theirs, rtol=1e-5, atol=1e-6)
