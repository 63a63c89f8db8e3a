"""`turnwise train` forwards shared prefixes once by default; losses, gradients and weights are those without."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from training_site import ROOT, make_site, steps_of, train

from turnwise_grpo_trainer.learner.prefix_forests import place_tokens

SAME = ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "gap/mean", "policy/nats", "noise/trace")
GROUPS = ("rollout.n=8", "train.num_steps=1", "train.algorithm.entropy_coeff=0.01")  # all rows have a gradient


def assert_close(separate: Path, shared: Path) -> None:
    """Check the metrics of the update, the weights after it, and that tokens were saved."""
    one, two = (next(line for line in steps_of(out) if "actor/pg_loss" in line) for out in (separate, shared))
    for name in SAME:
        assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-6), name
    assert one["update/row_tokens"] == two["update/row_tokens"] <= one["update/forwarded_tokens"]
    assert two["update/forwarded_tokens"] < 0.6 * one["update/row_tokens"]
    weights = [load_file(out / "model" / "model.safetensors") for out in (separate, shared)]
    assert max(abs(weights[0][name] - weights[1][name]).max() for name in weights[0]) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("train.policy.max_tokens_per_micro_batch=100", "train.policy.packed=true"),
        ("train.lora.rank=2", "train.algorithm.kl_loss_coef=0.01"),
    ],
    ids=str,
)
def test_a_training_is_the_same(tmp_path: Path, options: tuple[str, ...]) -> None:
    """With any micro-batches, and with adapters and a reference; the engine is deterministic to the bit."""
    site = make_site(tmp_path)
    separate = train(site, "separate", *GROUPS, *options, "train.policy.share_prefixes=false")
    shared = train(site, "shared", *GROUPS, *options)

    assert_close(separate, shared)


@pytest.mark.slow
@pytest.mark.ray
def test_two_processes_are_the_same(tmp_path: Path) -> None:
    """Each process of a sharded model gets whole trees."""
    pytest.importorskip("ray")
    site = make_site(tmp_path)
    separate = train(site, "separate", *GROUPS, "train.policy.share_prefixes=false")
    processes = ("train.sharding.num_processes=2", "train.sharding.cpus_per_process=0.5")
    shared = train(site, "shared", *GROUPS, *processes)

    assert_close(separate, shared)


def test_the_picture_is_that_of_the_code() -> None:
    """The page has the picture that the script draws, and the script has the subtrees of the trainer."""
    script = runpy.run_path(str(ROOT / "docs/shared_prefixes.py"))
    page = (ROOT / "docs/explanation/shared-prefixes.md").read_text(encoding="utf-8")
    _, ends = place_tokens([6, 8, 7, 6], [0, 4, 6, 4])

    assert script["draw"]() in page
    assert "../images/shared-prefixes.svg" in page
    picture = (ROOT / "docs/images/shared-prefixes.svg").read_text(encoding="utf-8")
    assert script["draw_svg"]() == picture
    seen = [line.split("keys")[-1].count("x") for line in script["draw"]().splitlines()[1:]]
    assert 13 * 13 - sum(seen) == picture.count('fill="#eeeeee"')
    assert [end for _, size, end in script["TREE"] for _ in range(size)] == ends.tolist()
