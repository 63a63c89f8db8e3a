"""The chat templates that the installed `trl` ships, over tokenizers without merges."""

import copy
import importlib.util
import re
from functools import cache
from pathlib import Path

from turnwise_chat_templates.template import ChatTemplate
from turnwise_testing.inputs.tokenizers import byte_tokenizer
from turnwise_testing.inputs.vocabularies import vocabulary_tokenizer


def package_folder(package: str, folder: str) -> Path:
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent / folder if spec and spec.origin else Path("missing")


TEMPLATES = package_folder("trl", "chat_templates")
VOCABULARIES = package_folder("mistral_common", "data")

# Qwen's tool tags and the like are left out on purpose: real tokenizers do not have them as special tokens either.
SPECIAL = re.compile(
    r'<\|"\|>|<\|[A-Za-z_]+\|?>|<[a-z_]+\|>|<\uff5c[^\uff5c]+\uff5c>|<(?:start|end)_of_[a-z]+>|\[gMASK\]|<sop>|\[/?INST\]|</s>'
)


def tokenizer_of(source: str):
    return byte_tokenizer(source, specials_of(source), bos_token="<bos>", eos_token="<eos>")


def specials_of(source: str) -> list[str]:
    return sorted(set(SPECIAL.findall(source)))


@cache
def source_of(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def special_tokens_of(name: str) -> str:
    """Return a text that spells all special tokens of a template."""
    return "A" + "B".join([*specials_of(source_of(name)), "<eos>"]) + "C"


@cache
def chat_of(name: str) -> ChatTemplate:
    return ChatTemplate(tokenizer_of(source_of(name)), name=name)


@cache
def shared_tokenizer(vocabulary: str, special_tokens: tuple[str, ...], eos_token: str = "<eos>"):
    """
    Return a tokenizer with the vocabulary of a model, for many templates: see `with_template`.

    A copy takes seconds, so its copies share one: a chat template copies its tokenizer when a message spells a special
    token.
    """
    tokenizer, twin = (
        vocabulary_tokenizer(vocabulary, "", special_tokens, bos_token="<bos>", eos_token=eos_token) for _ in range(2)
    )
    tokenizer.__deepcopy__ = lambda _memo: twin
    return tokenizer


def with_template(tokenizer, source: str):
    """Return a tokenizer with a template, over the same vocabulary."""
    other = copy.copy(tokenizer)
    other.chat_template = source
    return other


@cache
def all_specials() -> tuple[str, ...]:
    return tuple(sorted({token for path in TEMPLATES.glob("*.jinja") for token in specials_of(source_of(path.stem))}))


def chat_with(vocabulary: str, name: str) -> ChatTemplate:
    """
    Return a chat template over the vocabulary of a model.

    One tokenizer with the special tokens of all templates serves every template: a template writes only its own special
    tokens, so the others do not change its ids.
    """
    return ChatTemplate(with_template(shared_tokenizer(vocabulary, all_specials()), source_of(name)), name=name)
