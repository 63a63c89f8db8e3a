"""Model directories: which one an engine loads, and what its files say without loading the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from turnwise.errors import ConfigError
from turnwise.protocols import ModelSpec, Resources


def model_spec(own_path: Path | None, resources: Resources) -> ModelSpec:
    """
    Return the model to load: the engine's own if its config names one, else the run's.

    An engine's own model is never trusted to run remote code: the run's `trust_remote_code` and `revision` were given
    for another repository.
    """
    if own_path is not None and own_path != resources.model.path:
        return ModelSpec(path=own_path)
    return resources.model


def check_model_directory(spec: ModelSpec, engine: str) -> Path:
    """
    Return the model's directory.

    Args:
        spec: the model to load.
        engine: the engine's name, for the error text.

    Raises:
        ConfigError: no model is configured, the directory does not exist, or it has no `config.json`.
    """
    if spec.path is None:
        raise ConfigError(f"the {engine} engine has no model: set model.path, or engine.model")
    if not spec.path.is_dir():
        raise ConfigError(f"the model directory {str(spec.path)!r} does not exist")
    if not (spec.path / "config.json").is_file():
        raise ConfigError(f"{str(spec.path)!r} is not a model directory: it has no config.json")
    return spec.path


def read_whole_config(path: Path | None) -> dict[str, Any]:
    """
    Return `config.json` of a model; empty if the file is missing or broken.

    The start of an engine reports a broken file. Limits are also asked for before the start, and must not fail.
    """
    try:
        config = json.loads(((path or Path()) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def read_model_config(path: Path | None) -> dict[str, Any]:
    """Return the text model's part of `config.json`; empty if the file is missing or broken."""
    config = read_whole_config(path)
    text = config.get("text_config", config)
    return text if isinstance(text, dict) else {}


def model_limit(path: Path | None) -> int | None:
    """Return `max_position_embeddings` of the model, or None if its directory does not say."""
    limit = read_model_config(path).get("max_position_embeddings")
    return limit if isinstance(limit, int) and limit > 0 else None


def model_vocab_size(path: Path | None) -> int | None:
    """Return the number of ids of the model, or None if its directory does not say."""
    size = read_model_config(path).get("vocab_size")
    return size if isinstance(size, int) and size > 0 else None


def checkpoint_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """
    Return the shape of each weight in a directory, by name; empty if it has no safetensors files.

    Only the headers of the files are read.
    """
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="np") as opened:
            shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
    return shapes


def axes_take_turns(path: Path) -> bool:
    """
    Return whether an engine that asks the model's config reads positions as transformers does.

    transformers always lets the three axes of a Qwen3-VL take turns; vLLM and SGLang ask for an entry.
    """
    text = read_model_config(path)
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    return read_whole_config(path).get("model_type") != "qwen3_vl" or bool(rope.get("mrope_interleaved"))
