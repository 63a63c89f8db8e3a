"""
LoRA (arXiv:2106.09685) through peft: W = W0 + (alpha / r) B A with a frozen W0; only A and B are trained.

peft replaces modules inside the model, which stays a model of transformers: attention, output head and sharding find it
as before. The engine gets A and B alone if it can apply them, else whole merged weights.
"""

# ruff: noqa: TID253 - only the trainer imports this module; no hook does

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import define
from torch import Tensor

from turnwise.errors import ConfigError
from turnwise.files import share_weights
from turnwise_grpo_trainer.config import LoraConfig

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

_ADAPTER: Final = "default"
_ALL_LINEAR: Final = "all-linear"
_PEFT_PREFIX: Final = "base_model.model."
"""Prefix of weights in an adapter file of peft."""


def add_adapters(
    model: object, config: LoraConfig, base: str, commit: str | None = None, excluded: str | None = None
) -> Any:
    """
    Freeze a model and add adapters, which change nothing at first because B is 0.

    Args:
        model: a causal model of transformers; changed in place.
        config: the options.
        base: directory of the model or its id on the hub, as exported adapters name it; empty if unknown.
        commit: of a model on the hub.
        excluded: a regular expression for names of modules that get none.

    Raises:
        ConfigError: peft is missing, or the model does not have these modules.
    """
    try:
        import peft
    except ModuleNotFoundError as error:
        raise ConfigError(f"train.lora needs {error.name}: pip install 'turnwise-grpo-trainer[lora]'") from error
    names = config.target_modules
    options = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=_ALL_LINEAR if names == (_ALL_LINEAR,) else list(names),
        exclude_modules=excluded,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base or None,
        revision=commit,
    )
    tied = _count_names(model)
    # All processes that shard a model must start with the same A, whatever they have drawn before.
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.manual_seed(0)
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings", UserWarning)  # refused below
        try:
            model = peft.inject_adapter_in_model(options, model, _ADAPTER)
        except ValueError as error:
            raise ConfigError(f"train.lora.target_modules: {next(iter(str(error).splitlines()), '')}") from error
    for name, layer in find_adapters(model).items():
        if type(layer.get_base_layer()) is not torch.nn.Linear:
            kind = type(layer.get_base_layer()).__name__
            text = "only linear modules can be adapted; name them, such as [q_proj, v_proj]"
            raise ConfigError(f"train.lora.target_modules: {name} is a {kind}; {text}")
        if tied[layer.get_base_layer().weight] > 1:
            raise ConfigError(f"train.lora.target_modules: {name} shares its weight with another module")
    return model


def _count_names(model: Any) -> dict[Tensor, int]:
    counts: dict[Tensor, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        counts[parameter] = counts.get(parameter, 0) + 1
    return counts


def find_adapters(model: Any) -> dict[str, LoraLayer]:
    """Return the adapted modules by name; empty for a model without adapters."""
    if getattr(model, "peft_config", None) is None:
        return {}
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def adapter_scale(model: Any) -> float | None:
    """Return alpha / r, the same for all adapters; None for a model without adapters."""
    return next((float(layer.scaling[_ADAPTER]) for layer in find_adapters(model).values()), None)


def adapter_weights(model: object, gather: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """
    Yield A (r, in) and B (out, r) of each adapted module, as `Engine.update_weights` takes them: B includes the scale.

    Args:
        model: with adapters.
        gather: returns the whole tensor of a sharded one; collective.
    """
    for name, layer in find_adapters(model).items():
        yield f"{name}.lora_A.weight", gather(layer.lora_A[_ADAPTER].weight).detach()
        out = gather(layer.lora_B[_ADAPTER].weight).detach()
        scaled = out.float() * layer.scaling[_ADAPTER]
        # A scale that is a power of two loses nothing in the data type of the weights.
        narrow = scaled.to(out.dtype)
        yield f"{name}.lora_B.weight", narrow if torch.equal(narrow.float(), scaled) else scaled


def merged_weights(model: object, gather: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """
    Yield the state dict that the model would have without adapters: W0 + (alpha / r) B A for adapted modules.

    Args:
        model: with adapters or without.
        gather: as in `adapter_weights`.
    """
    for name, tensor, layer in base_weights(model):
        whole = gather(tensor).detach()
        if layer is not None:
            into, out = (gather(each[_ADAPTER].weight).detach() for each in (layer.lora_A, layer.lora_B))
            delta = out.float() @ into.float() * layer.scaling[_ADAPTER]
            whole = (whole.float() + delta).to(whole.dtype)
        yield name, whole


def base_weights(model: Any) -> Iterator[tuple[str, Tensor, LoraLayer | None]]:
    """Yield name and tensor of each weight as without adapters, maybe sharded, and the layer that adapts the weight."""
    layers = find_adapters(model)
    for name, tensor in model.state_dict().items():
        module, separator, rest = name.rpartition(".base_layer.")
        if name.partition(".lora_")[0] in layers:
            continue
        layer = layers[module] if separator and rest == "weight" else None
        yield f"{module}.{rest}" if separator else name, tensor, layer


def write_adapters(model: Any, folder: Path) -> None:
    """Write the adapters of an unsharded model as a folder of peft: `adapter_config.json` and safetensors."""
    from safetensors.torch import save_file

    weights = {
        f"{_PEFT_PREFIX}{name}.{part}.weight": getattr(layer, part)[_ADAPTER].weight.detach().contiguous()
        for name, layer in find_adapters(model).items()
        for part in ("lora_A", "lora_B")
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    model.peft_config[_ADAPTER].save_pretrained(folder)
    share_weights(folder)


@define(eq=False)
class BaseModel:
    """
    The initial model as a reference: the policy's own weights without its adapters, so it takes no memory.

    Attributes:
        policy: a model with adapters.
    """

    policy: Any

    def __call__(self, **inputs: object) -> Any:
        """Run the forward pass of the frozen weights."""
        with self.adapters_off() as model:
            return model(**inputs)

    @contextmanager
    def adapters_off(self) -> Iterator[Any]:
        """Yield the policy without adapters, for a caller that computes with one of its modules, such as its head."""
        layers = find_adapters(self.policy).values()
        for layer in layers:
            layer.enable_adapters(enabled=False)
        try:
            yield self.policy
        finally:
            for layer in layers:
                layer.enable_adapters(enabled=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)


@contextmanager
def without_dropout(model: object) -> Iterator[None]:
    """Switch the dropout of adapters off."""
    drops = [layer.lora_dropout for layer in find_adapters(model).values()]
    for drop in drops:
        drop.eval()
    try:
        yield
    finally:
        for drop in drops:
            drop.train()
