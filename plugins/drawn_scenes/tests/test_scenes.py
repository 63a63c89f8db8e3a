"""Scenes, their pictures, and parts of pictures."""

import asyncio
import json
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoImageProcessor

from turnwise import Task
from turnwise.errors import DataError, ToolError
from turnwise_drawn_scenes import model_dir
from turnwise_drawn_scenes.crop import MIN_PIXELS, CropTool, crop
from turnwise_drawn_scenes.drawing import draw, encode
from turnwise_drawn_scenes.scenes import COLOURS, GRID, NUM_SHAPES, PATTERNS, SIZE, SPLITS, Scene, generate_scenes
from turnwise_drawn_scenes.source import SceneSource
from turnwise_drawn_scenes.tasks import main
from turnwise_task_files import read_tasks

SEEDS = st.integers(0, 2**32)
PATTERN = st.sampled_from([*PATTERNS])


def scene_of(seed: int) -> Scene:
    """Return the first scene of a stream."""
    return next(generate_scenes("train", seed))


def with_patterns(scene: Scene, patterns: Sequence[str]) -> Scene:
    """Return a scene whose shapes have other patterns."""
    shapes = tuple(evolve(each, pattern=pattern) for each, pattern in zip(scene.shapes, patterns, strict=True))
    return evolve(scene, shapes=shapes)


@pytest.fixture(scope="module")
def see() -> Any:
    """A function that returns the pixels that the shipped model sees of an image."""
    processor = AutoImageProcessor.from_pretrained(model_dir(), backend="pil")
    return lambda image: processor([image], return_tensors="np")["pixel_values"]


@given(seed=SEEDS)
def test_a_scene_has_one_answer(seed: int) -> None:
    """Cells and colours of its shapes differ, so the question is about one of them."""
    scene = scene_of(seed)
    assert len({(each.column, each.row) for each in scene.shapes}) == NUM_SHAPES
    assert len({each.colour for each in scene.shapes} & {*COLOURS}) == NUM_SHAPES
    assert all(0 <= each.column < GRID and 0 <= each.row < GRID for each in scene.shapes)
    place = f"in row {scene.target.row + 1}, column {scene.target.column + 1}"
    assert scene.question == f"Which pattern is on the {scene.asked_name} {place}?"
    (without,) = islice(generate_scenes("train", seed, has_place=False), 1)
    assert without.question == f"Which pattern is on the {scene.asked_name}?"
    assert evolve(without, has_place=True) == scene
    assert scene.answer == scene.target.pattern


@given(seed=SEEDS)
def test_the_seed_decides_the_scenes(seed: int) -> None:
    """A stream is reproducible, all of its scenes are of its split, and their pictures have the same bytes."""
    for split in SPLITS:
        first, second = (list(islice(generate_scenes(split, seed), 3)) for _ in range(2))
        assert first == second
        assert {each.split for each in first} == {split}
        assert encode(draw(first[0])).data == encode(draw(second[0])).data


def test_every_tile_is_half_black() -> None:
    """So all patterns have the same mean, and no two are equal."""
    assert {8} == {"".join(tile).count("X") for tile in PATTERNS.values()}
    assert len({*PATTERNS.values()}) == len(PATTERNS)


@given(seed=SEEDS, patterns=st.lists(PATTERN, min_size=NUM_SHAPES, max_size=NUM_SHAPES))
def test_the_whole_picture_does_not_show_patterns(see: Any, seed: int, patterns: list[str]) -> None:
    """The model sees equal pixels of two scenes that differ in their patterns alone."""
    scene = scene_of(seed)
    np.testing.assert_array_equal(see(draw(with_patterns(scene, patterns))), see(draw(scene)))


@given(seed=SEEDS, pattern=PATTERN)
def test_the_part_shows_the_pattern(see: Any, seed: int, pattern: str) -> None:
    """The cell of the asked shape, enlarged by the tool, has other pixels for another pattern."""
    scene = scene_of(seed)
    other = with_patterns(scene, [pattern] * NUM_SHAPES)
    seen = [see(crop(draw(each), [*each.target.box])) for each in (scene, other)]
    assert np.array_equal(*seen) == (scene.answer == pattern)


@given(data=st.data())
def test_a_part_has_the_pixels_of_the_picture(data: st.DataObject) -> None:
    """Each pixel of a part is enlarged to a square, by the same factor for all."""
    starts = st.integers(0, SIZE - MIN_PIXELS)
    left, top = data.draw(starts), data.draw(starts)
    right, bottom = (data.draw(st.integers(start + MIN_PIXELS, SIZE)) for start in (left, top))
    image = draw(scene_of(0))
    part = crop(image, [left, top, right, bottom])
    factor = part.width // (right - left)
    assert part.size == (factor * (right - left), factor * (bottom - top))
    assert factor == max(1, SIZE // max(right - left, bottom - top))
    small = np.asarray(image)[top:bottom, left:right]
    np.testing.assert_array_equal(np.asarray(part), small.repeat(factor, axis=0).repeat(factor, axis=1))


@pytest.mark.parametrize(
    ("edges", "text"),
    [
        ((-1, 0, 32, 32), "Error: the picture has 128 x 128 pixels"),
        ((0, 0, 129, 32), "Error: the picture has 128 x 128 pixels"),
        ((0, 0, 32, 7), "Error: a part needs at least 8 x 8 pixels"),
        ((32, 0, 0, 32), "Error: a part needs at least 8 x 8 pixels"),
        ((0, 0, 32.5, 32), "Error: right must be a whole number"),
        ((True, 0, 32, 32), "Error: left must be a whole number"),
        ((0, "0", 32, 32), "Error: top must be a whole number"),
        ((0, 0, 32, None), "Error: bottom must be a whole number"),
    ],
)
def test_edges_that_describe_no_part(edges: tuple[Any, ...], text: str) -> None:
    """The model reads the reason."""
    with pytest.raises(ToolError) as caught:
        crop(Image.new("RGB", (128, 128)), [*edges])
    assert text == str(caught.value)


def test_a_task_without_a_picture() -> None:
    """The error names the task."""
    task = Task(messages=({"role": "user", "content": "Which pattern?"},), uid="plain")
    with pytest.raises(DataError, match=r"task 'plain' \(row 0\) has no picture, which the tool crop needs"):
        asyncio.run(CropTool().create(task))


def test_the_command_writes_the_tasks_of_the_source(tmp_path, capsys) -> None:
    """Its file gives the tasks of the source with the same options, pictures included."""
    main(["--split", "test", "--num", "3", "--seed", "2", "--out", str(tmp_path / "scenes")])
    assert f"wrote 3 test tasks to {tmp_path / 'scenes'}" in capsys.readouterr().out
    written = read_tasks(tmp_path / "scenes" / "tasks.jsonl")
    rows = list(SceneSource().rows("test?num_tasks=3&seed=2"))
    assert [row["messages"] for row in rows] == [json.loads(json.dumps(task.messages)) for task in written]
    assert [row["ground_truth"] for row in rows] == [task.ground_truth for task in written]
    with pytest.raises(SystemExit):
        main(["--num", "0", "--out", str(tmp_path / "none")])
