"""A vision-language model on tasks with pictures: rollouts and training steps by the command line."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from training_site import make_site, run, steps_of, train

from turnwise_result_files import read_results
from turnwise_testing.inputs.vision import QWEN_3_VL, draw_picture
from turnwise_testing.references.vision_reference import VisionReference
from turnwise_tiny_models import VisionKind, VisionSizes, save_random_tiles, save_random_vision

ENGINES = {
    "transformers": "engine={name: transformers, device: cpu, max_context: 160}",
    "vllm": f"engine={{name: vllm, max_context: 160, kv_cache_bytes: {64 << 20}, num_threads: 1}}",
    "sglang": "engine={name: sglang, device: cpu, max_context: 160, num_threads: 1}",
}
SIZES = {
    "transformers": VisionSizes(),
    "vllm": VisionSizes(hidden_size=128),  # heads of 32 are the smallest of vLLM's kernels for a CPU
    "sglang": VisionSizes(patch_size=14),  # the only patches of a Qwen2.5-VL that SGLang reads
}
SITES = [
    ("qwen2_5_vl", "transformers"),
    ("qwen3_vl", "transformers"),
    ("internvl", "transformers"),
    ("idefics3", "transformers"),
    pytest.param(("qwen2_5_vl", "vllm"), marks=pytest.mark.vllm),
    pytest.param(("qwen2_5_vl", "sglang"), marks=pytest.mark.sglang),
]
OPTIONS = (
    "model.path=model",
    "rollout.prompt_length=128",
    "rollout.sampling={temperature: 1.0, max_tokens: 8}",
    "observers=[]",
    "postprocessors=[]",
    "train.num_steps=2",
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("starts_a_process")]


@pytest.fixture(params=SITES, ids="-".join)
def names(request):
    """A model and an engine. vLLM and SGLang are in the environments of their plugins' requirements-cpu.txt."""
    if find_spec(engine := request.param[1]) is None:
        pytest.skip(f"{engine} is not installed: run this in the environment of its plugin's requirements-cpu.txt")
    return request.param


@pytest.fixture
def options(names):
    """The options of a command."""
    return (ENGINES[names[1]], *OPTIONS)


@pytest.fixture
def site(names, tmp_path):
    """A folder with a random model and tasks that show one to three pictures."""
    make_site(tmp_path)
    kind, sizes = names[0], SIZES[names[1]]
    if kind in get_args(VisionKind):
        save_random_vision(kind, tmp_path / "model", sizes, text="What is shown?", chat_template=QWEN_3_VL)
    else:
        save_random_tiles(kind, tmp_path / "model")
    rows = []
    for number in range(5):
        content: list[dict[str, str]] = [{"type": "text", "text": "What is shown?"}]
        for place in range(1 + number % 3):
            picture = draw_picture(10 * number + place, 8 * (1 + place), 16)
            (tmp_path / picture.file_name).write_bytes(picture.data)
            content.append({"type": "image", "path": picture.file_name})
        rows.append({"messages": [{"role": "user", "content": content}], "uid": f"t{number}"})
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return tmp_path


def test_a_rollout_has_the_probabilities_of_the_model(site: Path, options: tuple[str, ...]) -> None:
    """Each sampled token has the one of a single forward pass over its record and the pictures of its task."""
    output = run(site, "rollout", str(site / "config.yaml"), *options, "--out", str(site / "out"))
    results = read_results(site / "out")

    reference = VisionReference(site / "model")
    assert len(results) == 15, output
    assert {str(each.status) for each in results} <= {"truncated", "completed"}
    for result in results:
        (record,) = result.trajectories
        assert len(record.pictures) == 1 + int(result.task.uid[1:]) % 3
        scores, _best = reference.scores(
            record.input_ids.tolist(), record.num_prompt_tokens, temperature=1.0, variant=0, pictures=record.pictures
        )
        np.testing.assert_allclose(record.logprobs, scores, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("train.lora.rank=2",),
        ("train.policy.freeze_vision=true",),
        pytest.param(("runtime=ray", "runtime.num_workers=2", "runtime.num_replicas=2"), marks=pytest.mark.ray),
    ],
    ids=str,
)
def test_a_training_computes_what_the_engine_did(
    site: Path, names: tuple[str, str], options: tuple[str, ...], more: tuple[str, ...]
) -> None:
    """The gap between engine and trainer is rounding error, before and after weights were synced."""
    if "transformers" not in names and more:
        pytest.skip("the options are the trainer's: one training with another engine is enough")
    out = train(site, "out", *options, *more)

    steps = [line for line in steps_of(out) if "gap/max" in line]
    assert len(steps) == 2
    for line in steps:
        assert line["gap/max"] < 1e-4
        assert line["actor/grad_norm"] > 0
