"""
The truth by a plain forward pass: a causal model of transformers in float32, for engine checks that compare.

Needs torch and transformers, which are imported when a reference is made.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from attrs import define, field

from turnwise.protocols.weights import dtype_of
from turnwise.types import FloatArray

_KEPT_VARIANTS: Final = 2
"""Models besides the first: a version and the one before it are asked for in turns."""


def save_random_model(config: object, directory: Path) -> Path:
    """
    Write a causal model with random weights, so large that no distribution is even, and return the directory.

    Args:
        config: of transformers; the weights are the same for the same one.
        directory: to write to.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]  # transformers leaves it so
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20.0)
        for name, weight in model.named_parameters():
            if "proj" in name:
                weight.mul_(8.0)
    model.save_pretrained(directory)
    return directory


def mixture_config(vocab_size: int, **changes: Any) -> Any:
    """Return the config of a Qwen3 with three layers of 8 experts, of which a token runs two."""
    from transformers import Qwen3MoeConfig

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    }
    return Qwen3MoeConfig(**{"vocab_size": vocab_size, **sizes, **changes})


def randomize_matrices(model: Any, std: float, others: Mapping[str, float] = MappingProxyType({})) -> Any:
    """
    Draw all weights but the norms anew, and return the model.

    Args:
        model: of torch; its generator draws.
        std: standard deviation of the weights.
        others: the same of weights whose names contain a text.
    """
    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.normal_(0, next((other for part, other in others.items() if part in name), std))
    return model


def random_qwen3(vocab_size: int, seed: int = 0) -> Any:
    """Return a tied Qwen3 of two layers with random weights, for trainings, which attends to more than one token."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    model: Any = Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call]  # transformers leaves it so
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)  # otherwise attention is nearly uniform
    return model


@define(eq=False)
class TransformersReference:
    """
    A `turnwise_testing.probes.engine.Reference` of a model directory.

    Every other variant has the same weights with noise on every matrix, from a different seed.

    Attributes:
        path: of the model.
        noise: standard deviation of the noise, in standard deviations of each matrix.
        dtype: of the weights that it returns; scores are always computed in float32.
    """

    path: Path
    noise: float = 0.5
    dtype: str = "float32"
    _models: dict[int, Any] = field(factory=dict, init=False)

    def weights(self, *, variant: int) -> Iterable[tuple[str, Any]]:
        """Return the whole state dict as numpy arrays."""
        dtype = dtype_of(self.dtype)
        state = self.model(variant=variant).state_dict()
        return [(name, tensor.detach().numpy().astype(dtype)) for name, tensor in state.items()]

    def scores(
        self, token_ids: Sequence[int], num_context: int, *, temperature: float, variant: int
    ) -> tuple[FloatArray, FloatArray]:
        """Return the (n,) log-probabilities of the ids after the context, and of the best ids in their places."""
        import torch

        ids = torch.tensor([list(token_ids)])
        with torch.no_grad():
            logits = self.model(variant=variant)(ids).logits[0, num_context - 1 : -1]
            logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
        chosen = logprobs.gather(1, ids[0, num_context:, None])[:, 0]
        return chosen.numpy().astype(np.float32), logprobs.max(dim=-1).values.numpy().astype(np.float32)

    def model(self, *, variant: int) -> Any:
        """Return a variant's model; the first is kept for good, and of the others the last that were asked for."""
        if variant not in self._models:
            others = [each for each in self._models if each]
            for old in others[: 1 - _KEPT_VARIANTS]:
                del self._models[old]
            self._models[variant] = self._load(variant)
        return self._models[variant]

    def _load(self, variant: int) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        if variant == 0:
            model: Any = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)
            return model.eval()
        model = copy.deepcopy(self.model(variant=0))
        generator = torch.Generator().manual_seed(variant)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() > 1:
                    noise = torch.randn(weight.shape, generator=generator)
                    weight.add_(noise * weight.std() * self.noise)
        return model
