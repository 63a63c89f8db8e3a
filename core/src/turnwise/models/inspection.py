"""Says where a model is without the network and without a conversion, for plans and diagnoses."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from attrs import frozen

from turnwise.errors import ConfigError
from turnwise.files import expanded
from turnwise.models.finding import refuse
from turnwise.models.gguf import cache_folder
from turnwise.models.hub import cache_of, is_cached
from turnwise.models.location import GGUF_END, ModelSource


@frozen
class ModelState:
    """
    Where a model is.

    Attributes:
        here: this machine has all that a run needs of it.
        text: the same for people.
    """

    here: bool
    text: str


@frozen
class HubState:
    """
    The access to the hub of Hugging Face.

    Attributes:
        endpoint: its address.
        cache: folder of the cache.
        free: bytes that are left there.
        offline: HF_HUB_OFFLINE is set.
        token: there is a token.
    """

    endpoint: str
    cache: Path
    free: int
    offline: bool
    token: bool


def inspect_model(source: ModelSource, *, weights: bool = True) -> ModelState:
    """
    Return where a model is; nothing is downloaded or converted.

    Args:
        source: the model.
        weights: the run needs the weights of a model on the hub too.

    Raises:
        ConfigError: the path is no folder, no GGUF file and no id on the hub.
    """
    if source.is_on_hub:
        asked = source.commit or source.revision or "main"
        if is_cached(source, weights=weights):
            return ModelState(True, f"{source.path} at {asked}, in the cache {cache_of(source)}")
        return ModelState(False, f"{source.path} at {asked}, which the run downloads to {cache_of(source)}")
    file = source.file
    if file.is_dir():
        return ModelState(True, str(file))
    if file.is_file() and file.suffix == GGUF_END:
        folder = cache_folder(file)
        converted = "converted in" if folder.is_dir() else "which the run converts to"
        return ModelState(folder.is_dir(), f"{file}, {converted} {folder}")
    raise refuse(source)


def inspect_hub() -> HubState:
    """Return the access to the hub; `ConfigError` without its library."""
    try:
        import huggingface_hub
        from huggingface_hub import constants
    except ImportError as error:
        raise ConfigError("models of the hub need `pip install 'turnwise[tokenizers]'`") from error
    cache = expanded(constants.HF_HUB_CACHE)
    existing = next(each for each in (cache, *cache.absolute().parents) if each.exists())
    return HubState(
        endpoint=constants.ENDPOINT,
        cache=cache,
        free=shutil.disk_usage(existing).free if os.access(existing, os.W_OK) else 0,
        offline=bool(constants.HF_HUB_OFFLINE),
        token=huggingface_hub.get_token() is not None,
    )
