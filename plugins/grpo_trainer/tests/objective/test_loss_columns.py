"""Losses that read open columns of a batch, and scorers that fill them."""

from __future__ import annotations

import copy
import sys

import numpy as np
import pytest
import torch
from attrs import evolve
from made_batches import VOCABULARY, conversation, make_result

from turnwise.config.parts import Choice
from turnwise.errors import ConfigError, PluginError, TrajectoryError
from turnwise.types import PluginRecipe
from turnwise_grpo_trainer.config import AlgorithmConfig, PolicyConfig, TrainConfig
from turnwise_grpo_trainer.learner.learner import Learner
from turnwise_grpo_trainer.learner.micro_batches import collate
from turnwise_grpo_trainer.objective.advantages import compute_loss_mask
from turnwise_grpo_trainer.objective.hooks import ColumnLoss
from turnwise_grpo_trainer.objective.rows import TokenRows
from turnwise_grpo_trainer.objective.scorers import score_episodes
from turnwise_testing.whole_runs.installation import install_plugin

READER = """
import turnwise


class Reader:
    columns = ("choices", "shares", "scale")
    ids_column = "choices"

    def __init__(self, config, resources):
        pass

    def compute(self, *, log_probs, advantages, columns, id_log_probs, **more):
        assert id_log_probs.shape == columns["choices"].shape == columns["shares"].shape
        losses = -columns["scale"] * ((columns["shares"] * id_log_probs).sum(-1) + log_probs)
        return losses, {"scale": columns["scale"]}


@turnwise.hookimpl
def register_losses(registry):
    registry.add("reader", Reader)
"""
PLUGINS = PluginRecipe(allow=("grpo_trainer", "reader"))
NUM_CHOICES = 3


@pytest.fixture(autouse=True)
def reader(tmp_path, monkeypatch):
    """Install a plugin with a loss that reads three columns."""
    monkeypatch.syspath_prepend(tmp_path)
    install_plugin(tmp_path, "turnwise_reader", READER, entry="reader")
    yield
    sys.modules.pop("turnwise_reader", None)


def with_columns(batch, **replaced):
    """Return a batch with the columns of the loss."""
    generator, shape = torch.Generator().manual_seed(0), tuple(batch.response_mask.shape)
    columns = {
        "choices": torch.randint(VOCABULARY, (*shape, NUM_CHOICES), generator=generator, dtype=torch.int32),
        "shares": torch.rand((*shape, NUM_CHOICES), generator=generator),
        "scale": torch.rand(shape, generator=generator),
    }
    return batch.with_fields({**columns, **replaced})


def make_learner(spec, **policy):
    """Return a learner with the loss, whose optimizer changes no weight."""
    config = TrainConfig(
        loss=Choice("reader"),
        algorithm=AlgorithmConfig(tis_imp_ratio_cap=None),
        policy=PolicyConfig(device="cpu", **policy),
    )
    config = evolve(config, optimizer=evolve(config.optimizer, lr=0.0, grad_clip=None))
    return Learner.load(config, spec, temperature=1.0, response_length=64, device=torch.device("cpu"), plugins=PLUGINS)


def reference_norm(learner, batch):
    """Return the norm of the gradient, in float64 and row by row, with the distribution over the whole vocabulary."""
    model = copy.deepcopy(learner.policy.model).double()
    mask = compute_loss_mask(batch)
    rows, total = TokenRows.from_batch(batch, mask), int(mask.sum())
    for row in range(len(rows)):
        micro = collate(rows, [row], packed=False)
        size = micro.input_ids.shape[1]
        seen = micro.attention_mask()[0, 0] if micro.has_blocks else torch.ones(size, size).tril().bool()
        bias = torch.zeros(1, 1, size, size, dtype=torch.float64).masked_fill(~seen, torch.finfo().min)
        logits = model(input_ids=micro.input_ids, position_ids=micro.position_ids, attention_mask=bias).logits[0]
        each = logits[micro.keep[micro.predictors[1]]].log_softmax(-1)
        own = mask[row].bool()
        wanted = torch.zeros_like(each)
        for name in range(NUM_CHOICES):
            ids = batch.fields["choices"][row, own, name].long()[:, None]
            wanted.scatter_add_(1, ids, batch.fields["shares"][row, own, name].double()[:, None])
        wanted.scatter_add_(1, micro.labels[:, None], torch.ones_like(micro.labels, dtype=torch.float64)[:, None])
        torch.autograd.backward(-(batch.fields["scale"][row, own].double() * (wanted * each).sum(-1)).sum() / total)
    gradients = [each.grad.flatten() for each in model.parameters() if each.grad is not None]
    return float(torch.cat(gradients).norm())


@pytest.mark.parametrize(
    "policy",
    [{}, {"packed": True}, {"max_tokens_per_micro_batch": 20}, {"logits_mib": 0.001}],
    ids=["padded", "packed", "micro-batches", "chunks"],
)
def test_the_gradient_is_that_of_a_dense_reference(spec, mixed, policy):
    """Rows with paths too, however they are grouped: columns and further ids stay with their tokens."""
    batch, learner = with_columns(mixed), make_learner(spec, **policy)
    expected = reference_norm(learner, batch)
    metrics = learner.update(batch, step=1, version=0)

    assert expected == pytest.approx(metrics["actor/grad_norm"], rel=1e-5)
    trained = compute_loss_mask(batch).bool()
    assert batch.fields["scale"][trained].mean().item() == pytest.approx(metrics["actor/scale"], rel=1e-5)
    assert int(trained.sum()) == metrics["actor/measured_tokens"]


@pytest.mark.parametrize("shared", [True, False])
def test_shared_prefixes(spec, grouped, shared):
    """Where rows share a prefix that is computed once, columns and further ids stay with their tokens, too."""
    batch, learner = with_columns(grouped), make_learner(spec, share_prefixes=shared, max_tokens_per_micro_batch=512)
    expected = reference_norm(learner, batch)
    metrics = learner.update(batch, step=1, version=0)

    assert expected == pytest.approx(metrics["actor/grad_norm"], rel=1e-5)
    assert shared == (metrics["update/forwarded_tokens"] < metrics["update/row_tokens"])


def test_rows_without_an_advantage_are_trained(spec, rewarded):
    """Equal rewards give no advantage, and the columns still train."""
    metrics = make_learner(spec).update(with_columns(rewarded([1, 1, 1, 1])), step=1, version=0)

    assert metrics["actor/grad_norm"] > 0
    assert metrics["actor/measured_tokens"] == metrics["actor/trained_tokens"]


def test_values_outside_the_loss_have_no_effect(spec, conversations):
    """Tokens of tools and pads may have any value, nan and ids that do not exist too."""
    outside = compute_loss_mask(conversations) == 0
    plain = with_columns(conversations)
    others = {
        "choices": torch.where(outside[..., None], -1, plain.fields["choices"]),
        "shares": torch.where(outside[..., None], torch.nan, plain.fields["shares"]),
        "scale": torch.where(outside, torch.nan, plain.fields["scale"]),
    }
    norms = [
        make_learner(spec).update(each, step=1, version=0)["actor/grad_norm"]
        for each in (plain, with_columns(conversations, **others))
    ]
    assert norms[0] == norms[1]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        (
            "scale",
            torch.nan,
            r"column 'scale' has no value for 1 of \d+ tokens in the loss, the first in a record of task",
        ),
        ("shares", torch.nan, "column 'shares' has no value for 1 of"),
        ("choices", -1, "column 'choices' has no value for 1 of"),
    ],
)
def test_a_trained_token_without_a_value(spec, conversations, name, value, text):
    """It ends the update, and no weight changes."""
    batch = with_columns(conversations)
    row, column = compute_loss_mask(batch).nonzero()[3]
    batch.fields[name][row, column] = value

    with pytest.raises(TrajectoryError, match=text):
        make_learner(spec).update(batch, step=1, version=0)


def test_a_column_that_is_missing(spec, conversations):
    """The error names the column, and where to add a scorer."""
    with pytest.raises(ConfigError, match=r"it reads the column 'choices', which no record .* train\.scorers"):
        make_learner(spec).update(conversations, step=1, version=0)


def test_a_column_of_all_tokens(spec, conversations):
    """A loss reads values of responses."""
    wide = torch.zeros(*conversations.input_ids.shape)
    batch = with_columns(conversations).select(slice(None))
    batch = evolve(batch, fields={**batch.fields, "scale": wide})
    with pytest.raises(ConfigError, match="the column 'scale' is of all tokens"):
        make_learner(spec).update(batch, step=1, version=0)


def test_other_losses_read_no_column(spec):
    """The protocol tells a loss with columns from one without."""
    assert isinstance(make_learner(spec).objectives.loss, ColumnLoss)
    learner = make_learner(spec)
    config = evolve(learner.config, loss=None)
    plain = Learner.load(config, spec, temperature=1.0, response_length=64, device=torch.device("cpu"))
    assert not isinstance(plain.objectives.loss, ColumnLoss)


def test_scorers_follow_each_other():
    """Each gets what the one before returned; one that leaves out an episode is refused."""
    rng = np.random.default_rng(0)
    episodes = [make_result(conversation(rng), uid=uid) for uid in "ab"]

    class Counts:
        def score(self, given):
            return [evolve(each, worker=f"{each.worker}+") for each in given]

    class Drops:
        def score(self, given):
            return given[1:]

    assert ["++", "++"] == [each.worker for each in score_episodes([Counts(), Counts()], episodes)]
    with pytest.raises(PluginError, match="scorer Drops returned other episodes than it was given"):
        score_episodes([Counts(), Drops()], episodes)


@pytest.mark.parametrize("given", [None, 1.0, [0.5, 0.5], "ab", {}], ids=repr)
def test_a_scorer_that_returns_no_episodes(given):
    """The error names it, whatever it returns."""
    episodes = [make_result(conversation(np.random.default_rng(0)), uid=uid) for uid in "ab"]

    class Odd:
        def score(self, _episodes):
            return given

    with pytest.raises(PluginError, match=r"scorer Odd returned .*, expected the episodes"):
        score_episodes([Odd()], episodes)
