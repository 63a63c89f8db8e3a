"""Refuses a loaded model whose folder or file lacks weights: transformers fills them at random and only prints so."""

from __future__ import annotations

from collections.abc import Iterable

from turnwise.errors import ConfigError


def refuse_missing(source: str, missing: Iterable[str]) -> None:
    """
    Raise `ConfigError` if any weight of a model is missing.

    Args:
        source: names the folder or file, and starts the error's text.
        missing: the `missing_keys` that `from_pretrained(..., output_loading_info=True)` returns; tied weights are not
            among them.
    """
    if names := sorted(missing):
        raise ConfigError(f"{source} lacks {len(names)} weights of its model, such as {names[0]!r}")
