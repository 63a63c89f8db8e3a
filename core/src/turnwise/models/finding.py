"""Finds the local folder of a model, whatever form its path has."""

from __future__ import annotations

from turnwise.errors import ConfigError
from turnwise.models.gguf import convert
from turnwise.models.hub import fetch
from turnwise.models.location import GGUF_END, FoundModel, ModelSource


def find_model(source: ModelSource, *, weights: bool = True) -> FoundModel:
    """
    Return the folder of a model. A model of the hub is downloaded and a GGUF file converted, each once.

    Args:
        source: the model.
        weights: the weights are needed too; without them only small files of the hub are downloaded.

    Raises:
        ConfigError: there is no such model, or it cannot be downloaded or converted; one line.
    """
    if source.is_on_hub:
        return fetch(source, weights=weights)
    file = source.file
    if file.is_dir():
        return FoundModel(file, file.name)
    if file.is_file() and file.suffix == GGUF_END:
        return FoundModel(convert(file, source.key), file.stem)
    raise refuse(source)


def refuse(source: ModelSource) -> ConfigError:
    """Return the error for a path that is no folder, no GGUF file and no id on the hub."""
    key, file = source.key, source.file
    if file.is_file():
        return ConfigError(f"{key}: {str(file)!r} is a file; expected a folder, or a file that ends in .gguf")
    if source.path.endswith(GGUF_END):
        return ConfigError(f"{key}: there is no file {str(file)!r}")
    return ConfigError(
        f"{key}: there is no directory {str(file)!r}, and {source.path!r} is no id of a model on the hub, such as"
        " 'Qwen/Qwen3-0.6B'"
    )
