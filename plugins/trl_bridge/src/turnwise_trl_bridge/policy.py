"""The weights of the model that a TRL trainer trains, on their way to the engines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from turnwise.errors import ConfigError

_WRAPPERS: Final = re.compile(r"(^|\.)(_fsdp_wrapped_module|_checkpoint_wrapped_module|module|_orig_mod)\.")


def policy_weights(trainer: Any) -> Iterator[tuple[str, Any]]:
    """
    Yield (name, tensor) of every parameter, by the names of the Hugging Face state dict, one whole tensor at a time.

    Every process must go through it: a sharded parameter (FSDP2) is gathered from all. An adapter (PEFT) is merged
    while it goes on, and taken out again at its end.

    Raises:
        ConfigError: the model is sharded by DeepSpeed ZeRO-3 or FSDP1.
    """
    if getattr(trainer, "is_deepspeed_enabled", False) or _is_fsdp1(trainer):
        raise ConfigError("turnwise cannot read weights that DeepSpeed or FSDP1 sharded: use FSDP2 or one process")
    model = trainer.accelerator.unwrap_model(trainer.model)
    adapted = hasattr(model, "merge_adapter")
    if adapted:
        model.merge_adapter()
    try:
        for name, parameter in model.named_parameters():
            if (plain := _plain_name(name, adapted=adapted)) is not None:
                whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
                yield plain, whole.detach().cpu()
    finally:
        if adapted:
            model.unmerge_adapter()


def _is_fsdp1(trainer: Any) -> bool:
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    return plugin is not None and getattr(plugin, "fsdp_version", 1) == 1


def _plain_name(name: str, *, adapted: bool) -> str | None:
    """Return a parameter's name in the checkpoint; None for what an adapter added."""
    while (shorter := _WRAPPERS.sub(r"\1", name)) != name:
        name = shorter
    if not adapted:
        return name
    if "lora_" in name or "original_module" in name:
        return None
    name = name.removeprefix("base_model.model.").replace(".base_layer", "")
    return re.sub(r"\.modules_to_save\.[^.]+", "", name)
