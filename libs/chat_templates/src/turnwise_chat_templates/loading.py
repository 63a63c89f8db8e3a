"""Loads the tokenizer and the chat template of a model's directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from turnwise.errors import ConfigError
from turnwise.options import SpecialTokenPolicy
from turnwise.protocols import ModelSpec
from turnwise_chat_templates.config import MAX_PICTURE_PIXELS
from turnwise_chat_templates.pictures import Placeholders, takes_pictures
from turnwise_chat_templates.render import MAX_TEMPLATE_BYTES
from turnwise_chat_templates.template import ChatTemplate

_KNOWN_CLASSES = dict.fromkeys(("PreTrainedTokenizerFast", "TokenizersBackend"), "TokenizersBackend")
_KNOWN_CLASSES |= dict.fromkeys(("Qwen2Tokenizer", "Qwen2TokenizerFast"), "Qwen2Tokenizer")
_TOKENIZER_FILES = (
    *("tokenizer*", "vocab*", "merges.txt", "tekken*.json", "*.tiktoken", "*.model", "*.spm", "*.bpe", "spiece*"),
    "tokenization_*.py",
)
"""Names of files that tokenizers of transformers are made of; a directory has some of them."""


def load_chat(
    spec: ModelSpec,
    special_tokens: SpecialTokenPolicy = "text",
    check_every: int = 64,
    max_picture_pixels: int = MAX_PICTURE_PIXELS,
) -> ChatTemplate:
    """
    Load the tokenizer and chat template of a model directory; `RunConfig.model_spec` finds the one of any model.

    Args:
        spec: the model.
        special_tokens: treatment of special tokens that messages spell.
        check_every: one conversation in so many is compared with its rendering as a whole; 0 compares none.
        max_picture_pixels: most pixels of a picture.

    Raises:
        ConfigError: a file is missing or cannot be read, or `trust_remote_code` comes without `revision`.
        TemplateError: the template cannot be used (see `ChatTemplate`).
    """
    tokenizer = load_tokenizer(spec)
    assert spec.path is not None
    name = f"the chat template of {str(spec.path)!r}"
    if spec.chat_template is not None:
        tokenizer.chat_template = _read_template(spec.chat_template)
        name = f"the chat template {str(spec.chat_template)!r}"
    if not tokenizer.chat_template:
        raise ConfigError(f"{str(spec.path)!r} has no chat template; name a file of one in model.chat_template")
    stops = generation_stops(spec.path)
    return ChatTemplate(
        tokenizer,
        spec.template_options,
        stop_token_ids=stops,
        name=name,
        special_tokens=special_tokens,
        check_every=check_every,
        placeholders=Placeholders(spec.path, tokenizer, max_picture_pixels) if takes_pictures(spec.path) else None,
    )


def load_tokenizer(spec: ModelSpec) -> Any:
    """
    Load the tokenizer of a model's directory, as transformers has it.

    Raises:
        ConfigError: as `load_chat`.
    """
    if spec.path is None:
        raise ConfigError("model.path: a chat template needs the directory of a model")
    if not spec.path.is_dir():
        raise ConfigError(f"model.path: there is no directory {str(spec.path)!r}")
    if spec.trust_remote_code and not spec.revision:
        raise ConfigError("model.trust_remote_code: running a model's code needs its commit in model.revision")
    _check_tokenizer_files(spec.path)
    return _load_tokenizer(spec.path, spec)


def _check_tokenizer_files(path: Path) -> None:
    """Raise `ConfigError` for a directory without a tokenizer; `transformers` takes seconds to find an empty one."""
    if not any(file.match(pattern) for file in path.iterdir() for pattern in _TOKENIZER_FILES):
        text = "has no tokenizer files, such as tokenizer.json; copy them from the repository of the model"
        raise ConfigError(f"model.path: {str(path)!r} {text}")


def _load_tokenizer(path: Path, spec: ModelSpec) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError("model.path: tokenizers need `pip install 'turnwise[tokenizers]'`") from error
    options = {"revision": spec.revision} if spec.revision else {}
    try:
        chosen = getattr(transformers, _known_class(path) or "AutoTokenizer")
        return chosen.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=spec.trust_remote_code, **options
        )
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"model.path: no tokenizer can be loaded from {str(path)!r}: {reason}") from error


def _known_class(path: Path) -> str | None:
    """Return the class that `AutoTokenizer` would choose; it imports torch, which takes seconds in each worker."""
    files = (path / "config.json", path / "tokenizer_config.json")
    model, tokenizer = (json.loads(each.read_bytes()) if each.is_file() else {} for each in files)
    if "auto_map" not in model | tokenizer and model.get("model_type") in (None, "llama", "qwen3", "qwen3_moe"):
        return _KNOWN_CLASSES.get(tokenizer.get("tokenizer_class"))
    return None


def _read_template(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_TEMPLATE_BYTES:
            raise ConfigError(f"model.chat_template: {str(path)!r} is larger than {MAX_TEMPLATE_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"model.chat_template: cannot read {str(path)!r}: {error}") from error


def generation_stops(path: Path) -> tuple[int, ...]:
    """Return `eos_token_id` of the model's generation config: none, one or several."""
    file = path / "generation_config.json"
    if not file.is_file():
        return ()
    try:
        found = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        return () if found is None else tuple(int(token_id) for token_id in np.atleast_1d(found))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"model.path: cannot read 'eos_token_id' in {str(file)!r}: {error}") from error
