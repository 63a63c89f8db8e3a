"""The demonstrations, their ids, and the shipped model."""

import random
from itertools import islice
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForImageTextToText, AutoTokenizer

from turnwise_drawn_scenes import model_dir
from turnwise_drawn_scenes.demonstrations import SlipRates, answer_text, call_text, solve
from turnwise_drawn_scenes.scenes import generate_scenes
from turnwise_drawn_scenes.train import SHIPPED_SLIPS, SceneEncoder, TrainConfig, examples, main
from turnwise_tiny_models import IMAGE_PAD

FILES = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture(scope="module")
def encoder() -> SceneEncoder:
    """The encoder of the shipped tokenizer."""
    return SceneEncoder(AutoTokenizer.from_pretrained(model_dir()))


@given(seed=st.integers(0, 2**32))
def test_a_solver_without_slips_is_right(seed: int) -> None:
    """It looks at the asked shape and names its pattern."""
    scene = next(generate_scenes("train", seed))
    found = solve(scene, SlipRates(), random.Random(seed))
    assert found.seen == scene.target
    assert found.answer == answer_text(scene.answer)


@given(seed=st.integers(0, 2**32))
def test_each_slip_alone(seed: int) -> None:
    """A rate of one always slips: no look, or a look at another shape whose pattern is the answer."""
    scene = next(generate_scenes("train", seed))
    assert solve(scene, SlipRates(at_once=1.0), random.Random(seed)).seen is None
    found = solve(scene, SlipRates(elsewhere=1.0), random.Random(seed))
    assert found.seen is not None
    assert found.seen != scene.target
    assert found.answer == answer_text(found.seen.pattern)


def test_the_shipped_rates_leave_room_on_both_sides() -> None:
    """The solver that the model imitates is right in more than 15 % and less than 50 % of the scenes."""
    source = random.Random(0)
    scenes = islice(generate_scenes("train", 0), 2000)
    right = sum(solve(scene, SHIPPED_SLIPS, source).answer == answer_text(scene.answer) for scene in scenes)
    assert 0.15 < right / 2000 < 0.5
    with pytest.raises(ValueError, match="misread"):
        SlipRates(misread=1.5)


@given(seed=st.integers(0, 2**32))
def test_only_the_turns_are_learned(encoder: SceneEncoder, seed: int) -> None:
    """The ids that count are those of the turns, and each picture has its placeholders."""
    scene = next(generate_scenes("train", seed))
    example = encoder.encode(scene, solve(scene, SlipRates(), random.Random(seed)))
    inputs, targets = encoder.collate([example])
    tokenizer = AutoTokenizer.from_pretrained(model_dir())
    written = tokenizer.decode(targets[targets >= 0])
    assert written == f"{call_text(scene.target)}<|im_end|>{answer_text(scene.answer)}<|im_end|>"
    placeholders = int((inputs["input_ids"] == tokenizer.convert_tokens_to_ids(IMAGE_PAD)).sum())
    assert placeholders == int(inputs["image_grid_thw"].prod(dim=1).sum()) // 4 == 32
    assert int(inputs["mm_token_type_ids"].sum()) == placeholders


def test_the_phases_of_the_stream(encoder: SceneEncoder) -> None:
    """Batches of single turns come first, one kind after the other, and whole demonstrations follow."""
    config = TrainConfig(steps=4, batch_size=2, turns_share=0.5, slips=SlipRates())
    lengths = [len(ids) for ids, _mask, _images in islice(examples(config, encoder), 8)]
    pictures = [len(images) for *_, images in islice(examples(config, encoder), 8)]
    assert pictures == [1, 1, 1, 1, 2, 2, 2, 2]
    assert max(lengths[2:4]) < min(lengths[:2]) < min(lengths[4:])
    at_once = evolve(config, turns_share=0.0, slips=SlipRates(at_once=1.0))
    assert [1] * 8 == [len(images) for *_, images in islice(examples(at_once, encoder), 8)]


def test_the_shipped_folder_is_complete_and_small() -> None:
    """It has no pickle and at most 2 MB, and loads as any Qwen2.5-VL."""
    assert {path.name for path in model_dir().iterdir()} == FILES
    assert sum(path.stat().st_size for path in model_dir().iterdir()) <= 2_000_000
    model = AutoModelForImageTextToText.from_pretrained(model_dir())
    tokenizer = AutoTokenizer.from_pretrained(model_dir())
    assert model.config.model_type == "qwen2_5_vl"
    assert model.config.text_config.vocab_size == len(tokenizer)


@pytest.mark.slow
def test_training_writes_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two training steps write the files of the shipped folder."""
    main(["--out", str(tmp_path / "model"), "--steps", "2", "--threads", "1"])
    assert {path.name for path in (tmp_path / "model").iterdir()} == FILES
    assert "step     2/2" in capsys.readouterr().out
