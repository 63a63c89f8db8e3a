"""The task source `drawn_scenes`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

from attrs import field, frozen, validators

from turnwise.errors import DataError
from turnwise.media import picture_part
from turnwise.types import JsonDict
from turnwise_drawn_scenes.drawing import draw, encode
from turnwise_drawn_scenes.scenes import SPLITS, Scene, Split, generate_scenes
from turnwise_task_files import parse_text


@frozen(kw_only=True)
class Options:
    """
    Options of a path, such as `drawn_scenes:train?num_tasks=64&seed=1`.

    Attributes:
        num_tasks: number of tasks; a larger number with the same seed has the tasks of a smaller one.
        seed: of the scenes.
        places: whether questions name the row and the column of the shape; without them a model has to find it.
    """

    num_tasks: int = field(default=512, validator=validators.ge(1))
    seed: int = field(default=0, validator=validators.ge(0))
    places: bool = True


@frozen
class SceneSource:
    """Makes tasks from ``SPLIT?NAME=VALUE&...``; each row holds its picture as a PNG."""

    def describe(self, text: str) -> str:
        """Return one line about the rows of a text; `DataError` for an unknown split or wrong options."""
        split, options = _parse(text)
        return f"{options.num_tasks} drawn scenes of the split {split}, seed {options.seed}"

    def rows(self, text: str) -> Iterator[Mapping[str, object]]:
        """Yield the rows of a text; `DataError` as `describe`."""
        split, options = _parse(text)
        scenes = generate_scenes(split, options.seed, has_place=options.places)
        for index, scene in enumerate(islice(scenes, options.num_tasks)):
            yield make_row(scene, f"{split}-{options.seed}-{index}", picture_part(encode(draw(scene))))


def make_row(scene: Scene, uid: str, picture: Mapping[str, object]) -> JsonDict:
    """Return a scene as a row of tasks; `picture` is the part of its message that shows it."""
    content = [dict(picture), {"type": "text", "text": scene.question}]
    return {
        "uid": uid,
        "messages": [{"role": "user", "content": content}],
        "ground_truth": scene.answer,
        "data_source": "drawn_scenes",
        "extra_info": {"box": list(scene.target.box)},
    }


def _parse(text: str) -> tuple[Split, Options]:
    name, options = parse_text(text, Options)
    for split in SPLITS:
        if name == split:
            return split, options
    raise DataError(f"unknown split {name!r}: expected {' or '.join(SPLITS)}")
