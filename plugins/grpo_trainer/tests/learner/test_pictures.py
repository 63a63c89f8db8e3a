"""Rows with pictures: packed or padded they have the gradient of rows by themselves, and the engine's probabilities."""

from __future__ import annotations

import asyncio
from typing import Any, get_args

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_batches import make_batch
from structlog.testing import capture_logs

from turnwise import Trajectory
from turnwise.errors import ConfigError, DataError
from turnwise.protocols import ModelSpec, Resources
from turnwise.types import GenerateRequest, MediaTokens, PlacedPicture, SamplingParams
from turnwise_engine_support.picture_families import FAMILIES
from turnwise_engine_support.pictures import PictureReader
from turnwise_grpo_trainer.config import LoraConfig, OptimizerConfig, PolicyConfig, TrainConfig
from turnwise_grpo_trainer.learner.learner import Learner
from turnwise_grpo_trainer.learner.log_probs import token_log_probs
from turnwise_grpo_trainer.learner.micro_batches import collate, pack_by_tokens
from turnwise_grpo_trainer.learner.models import load_critic, load_policy, run_model
from turnwise_grpo_trainer.objective.advantages import compute_loss_mask
from turnwise_grpo_trainer.objective.picture_rows import add_pictures
from turnwise_grpo_trainer.objective.rows import TokenRows
from turnwise_grpo_trainer.processes.trainers import export
from turnwise_testing.inputs.vision import draw_picture
from turnwise_testing.references.float64 import float64_throughout
from turnwise_testing.references.vision_reference import VisionReference
from turnwise_tiny_models import VisionKind, save_random_tiles, save_random_vision
from turnwise_transformers_engine import TransformersConfig, TransformersEngine

POLICY = PolicyConfig(device="cpu")
SIZES = ((8, 8), (24, 24), (16, 40), (40, 8))


@pytest.fixture(scope="module", params=[each.model_type for each in FAMILIES])
def reference(request, tmp_path_factory):
    """The forward pass of a tiny vision-language model of each family."""
    save: Any = save_random_vision if request.param in get_args(VisionKind) else save_random_tiles
    return VisionReference(save(request.param, tmp_path_factory.mktemp(request.param)))


def is_vision(name):
    """Return whether a weight is one that only pictures reach."""
    return name.removeprefix("model.").startswith(
        ("visual.", "vision_tower.", "vision_model.", "multi_modal_projector.", "connector.", "image_newline")
    )


def make_record(reference, seed, num_pictures):
    """Return a record of two turns with pictures in prompt and observation."""
    rng = np.random.default_rng(seed)

    def text(size):
        return rng.integers(20, 200, size).tolist()

    def write(count):
        ids, pictures = text(3), []
        for _ in range(count):
            picture = draw_picture(int(rng.integers(4)), *SIZES[int(rng.integers(4))])
            own = reference.write(picture)
            pictures.append(PlacedPicture(start=len(ids), num_tokens=len(own), picture=picture))
            ids += own + text(2)
        return MediaTokens(token_ids=ids, pictures=pictures)

    record = Trajectory(write(num_pictures // 2))
    # A sampled placeholder is text, as for the engine.
    record.add_action([*text(4), reference.placeholder], -rng.random(5).astype(np.float32))
    record.add_observation(write(num_pictures - num_pictures // 2))
    record.add_action(text(4), -rng.random(4).astype(np.float32))
    return record


def count_patches(reference, picture):
    """Return the patches of a picture: rows of numbers of a Qwen-VL, squares of 4 x 4 pixels of the others."""
    pixels = reference.inputs([picture])["pixel_values"]
    return len(pixels) if pixels.ndim == 2 else pixels.numel() // (3 * 4 * 4)


def make_rows(reference, counts, model):
    """Return rows with these numbers of pictures, and their records."""
    records = [make_record(reference, seed, count) for seed, count in enumerate(counts)]
    batch = make_batch(records, group_size=2)
    rows = TokenRows.from_batch(batch, compute_loss_mask(batch))
    return add_pictures(rows, batch.column("pictures"), PictureReader(reference.path), model), records


COUNTS = st.lists(st.integers(0, 3), min_size=1, max_size=4)
CASES = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@CASES
@given(counts=COUNTS, packed=st.booleans(), chunk=st.none() | st.integers(1, 9))
def test_log_probabilities_are_those_of_the_whole_context(reference, counts, packed, chunk):
    """Packed or padded, each token has the score of one forward pass over its row alone."""
    model = load_policy(POLICY, ModelSpec(path=reference.path))
    rows, records = make_rows(reference, counts, model)
    micro = collate(rows, range(len(rows)), packed=packed)
    with torch.no_grad():
        found = torch.zeros(rows.num_tokens)
        found[micro.tokens] = token_log_probs(model, micro, 0.7, chunk=chunk)[0]
    for row, record in enumerate(records):
        ids = record.input_ids.tolist()
        expected, _best = reference.scores(ids, 1, temperature=0.7, variant=0, pictures=record.pictures)
        own = slice(rows.bounds[row] + 1, rows.bounds[row + 1])
        mask = rows["loss_mask"][own].bool().numpy()
        assert mask.sum() == 9
        np.testing.assert_allclose(found[own].numpy()[mask], expected[mask], atol=1e-4, rtol=0)


@CASES
@given(counts=COUNTS)
def test_packed_rows_have_the_gradient_of_separate_rows(reference, counts):
    """In float64 the gradients of all weights, the vision tower's too, agree to 1e-10 of the largest."""
    model = load_policy(POLICY, ModelSpec(path=reference.path)).double()
    rows, _records = make_rows(reference, counts, model)

    def gradient(micros):
        model.zero_grad()
        for micro in micros:
            logits = run_model(model, micro, logits_to_keep=micro.keep).logits
            scores = logits[micro.predictors[0], micro.predictors[1]].log_softmax(-1)
            scores.gather(-1, micro.labels[:, None]).sum().backward()
        return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}

    with float64_throughout():
        separate = gradient([collate(rows, [row], packed=False) for row in range(len(rows))])
        both = [gradient([collate(rows, range(len(rows)), packed=packed)]) for packed in (True, False)]
    for together in both:
        assert together.keys() == separate.keys()
        for name, expected in separate.items():
            assert (together[name] - expected).abs().max() <= 1e-10 * max(1.0, float(expected.abs().max())), name
    assert any(map(is_vision, separate)) == any(counts)


@pytest.mark.many_cases(2)
@pytest.mark.parametrize(("packed", "lora"), [(True, None), (False, None), (False, LoraConfig(rank=2))])
def test_the_gap_to_the_engine_is_rounding_error(reference, packed, lora):
    """Engine and trainer agree about sampled tokens, before a step and after its weights or adapters have travelled."""
    spec = ModelSpec(path=reference.path)
    learner = make_learner(spec, lora, {"packed": packed})

    async def rollout(engine, number):
        record = make_record(reference, number, 2)
        request = GenerateRequest(
            request_id=f"r{number}",
            trajectory_id="t",
            token_ids=record.input_ids,
            sampling=SamplingParams(temperature=1.0, max_tokens=12, seed=number),
            pictures=record.pictures,
        )
        result = await engine.generate(request)
        sampled = Trajectory(MediaTokens(token_ids=record.input_ids, pictures=record.pictures))
        sampled.add_action(result.token_ids, result.logprobs, weight_version=result.weight_version)
        return sampled

    async def scenario():
        engine = TransformersEngine(
            TransformersConfig(model=reference.path, device="cpu", max_context=256), Resources()
        )
        await engine.start()
        gaps = []
        try:
            for version in (0, 1):
                batch = make_batch([await rollout(engine, number) for number in range(4)], group_size=2)
                metrics = learner.update(batch, step=version + 1, version=version)
                gaps.append(metrics["gap/max"])
                assert metrics["gap/tokens"] == 48
                weights = learner.policy.adapter_weights() if lora else learner.policy.full_weights()
                await engine.update_weights(weights, version + 1)
        finally:
            await engine.stop()
        return gaps

    assert max(asyncio.run(scenario())) < 1e-4


def make_learner(spec, lora=None, policy=None):
    policy_config = PolicyConfig(device="cpu", **(policy or {}))
    config = TrainConfig(policy=policy_config, optimizer=OptimizerConfig(lr=1e-3), lora=lora)
    return Learner.load(config, spec, temperature=1.0, response_length=64, device=torch.device("cpu"))


@pytest.mark.many_cases(3)
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)], ids=["weights", "lora"])
@pytest.mark.parametrize("frozen", [True, False])
def test_a_frozen_vision_tower_stays(reference, lora, frozen):
    """With `freeze_vision` a step changes the text model alone, with adapters too; else it changes both."""
    learner = make_learner(ModelSpec(path=reference.path), lora, {"freeze_vision": frozen})
    before = {name: weight.clone() for name, weight in learner.policy.full_weights()}
    batch = make_batch([make_record(reference, number, 2) for number in range(4)], group_size=2)
    for step in (1, 2):  # adapters start at B = 0, so that the first step moves B alone
        learner.update(batch, step=step, version=0)
    changed = {name for name, weight in learner.policy.full_weights() if not torch.equal(weight, before[name])}
    assert not all(map(is_vision, changed))
    assert any(map(is_vision, changed)) is not frozen


def test_a_micro_batch_counts_patches(reference):
    """A row with a picture takes the budget of its tokens and its patches; text takes that of its tokens."""
    model = load_policy(POLICY, ModelSpec(path=reference.path))
    rows, records = make_rows(reference, [2, 2, 0, 0], model)
    expected = [
        len(record.input_ids) + sum(count_patches(reference, place.picture) for place in record.pictures)
        for record in records
    ]
    assert rows.sizes == expected
    order = sorted(range(4), key=lambda row: -rows.lengths[row])
    for packed in (True, False):
        groups = pack_by_tokens(rows, order, max_tokens=rows.sizes[order[0]] + 1, packed=packed)
        assert groups[0] == order[:1]
        assert sorted(row for group in groups for row in group) == [0, 1, 2, 3]


def test_an_export_is_a_whole_model(reference, tmp_path):
    """The written folder has the image processor, and gives the trained model's scores."""
    learner = make_learner(ModelSpec(path=reference.path))
    record, other = (make_record(reference, seed, 2) for seed in range(2))
    learner.update(make_batch([record, other], group_size=2), step=1, version=0)
    export(learner.policy, reference.path, tmp_path)
    written, ids = VisionReference(tmp_path), record.input_ids.tolist()
    rows, _made = make_rows(reference, [2], learner.policy.model)
    micro = collate(rows, [0], packed=False)
    with torch.no_grad():
        found = token_log_probs(learner.policy.model, micro, 1.0)[0].numpy()
    expected, _best = written.scores(ids, 1, temperature=1.0, variant=0, pictures=record.pictures)
    before, _best = reference.scores(ids, 1, temperature=1.0, variant=0, pictures=record.pictures)
    own = micro.tokens.numpy() - 1
    np.testing.assert_allclose(found, expected[own], atol=1e-4, rtol=0)
    assert np.abs(found - before[own]).max() > 1e-3


def test_prefixes_are_not_shared(reference):
    """A vision-language model computes separate rows, and the log says why."""
    with capture_logs() as logs:
        learner = make_learner(ModelSpec(path=reference.path))
    assert learner.sharing is None
    assert [each["event"] for each in logs] == [
        "shared prefixes are forwarded once for each row: the model reads pictures"
    ]


def test_what_cannot_be_trained_is_refused(reference, tmp_path, model_dir):
    """Each refusal is one line that names the option or the row."""
    spec = ModelSpec(path=reference.path)
    model = load_policy(POLICY, spec)
    rows, (record,) = make_rows(reference, [1], model)
    reader = PictureReader(reference.path)
    wrong = evolve(record.pictures[0], picture=draw_picture(9, 40, 40), num_tokens=1)
    with pytest.raises(DataError, match=r"has 1 placeholders, but the model's processor computes \d\d"):
        add_pictures(rows, [(wrong,)], reader, model)
    with pytest.raises(DataError, match="row 0 has parallel paths and a picture"):
        add_pictures(rows.with_columns(path_start=torch.ones(rows.num_tokens)), [record.pictures], reader, model)
    with pytest.raises(DataError, match="which the model to train does not read"):
        add_pictures(rows, [record.pictures], None, model)
    with pytest.raises(ConfigError, match="gae has no critic for a vision-language model"):
        load_critic(POLICY, spec)
    with pytest.raises(ConfigError, match="turnwise_segments has no attention of a vision tower"):
        load_policy(evolve(POLICY, attn_implementation="turnwise_segments"), spec)
    with pytest.raises(ConfigError, match=r"train.policy.freeze_vision: Qwen3ForCausalLM has no vision tower"):
        load_policy(evolve(POLICY, freeze_vision=True), ModelSpec(path=model_dir))
