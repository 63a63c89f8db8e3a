"""The plan of `turnwise train --dry-run`: devices, memory, and the numbers of a step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from attrs import evolve

from turnwise import PoolPlacement, RunPlacement
from turnwise.cli import main
from turnwise.errors import ConfigError
from turnwise_grpo_trainer.config import LoraConfig, PolicyConfig, ShardingConfig, TrainConfig
from turnwise_grpo_trainer.learner.devices import gpus_per_process
from turnwise_grpo_trainer.processes import placement
from turnwise_grpo_trainer.processes.placement import describe_plan, place_training
from turnwise_grpo_trainer.processes.sharding import find_layers
from turnwise_grpo_trainer.train_setup import read_setup

EXAMPLE = str(Path(__file__).parents[4] / "examples/train_calculator.yaml")


@pytest.fixture(scope="module")
def setup():
    """The setup of the example."""
    return read_setup(EXAMPLE, ("train.policy.device=cpu",))


@pytest.fixture
def engine_gpus(monkeypatch):
    """A function that gives the engine a number of GPUs."""

    def give(num, *, each=1.0, bundles=1, judge=0):
        def plan(_run):
            bundle = {"GPU": each / bundles}
            replicas = PoolPlacement(
                num_replicas=int(num / each), device="GPU", num_devices=each, bundles=(bundle,) * bundles
            )
            judges = PoolPlacement(name="judge", num_replicas=judge, device="GPU", num_devices=1)
            pools = (replicas, judges) if num else (judges,)
            return RunPlacement(runtime="ray", address=None, pools=pools, num_workers=1)

        monkeypatch.setattr(placement, "plan_placement", plan)

    return give


def with_trainer_gpus(setup, num, **train):
    """Return the setup with this many training processes of one GPU each."""
    sharding = ShardingConfig(num_processes=num, gpus_per_process=1)
    return evolve(setup, train=evolve(setup.train, sharding=sharding, **train))


def test_the_plan_has_the_numbers_of_the_training(setup):
    """Tasks, episodes of a step, and epochs follow from the config."""
    plan = dict(describe_plan(evolve(setup, train=evolve(setup.train, num_steps=10, tasks_per_step=16))))

    num_tasks, size = len(setup.tasks), setup.group_size
    assert f"16 tasks x {size} = {16 * size} episodes" == plan["a step"]
    assert f"10, {-(-160 // num_tasks)} epochs" == plan["steps"]
    assert f"{num_tasks} for training, 64 held out" == plan["tasks"]
    assert "rollout 0, trainer 0, together 0" == plan["GPUs"]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_separate_devices_add_up(setup, engine_gpus, mode):
    """Engine and trainer have separate GPUs."""
    engine_gpus(4)
    place = place_training(with_trainer_gpus(setup, 2, mode=mode))

    assert (4, 2, 6) == (place.rollout_gpus, place.trainer_gpus, place.total_gpus)


def on_shared_devices(setup, runtime="ray"):
    """Return the setup with engine and trainer on the same devices."""
    run = setup.run
    memory, runtime = evolve(run.memory, mode="hybrid", level=2), evolve(run.runtime, name=runtime)
    return evolve(setup, run=evolve(run, memory=memory, runtime=runtime))


def test_shared_devices_do_not_grow(setup, engine_gpus):
    """A hybrid training cannot share the devices of replicas that join later; with devices of their own they may."""
    engine_gpus(0)
    ray = evolve(setup.run.runtime.ray, max_replicas=3)
    growing = evolve(setup, run=evolve(setup.run, runtime=evolve(setup.run.runtime, ray=ray)))
    alone = evolve(growing.run, memory=evolve(growing.run.memory, mode="standalone"))

    with pytest.raises(ConfigError, match=r"memory\.mode: hybrid has a fixed number of replicas; remove runtime\.ray"):
        place_training(on_shared_devices(growing))
    place_training(evolve(growing, run=alone))


def test_shared_devices_count_once(setup, engine_gpus):
    """Engine and trainer need the same number of GPUs, or none; a difference is refused with both numbers."""
    shared = on_shared_devices(setup)
    engine_gpus(2)

    assert 2 == place_training(with_trainer_gpus(shared, 2)).total_gpus
    with pytest.raises(ConfigError, match=r"memory\.mode: hybrid shares .* the engine has 2 GPUs and the trainer 3"):
        place_training(with_trainer_gpus(shared, 3))
    engine_gpus(0)
    assert 1 == place_training(with_trainer_gpus(shared, 1)).total_gpus
    engine_gpus(2, judge=3)
    assert (5, 2, 5) == attrs_of(place_training(with_trainer_gpus(shared, 2)))


def attrs_of(place):
    """Return the numbers of GPUs."""
    return place.rollout_gpus, place.trainer_gpus, place.total_gpus


def test_devices_that_cannot_be_shared_are_refused(setup, engine_gpus):
    """The dry run gives the reason why several training processes cannot run on the replicas' GPUs."""
    shared = on_shared_devices(setup)
    halves = evolve(shared.train, sharding=ShardingConfig(num_processes=4, gpus_per_process=0.5))
    cases = [
        (on_shared_devices(setup, "local"), {"num": 2}, "needs runtime.name=ray"),
        (shared, {"num": 0}, "needs replicas on GPUs"),
        (evolve(shared, train=halves), {"num": 2}, "needs train.sharding.gpus_per_process=1"),
        (shared, {"num": 2, "each": 2, "bundles": 2}, "needs replicas that fit on one node"),
        (shared, {"num": 2, "each": 0.5}, "needs replicas of whole GPUs, not of 0.5"),
    ]
    for wrong, gpus, text in cases:
        engine_gpus(**gpus)
        changed = wrong if wrong.train is halves else with_trainer_gpus(wrong, 2)
        with pytest.raises(ConfigError, match=f"memory.mode: hybrid with several training processes {text}"):
            place_training(changed)


@pytest.mark.slow
def test_the_plan_and_turnwise_plan_agree_on_the_memory(setup, capsys):
    """`turnwise plan` and `turnwise train --dry-run` print the same `memory.mode` and `memory.level`."""
    overrides = ("memory.mode=hybrid", "memory.level=2")
    for arguments in (["plan", EXAMPLE], ["plan", EXAMPLE, *overrides]):
        assert 0 == main([*arguments, "--json"])
        memory = json.loads(capsys.readouterr().out)["memory"]
        plan = dict(describe_plan(read_setup(EXAMPLE, arguments[2:])))["memory"]

        assert plan.startswith(f"{memory['mode']}: ")
        assert ("level 2" in plan) == (memory["level"] == 2)
    assert "hybrid: engine and trainer share devices" in plan


def test_the_memory_of_the_trainer(setup, tmp_path):
    """Weights, gradients and two moments count; reference adds one model, a critic four; shards divide it."""
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 2 << 30}}))
    setup = evolve(setup, model=evolve(setup.model, path=tmp_path))
    algorithm = evolve(setup.train.algorithm, adv_estimator="grpo", kl_loss_coef=0.0)

    def gib(dtype="float32", num_processes=1, **changes):
        train = evolve(
            setup.train,
            algorithm=evolve(algorithm, **changes),
            policy=PolicyConfig(device="cpu", dtype=dtype),
            sharding=ShardingConfig(num_processes=num_processes),
        )
        return place_training(evolve(setup, train=train)).trainer_gib

    # 2 GiB of bfloat16 are 2**30 parameters, which are 4 GiB in float32.
    assert 16 == gib()
    assert 8 == gib(dtype="bfloat16")
    assert 20 == gib(kl_loss_coef=0.1)
    assert 32 == gib(adv_estimator="gae")
    assert 4 == gib(num_processes=4)


def test_the_memory_of_adapters(setup, tmp_path):
    """With LoRA the frozen weights count once, as policy and as reference, and the plan says what is trained."""
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 2 << 30}}))
    algorithm = evolve(setup.train.algorithm, kl_loss_coef=0.1)
    train = evolve(setup.train, algorithm=algorithm, lora=LoraConfig(rank=8, target_modules=("q_proj", "v_proj")))
    setup = evolve(setup, model=evolve(setup.model, path=tmp_path), train=train)

    assert 4 == place_training(setup).trainer_gib
    plan = dict(describe_plan(evolve(read_setup(EXAMPLE), train=train)))
    assert plan["trainer"].endswith("unsharded, LoRA of rank 8 on q_proj, v_proj")


def test_a_model_that_is_missing_has_no_size(setup, tmp_path):
    """The plan can be printed before the model is downloaded."""
    assert 0 == place_training(evolve(setup, model=evolve(setup.model, path=tmp_path))).trainer_gib


def test_weight_files_without_an_index(setup, model_dir):
    """A small model has the size of its weight files."""
    place = place_training(evolve(setup, model=evolve(setup.model, path=model_dir)))
    size = (model_dir / "model.safetensors").stat().st_size

    assert 4 * size / (1 << 30) == pytest.approx(place.trainer_gib, rel=0.01)


@pytest.mark.parametrize(("device", "has_gpu", "gpus"), [("auto", True, 1), ("auto", False, 0), ("cuda:0", False, 1)])
def test_processes_reserve_what_they_train_on(monkeypatch, device, has_gpu, gpus):
    """Ray reserves one GPU for each process that trains on a GPU, unless the config has another number."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    policy = PolicyConfig(device=device)

    assert gpus == gpus_per_process(TrainConfig(policy=policy))
    assert 0.5 == gpus_per_process(TrainConfig(policy=policy, sharding=ShardingConfig(gpus_per_process=0.5)))


def test_layers_that_are_sharded(spec):
    """FSDP shards the decoder layers, in order, one unit each."""
    from turnwise_grpo_trainer.learner.models import load_policy

    model = load_policy(PolicyConfig(device="cpu"), spec)

    assert list(model.model.layers) == find_layers(model)


@pytest.mark.parametrize("device", ["foo", "", "cuda:x", "cuda:99999999999999999999", "cpu cuda"])
@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_device_that_torch_does_not_know_has_no_plan(capsys, device, num_processes):
    """`--dry-run` refuses its name in one line, as the training does."""
    overrides = (f"train.policy.device='{device}'", f"train.sharding.num_processes={num_processes}")
    assert 2 == main(["train", EXAMPLE, *overrides, "--dry-run"])
    assert f"train.policy.device: {device!r} is no device of torch" in capsys.readouterr().err


def test_a_plan_may_be_for_another_machine(capsys):
    """A GPU that this machine lacks is planned for."""
    assert 0 == main(["train", EXAMPLE, "train.policy.device=cuda:7", "--dry-run"])
    assert "trainer 1" in capsys.readouterr().out
