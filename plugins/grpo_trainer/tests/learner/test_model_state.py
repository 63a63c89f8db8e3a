"""Saved models, optimizers and random number generators: a restored learner continues as if it had never stopped."""

from __future__ import annotations

import json
import os
import pickle
import tracemalloc
from pathlib import Path

import pytest
import torch
from attrs import evolve
from safetensors.numpy import load_file
from torch.distributed.checkpoint import FileSystemWriter, save
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from turnwise import ModelSpec
from turnwise.errors import ConfigError
from turnwise_grpo_trainer.config import (
    AlgorithmConfig,
    CriticConfig,
    LoraConfig,
    OptimizerConfig,
    PolicyConfig,
    TrainConfig,
)
from turnwise_grpo_trainer.learner import model_state
from turnwise_grpo_trainer.learner.learner import Learner
from turnwise_grpo_trainer.learner.model_state import SCHEDULES_FILE, load_policy_state, load_state, save_state
from turnwise_grpo_trainer.learner.optimization import lr_factor
from turnwise_testing.references.reference_model import random_qwen3
from turnwise_tiny_models import save_random_vision

COSINE = OptimizerConfig(lr=1e-3, lr_schedule="cosine", min_lr_ratio=0.05)
CONFIG = TrainConfig(num_steps=2, optimizer=COSINE, policy=PolicyConfig(device="cpu"))
GAE = evolve(CONFIG, algorithm=AlgorithmConfig(adv_estimator="gae"), critic=CriticConfig(lr=1e-2))


def load(spec, config):
    """Return an untrained learner."""
    return Learner.load(config, spec, temperature=1.0, response_length=64, device=torch.device("cpu"))


@pytest.fixture(scope="session")
def vision_spec(tmp_path_factory):
    """A tiny vision-language model: no picture of the tests below ever gives its tower a gradient."""
    folder = tmp_path_factory.mktemp("vision")
    save_random_vision("qwen2_5_vl", folder)
    return ModelSpec(path=folder)


CASES = {
    "grpo": CONFIG,
    "gae": GAE,
    "gae, whose policy waits": evolve(GAE, critic=CriticConfig(lr=1e-2, warmup_steps=1)),
    "adapters": evolve(CONFIG, lora=LoraConfig(rank=4)),
    "vision": CONFIG,
    "vision with adapters": evolve(CONFIG, lora=LoraConfig(rank=4)),
}


def compare(one, other):
    """Check that two learners have the same weights and moments, to the bit."""
    for first, second in ((one.policy, other.policy), (one.critic, other.critic)):
        if first is None:
            continue
        weights = dict(second.model.named_parameters())
        for name, weight in first.model.named_parameters():
            assert torch.equal(weight, weights[name]), name
            moments = second.optimizer.state.get(weights[name], {})
            expected = first.optimizer.state.get(weight, {})
            assert expected.keys() == moments.keys(), name
            assert all(torch.equal(each, moments[key]) for key, each in expected.items()), name


@pytest.mark.parametrize("num_steps", [0, 1, 2])
@pytest.mark.parametrize("case", CASES)
def test_checkpoints_change_no_training(spec, vision_spec, conversations, tmp_path, case, num_steps):
    """
    The next step is the same, to the bit, without a checkpoint, after its save, and after its load.

    It is loaded into a new learner, as in a resume, and into one that has trained further, as for the best step.
    """
    model = vision_spec if "vision" in case else spec
    plain, saved, resumed = (load(model, CASES[case]) for _ in range(3))
    for step in range(num_steps):
        for each in (plain, saved):
            each.update(conversations, step=step + 1, version=step)
    save_state(saved, tmp_path / "state")
    compare(plain, saved)
    load_state(resumed, tmp_path / "state")
    compare(plain, resumed)

    found = [each.update(conversations, step=num_steps + 1, version=num_steps) for each in (plain, saved, resumed)]

    expected, *others = [
        {name: value for name, value in metrics.items() if name.startswith(("actor/", "critic/", "noise/", "policy/"))}
        for metrics in found
    ]
    assert [expected] * 2 == others
    compare(plain, resumed)
    load_state(saved, tmp_path / "state")
    saved.update(conversations, step=num_steps + 1, version=num_steps)
    compare(plain, saved)


class CountedCopies(TorchDispatchMode):
    """Counts the bytes of the tensors that operators of torch make."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        given = {each.untyped_storage().data_ptr() for each in tree_leaves(args) if isinstance(each, torch.Tensor)}
        own = [each for each in tree_leaves(made) if isinstance(each, torch.Tensor)]
        self.num_bytes += sum(each.nbytes for each in own if each.untyped_storage().data_ptr() not in given)
        return made


def test_a_checkpoint_is_written_without_copies(mixed, tmp_path):
    """Neither torch nor Python allocates as much as the tensors have, which go to the disk from where they are."""
    random_qwen3(50_000).save_pretrained(tmp_path / "model")
    learner = load(ModelSpec(path=tmp_path / "model"), CONFIG)
    learner.update(mixed, step=1, version=0)
    save_state(learner, tmp_path / "first")  # imports and caches are no copies

    tracemalloc.start()
    with CountedCopies() as copies:
        save_state(learner, tmp_path / "state")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    written = sum(file.stat().st_size for file in (tmp_path / "state").glob("*.safetensors"))
    assert written > 3 * sum(each.nbytes for each in learner.policy.model.parameters())
    assert 0 == copies.num_bytes
    assert peak < written / 4


def test_files_have_a_limited_size(spec, mixed, tmp_path, monkeypatch):
    """A process that trains on a GPU copies one file to the host at a time; a restart reads all of them."""
    monkeypatch.setattr(model_state, "_FILE_BYTES", 1 << 15)
    first, second = load(spec, GAE), load(spec, GAE)
    first.update(mixed, step=1, version=0)
    save_state(first, tmp_path / "state")

    load_state(second, tmp_path / "state")

    files = [load_file(file) for file in (tmp_path / "state").glob("*.safetensors")]
    sizes = [sum(array.nbytes for array in arrays.values()) for arrays in files]
    assert all(size <= 1 << 15 or len(arrays) == 1 for size, arrays in zip(sizes, files, strict=True))
    assert len(files) < sum(map(len, files)) / 2
    weights = dict(second.policy.full_weights())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in first.policy.full_weights())


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_who_may_read_a_checkpoint(spec, tmp_path, umask):
    """The umask decides, as with the other files of a training; safetensors makes private files."""
    before = os.umask(umask)
    try:
        save_state(load(spec, CONFIG), tmp_path / "state")
    finally:
        os.umask(before)
    assert {oct(path.stat().st_mode) for path in (tmp_path / "state").iterdir()} == {oct(0o100666 & ~umask)}


def test_the_random_numbers_continue(spec, tmp_path):
    """After loading, torch draws the numbers that it would have drawn after saving."""
    learner = load(spec, CONFIG)
    torch.manual_seed(7)
    save_state(learner, tmp_path / "state")
    expected = torch.rand(3)
    torch.manual_seed(8)

    load_state(learner, tmp_path / "state")

    assert torch.equal(expected, torch.rand(3))


def test_the_config_decides_the_schedule(spec, mixed, tmp_path):
    """After 2 of 2 steps, a resume with 4 steps has the learning rates and AdamW settings of the new config."""
    first = load(spec, CONFIG)
    for step in (1, 2):
        first.update(mixed, step=step, version=step - 1)
    save_state(first, tmp_path / "state")

    optimizer = evolve(COSINE, lr=1e-2, betas=(0.5, 0.6), weight_decay=0.5)
    longer = load(spec, evolve(CONFIG, num_steps=4, optimizer=optimizer))
    load_state(longer, tmp_path / "state")

    rates = [longer.update(mixed, step=step, version=step - 1)["actor/lr"] for step in (3, 4)]
    assert rates == pytest.approx([1e-2 * lr_factor(optimizer, step, 4) for step in (2, 3)])
    (group,) = longer.policy.optimizer.param_groups
    assert ((0.5, 0.6), 0.5) == (tuple(group["betas"]), group["weight_decay"])


def test_a_checkpoint_of_another_model_is_one_line(spec, tmp_path):
    """The error has the cause, and not the process in which torch found it."""
    save_state(load(spec, CONFIG), tmp_path / "state")

    with pytest.raises(ConfigError, match="not a checkpoint of this model: RuntimeError: Missing key") as caught:
        load_state(load(spec, GAE), tmp_path / "state")
    assert "\n" not in str(caught.value)


ADAPTERS = evolve(CONFIG, lora=LoraConfig(rank=4, alpha=32.0, target_modules=("q_proj", "v_proj")))
CHANGES = {
    "fewer adapters": (ADAPTERS, evolve(ADAPTERS, lora=evolve(ADAPTERS.lora, target_modules=("q_proj",)))),
    "more adapters": (ADAPTERS, evolve(ADAPTERS, lora=evolve(ADAPTERS.lora, target_modules=("all-linear",)))),
    "another alpha": (ADAPTERS, evolve(ADAPTERS, lora=evolve(ADAPTERS.lora, alpha=8.0))),
    "another rank": (ADAPTERS, evolve(ADAPTERS, lora=evolve(ADAPTERS.lora, rank=8))),
    "another rank of one scale": (ADAPTERS, evolve(ADAPTERS, lora=evolve(ADAPTERS.lora, rank=8, alpha=64.0))),
    "no adapters": (ADAPTERS, CONFIG),
    "adapters for none": (CONFIG, ADAPTERS),
    "a frozen tower, vision": (CONFIG, evolve(CONFIG, policy=evolve(CONFIG.policy, freeze_vision=True))),
    "a tower no longer frozen, vision": (evolve(CONFIG, policy=evolve(CONFIG.policy, freeze_vision=True)), CONFIG),
    "no critic": (GAE, CONFIG),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_config_that_would_lose_weights_is_refused(spec, vision_spec, tmp_path, change):
    """A resume and an export refuse a checkpoint with other trained weights or another scale of adapters, unread."""
    saved, config = CHANGES[change]
    model = vision_spec if "vision" in change else spec
    save_state(load(model, saved), tmp_path / "state")
    learner = load(model, config)
    before = {name: weight.clone() for name, weight in learner.policy.model.named_parameters()}

    with pytest.raises(ConfigError, match="not a checkpoint of this model") as caught:
        load_state(learner, tmp_path / "state")

    assert "\n" not in str(caught.value)
    assert all(torch.equal(before[name], weight) for name, weight in learner.policy.model.named_parameters())
    if change == "no critic":  # an export needs none
        load_policy_state(learner.policy.model, tmp_path / "state")
    else:
        with pytest.raises(ConfigError, match="not a checkpoint of this model"):
            load_policy_state(learner.policy.model, tmp_path / "state")


def test_a_checkpoint_without_a_scale(spec, tmp_path):
    """Earlier versions did not write the scale of adapters, and their checkpoints load."""
    learner = load(spec, ADAPTERS)
    save_state(learner, tmp_path / "state")
    file = tmp_path / "state" / SCHEDULES_FILE
    assert {"policy": 0, "adapter_scale": 8.0} == json.loads(file.read_text())
    file.write_text('{"policy": 0}')

    load_state(learner, tmp_path / "state")
    load_policy_state(learner.policy.model, tmp_path / "state")


@pytest.mark.parametrize("damage", ["missing", "not JSON"])
def test_damaged_schedules_are_one_line(spec, tmp_path, damage):
    """Without readable schedules the checkpoint is refused, and the learner keeps its weights."""
    learner = load(spec, CONFIG)
    save_state(learner, tmp_path / "state")
    file = tmp_path / "state" / SCHEDULES_FILE
    assert {"policy": 0} == json.loads(file.read_text())
    if damage == "missing":
        file.unlink()
    else:
        file.write_text("{")

    with pytest.raises(ConfigError, match=r"state: not a checkpoint of this model: ") as caught:
        load_state(learner, tmp_path / "state")
    assert "\n" not in str(caught.value)


def test_no_file_is_a_pickle(spec, mixed, tmp_path):
    """The files are safetensors and JSON, read here without torch."""
    learner = load(spec, GAE)
    learner.update(mixed, step=1, version=0)
    save_state(learner, tmp_path)

    kinds = {path.suffix: path for path in tmp_path.iterdir()}
    assert {".json", ".safetensors"} == kinds.keys()
    arrays = load_file(kinds[".safetensors"])
    weights = dict(learner.policy.full_weights())
    assert {f"policy.model.{name}" for name in weights} == {name for name in arrays if name.startswith("policy.model.")}
    assert 1.0 == arrays["critic.optimizer.model.norm.weight.step"].item()


class Bomb:
    """An object whose pickle creates a file when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_forged_checkpoint_runs_nothing(spec, tmp_path):
    """A folder in torch's default format, whose table of contents is a forged pickle, is refused unread."""
    exploded = tmp_path / "exploded"
    state = tmp_path / "state"
    learner = load(spec, CONFIG)
    save({"rng": torch.get_rng_state()}, checkpoint_id=state, no_dist=True)
    (state / ".metadata").write_bytes(pickle.dumps(Bomb(exploded)))
    (state / SCHEDULES_FILE).write_text('{"policy": 0}')

    with pytest.raises(ConfigError, match=r"state: not a checkpoint of this model: RuntimeError: Missing key"):
        load_state(learner, state)
    assert not exploded.exists()
    pickle.loads((state / ".metadata").read_bytes())
    assert exploded.exists()


def test_ctrl_c_while_a_checkpoint_is_written(spec, tmp_path, monkeypatch):
    """It is raised as an interrupt, not as a failed checkpoint."""

    def interrupted(*_arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(FileSystemWriter, "prepare_local_plan", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_state(load(spec, CONFIG), tmp_path / "state")
