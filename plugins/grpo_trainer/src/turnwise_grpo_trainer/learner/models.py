"""
Loads policy, reference and critic from a model directory: any causal model of transformers, or a vision-language one.

Problems with the directory or the installed packages become one-line config errors here.
"""

# ruff: noqa: TID253 - only the trainer imports this module; no hook does

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import Tensor, nn

from turnwise.errors import ConfigError
from turnwise.models.loaded_weights import refuse_missing
from turnwise.protocols import ModelSpec
from turnwise_engine_support.picture_families import family_of, placeholders_at, supports_pictures
from turnwise_engine_support.progress_bars import hide_progress_bars
from turnwise_grpo_trainer.config import LoraConfig, PolicyConfig
from turnwise_grpo_trainer.learner.lora import add_adapters
from turnwise_grpo_trainer.learner.micro_batches import MicroBatch

SEGMENTS: Final = "turnwise_segments"
"""`attn_implementation` of `turnwise-segment-attention`, which needs no (L, L) mask for rows with parallel paths."""

_HEADS: Final = ("score.", "classifier.")
"""Starts of the names of a critic's head, which no causal model has."""

SEGMENTS_OR_SDPA: Final = "turnwise_segments_or_sdpa"
"""In place of `sdpa` where the same library is installed: forests need no mask, and all else is as with `sdpa`."""


def load_policy(
    config: PolicyConfig, spec: ModelSpec, lora: LoraConfig | None = None, *, key: str = "model.path"
) -> Any:
    """
    Load the causal model on the host, in training mode, and add adapters; `key` names its path in errors.

    Raises:
        ConfigError: the folder is no such model or lacks weights, or the adapters do not fit it.
    """
    model = _load(_kind(spec), config, spec, key)
    if config.freeze_vision:
        freeze_vision(model)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    base = spec.name if spec.commit else str(spec.path or "")
    # With dropout, the trainer's probabilities would differ from the engine's.
    _disable_dropout(model)
    if lora is None:
        return model
    excluded = rf"model\.({'|'.join(family_of(model).vision_modules)})\..*" if config.freeze_vision else None
    return add_adapters(model, lora, base, spec.commit, excluded).train()


def load_reference(config: PolicyConfig, spec: ModelSpec, key: str = "model.path") -> Any:
    """Load a model, frozen and in evaluation mode; `key` names its path in errors."""
    model = _load(_kind(spec), config, spec, key).eval()
    return model.requires_grad_(requires_grad=False)


def load_critic(config: PolicyConfig, spec: ModelSpec) -> Any:
    """Load the model with a scalar head per token; the head is zero-initialised, so all values are 0 at first."""
    if supports_pictures(spec.path):
        raise ConfigError("train.algorithm.adv_estimator: gae has no critic for a vision-language model")
    model = _load("AutoModelForTokenClassification", config, spec, new=_HEADS, num_labels=1)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    head = model.score if hasattr(model, "score") else model.classifier
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    return _disable_dropout(model)


def _disable_dropout(model: Any) -> Any:
    """Switch off what the training mode draws: dropout, and the noise of a router's input."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for name in ("attention_dropout", "attn_pdrop"):
        if hasattr(model.config, name):
            setattr(model.config, name, 0.0)
    for module in model.modules():
        for name in ("attention_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
        # Of Mixtral and its kin. PhiMoE's values are left: its router compares scores with them in evaluation mode too.
        if isinstance(getattr(module, "jitter_noise", None), float):
            module.jitter_noise = 0.0
    return model.train()


def _kind(spec: ModelSpec) -> str:
    return "AutoModelForImageTextToText" if supports_pictures(spec.path) else "AutoModelForCausalLM"


def freeze_vision(model: Any) -> None:
    """Freeze the vision tower of a model and what projects its features; `ConfigError` if it has none."""
    try:
        family = family_of(model)
    except ConfigError as error:
        raise ConfigError(f"train.policy.freeze_vision: {error}") from error
    for name in family.vision_modules:
        getattr(model.model, name).requires_grad_(requires_grad=False)


def _load(
    kind: str,
    config: PolicyConfig,
    spec: ModelSpec,
    key: str = "model.path",
    *,
    new: tuple[str, ...] = (),
    **options: object,
) -> Any:
    """Load a model; a folder may lack the weights whose names start with one of `new`."""
    if spec.path is None:
        raise ConfigError(f"{key}: missing; the trainer needs a model directory")
    if not (spec.path / "config.json").is_file():
        raise ConfigError(f"{key}: {str(spec.path)!r} is not a model directory: it has no config.json")
    with _config_errors(f"{key}: cannot load {str(spec.path)!r} for training"):
        import transformers

        hide_progress_bars()
        attention = _resolve_attention(config, pictures=supports_pictures(spec.path))
        model, info = getattr(transformers, kind).from_pretrained(
            spec.path,
            dtype=getattr(torch, config.dtype),
            attn_implementation=attention,
            trust_remote_code=spec.trust_remote_code,
            local_files_only=True,
            output_loading_info=True,
            **options,
        )
    refuse_missing(f"{key}: {str(spec.path)!r}", (each for each in info["missing_keys"] if not each.startswith(new)))
    return model


def _resolve_attention(config: PolicyConfig, *, pictures: bool) -> str:
    """Return the name that transformers knows the attention by; registers the project's own with transformers."""
    if pictures and config.attn_implementation == SEGMENTS:
        # The vision tower would get it too, whose patches see each other in both directions.
        raise ConfigError(f"train.policy.attn_implementation: {SEGMENTS} has no attention of a vision tower")
    if pictures:
        return config.attn_implementation
    if config.attn_implementation == "sdpa" and config.share_prefixes and find_spec("turnwise_segment_attention"):
        import turnwise_segment_attention

        turnwise_segment_attention.register()
        return SEGMENTS_OR_SDPA
    if config.attn_implementation != SEGMENTS:
        return config.attn_implementation
    if config.packed:
        raise ConfigError(f"train.policy.packed: must be false with train.policy.attn_implementation={SEGMENTS}")
    try:
        import turnwise_segment_attention
    except ImportError as error:
        raise ConfigError(
            f"train.policy.attn_implementation: {SEGMENTS} needs turnwise-segment-attention[transformers]"
        ) from error
    turnwise_segment_attention.register()
    return str(turnwise_segment_attention.NAME)


@contextmanager
def _config_errors(prefix: str) -> Iterator[None]:
    """Turn any exception into a `ConfigError` of one line."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), "")
        raise ConfigError(f"{prefix}: {type(error).__name__}: {first}") from error


def run_model(model: Any, micro: MicroBatch, **options: Any) -> Any:
    """Return the output of a forward pass; `options` are further arguments of the model, errors as below."""
    inputs = forward_inputs(model, micro)
    if micro.is_picture is None:
        return model(**inputs, **options)
    with placeholders_at(model, micro.is_picture):
        return model(**inputs, **options)


def forward_inputs(model: Any, micro: MicroBatch) -> dict[str, Any]:
    """Return the keyword arguments of a forward pass; `ConfigError` if the attention does not support the mask."""
    inputs = {"input_ids": micro.input_ids, "position_ids": micro.position_ids, "use_cache": False}
    if micro.axes is not None:
        # The first axis is that of the text, by which transformers tells the rows of a packed sequence apart.
        inputs["position_ids"] = torch.cat([micro.position_ids[None], micro.axes])
    inputs |= micro.pictures
    kind = model.config._attn_implementation  # noqa: SLF001 - transformers has no public name for it
    if kind == SEGMENTS:
        from turnwise_segment_attention import plan

        return {**inputs, "layout": plan(micro.block_start, micro.path_start, micro.real, micro.subtree_end)}
    if kind == SEGMENTS_OR_SDPA and micro.subtree_end is not None:
        from turnwise_segment_attention import plan

        layout = plan(micro.block_start, micro.path_start, micro.real, micro.subtree_end)
        # transformers passes a mask of four dimensions on; without one, it would build one of all pairs.
        unused = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=micro.input_ids.device)
        return {**inputs, "layout": layout, "attention_mask": unused}
    mask = micro.attention_mask()
    return {**inputs, "attention_mask": None if mask is None else _dense_mask(model, kind, mask)}


def _dense_mask(model: Any, kind: str, visible: Tensor) -> Tensor:
    if "flash" in kind or kind == "flex_attention":
        raise ConfigError(
            f"train.policy.attn_implementation: {kind} does not support parallel paths; use {SEGMENTS} or sdpa"
        )
    if kind != "eager":
        return visible
    # Eager attention adds the mask to its scores: a bool mask would silently add 0 and 1.
    bias = torch.zeros_like(visible, dtype=model.dtype)
    return bias.masked_fill_(~visible, torch.finfo(bias.dtype).min)
