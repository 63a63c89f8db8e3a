"""Router replay from the command line: files of episodes, the gap between engine and trainer, refusals, and Ray."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_distillation import episodes_of, refused
from training_site import make_site, steps_of, train

from turnwise_calculator_demo import model_dir
from turnwise_moe_routes.recording import record_routes
from turnwise_moe_routes.shapes import COLUMN, read_shape
from turnwise_testing.references.reference_model import mixture_config, randomize_matrices

RAY = pytest.param(("runtime=ray", "runtime.num_workers=2"), marks=[pytest.mark.slow, pytest.mark.ray], id="ray")
SHARDED = pytest.param(("train.sharding.num_processes=2",), marks=[pytest.mark.slow, pytest.mark.ray], id="sharded")
FSDP = pytest.param(
    ("train.sharding.fully_shard=true", "train.policy.packed=true", "train.policy.gradient_checkpointing=true"),
    marks=pytest.mark.slow,
    id="fsdp",
)
ENGINE = ("engine=transformers", "engine.max_context=128", "engine.seed=0", "observers=[]", "postprocessors=[]")
ROUTES = ("engine.enable_return_routed_experts=true",)
REPLAY = (*ROUTES, "train.replays=[router_replay]")
SHORT = ("model.path=mixture", "train.num_steps=2", "train.checkpoint.every=0", "data.validation_path=null")


def make_mixture(folder: Path) -> Path:
    """Write a random mixture of experts with the tokenizer of the calculator's model, whose routers are undecided."""
    import torch
    from transformers import AutoTokenizer, Qwen3MoeForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(model_dir())
    torch.manual_seed(0)
    config = mixture_config(
        len(tokenizer),
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = randomize_matrices(Qwen3MoeForCausalLM(config), 0.2, {"gate.weight": 0.02})
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder to train in, with a mixture of experts."""
    make_site(tmp_path)
    make_mixture(tmp_path / "mixture")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("way", [pytest.param((), id="local"), FSDP, RAY, SHARDED])
def test_a_training_by_the_command_line(site: Path, way: tuple[str, ...]) -> None:
    """The files have the routes of the model that sampled, and the trainer's probabilities are the engine's."""
    from transformers import AutoModelForCausalLM

    out = train(site, "out", *ENGINE, *SHORT, *REPLAY, *way)

    model = AutoModelForCausalLM.from_pretrained(site / "mixture").eval()
    shape = read_shape(site / "mixture")
    assert shape is not None
    for episode in episodes_of(out, 1)[:3]:
        (record,) = episode.trajectories
        routes = record.column(COLUMN)
        np.testing.assert_array_equal(np.sort(routes[:-1]), np.sort(record_routes(model, record.input_ids, shape)[:-1]))
        assert (routes[-1] == -1).all()
    measured = [line for line in steps_of(out) if "reward/mean" in line]
    assert len(measured) == 2
    for line in measured:
        assert line["replay/routed_experts"] > 0.9
        assert line["gap/max"] < 1e-3


@pytest.mark.slow
def test_the_gap_to_a_bfloat16_engine(site: Path) -> None:
    """Rounding makes the engine's routers choose other experts; with replay the trainer is much closer to it."""
    common = (*ENGINE, *SHORT, "engine.dtype=bfloat16", "train.num_steps=1")
    (without,), (with_replay,) = (
        [line for line in steps_of(train(site, name, *common, *more)) if "reward/mean" in line]
        for name, more in (("without", ROUTES), ("with", REPLAY))
    )
    assert with_replay["gap/mean"] < without["gap/mean"] / 1.5
    assert with_replay["gap/max"] < without["gap/max"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            (*SHORT, "train.replays=[router_replay]"),
            "train.replays: router_replay needs the experts that the engine chose, and 'transformers' does not return",
        ),
        (REPLAY, "train.replays: router_replay needs a mixture of experts"),
        (
            (*SHORT, "train.replays=[router_repaly]"),
            "train.replays.0: unknown replay 'router_repaly'; did you mean 'router_replay'?",
        ),
    ],
)
def test_refusals(site: Path, options: tuple[str, ...], text: str) -> None:
    """An engine without routes, a dense model and an unknown name are one line, by a plan too."""
    assert text in refused(site, *ENGINE, *options, "--dry-run")


@pytest.mark.slow
def test_an_engine_of_a_dense_model(site: Path) -> None:
    """It is refused when the engine starts."""
    line = refused(site, *ENGINE, *ROUTES, "--out", str(site / "out"))
    assert "engine.enable_return_routed_experts: " in line
    assert "is no mixture of experts: its config.json has no experts" in line
