"""TRL's real GRPOTrainer on records with pictures: it computes what a plain forward pass over each record does."""

from typing import get_args

import numpy as np
import pytest
import torch
from fake_manager import FakeManager, make_result, make_task
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from turnwise import Status, Task, Trajectory
from turnwise.errors import ConfigError
from turnwise.media import picture_part
from turnwise.types import MediaTokens, PlacedPicture
from turnwise_testing.inputs.tokenizers import byte_tokenizer
from turnwise_testing.inputs.vision import draw_picture
from turnwise_testing.references.vision_reference import VisionReference
from turnwise_tiny_models import VisionKind, save_random_vision
from turnwise_trl_bridge import Rollouts, build_dataset

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

SIZES = ((8, 8), (24, 24), (16, 40), (40, 8))


@pytest.fixture(scope="module", params=get_args(VisionKind))
def reference(request, tmp_path_factory):
    """The forward pass of a tiny vision-language model."""
    return VisionReference(save_random_vision(request.param, tmp_path_factory.mktemp(request.param)))


def make_record(reference, seed, num_pictures):
    """Return a record of two turns with as many pictures in the prompt and behind the first turn, and its scores."""
    rng = np.random.default_rng(seed)

    def write(count):
        ids, pictures = rng.integers(20, 200, 2).tolist(), []
        for _ in range(count):
            picture = draw_picture(int(rng.integers(4)), *SIZES[int(rng.integers(4))])
            size = reference.count_tokens(picture)
            pictures.append(PlacedPicture(start=len(ids), num_tokens=size, picture=picture))
            ids += [reference.placeholder] * size + rng.integers(20, 200, 1 + seed % 3).tolist()
        return MediaTokens(token_ids=ids, pictures=pictures)

    prompt, observation = write(num_pictures), write(num_pictures)
    turns = [[*rng.integers(20, 200, 3 + seed % 2).tolist(), reference.placeholder], rng.integers(20, 200, 4).tolist()]

    def build(scores):
        record, given = Trajectory(prompt), iter(scores)
        for number, turn in enumerate(turns):
            record.add_action(turn, [float(next(given)) for _ in turn])
            if not number:
                record.add_observation(observation)
                _ = [next(given) for _ in range(len(observation))]
        return record

    blank = build(np.zeros(1000))
    first, ids = blank.num_prompt_tokens, blank.input_ids.tolist()
    return build(reference.scores(ids, first, temperature=1.0, variant=0, pictures=blank.pictures)[0])


def make_trainer(reference, folder, records, *, beta=0.0, args=(), kind=None, failed=()):
    """Return a trainer with four episodes for each of two tasks, and its manager."""
    from gap_trainer import GapTrainer
    from transformers import AutoModelForImageTextToText
    from trl import GRPOConfig

    tasks = {f"t{n}": make_task(f"t{n}") for n in range(2)}

    def result(task, number):
        if number in failed:
            return make_result(task, records[number], status=Status.FAILED)
        return make_result(task, records[number], reward=float(number % 3 == 0))

    manager = FakeManager(result)
    options = {
        "per_device_train_batch_size": 4,
        "steps_per_generation": 2,
        "num_generations": 4,
        "max_steps": 2,
        "report_to": "none",
        "bf16": False,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "disable_tqdm": True,
        "learning_rate": 0.0,
        "beta": beta,
        "output_dir": str(folder),
    }
    model = AutoModelForImageTextToText.from_pretrained(reference.path, dtype=torch.float32)
    rollouts = Rollouts(manager, tasks, reference.path)
    config = GRPOConfig(**options | dict(args))
    made = (kind or GapTrainer)(model, rollouts=rollouts, args=config, processing_class=byte_tokenizer())
    return made, manager


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(counts=st.lists(st.integers(0, 2), min_size=8, max_size=8))
def test_trained_and_sampled_log_probabilities_agree(reference, tmp_path_factory, counts):
    """They agree within float32 rounding, also where TRL shuffles and splits the rows of a generation."""
    records = [make_record(reference, number, count) for number, count in enumerate(counts)]
    trainer, _manager = make_trainer(reference, tmp_path_factory.mktemp("out"), records)
    trainer.train()
    assert len(trainer.gaps) == 2
    assert max(trainer.gaps) < 1e-4


def test_without_the_pictures_they_differ(reference, tmp_path):
    """The same rows with other pixels have a large gap, so the test above can fail."""
    from gap_trainer import GapTrainer

    class Blind(GapTrainer):
        def _compute_loss(self, model, inputs):
            rows = inputs["turnwise_pictures"]
            return super()._compute_loss(model, inputs | {"turnwise_pictures": [()] * len(rows)})

    records = [make_record(reference, number, 1) for number in range(8)]
    trainer, _manager = make_trainer(reference, tmp_path, records, kind=Blind)
    trainer.train()
    assert max(trainer.gaps) > 1e-2


def test_a_reference_model_sees_the_pictures(reference, tmp_path):
    """With `beta`, TRL's own frozen copy has the same log-probabilities, so that the divergence is 0."""
    records = [make_record(reference, number, number % 3) for number in range(8)]
    trainer, _manager = make_trainer(reference, tmp_path, records, beta=0.1)
    trainer.train()
    assert all(abs(entry["kl"]) < 1e-6 for entry in trainer.state.log_history if "kl" in entry)
    assert any("kl" in entry for entry in trainer.state.log_history)


def test_a_step_moves_the_vision_tower(reference, tmp_path):
    """Pixels have a gradient, and the engines get the weights under the names of the checkpoint."""
    records = [make_record(reference, number, 1) for number in range(8)]
    trainer, manager = make_trainer(reference, tmp_path, records, args={"learning_rate": 1e-3})
    before = {name: weight.clone() for name, weight in trainer.model.named_parameters()}
    trainer.train()
    moved = {name for name, weight in trainer.model.named_parameters() if not torch.equal(weight, before[name])}
    assert any("visual" in name for name in moved)
    assert any("language_model" in name for name in moved)
    assert set(manager.weights) == set(before)


def test_a_failed_episode_keeps_its_row(reference, tmp_path):
    """Its prompt has the pictures, and no token is in the loss."""
    records = [make_record(reference, number, 1) for number in range(8)]
    blank = Trajectory(MediaTokens(token_ids=records[0].prompt_ids, pictures=records[0].pictures[:1]))
    trainer, _manager = make_trainer(reference, tmp_path, [blank, *records[1:]], failed=(0,))
    trainer.train()
    assert max(trainer.gaps) < 1e-4


def test_the_function_of_trl_alone_is_refused(reference):
    """TRL computes pixels of the data set's prompts alone, and by its own processor."""

    class Plain:
        """A trainer that only has a `rollout_func`."""

        class accelerator:  # noqa: N801 - its name in TRL
            is_main_process, process_index = True, 0

        class state:  # noqa: N801
            global_step = 0

        class model:  # noqa: N801
            training = True

    records = [make_record(reference, 0, 1)]
    manager = FakeManager(lambda task, number: make_result(task, records[number], reward=1.0))
    rollouts = Rollouts(manager, {"t0": make_task("t0")})
    with pytest.raises(ConfigError, match="TRL's rollout_func has no place for them: use TurnwiseGRPOTrainer"):
        rollouts([[{"role": "user", "content": "Question?"}]], Plain())


def test_a_model_of_texts_is_refused(tiny, reference, tmp_path):
    """The same line, before a step."""
    records = [make_record(reference, number, 1) for number in range(8)]
    trainer, _manager = make_trainer(reference, tmp_path, records)
    trainer._reader = None
    with pytest.raises(ConfigError, match="the rows have pictures"):
        trainer.train()


def test_the_data_set_has_texts():
    """Tasks with pictures and without are rows of one data set."""
    shown = [{"type": "text", "text": "Which?"}, picture_part(draw_picture(0))]
    tasks = [
        Task(messages=({"role": "user", "content": content},), uid=uid) for uid, content in (("a", shown), ("b", "Hi"))
    ]
    assert [row["prompt"][0]["content"] for row in build_dataset(tasks)] == ["Which?<picture>", "Hi"]
