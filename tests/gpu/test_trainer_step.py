"""A trainer on the device: the update of a CPU, half precision, memory that goes back to the driver, checkpoints."""

import numpy as np
import pytest
from gpu_support import make_batch, report, small

from turnwise import ModelSpec
from turnwise.weights.sources import as_numpy
from turnwise_grpo_trainer.config import AlgorithmConfig, OptimizerConfig, PolicyConfig, TrainConfig
from turnwise_grpo_trainer.processes.sharding import LearnerSpec, load_local_trainer


def load(device, model, algorithm=None, **policy):
    """Return a trainer with a large learning rate."""
    config = TrainConfig(
        algorithm=algorithm or AlgorithmConfig(),
        optimizer=OptimizerConfig(lr=1e-2, eps=1e-3),  # Adam's first step is the sign of noise where gradients vanish
        policy=PolicyConfig(device=device, num_threads=1 if device == "cpu" else None, **policy),
    )
    return load_local_trainer(LearnerSpec(config, ModelSpec(path=model), 1.0, 64))


def weights_of(trainer):
    """Return copies of the weights."""
    return {name: as_numpy(tensor, copy=True) for name, tensor in trainer.weights()}


@pytest.mark.parametrize("attention", ["sdpa", "turnwise_segments"])
@small
def test_an_update_is_that_of_a_cpu(target, tiny_model, attention):
    """With critic, reference and entropy, weights and metrics after two updates are those of sdpa on a CPU."""
    algorithm = AlgorithmConfig(adv_estimator="gae", kl_loss_coef=0.1, entropy_coeff=0.01)
    batch = make_batch()
    on_cpu = load("cpu", tiny_model, algorithm)
    here = load(target.name, tiny_model, algorithm, attn_implementation=attention)
    for step in (1, 2):
        expected, metrics = (each.update(batch, step=step, version=0) for each in (on_cpu, here))

    for name in ("actor/grad_norm", "critic/grad_norm"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-3)
    old, new = weights_of(on_cpu), weights_of(here)
    largest = max(np.abs(old[name] - new[name]).max() for name in old)
    report(target, f"two updates with {attention}: largest difference of a weight to a CPU {largest:.1e}")
    assert old.keys() == new.keys()
    assert largest < 1e-3


@pytest.mark.parametrize(
    "policy", [{"dtype": "bfloat16"}, {"autocast": True}, {"gradient_checkpointing": True}], ids=str
)
def test_updates_in_half_precision(target, tiny_model, policy):
    """The gradient is about that of float32, and the weights move."""
    plain, half = load(target.name, tiny_model), load(target.name, tiny_model, **policy)
    before = weights_of(half)
    expected, metrics = (each.update(make_batch(), step=1, version=0) for each in (plain, half))

    assert metrics["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=0.1)
    assert any((before[name] != array).any() for name, array in weights_of(half).items())


@small
def test_an_offloaded_trainer_frees_the_device_and_learns_the_same(target, request):
    """Optimizer and weights leave separately, and each gives its bytes back to the driver."""
    model = request.getfixturevalue("random_model" if target.is_cuda else "tiny_model")
    plain, offloaded = load(target.name, model), load(target.name, model)
    batch = make_batch()
    plain.update(batch, step=1, version=0)
    offloaded.update(batch, step=1, version=0)
    weights = sum(each.nbytes for each in offloaded.learner.policy.model.parameters())
    with target.freed() as optimizer:
        offloaded.offload_optimizer()
    with target.freed() as parameters:
        offloaded.offload_parameters()
    with target.freed() as back:
        offloaded.onload()
    report(target, f"offload of the optimizer: {optimizer}; of the weights: {parameters}; onload: {back}")
    if target.is_cuda:
        assert optimizer.num_bytes > 0.95 * 2 * weights
        assert parameters.num_bytes > 0.95 * weights
    plain.update(batch, step=2, version=0)
    offloaded.update(batch, step=2, version=0)

    expected = weights_of(plain)
    assert all(np.allclose(array, expected[name], atol=1e-6) for name, array in weights_of(offloaded).items())


@small
def test_a_checkpoint_restores_the_trainer(target, tiny_model, tmp_path):
    """Weights and optimizer states return to the device, and the next update is the same."""
    batch = make_batch()
    first, second = load(target.name, tiny_model), load(target.name, tiny_model)
    first.update(batch, step=1, version=0)
    first.save(tmp_path / "state")
    second.load(tmp_path / "state")
    for each in (first, second):
        each.update(batch, step=2, version=1)

    expected = weights_of(first)
    assert all(np.allclose(array, expected[name], atol=1e-6) for name, array in weights_of(second).items())
    assert {str(each.device.type) for each in second.learner.policy.model.parameters()} == {target.name.split(":")[0]}
