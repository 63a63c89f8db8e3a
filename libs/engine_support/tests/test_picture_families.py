"""Families of pictures: how many placeholders they need, and refusals of models that are of none."""

import json
from typing import Any, get_args

import numpy as np
import pytest
import torch
from attrs import evolve
from PIL import Image

from turnwise.errors import ConfigError, DataError
from turnwise.types import PlacedPicture
from turnwise_engine_support.model_directory import checkpoint_shapes
from turnwise_engine_support.picture_families import FAMILIES, check_grids, find_family, supports_grids
from turnwise_engine_support.pictures import PictureReader
from turnwise_testing.inputs.vision import draw_picture
from turnwise_testing.references.vision_reference import VisionReference
from turnwise_tiny_models import TileKind, save_random_tiles, save_random_vision

NAMES = tuple(each.model_type for each in FAMILIES)


@pytest.fixture(scope="module", params=get_args(TileKind))
def reference(request, tmp_path_factory):
    """The forward pass of a tiny model whose pictures are stacks of tiles."""
    return VisionReference(save_random_tiles(request.param, tmp_path_factory.mktemp(request.param)))


@pytest.fixture
def folder(tmp_path):
    """A function that writes the directory of a model with nothing but a config."""

    def write(config):
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return tmp_path

    return write


@pytest.mark.parametrize("size", [(8, 8), (24, 24), (16, 40), (90, 33), (33, 200)])
def test_placeholders_are_the_features_of_the_model(reference, size):
    """The number from the arrays is the number of features that the model computes, which differ between pictures."""
    reader, model = PictureReader(reference.path), reference.model(variant=0)
    features = []
    for seed in range(2):
        arrays = reader.arrays(draw_picture(seed, *size))
        with torch.no_grad():
            (found,) = reader.family.encode(model, arrays)
        assert found.shape == (arrays.num_tokens, 64)
        features.append(found)
    assert (features[0] - features[1]).abs().max() > 1e-2


@pytest.mark.parametrize("name", [each.model_type for each in FAMILIES if each.prefixes])
def test_names_of_a_checkpoint_become_those_of_the_state_dict(name, tmp_path):
    """An engine that checks the names of an update accepts the names that a trainer sends."""
    save: Any = save_random_tiles if name in get_args(TileKind) else save_random_vision
    path = save(name, tmp_path)
    family, state = find_family(path), VisionReference(path).model(variant=0).state_dict()
    assert {family.state_name(each) for each in checkpoint_shapes(path)} == state.keys()


def test_features_are_placed_as_the_model_places_them(reference):
    """The reference, which puts features at places, agrees with the model, which finds placeholders by their id."""
    pictures = [draw_picture(seed, 20, 20 + 30 * seed) for seed in range(3)]
    ids, places = [50], []
    for picture in pictures:
        own = reference.write(picture)
        places.append(PlacedPicture(start=len(ids), num_tokens=len(own), picture=picture))
        ids += [*own, 60]
    found = reference.all_logprobs(ids, 1.0, 0, places)
    np.testing.assert_allclose(found, reference.plain_logprobs(ids, pictures), atol=1e-5, rtol=0)
    others = [evolve(each, picture=draw_picture(9, 20, 20 + 30 * number)) for number, each in enumerate(places)]
    assert np.abs(reference.all_logprobs(ids, 1.0, 0, others) - found).max() > 1e-2


def test_pictures_with_plain_positions_may_touch(reference):
    """Only positions with axes need text between two pictures."""
    own = reference.write(picture := draw_picture(0))
    places = [PlacedPicture(start=1 + len(own) * each, num_tokens=len(own), picture=picture) for each in range(2)]
    ids, reader = np.array([50, *own, *own]), PictureReader(reference.path)
    assert len(reader.read(ids, places)) == 2
    count = own.count(reference.placeholder)
    assert reader.feature_rows(ids, places).max() == 2 * count - 1
    with pytest.raises(DataError, match="touches another picture"):
        reader.read(ids, [places[0], evolve(places[1], start=places[1].start - 1)])


def test_llava_may_keep_the_class_of_a_picture(tmp_path):
    """With the strategy `full`, a tile has a feature more than patches."""
    path = save_random_tiles("llava", tmp_path)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    (path / "config.json").write_text(json.dumps(config | {"vision_feature_select_strategy": "full"}), encoding="utf-8")
    reader, model = PictureReader(path), VisionReference(path).model(variant=0)
    arrays = reader.arrays(draw_picture(0))
    with torch.no_grad():
        (found,) = reader.family.encode(model, arrays)
    assert len(found) == arrays.num_tokens == 17


def test_tiles_have_the_size_of_the_tower(tmp_path):
    """A processor that makes other tiles than the vision tower reads is an error that names both."""
    path = save_random_tiles("llava", tmp_path)
    options = json.loads((path / "preprocessor_config.json").read_text(encoding="utf-8"))
    options["crop_size"] = {"height": 8, "width": 8}
    (path / "preprocessor_config.json").write_text(json.dumps(options), encoding="utf-8")
    with pytest.raises(DataError, match=r"makes tiles of \(8, 8\) pixels, and the vision tower reads \(16, 16\)"):
        PictureReader(path).arrays(draw_picture(0))


def test_a_black_picture_is_a_picture(reference):
    """Idefics3 takes a tile of zeros for padding, and no pixel of a picture becomes a zero."""
    reader, model = PictureReader(reference.path), reference.model(variant=0)
    for color in ("black", "white", (127, 127, 127), (128, 128, 128)):
        arrays = reader.family.compute(reader._processor, Image.new("RGB", (40, 40), color), model.config)
        with torch.no_grad():
            (found,) = reader.family.encode(model, arrays)
        assert len(found) == arrays.num_tokens


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gemma3", "vision_config": {"model_type": "siglip_vision_model"}},
        {"model_type": "llava", "vision_config": {"model_type": "pixtral"}},
        {"model_type": "llava", "vision_config": {"model_type": "siglip_vision_model"}},
        {"model_type": "glm4v", "vision_config": {}},
        {"model_type": "qwen3"},
    ],
)
def test_a_model_of_no_family_is_refused_by_name(folder, config):
    """The line lists the model types of all families."""
    path = folder(config)
    assert find_family(path) is None
    with pytest.raises(ConfigError, match="are not supported: engine and trainer take those of ") as caught:
        PictureReader(path)
    assert str(caught.value).endswith(", ".join(NAMES))


@pytest.mark.parametrize("name", NAMES)
def test_a_part_that_takes_grids_alone(folder, name):
    """It refuses the other families by name."""
    path = folder({"model_type": name, "vision_config": {"model_type": "clip_vision_model"}})
    family = find_family(path)
    assert family is not None
    assert family.model_type == name
    if supports_grids(path):
        check_grids(path, "turnwise sft")
        return
    reason = f"turnwise sft takes vision-language models of qwen2_5_vl, qwen3_vl, and .* is {name}$"
    with pytest.raises(ConfigError, match=reason):
        check_grids(path, "turnwise sft")
