"""The scorer fills the columns with the values of a plain forward pass of the teacher, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForCausalLM

from turnwise import EpisodeResult, Status, Task, Trajectory, TrajectoryScore
from turnwise.batch.rollout_batch import collate
from turnwise.errors import ConfigError
from turnwise.layout import Objective
from turnwise.record.invariants import check_trajectory
from turnwise.record.lineage import RecordLineage
from turnwise_distillation.config import TeacherConfig
from turnwise_distillation.frozen_model import FrozenModel
from turnwise_distillation.teacher import Teacher
from turnwise_grpo_trainer.config import PolicyConfig
from turnwise_testing.references.reference_model import random_qwen3

VOCABULARY, NUM_IDS, TEMPERATURE, TOP_K = 40, 37, 1.25, 3


MODELS = {"math": random_qwen3(VOCABULARY).eval(), "code": random_qwen3(VOCABULARY, seed=1).eval()}


def make_teacher(names=("math",), **options):
    """Return a scorer that has loaded models, each by the data source of its tasks if there are several."""
    paths = {"teachers": dict.fromkeys(names, ".")} if len(names) > 1 else {"path": "."}
    scorer = Teacher(TeacherConfig(device="cpu", **paths, **options))
    for name in names:
        scorer._models[name if len(names) > 1 else ""] = FrozenModel(
            MODELS[name], torch.device("cpu"), scorer.config, TEMPERATURE, NUM_IDS, "teacher.path"
        )
    return scorer


def sample(rng, num):
    """Return random ids and log-probabilities."""
    return rng.integers(0, NUM_IDS, num), -rng.random(num).astype(np.float32)


def conversation(rng):
    """Return a record of two turns, an observation, a constrained turn and forced tokens."""
    record = Trajectory(sample(rng, int(rng.integers(2, 6)))[0])
    record.add_action(*sample(rng, int(rng.integers(1, 6))))
    record.add_observation(sample(rng, 2)[0])
    record.add_action(*sample(rng, 2), constrained=True)
    record.add_forced(sample(rng, 1)[0])
    record.add_action(*sample(rng, int(rng.integers(1, 6))))
    return record


def parallel(rng):
    """Return a record with a block of three paths and a summary."""
    record = Trajectory(sample(rng, 4)[0])
    record.add_action(*sample(rng, 2))
    paths = record.fork(3)
    for path in paths:
        path.add_action(*sample(rng, int(rng.integers(1, 5))))
    record.join(paths)
    record.add_action(*sample(rng, 3))
    return record


def branch(rng):
    """Return a record and one that branches from it, in which the shared sampled tokens are replayed."""
    record = Trajectory(sample(rng, 3)[0])
    record.add_action(*sample(rng, 3))
    mark = record.mark()
    record.add_action(*sample(rng, 2))
    other = record.branched(mark)
    other.add_observation(sample(rng, 1)[0])
    other.add_action(*sample(rng, 2))
    return record, other


def make_episode(*records, source="math", uid="a", **more):
    """Return an episode with some records."""
    task = Task(messages=({"role": "user", "content": "?"},), uid=uid, data_source=source)
    scores = tuple(TrajectoryScore(value=1.0) for _ in records)
    return EpisodeResult(
        **{"task": task, "status": Status.COMPLETED, "trajectories": records, "scores": scores, **more}
    )


def dense(record, model):
    """Return (R, V) log-probabilities before each response token, by one forward pass with the record's own mask."""
    size = len(record)
    seen = torch.tensor([[record.visible(query, key) for key in range(size)] for query in range(size)])
    mask = torch.zeros(1, 1, size, size).masked_fill(~seen, torch.finfo().min)
    ids, positions = (torch.tensor(each.astype(np.int64))[None] for each in (record.input_ids, record.position_ids))
    with torch.no_grad():
        logits = model(input_ids=ids, position_ids=positions, attention_mask=mask).logits[0]
    each = (logits / TEMPERATURE).log_softmax(-1).numpy()
    # The token before a path's first one is the last one before the block.
    before = [
        max(key for key in range(query) if record.visible(query, key))
        for query in range(record.num_prompt_tokens, size)
    ]
    return each[before]


def assert_scored(record, model, *, top_k=0, tokens=None):
    """The sampled tokens have the values of a forward pass, and the others have none."""
    check_trajectory(record)
    wanted = record.response_mask.astype(bool) if tokens is None else tokens
    values, each = record.column("teacher_logprobs"), dense(record, model)
    assert np.isnan(values[~wanted]).all()
    own = each[np.arange(len(each)), record.response_ids]
    np.testing.assert_allclose(values[wanted], own[wanted], atol=2e-5)
    if top_k:
        ids, best = record.column("teacher_topk_ids"), record.column("teacher_topk_logprobs")
        assert (ids[~wanted] == -1).all()
        assert np.isnan(best[~wanted]).all()
        expected = -np.sort(-each[:, :NUM_IDS])[:, :top_k]
        np.testing.assert_allclose(best[wanted], expected[wanted], atol=2e-5)
        np.testing.assert_allclose(np.take_along_axis(each, ids, 1)[wanted], expected[wanted], atol=2e-5)


@given(seed=st.integers(0, 1000), tokens=st.sampled_from([1, 40, 8192]), mib=st.sampled_from([0.0, 0.001, 256.0]))
@settings(deadline=None)
def test_values_are_those_of_a_forward_pass(seed, tokens, mib):
    """Conversations, blocks, branches, cuts and masks: whatever the passes and chunks are."""
    rng = np.random.default_rng(seed)
    whole = conversation(rng)
    cut = whole.truncated(int(rng.integers(1, whole.num_response_tokens)))
    episodes = [
        make_episode(conversation(rng), parallel(rng)),
        make_episode(cut, uid="b", status=Status.TRUNCATED),
        make_episode(*branch(rng), uid="c"),
    ]
    found = make_teacher(top_k=TOP_K, max_tokens_per_pass=tokens, logits_mib=mib).score(episodes)

    for before, after in zip(episodes, found, strict=True):
        assert evolve(after, trajectories=before.trajectories).__getstate__() == before.__getstate__()
        for record, scored in zip(before.trajectories, after.trajectories, strict=True):
            for name in ("input_ids", "response_mask", "origins", "logprobs", "weight_versions", "position_ids"):
                np.testing.assert_array_equal(getattr(record, name), getattr(scored, name))
            assert_scored(scored, MODELS["math"], top_k=TOP_K)


def test_rows_of_paths():
    """A record whose paths the engine saw as plain text has the values of these rows, in the order of the record."""
    rng = np.random.default_rng(0)
    episode = make_episode(parallel(rng), objective=Objective.EXPANDED)
    (found,) = make_teacher().score([episode])
    batch = collate([found], pad_token_id=0)

    assert 3 == len(batch)
    field = batch.fields["teacher_logprobs"]
    for row in range(len(batch)):
        length = int(batch.prompt_lens[row] + batch.response_lens[row])
        ids = batch.input_ids[row, batch.prompt_length - int(batch.prompt_lens[row]) :][:length].long()
        with torch.no_grad():
            each = (MODELS["math"](input_ids=ids[None]).logits[0] / TEMPERATURE).log_softmax(-1)
        own = each[:-1].gather(1, ids[1:, None])[:, 0][int(batch.prompt_lens[row]) - 1 :]
        trained = batch.loss_mask[row, : len(own)].bool()
        np.testing.assert_allclose(field[row, : len(own)][trained], own[trained], atol=2e-5)
        assert field[row][: len(own)][~trained].isnan().all()


def test_untrained_tokens_have_no_values():
    """Failed episodes and records that are not trained are left alone, and so is an episode without a record."""
    rng = np.random.default_rng(0)
    lineage = (RecordLineage(), RecordLineage(kind="auxiliary", trained=False))
    episodes = [
        make_episode(conversation(rng), status=Status.FAILED),
        make_episode(conversation(rng), conversation(rng), uid="b", lineage=lineage),
        make_episode(uid="c", status=Status.FAILED),
    ]
    failed, mixed, empty = make_teacher().score(episodes)

    assert np.isnan(failed.trajectories[0].column("teacher_logprobs")).all()
    assert_scored(mixed.trajectories[0], MODELS["math"])
    assert "teacher_logprobs" not in mixed.trajectories[1].columns
    assert () == empty.trajectories


def test_several_teachers():
    """Each record has the values of the teacher of its task."""
    rng = np.random.default_rng(0)
    sources = ["code", "math", "code"]
    episodes = [make_episode(conversation(rng), source=each, uid=str(n)) for n, each in enumerate(sources)]
    found = make_teacher(("math", "code")).score(episodes)

    for source, each in zip(sources, found, strict=True):
        assert_scored(each.trajectories[0], MODELS[source])


def test_few_passes(monkeypatch):
    """A step has as many forward passes as its tokens need, and not one for each episode."""
    rng, shapes = np.random.default_rng(0), []
    forward = Qwen3ForCausalLM.forward

    def record_shape(self, *args, **options):
        shapes.append(tuple(options["input_ids"].shape))
        return forward(self, *args, **options)

    monkeypatch.setattr(Qwen3ForCausalLM, "forward", record_shape)
    episodes = [make_episode(conversation(rng), uid=str(number)) for number in range(24)]
    make_teacher(max_tokens_per_pass=256).score(episodes)

    assert 24 == sum(rows for rows, _columns in shapes)
    assert all(rows * columns <= 256 for rows, columns in shapes)
    assert len(shapes) <= 4


@pytest.mark.parametrize("awake", [False, True])
def test_sleep(monkeypatch, awake):
    """The weights are on the device while it scores, and with `offload` only then."""
    moves = []
    monkeypatch.setattr(MODELS["math"], "to", lambda device: moves.append(str(device)))
    model = FrozenModel(
        MODELS["math"], torch.device("meta"), TeacherConfig(path=".", offload=not awake), 1.0, NUM_IDS, "teacher.path"
    )
    with pytest.raises(RuntimeError), model.awake():
        raise RuntimeError
    assert moves == (["meta"] if awake else ["meta", "cpu"])


def test_a_folder_that_lacks_a_weight_is_refused(tmp_path):
    """transformers would fill the gap at random; the error names the key of the teacher."""
    MODELS["code"].save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = max(weights)
    del weights[name]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    options = {"policy": PolicyConfig(), "temperature": 1.0, "num_ids": NUM_IDS, "key": "teacher.teachers.code"}
    with pytest.raises(ConfigError, match=rf"^teacher\.teachers\.code: '.*' lacks 1 weights .* such as '{name}'$"):
        FrozenModel.load(tmp_path, TeacherConfig(path=tmp_path, device="cpu"), **options)


def test_a_folder_is_loaded_frozen(tmp_path):
    """The model of a folder has its data type and no gradient."""
    MODELS["code"].save_pretrained(tmp_path)
    model = FrozenModel.load(
        tmp_path,
        TeacherConfig(path=tmp_path, dtype="bfloat16", device="cpu"),
        policy=PolicyConfig(packed=True),
        temperature=1.0,
        num_ids=NUM_IDS,
        key="teacher.path",
    ).model
    assert {torch.bfloat16} == {each.dtype for each in model.parameters()}
    assert not any(each.requires_grad for each in model.parameters())
    assert not model.training
