"""Reads the weights of the model that a TRL trainer trains."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from turnwise.errors import ConfigError

_WRAPPERS: Final = re.compile(r"(^|\.)(_fsdp_wrapped_module|_checkpoint_wrapped_module|module|_orig_mod)\.")


def policy_weights(trainer: Any) -> Iterator[tuple[str, Any]]:
    """
    Yield (name, full tensor) of every parameter on the CPU, under the names of the Hugging Face state dict.

    Every process must exhaust the iterator: gathering a sharded parameter (FSDP2) needs all processes. An adapter
    (PEFT) is merged during the iteration and unmerged at its end.

    Raises:
        ConfigError: the model is sharded by DeepSpeed ZeRO-3 or FSDP1.
    """
    if getattr(trainer, "is_deepspeed_enabled", False) or _is_fsdp1(trainer):
        raise ConfigError("turnwise cannot read a model that DeepSpeed or FSDP1 shards: use FSDP2 or one process")
    model = trainer.accelerator.unwrap_model(trainer.model)
    adapted = hasattr(model, "merge_adapter")
    if adapted:
        model.merge_adapter()
    try:
        for name, parameter in model.named_parameters():
            if (checkpoint_name := _checkpoint_name(name, adapted=adapted)) is not None:
                full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
                yield checkpoint_name, full.detach().cpu()
    finally:
        if adapted:
            model.unmerge_adapter()


def _is_fsdp1(trainer: Any) -> bool:
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    return plugin is not None and getattr(plugin, "fsdp_version", 1) == 1


def _checkpoint_name(name: str, *, adapted: bool) -> str | None:
    """Return a parameter's name in the checkpoint; None for a parameter of an adapter."""
    while (shorter := _WRAPPERS.sub(r"\1", name)) != name:
        name = shorter
    if not adapted:
        return name
    if "lora_" in name or "original_module" in name:
        return None
    name = name.removeprefix("base_model.model.").replace(".base_layer", "")
    return re.sub(r"\.modules_to_save\.[^.]+", "", name)
