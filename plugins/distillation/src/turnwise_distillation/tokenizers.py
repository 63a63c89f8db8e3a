"""Compares the tokenizers of policy and teacher: an id must be the same token for both."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from attrs import evolve

from turnwise.errors import ConfigError
from turnwise.protocols import ModelSpec
from turnwise_chat_templates.loading import load_tokenizer


def check_tokenizers(policy: ModelSpec, teacher: Path, key: str) -> None:
    """
    Check that each id is the same token for two models.

    The policy's tokenizer makes all ids, so the merges and the templates of the teacher's have no effect.

    Args:
        policy: on this machine.
        teacher: folder of the teacher.
        key: names its path in errors.

    Raises:
        ConfigError: a tokenizer cannot be loaded, or they differ; the text has the first token that does.
    """
    ours = tokens_of(policy)
    try:
        theirs = tokens_of(evolve(policy, path=teacher, name=teacher.name, commit=None, revision=None))
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.path", key, 1)) from error
    number = first_difference(ours, theirs)
    if number is not None:
        one, other = (repr(each[number]) if number in each else "no token" for each in (ours, theirs))
        raise ConfigError(
            f"{key}: the tokenizer of {str(teacher)!r} differs from the policy's: id {number} is {one} for the policy"
            f" and {other} for the teacher"
        )


def tokens_of(model: ModelSpec) -> dict[int, str]:
    """Return the tokens of a model by id; errors as in `load_tokenizer`."""
    return {number: token for token, number in load_tokenizer(model).get_vocab().items()}


def first_difference(ours: Mapping[int, str], theirs: Mapping[int, str]) -> int | None:
    """Return the lowest id that is not the same token in both; None if all are."""
    return min((number for number in {*ours, *theirs} if ours.get(number) != theirs.get(number)), default=None)
