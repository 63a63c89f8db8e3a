"""What a training goes on from: the optimizer's settings, the log, the checkpoints that are kept or refused."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from attrs import evolve
from torch.distributed.checkpoint import FileSystemWriter

from turnwise.errors import ConfigError
from turnwise_grpo_trainer.checkpoints import load as load_checkpoint
from turnwise_grpo_trainer.checkpoints import remove_checkpoints
from turnwise_grpo_trainer.config import AlgorithmConfig, OptimizerConfig, PolicyConfig, TrainConfig
from turnwise_grpo_trainer.learner import Learner
from turnwise_grpo_trainer.metric_log import METRICS_FILE, read_metrics
from turnwise_grpo_trainer.model_state import load_state, save_state
from turnwise_grpo_trainer.optimization import lr_factor
from turnwise_grpo_trainer.setup import checked_out
from turnwise_grpo_trainer.sharding import gpus_each

COSINE = OptimizerConfig(lr=1e-3, lr_schedule="cosine", min_lr_ratio=0.05)
CONFIG = TrainConfig(num_steps=2, optimizer=COSINE, policy=PolicyConfig(device="cpu"))


def learner(spec, config):
    """Return one that has learnt nothing."""
    return Learner.load(config, spec, temperature=1.0, response_length=64, device=torch.device("cpu"))


def test_the_schedule_is_that_of_the_config(spec, mixed, tmp_path):
    """Two of two steps, then two more of four: the rate is that of a training of four, with the settings of now."""
    first = learner(spec, CONFIG)
    for step in (1, 2):
        first.update(mixed, step=step, version=step - 1)
    save_state(first, tmp_path / "state")

    optimizer = evolve(COSINE, lr=1e-2, betas=(0.5, 0.6), weight_decay=0.5)
    longer = learner(spec, evolve(CONFIG, num_steps=4, optimizer=optimizer))
    load_state(longer, tmp_path / "state")

    rates = [longer.update(mixed, step=step, version=step - 1)["actor/lr"] for step in (3, 4)]
    assert rates == pytest.approx([1e-2 * lr_factor(optimizer, step, 4) for step in (2, 3)])
    (group,) = longer.policy.optimizer.param_groups
    assert ((0.5, 0.6), 0.5) == (tuple(group["betas"]), group["weight_decay"])


def test_another_models_checkpoint_is_one_line(spec, tmp_path):
    """It says what is wrong rather than in which process."""
    save_state(learner(spec, CONFIG), tmp_path / "state")
    critic = learner(spec, evolve(CONFIG, algorithm=AlgorithmConfig(adv_estimator="gae")))

    with pytest.raises(ConfigError, match="not a checkpoint of this model: RuntimeError: Missing key") as caught:
        load_state(critic, tmp_path / "state")
    assert "\n" not in str(caught.value)


def test_ctrl_c_while_a_checkpoint_is_written(spec, tmp_path, monkeypatch):
    """It is an interrupt, not a failure of the checkpoint."""

    def interrupted(*_arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(FileSystemWriter, "prepare_local_plan", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_state(learner(spec, CONFIG), tmp_path / "state")


def test_a_line_that_was_cut_is_none(tmp_path):
    """A training that was killed while it wrote can be gone on with; what is no log cannot."""
    file = tmp_path / METRICS_FILE
    file.write_text('{"step": 1, "reward/mean": 0.5}\n{"step": 2, "rew')
    assert [{"step": 1, "reward/mean": 0.5}] == read_metrics(tmp_path)

    file.write_text("hello\n")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl: not the metrics of a training"):
        read_metrics(tmp_path)


def test_a_folder_with_checkpoints_is_not_taken(tmp_path):
    """Also without a log; a resume needs one of ours; and what lies beside ours is never removed."""
    kept = tmp_path / "checkpoints" / "thesis" / "weights"
    kept.parent.mkdir(parents=True)
    kept.write_text("mine")
    with pytest.raises(ConfigError, match="holds another training"):
        checked_out(tmp_path, overwrite=False, resume=False)
    with pytest.raises(ConfigError, match="has no checkpoint"):
        checked_out(tmp_path, overwrite=False, resume=True)

    ours = tmp_path / "checkpoints" / "step-00000001"
    ours.mkdir()
    (ours / "loop.json").write_text(json.dumps({}))
    checked_out(tmp_path, overwrite=True, resume=False)
    assert ours.exists()
    remove_checkpoints(tmp_path)
    assert "mine" == kept.read_text()
    assert not ours.exists()


def test_a_resume_leaves_no_folder(tmp_path):
    """Where there is nothing to go on with, nothing is made."""
    with pytest.raises(ConfigError, match="has no checkpoint"):
        checked_out(tmp_path / "out", overwrite=False, resume=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("device", "has_gpu", "gpus"), [("auto", True, 1), ("auto", False, 0), ("cuda:0", False, 1)])
def test_processes_reserve_what_they_train_on(monkeypatch, device, has_gpu, gpus):
    """Also where the device is found out."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert gpus == gpus_each(TrainConfig(num_steps=1, policy=PolicyConfig(device=device)))


def test_what_is_no_checkpoint_is_one_line(tmp_path):
    """A file that is not there, is not JSON, or lacks something."""
    loop = SimpleNamespace(
        trainer=SimpleNamespace(load=lambda _folder: None),
        buffer=SimpleNamespace(load_state_dict=lambda _state: None),
        load_state_dict=lambda state: state["version"],
        go_on_with=lambda _unfinished: None,
    )
    for text, said in (
        (None, "No such file"),
        ("{", "Expecting"),
        ("{}", "no 'buffer'"),
        ('{"buffer": {}}', "no 'version'"),
    ):
        if text is not None:
            (tmp_path / "loop.json").write_text(text)
        with pytest.raises(ConfigError, match=said):
            load_checkpoint(loop, tmp_path)
