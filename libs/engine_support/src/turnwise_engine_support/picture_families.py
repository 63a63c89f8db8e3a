"""
Families of vision-language models of transformers: the arrays of a picture, and how a forward pass reads them.

`FAMILIES` lists what engine and trainer take pictures for. A new family is one object there: how many placeholders the
arrays of a picture need, and the names of the arguments and methods that its class in transformers has. All of them
attend causally, also inside a picture. torch and transformers are imported when they are needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from turnwise.errors import ConfigError, DataError
from turnwise.types import PlacedPicture
from turnwise_engine_support.model_directory import read_whole_config


@frozen(kw_only=True, eq=False)
class PictureArrays:
    """
    The arrays of a picture, as the model's own image processor computes them.

    Attributes:
        inputs: arguments of the model for this picture alone, by name.
        num_tokens: placeholders that the model needs for them.
        num_patches: that the vision tower computes.
    """

    inputs: Mapping[str, Any]
    num_tokens: int
    num_patches: int

    @property
    def pixel_values(self) -> Any:
        """The float32 tensor of pixels, whose shape depends on the family."""
        return self.inputs["pixel_values"]

    @property
    def grid(self) -> Any:
        """(3,) int64 tensor of a Qwen-VL: the patches in time, height and width."""
        return self.inputs["image_grid_thw"][0]

    @property
    def num_bytes(self) -> int:
        """Size of the tensors."""
        return sum(each.nbytes for each in self.inputs.values())


@frozen(kw_only=True, eq=False)
class PictureFamily:
    """
    A family whose tokens have plain positions, and whose picture is a stack of square tiles of one size.

    Attributes:
        model_type: of its `config.json`.
        names: arguments of the model that its image processor computes.
        options: of the image processor, which the processor of texts and pictures gives it too.
        towers: model types of vision towers; empty if the family has one.
        vision_modules: parts of the model that only pictures reach: the tower, and what projects its features.
        merger: method of the model that puts features at placeholders, or finds these.
        has_marks: whether other tokens are among the placeholders of a picture.
        prefixes: of names of weights in checkpoints, and those in the state dict; the first that fits counts.
    """

    model_type: str
    names: tuple[str, ...] = ("pixel_values",)
    options: Mapping[str, Any] = field(factory=dict)
    towers: tuple[str, ...] = ()
    vision_modules: tuple[str, ...] = ("vision_tower", "multi_modal_projector")
    merger: str = "get_placeholder_mask"
    has_marks: bool = False
    prefixes: Mapping[str, str] = field(factory=dict)

    @property
    def has_axes(self) -> bool:
        """Whether positions have the axes time, height and width."""
        return False

    def knows(self, config: Mapping[str, Any]) -> bool:
        """Return whether a `config.json` is of this family."""
        tower = (config.get("vision_config") or {}).get("model_type")
        return config.get("model_type") == self.model_type and (not self.towers or tower in self.towers)

    def state_name(self, name: str) -> str:
        """
        Return the name in the state dict of a weight of a checkpoint.

        Checkpoints have older names, such as `visual.merger.mlp.0.weight` and `model.norm.weight` of Qwen2.5-VL.
        Trainers send the names of the state dict. Engines load both.
        """
        for old, new in self.prefixes.items():
            if name.startswith(old):
                return new + name.removeprefix(old)
        return name

    def compute(self, processor: Any, image: Any, config: object) -> PictureArrays:
        """
        Return the arrays of a picture.

        Args:
            processor: the image processor of the model's directory.
            image: of pillow, in RGB.
            config: of the model, of transformers.

        Raises:
            DataError: the tiles of the processor have another size than the vision tower reads.
        """
        found = processor(images=[image], return_tensors="pt", **self.options)
        return self.measure({name: found[name] for name in self.names}, config)

    def measure(self, inputs: Mapping[str, Any], config: Any) -> PictureArrays:
        """Return the arrays with the numbers of their placeholders and patches; errors as in `compute`."""
        tiles = inputs["pixel_values"]
        num_tiles, size = tiles.numel() // tiles.shape[-3:].numel(), tuple(tiles.shape[-2:])
        if size != (side := _pair(config.vision_config.image_size)):
            raise DataError(f"the image processor makes tiles of {size} pixels, and the vision tower reads {side}")
        height, width = (
            pixels // patch for pixels, patch in zip(size, _pair(config.vision_config.patch_size), strict=True)
        )
        patches = height * width
        num_tokens = self.count_tokens(inputs, num_tiles, patches, config)
        return PictureArrays(inputs=inputs, num_tokens=num_tokens, num_patches=num_tiles * patches)

    def count_tokens(self, _inputs: Mapping[str, object], num_tiles: int, patches: int, config: object) -> int:
        """Return the placeholders of a picture: of so many tiles with so many patches each."""
        raise NotImplementedError

    def collate(self, arrays: Sequence[PictureArrays]) -> dict[str, Any]:
        """Return the arguments of a forward pass over some pictures, at least one, in the order of placeholders."""
        import torch

        return {name: torch.cat([each.inputs[name] for each in arrays]) for name in self.names}

    def axes(
        self, _model: object, _num_tokens: int, _places: Sequence[PlacedPicture], _arrays: Sequence[PictureArrays]
    ) -> NDArray[np.int64] | None:
        """Return positions as `axis_positions` does; None where tokens have plain positions."""
        return None

    def encode(self, model: Any, arrays: PictureArrays) -> list[Any]:
        """Return (n, H) features of the placeholders of a picture: for the first layer, and for some further layers."""
        import torch

        inputs = {name: each.to(model.device) for name, each in arrays.inputs.items()}
        found = model.model.get_image_features(**inputs)
        # A tensor with a row for each tile, or a list with a tensor for each picture.
        return [torch.cat([each.reshape(-1, each.shape[-1]) for each in found.pooler_output])]

    def encoder_output(self, layers: Sequence[Sequence[Any]]) -> Any:
        """Return what the model takes for the output of its encoder, from the features of rows for each layer."""
        import torch

        return SimpleNamespace(pooler_output=torch.cat(list(layers[0])))

    def merge(self, mask: Any) -> Any:
        """Return the method `merger` for a forward pass whose placeholders are at (B, L) bool `mask`."""
        return lambda *_args, **_options: mask[:, :, None]


class _QwenFamily(PictureFamily):
    """Patches with a grid, placeholders that follow one another, and positions on three axes."""

    @property
    def has_axes(self) -> bool:
        return True

    def measure(self, inputs: Mapping[str, Any], config: Any) -> PictureArrays:
        num_patches = len(inputs["pixel_values"])
        merged = config.vision_config.spatial_merge_size**2
        return PictureArrays(inputs=inputs, num_tokens=num_patches // merged, num_patches=num_patches)

    def axes(
        self, model: object, num_tokens: int, places: Sequence[PlacedPicture], arrays: Sequence[PictureArrays]
    ) -> NDArray[np.int64]:
        return axis_positions(model, num_tokens, places, arrays)

    def encode(self, model: Any, arrays: PictureArrays) -> list[Any]:
        inputs = {name: each.to(model.device) for name, each in arrays.inputs.items()}
        found = model.model.get_image_features(**inputs)
        (vectors,) = found.pooler_output
        return [vectors, *(vectors for (vectors,) in getattr(found, "deepstack_features", None) or ())]

    def encoder_output(self, layers: Sequence[Sequence[object]]) -> Any:
        first, *further = layers
        return SimpleNamespace(pooler_output=first, deepstack_features=further)

    def merge(self, mask: Any) -> Any:
        return lambda *_args, **_options: (mask[:, :, None], None)


class _InternFamily(PictureFamily):
    """A row of tiles, and an overview of the picture as the last one."""

    def count_tokens(self, _inputs: Mapping[str, object], num_tiles: int, patches: int, config: Any) -> int:
        return num_tiles * round(patches * float(config.downsample_ratio) ** 2)


class _IdeficsFamily(PictureFamily):
    """Tiles with a mark before each, whose pixels are those of one row of the batch."""

    def count_tokens(self, _inputs: Mapping[str, object], num_tiles: int, patches: int, config: Any) -> int:
        return int(num_tiles * (patches // config.scale_factor**2))

    def collate(self, arrays: Sequence[PictureArrays]) -> dict[str, Any]:
        import torch

        return {name: torch.cat([each.inputs[name] for each in arrays], dim=1) for name in self.names}

    def merge(self, mask: Any) -> Any:
        def merge(input_ids: object, inputs_embeds: Any, image_hidden_states: Any) -> Any:
            del input_ids
            return inputs_embeds.masked_scatter(mask[:, :, None], image_hidden_states.to(inputs_embeds.dtype))

        return merge


class _LlavaFamily(PictureFamily):
    """One tile."""

    def count_tokens(self, _inputs: Mapping[str, object], num_tiles: int, patches: int, config: object) -> int:
        return num_tiles * _selected(patches, config)

    def encoder_output(self, layers: Sequence[Sequence[object]]) -> Any:
        return SimpleNamespace(pooler_output=list(layers[0]))


class _LlavaNextFamily(_LlavaFamily):
    """An overview, and tiles whose features are joined, cut to the picture's form, and have a mark after each line."""

    def measure(self, inputs: Mapping[str, Any], config: object) -> PictureArrays:
        # The processor's array has a dimension of pictures, whose numbers of tiles differ.
        tiles = inputs["pixel_values"].flatten(0, -4)
        return super().measure({**inputs, "pixel_values": tiles}, config)

    def count_tokens(self, inputs: Mapping[str, Any], num_tiles: int, patches: int, config: Any) -> int:
        import torch
        from transformers.models.llava_next import modeling_llava_next

        if num_tiles == 1:
            return _selected(patches, config) + 1
        own: Any = modeling_llava_next
        size, side = inputs["image_sizes"][0], config.vision_config.image_size
        rows, columns = own.get_anyres_image_grid_shape(size, config.image_grid_pinpoints, side)
        tile = side // config.vision_config.patch_size
        kept = own.unpad_image(torch.empty(1, rows * tile, columns * tile, device="meta"), size)
        return int(_selected(patches, config) + kept.shape[1] * (kept.shape[2] + 1))


def _pair(size: Any) -> tuple[int, int]:
    """Return a size in height and width, which a config may write as one number."""
    height, width = (size, size) if isinstance(size, int) else size
    return int(height), int(width)


def _selected(patches: int, config: Any) -> int:
    """Return the features of a tile of LLaVA: CLIP has one more than patches, and `default` drops the first."""
    return patches + int(config.vision_feature_select_strategy != "default")


_QWEN_PREFIXES: Final = {
    **{name: name for name in ("model.visual.", "model.language_model.")},
    "visual.": "model.visual.",
    "model.": "model.language_model.",
}
_INTERN_PREFIXES: Final = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}
_QWEN_NAMES: Final = ("pixel_values", "image_grid_thw")
_TILE_NAMES: Final = ("pixel_values", "pixel_attention_mask")
_IDEFICS_MODULES: Final = ("vision_model", "connector")
_TOWERS: Final = ("clip_vision_model",)

FAMILIES: Final[tuple[PictureFamily, ...]] = (
    *(
        _QwenFamily(model_type=name, names=_QWEN_NAMES, vision_modules=("visual",), prefixes=_QWEN_PREFIXES)
        for name in ("qwen2_5_vl", "qwen3_vl")
    ),
    _InternFamily(model_type="internvl", options={"crop_to_patches": True}, prefixes=_INTERN_PREFIXES),
    *(
        _IdeficsFamily(
            model_type=name,
            names=_TILE_NAMES,
            vision_modules=_IDEFICS_MODULES,
            merger="inputs_merger",
            has_marks=True,
        )
        for name in ("idefics3", "smolvlm")
    ),
    _LlavaFamily(model_type="llava", towers=_TOWERS),
    _LlavaNextFamily(
        model_type="llava_next",
        names=("pixel_values", "image_sizes"),
        towers=_TOWERS,
        vision_modules=("vision_tower", "multi_modal_projector", "image_newline"),
    ),
)
"""The families of which engine and trainer take pictures."""


def find_family(path: Path | None) -> PictureFamily | None:
    """Return the family of a model directory; None if it has no vision-language model of one."""
    config = read_whole_config(path)
    return next((each for each in FAMILIES if each.knows(config)), None)


def family_of(model: Any) -> PictureFamily:
    """Return the family of a vision-language model of transformers; `ConfigError` if it is of none."""
    found = next((each for each in FAMILIES if each.model_type == model.config.model_type), None)
    if found is None:
        raise ConfigError(f"{type(model).__name__} has no vision tower that is known: {supported_families()}")
    return found


def supports_pictures(path: Path | None) -> bool:
    """Return whether a model directory has a vision-language model that this module knows."""
    return find_family(path) is not None


def supported_families() -> str:
    """Return a clause that lists the model types of all families."""
    return f"engine and trainer take those of {', '.join(each.model_type for each in FAMILIES)}"


def supports_grids(path: Path | None) -> bool:
    """Return whether it is one with a grid of patches and positions on three axes, as some engines alone take it."""
    family = find_family(path)
    return family is not None and family.has_axes


def check_grids(path: Path | None, subject: str) -> None:
    """Raise `ConfigError` for a vision-language model that this module knows and a part of turnwise does not."""
    family = find_family(path)
    if family is not None and not family.has_axes:
        known = ", ".join(each.model_type for each in FAMILIES if each.has_axes)
        raise ConfigError(
            f"{subject} takes vision-language models of {known}, and {str(path)!r} is {family.model_type}"
        )


def axis_positions(
    model: Any, num_tokens: int, places: Sequence[PlacedPicture], arrays: Sequence[PictureArrays]
) -> NDArray[np.int64]:
    """
    Return the positions of a context with pictures, by the own `get_rope_index` of a Qwen-VL.

    Args:
        model: a vision-language model of transformers.
        num_tokens: of the context, at least 1.
        places: of its pictures, which do not touch.
        arrays: of these pictures.

    Returns:
        (3, n): in time, height and width. The next token has 1 more than the largest on each axis.
    """
    import torch

    types = torch.zeros(1, num_tokens, dtype=torch.int64)
    for place in places:
        types[0, place.start : place.stop] = 1
    grids = torch.stack([each.grid for each in arrays]) if arrays else None
    found, _delta = model.model.get_rope_index(torch.zeros_like(types), types, image_grid_thw=grids)
    positions: NDArray[np.int64] = found[:, 0].numpy()
    return positions


@contextmanager
def placeholders_at(model: Any, mask: object) -> Iterator[None]:
    """
    Let a forward pass read the placeholders of pictures by their places, not by their id.

    A model may sample the id of a placeholder, which is then text and has no picture.

    Args:
        model: a vision-language model of transformers.
        mask: (B, L) bool, True on placeholders of pictures, which the features fill in order of rows.
    """
    family, inner = family_of(model), model.model
    setattr(inner, family.merger, family.merge(mask))
    try:
        yield
    finally:
        delattr(inner, family.merger)
