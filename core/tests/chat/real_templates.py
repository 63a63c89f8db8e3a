"""The chat templates that the installed `trl` ships, over tokenizers without merges."""

import importlib.util
import re
from functools import cache
from pathlib import Path

from turnwise.chat.template import ChatTemplate
from turnwise_testing.tokenizers import byte_tokenizer
from turnwise_testing.vocabularies import vocabulary_tokenizer


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
    return byte_tokenizer(source, sorted(set(SPECIAL.findall(source))), bos_token="<bos>", eos_token="<eos>")


@cache
def chat_of(name: str) -> ChatTemplate:
    return ChatTemplate(tokenizer_of((TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")), name=name)


def chat_with(vocabulary: str, name: str) -> ChatTemplate:
    """Return a chat template over the vocabulary of a model."""
    source = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    specials = sorted(set(SPECIAL.findall(source)))
    tokenizer = vocabulary_tokenizer(vocabulary, source, specials, bos_token="<bos>", eos_token="<eos>")
    return ChatTemplate(tokenizer, name=name)
