"""Losses and advantages of other plugins: found, checked, and used in the update."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from attrs import evolve
from made_batches import advantages_of

from turnwise.cli import main
from turnwise.config.parts import Choice
from turnwise.errors import ConfigError, PluginError
from turnwise.types import PluginRecipe
from turnwise_grpo_trainer.config import AlgorithmConfig, PolicyConfig, TrainConfig
from turnwise_grpo_trainer.learner.learner import Learner
from turnwise_grpo_trainer.objective.advantages import compute_loss_mask
from turnwise_grpo_trainer.objective.estimators import OWN_ESTIMATORS
from turnwise_grpo_trainer.objective.hooks import build_objectives
from turnwise_grpo_trainer.train_setup import read_setup
from turnwise_testing.checks.objective import ADVANTAGE_CHECKS, LOSS_CHECKS
from turnwise_testing.whole_runs.installation import install_plugin

EXAMPLE = str(Path(__file__).parents[4] / "examples/train_calculator.yaml")
STRANGER = """
from attrs import frozen
import turnwise

@frozen
class Options:
    scale: float = 1.0

class MyLoss:
    def __init__(self, config, resources):
        self.scale = config.scale

    def compute(self, *, log_probs, advantages, **more):
        return -self.scale * advantages * log_probs, {"scale": 0 * log_probs.detach() + self.scale}

class MyAdvantage:
    def __init__(self, config, resources):
        pass

    def estimate(self, *, rewards, valid, **more):
        return (rewards - 0.5) * valid

@turnwise.hookimpl
def register_losses(registry):
    registry.add("my_loss", MyLoss, config=Options)

@turnwise.hookimpl
def register_advantages(registry):
    registry.add("my_advantage", MyAdvantage)
"""
PLUGINS = PluginRecipe(allow=("grpo_trainer", "stranger"))
CPU = PolicyConfig(device="cpu")


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """Install a plugin with a loss and an advantage; return a function that changes its text."""

    def replace(old, new):
        file.write_text(STRANGER.replace(old, new))
        sys.modules.pop("turnwise_stranger", None)
        importlib.invalidate_caches()

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # else a changed text of the same size and second is not read
    file = install_plugin(tmp_path, "turnwise_stranger", STRANGER, entry="stranger")
    yield replace
    sys.modules.pop("turnwise_stranger", None)


def choose(loss=None, advantage="grpo", **options):
    """Return a config with a loss and an estimator."""
    return TrainConfig(
        loss=loss, algorithm=AlgorithmConfig(adv_estimator=advantage, ppo_mini_batch_size=4, **options), policy=CPU
    )


@pytest.mark.usefixtures("stranger")
def test_a_config_names_them(monkeypatch):
    """A loss and an advantage of an installed plugin are chosen by name or with options, and checked before the run."""
    monkeypatch.setenv("TURNWISE_PLUGINS", ",".join(("stranger", *installed_plugins())))
    overrides = ("train.loss.name=my_loss", "train.loss.scale=2.0", "train.algorithm.adv_estimator=my_advantage")

    setup = read_setup(EXAMPLE, overrides)
    parts = build_objectives(setup.train, setup.host.recipe())

    assert 2.0 == parts.loss.scale
    assert "MyAdvantage" == type(parts.advantage).__name__
    with pytest.raises(ConfigError, match=r"train_calculator.yaml: train\.loss\.scala: unknown key; did you mean"):
        read_setup(EXAMPLE, ("train.loss.name=my_loss", "train.loss.scala=2.0"))


def installed_plugins():
    """Return the names of the installed plugins that the example needs."""
    return ("grpo_trainer", "transformers_engine", "tool_agent", "hermes_parser", "calculator_demo")


@pytest.mark.usefixtures("stranger")
def test_an_update_uses_them(spec, conversations):
    """The gradient of an update comes from the registered loss and the registered advantages."""
    losses = {}
    for scale in (1.0, 3.0):
        config = choose(Choice("my_loss", {"scale": scale}), "my_advantage")
        losses[scale] = update(spec, config, conversations)

    assert [1.0, 3.0] == pytest.approx([each["actor/scale"] for each in losses.values()])
    assert 3 * losses[1.0]["actor/grad_norm"] == pytest.approx(losses[3.0]["actor/grad_norm"], rel=1e-5)


def update(spec, config, batch):
    """Return the metrics of an update without an optimizer step that changes weights."""
    config = evolve(config, optimizer=evolve(config.optimizer, lr=0.0))
    learner = Learner.load(
        config, spec, temperature=1.0, response_length=64, device=torch.device("cpu"), plugins=PLUGINS
    )
    return learner.update(batch, step=1, version=0)


@pytest.mark.usefixtures("stranger")
def test_the_default_loss_by_its_name(spec, conversations):
    """`ppo_clip` is the trainer's own loss: the same gradient, and the same metrics."""
    own, named = (update(spec, choose(loss), conversations) for loss in (None, "ppo_clip"))

    assert own["actor/grad_norm"] == pytest.approx(named["actor/grad_norm"], rel=1e-6)
    assert own["actor/clip_frac"] == named["actor/clip_frac"]


@pytest.mark.parametrize("loss", ["gspo", "cispo", "dual_clip"])
@pytest.mark.usefixtures("stranger")
def test_micro_batches_do_not_matter(spec, mixed, loss):
    """The gradient of a registered loss does not depend on the token budget, packed or padded, with blocks or not."""
    config = choose(loss, loss_agg_mode="seq-mean-token-mean")
    norms = [
        update(spec, evolve(config, policy=evolve(CPU, **policy)), mixed)["actor/grad_norm"]
        for policy in ({}, {"max_tokens_per_micro_batch": 20}, {"packed": True})
    ]

    assert [norms[0]] * 3 == pytest.approx(norms, rel=1e-4)


@pytest.mark.usefixtures("stranger")
def test_masked_tokens_have_no_effect(spec, rewarded):
    """Tokens outside the loss, such as those of tools, change nothing: not by their old log-probabilities either."""
    batch = rewarded([1, 0, 0, 1])
    outside = batch.response_mask == 0
    other = evolve(batch, rollout_log_probs=torch.where(outside, -9.0, batch.rollout_log_probs))
    config = choose("gspo", old_log_probs="rollout")

    assert update(spec, config, batch)["actor/grad_norm"] == update(spec, config, other)["actor/grad_norm"]


@pytest.mark.parametrize("result", ["episodes", "tokens", "wrong"])
def test_shapes_of_advantages(rewarded, result):
    """An estimator returns one value for each episode or for each token; another shape is an error with both."""
    batch = rewarded([1, 0, 0, 1])
    mask = compute_loss_mask(batch)

    class Estimator:
        def estimate(self, *, rewards, mask, **more):
            shapes = {"episodes": rewards.shape, "tokens": mask.shape, "wrong": (3,)}
            return torch.full(shapes[result], 2.0)

    def estimate():
        return advantages_of(batch, AlgorithmConfig(adv_estimator="mine"), mask=mask, estimator=Estimator())

    if result == "wrong":
        with pytest.raises(PluginError, match=r"advantage 'mine' returned the shape \(3,\); expected \(4,\)"):
            estimate()
    else:
        assert torch.equal(2.0 * mask, estimate().values)


def test_the_inputs_of_an_estimator(rewarded):
    """The estimator gets a reward for each episode, and where it was placed."""
    batch, seen = rewarded([1, 0, 2, 1, 0, 3, 1, 1]), {}

    class Estimator:
        def estimate(self, **inputs):
            seen.update(inputs)
            return inputs["rewards"]

    advantages_of(batch, AlgorithmConfig(adv_estimator="mine"), mask=compute_loss_mask(batch), estimator=Estimator())

    assert [1, 0, 2, 1, 0, 3, 1, 1] == seen["rewards"].tolist() == seen["token_rewards"].sum(1).tolist()
    assert ([0] * 4 + [1] * 4, list(range(8))) == (seen["groups"].tolist(), seen["episodes"].tolist())
    assert seen["valid"].all()


@pytest.mark.usefixtures("stranger")
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (choose("my_los"), r"train\.loss: unknown loss 'my_los'; did you mean 'my_loss'\?"),
        (choose(advantage="gropo"), r"adv_estimator: unknown advantage 'gropo'; did you mean 'grpo'"),
        (choose(Choice("my_loss", {"scale": "big"})), r"train\.loss\.scale: "),
        (
            choose(advantage=Choice("grpo", {"eps": 1})),
            r"adv_estimator\.eps: unknown key; there are no options",
        ),
    ],
)
def test_a_bad_choice(config, message):
    """Unknown names and options are one line with the key."""
    with pytest.raises((ConfigError, PluginError), match=message) as caught:
        build_objectives(config, PLUGINS)
    assert 1 == len(str(caught.value).splitlines())


def test_bad_plugins(stranger):
    """A name that is taken, a hook without its mark and a hook that raises name the plugin."""
    stranger('"my_loss"', '"gspo"')
    with pytest.raises(
        PluginError, match="loss 'gspo' is registered by several plugins: 'grpo_trainer' and 'stranger'"
    ):
        build_objectives(choose("gspo"), PLUGINS)
    stranger('registry.add("my_loss"', 'registry.ad("my_loss"')
    with pytest.raises(PluginError, match="has a hook 'register_losses' that raised AttributeError"):
        build_objectives(choose("gspo"), PLUGINS)
    stranger("@turnwise.hookimpl", "")
    with pytest.raises(PluginError, match=r"has a function 'register_\w+' that is not marked with @turnwise"):
        build_objectives(choose("gspo"), PLUGINS)


def test_without_a_choice_the_parts_are_the_trainers():
    """The loss has the bounds of the algorithm, and no plugin but the trainer's is loaded without a recipe."""
    parts = build_objectives(choose(clip_ratio_high=0.28), None)

    assert (0.2, 0.28) == (parts.loss.config.clip_ratio_low, parts.loss.config.clip_ratio_high)
    assert OWN_ESTIMATORS["grpo"] is parts.advantage


@pytest.mark.usefixtures("stranger")
@pytest.mark.parametrize("name", ["my_loss", "my_advantage", "stranger", "gspo"])
def test_commands_know_losses_and_advantages(monkeypatch, capsys, name):
    """`turnwise plugins` lists them, and `turnwise check` runs their suites."""
    monkeypatch.setenv("TURNWISE_PLUGINS", "grpo_trainer,stranger,testing")
    assert 0 == main(["plugins", "--json"])
    rows = {row["name"]: row["registers"] for row in json.loads(capsys.readouterr().out)["plugins"]}
    assert {"losses": ["my_loss"], "advantages": ["my_advantage"]} == rows["stranger"]
    assert ["cispo", "dual_clip", "gspo", "ppo_clip"] == rows["grpo_trainer"]["losses"]

    assert 0 == main(["check", name])
    num_checks = {"stranger": len(LOSS_CHECKS) + len(ADVANTAGE_CHECKS), "my_advantage": len(ADVANTAGE_CHECKS)}
    assert num_checks.get(name, len(LOSS_CHECKS)) == capsys.readouterr().out.count("passed ")


def test_a_loss_without_its_method(stranger):
    """The error names the part and the method when the config is checked."""
    stranger("def compute", "def calculate")
    with pytest.raises(
        PluginError, match=r"loss 'my_loss' of plugin 'stranger' .*: its factory returned MyLoss, which has no compute"
    ):
        build_objectives(choose("my_loss"), PLUGINS)
