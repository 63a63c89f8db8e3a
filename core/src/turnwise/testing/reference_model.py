"""
The truth by a plain forward pass: a causal model of transformers in float32, for engine checks that compare.

Needs torch and transformers, which are imported when a reference is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import define, field

from turnwise.types import FloatArray
from turnwise.weights import dtype_of


@define(eq=False)
class TransformersReference:
    """
    A `turnwise.testing.engine_probe.Reference` of a model directory.

    The other weights are the same ones with noise on every matrix, from a fixed seed.

    Attributes:
        path: of the model.
        noise: standard deviation of the noise, in standard deviations of each matrix.
        dtype: of the weights that are handed out; scores are always those of float32.
    """

    path: Path
    noise: float = 0.5
    dtype: str = "float32"
    _models: dict[bool, Any] = field(factory=dict, init=False)

    def weights(self, *, changed: bool) -> Iterable[tuple[str, Any]]:
        """Return the whole state dict as numpy arrays."""
        dtype = dtype_of(self.dtype)
        state = self._model(changed).state_dict()
        return [(name, tensor.detach().numpy().astype(dtype)) for name, tensor in state.items()]

    def scores(
        self, token_ids: Sequence[int], num_context: int, *, temperature: float, changed: bool
    ) -> tuple[FloatArray, FloatArray]:
        """Return the (n,) log-probabilities of the ids after the context, and of the best ids in their places."""
        import torch

        ids = torch.tensor([list(token_ids)])
        with torch.no_grad():
            logits = self._model(changed)(ids).logits[0, num_context - 1 : -1]
            logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
        chosen = logprobs.gather(1, ids[0, num_context:, None])[:, 0]
        return chosen.numpy().astype(np.float32), logprobs.max(dim=-1).values.numpy().astype(np.float32)

    def _model(self, changed: bool) -> Any:
        if changed not in self._models:
            self._models[changed] = self._load(changed)
        return self._models[changed]

    def _load(self, changed: bool) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)
        model.eval()
        if changed:
            generator = torch.Generator().manual_seed(0)
            with torch.no_grad():
                for weight in model.parameters():
                    if weight.dim() > 1:
                        noise = torch.randn(weight.shape, generator=generator)
                        weight.add_(noise * weight.std() * self.noise)
        return model
