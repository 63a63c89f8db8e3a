"""
The visibility of a record as a picture: row q, column k is coloured by the origin of q where token q sees token k.

It needs Pillow (`pip install 'turnwise-observability[images]'`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from turnwise.errors import ConfigError
from turnwise.layout import visible_keys
from turnwise.record.columns import Origin
from turnwise.record.trajectory import Trajectory

MAX_TOKENS: Final = 4096
"""Limit of a record's length, because the picture has a pixel for each pair of tokens."""

_HIDDEN: Final = (244, 244, 240)
_COLORS: Final = {
    Origin.PROMPT: (150, 150, 150),
    Origin.ACTION: (46, 140, 70),
    Origin.OBSERVATION: (40, 130, 170),
    Origin.FORCED: (170, 70, 160),
    Origin.REPLAYED: (150, 205, 165),
    Origin.CONSTRAINED: (215, 165, 60),
}
_WIDTH: Final = 768


def mask_pixels(trajectory: Trajectory) -> NDArray[np.uint8]:
    """
    Return (T, T, 3) uint8 colours: the colour of the row's origin where the token sees the column, else a pale grey.

    Raises:
        ConfigError: the record has no tokens, or more than `MAX_TOKENS`.
    """
    size = len(trajectory)
    if not 0 < size <= MAX_TOKENS:
        raise ConfigError(f"expected a record of 1 to {MAX_TOKENS} tokens, this one has {size}")
    origins = np.concatenate([np.zeros(trajectory.num_prompt_tokens, np.uint8), trajectory.origins])
    colors = np.array([_COLORS[origin] for origin in Origin], np.uint8)[origins]
    seen = visible_keys(trajectory.block_start, trajectory.path_start, np.arange(size))
    pixels: NDArray[np.uint8] = np.where(seen[..., None], colors[:, None], np.array(_HIDDEN, np.uint8))
    return pixels


def save_mask(trajectory: Trajectory, path: Path) -> None:
    """
    Write the picture; pictures of short records are enlarged.

    Raises:
        ConfigError: Pillow is missing or cannot write a file with this suffix, or the record is empty or too long.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError("turnwise mask needs Pillow: pip install 'turnwise-observability[images]'") from error
    image = Image.fromarray(mask_pixels(trajectory))
    scale = max(1, _WIDTH // image.width)
    try:
        image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST).save(path)
    except (ValueError, OSError) as error:
        raise ConfigError(f"cannot write {path}: {error}") from error
