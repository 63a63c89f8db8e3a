"""Settings that cannot be trained with are refused before anything is loaded, in one line each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from turnwise.errors import ConfigError, DataError
from turnwise_grpo_trainer.train_setup import read_setup

EXAMPLES = Path(__file__).parents[3] / "examples"
EXAMPLE = str(EXAMPLES / "train_calculator.yaml")
WITHOUT_TRAIN = str(EXAMPLES / "calculator.yaml")
CRITIC = ("train.algorithm.adv_estimator=reinforce_plus_plus",)


@pytest.mark.many_cases(6)
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("train.mode=async", "memory.mode=hybrid"), "train.mode: async needs memory.mode=standalone"),
        (("rollout.n=1",), "rollout.n: must be at least 2: a group of one has no baseline"),
        (
            ("rollout.n=1", *CRITIC, "train.buffer.dynamic_sampling=true"),
            "train.buffer.dynamic_sampling: needs rollout.n of at least 2",
        ),
        (("rollout.sampling.temperature=0",), "rollout.sampling.temperature: must be above 0 to train"),
        (("rollout.sampling.top_p=0.9",), "rollout.sampling: top_p must be 1 and top_k -1 to train"),
        (("rollout.sampling.top_k=5",), "rollout.sampling: top_p must be 1 and top_k -1 to train"),
        (("data.limit=3",), "is more than the 3 tasks"),
        (("train.algorithm.use_kl_in_reward=true",), "use_kl_in_reward: needs train.algorithm.kl_loss_coef above 0"),
        (
            ("train.algorithm.ppo_mini_batch_size=null", "train.algorithm.target_kl=0.1"),
            "train.algorithm.target_kl: has no effect with one optimizer step on a batch",
        ),
        (("train.algorithm.mis_bounds=[0.5, 2.0]",), "train.algorithm.mis_bounds: needs old_log_probs: recompute"),
        (
            ("train.sharding.num_processes=2", "train.sharding.fully_shard=false"),
            "train.sharding.fully_shard: must not be false with several processes",
        ),
        (
            (
                "train.buffer.stale=correct",
                "train.algorithm.tis_imp_ratio_cap=null",
                "train.algorithm.old_log_probs=recompute",
            ),
            "train.buffer.stale: correct needs train.algorithm.tis_imp_ratio_cap, or old_log_probs=rollout",
        ),
        (("train.validation.patience=2",), "train.validation.patience: needs train.validation.every above 0"),
        (
            ("train.validation.patience=2", "train.validation.every=1", "data.validation_path=null"),
            "train.validation.patience: needs held-out tasks; set data.validation_path",
        ),
        (
            ("train.checkpoint.export=best", "data.validation_path=null"),
            "train.checkpoint.export: best needs held-out tasks; set data.validation_path",
        ),
        (
            ("train.checkpoint.export=best", "train.checkpoint.keep_best=false"),
            "train.checkpoint.export: best needs train.checkpoint.keep_best",
        ),
        (("reward=null",), "reward: missing; training needs one"),
        (
            ("train.tasks_per_step=8", "train.buffer.max_groups=4"),
            "train.buffer.max_groups: must be at least train.tasks_per_step, which is 8",
        ),
    ],
)
def test_settings_that_exclude_each_other(overrides, message):
    """The error names the file, the key and the reason."""
    with pytest.raises(ConfigError) as caught:
        read_setup(EXAMPLE, overrides)

    assert str(caught.value).startswith(f"{EXAMPLE}: ")
    assert message in str(caught.value)
    assert 1 == len(str(caught.value).splitlines())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.num_step=3", "train.num_step: unknown key; did you mean 'num_steps'?"),
        ("train.num_steps=0", "train.num_steps: "),
        ("train.optimizer.lr=-1", "train.optimizer.lr: "),
        ("train.optimizer.lr=fast", "train.optimizer.lr: "),
        ("train.algorithm.gamma=1.5", "train.algorithm.gamma: "),
        ("train.algorithm.adv_estimator=ppo", "train.algorithm.adv_estimator: unknown advantage 'ppo'"),
        ("train.algorithm.mis_bounds=[2.0, 0.5]", "train.algorithm.mis_bounds: "),
        ("train.mode=hybrid", "train.mode: expected one of sync, async"),
        ("train.buffer.stale=keep", "train.buffer.stale: expected one of drop, correct"),
        ("train.checkpoint.keep_last=0", "train.checkpoint.keep_last: "),
        ("train.sharding.num_processes=0", "train.sharding.num_processes: "),
        ("train.optimizer.betas=[0.9, 1.0]", "train.optimizer.betas: "),
        ("train.optimizer.betas=[1.0, 0.9]", "train.optimizer.betas: "),
        ("train.optimizer.betas=[-0.1, 0.9]", "train.optimizer.betas: "),
        ("train.policy.num_threads=9223372036854775807", "train.policy.num_threads: "),
        ("train.policy.num_threads=2147483647", "train.policy.num_threads: "),
        ("train.sharding.num_threads=9223372036854775807", "train.sharding.num_threads: "),
    ],
)
def test_values_outside_their_range(override, message):
    """A wrong key, type or range names the file and the full key, in one line."""
    with pytest.raises(ConfigError) as caught:
        read_setup(EXAMPLE, (override,))

    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{EXAMPLE}: {message}")


def test_all_wrong_values_are_reported_at_once():
    """Several wrong keys of the section give one line each."""
    with pytest.raises(ConfigError) as caught:
        read_setup(EXAMPLE, ("train.num_steps=0", "train.optimizer.lr=-1"))

    assert 2 == len(str(caught.value).splitlines())


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_groups_of_one_without_a_group_baseline(mode):
    """An estimator without group baseline trains groups of one, unless groups without variance are dropped."""
    overrides = (f"train.mode={mode}", "rollout.n=1", *CRITIC)

    assert 1 == read_setup(EXAMPLE, overrides).group_size
    with pytest.raises(ConfigError, match=r"train\.buffer\.dynamic_sampling: needs rollout\.n of at least 2"):
        read_setup(EXAMPLE, (*overrides, "train.buffer.dynamic_sampling=true"))


def test_a_config_without_the_section():
    """`turnwise train` needs the section `train`, and the error says where it is explained."""
    with pytest.raises(ConfigError, match=r"calculator\.yaml: train: missing; add this section, see turnwise train"):
        read_setup(WITHOUT_TRAIN)


def test_an_evaluation_needs_no_train_section():
    """For `turnwise eval`, the section may be missing, its checks do not apply, and no training tasks are loaded."""
    overrides = ("rollout.n=1", "data.path=missing.jsonl", "data.validation_path=heldout_calculator.jsonl")
    setup = read_setup(WITHOUT_TRAIN, overrides, needs_train=False)

    assert ([], 64) == (list(setup.tasks), len(setup.validation_tasks))


def test_validation_tasks_are_optional():
    """Without `data.validation_path` there are no held-out tasks, and a missing file is an error."""
    assert [] == list(read_setup(EXAMPLE, ("data.validation_path=null",)).validation_tasks)
    with pytest.raises(DataError, match=r"missing\.jsonl"):
        read_setup(EXAMPLE, ("data.validation_path=missing.jsonl",))


def test_the_description_is_plain():
    """Experiment trackers get JSON values: the model, the parts, and all settings of rollout and training."""
    setup = read_setup(EXAMPLE, ("train.num_steps=7",))

    described = json.loads(json.dumps(setup.describe(), default=repr))

    assert str(setup.model.path) == described["model"]
    assert setup.run.engine.name == described["engine"]
    assert (7, setup.group_size) == (described["train"]["num_steps"], described["rollout"]["n"])
