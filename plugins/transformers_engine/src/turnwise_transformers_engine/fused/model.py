"""
A forward pass of Llama-like models in few large operators, for many short sequences at once.

A step of a small model costs mostly the dispatch of operators. Here queries, keys and values come from one product, and
so do gate and up; residuals are added by the products, and one attention call serves all rows of a slab. The model's
own parameters become views of the fused ones, so an update in place reaches both. A step of a large model costs mostly
the products, so these keep packed copies of large weights.

Shapes depend only on the number of rows and the longest one, and nothing is read back to the host, so that a CUDA graph
can capture `decode`. That has not been tried.
"""

# ruff: noqa: TID253 - imported after the engine has loaded torch

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Final, cast

import numpy as np
import torch
from attrs import define, field, frozen
from torch import Tensor
from torch.nn.functional import embedding, scaled_dot_product_attention

from turnwise_transformers_engine.fused.operators import AttendRows, Operators, Rotary, TorchOperators
from turnwise_transformers_engine.fused.packed_product import Product
from turnwise_transformers_engine.fused.slab import Slab

ARCHITECTURES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Model types with this structure, as `model_type` of `config.json`. Only others that pass `refusal` may be added."""

_MOST_KEYS: Final = 1 << 14
"""Keys of several chunks in one attention call, which copies them."""

_FUSED = (("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj")))


@frozen(eq=False)
class Chunk:
    """
    Tokens of one sequence to prefill.

    Attributes:
        slab: with the sequence's keys and values.
        row: of the slab.
        past: number of tokens that are in the slab already.
        token_ids: the next tokens.
    """

    slab: Slab
    row: int
    past: int
    token_ids: Sequence[int]

    @property
    def place(self) -> tuple[int, int, int]:
        """Length of the slab, and the numbers of tokens before and in the chunk."""
        return self.slab.length, self.past, len(self.token_ids)


@frozen(eq=False)
class _EqualChunks:
    """
    Chunks of one slab and place, which attend in one call.

    Attributes:
        slab: with the keys and values.
        rows: of the slab: (R,), or a slice of one row, which needs no copy.
        shape: R and the number of tokens of each chunk.
        past: number of tokens before each chunk.
        mask: visible keys of each token, or None.
    """

    slab: Slab
    rows: Tensor | slice
    shape: tuple[int, int]
    past: int
    mask: Tensor | None


@define(eq=False)
class _Layer:
    """The weights of a layer."""

    norm: Tensor
    qkv: Product
    head_norm: Tensor | None
    out: Product
    mlp_norm: Tensor
    gate_up: Product
    down: Product

    @property
    def products(self) -> tuple[Product, ...]:
        """All products of the layer."""
        return self.qkv, self.out, self.gate_up, self.down


def refusal(model: Any) -> str:
    """Return the reason why a model of transformers cannot be fused, or an empty text."""
    config = model.config
    if config.model_type not in ARCHITECTURES:
        return f"the architecture {config.model_type!r} is not known"
    if model.dtype != torch.float32:
        return f"its weights are {str(model.dtype).removeprefix('torch.')}, not float32"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}, not silu"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        return f"its rotary positions are {rope['rope_type']}"
    if set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"} or (
        getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    ):
        return "it has layers with a sliding window"
    projections = [each for layer in model.model.layers for each in (layer.self_attn.o_proj, *layer.mlp.children())]
    if any(getattr(each, "bias", None) is not None for each in projections):
        return "its feed-forward or output projections have a bias"
    return ""


@define(eq=False)
class FusedModel:
    """
    The fused forward pass of a model.

    Attributes:
        model: of transformers, one for which `refusal` is empty. Its projections become views.
        max_context: most positions.
        pack_from: fewest weights of a matrix that is packed; None packs none.
        packed_dtype: of the packed weights.
        operators: besides matrix products.
    """

    model: Any
    max_context: int
    pack_from: int | None = None
    packed_dtype: torch.dtype = torch.float32
    operators: Operators = field(factory=TorchOperators)
    num_heads: int = field(init=False)
    num_groups: int = field(init=False)
    depth: int = field(init=False)
    _layers: list[_Layer] = field(factory=list, init=False)
    _head: Product = field(init=False)
    _rotary: Rotary = field(init=False)

    def __attrs_post_init__(self) -> None:
        config = self.model.config
        self.num_heads, self.num_groups = config.num_attention_heads, config.num_key_value_heads
        self.depth = getattr(config, "head_dim", None) or config.hidden_size // self.num_heads
        positions = torch.arange(self.max_context, device=self.model.device)[None]
        with torch.inference_mode():
            cos, sin = self.model.model.rotary_emb(torch.zeros(1, device=self.model.device), positions)
        if cos.shape[-1] != self.depth:
            raise ValueError(f"the rotary positions have {cos.shape[-1]} of {self.depth} dimensions")
        half = self.depth // 2
        self._rotary = Rotary(cos[0].contiguous(), torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1))
        self.bind()

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return int(self.model.config.num_hidden_layers)

    def bind(self) -> None:
        """Fuse the projections, and make the model's parameters views of them; also after `release`."""
        self._layers = [self._bind_layer(layer) for layer in self.model.model.layers]
        # Logits in bfloat16 would be the largest error: between 16 and 32 they would be an eighth apart.
        self._head = self._product(self.model.lm_head.weight.data, dtype=torch.float32)

    def release(self) -> None:
        """Drop all references to weights and packed copies, so that sleep can free them."""
        self._layers = []
        del self._head

    def refresh(self) -> None:
        """Compute again what derives from the weights, after they were changed in place."""
        for own, layer in zip(self._layers, self.model.model.layers, strict=True):
            own.head_norm = self._head_norm(layer.self_attn)
            for product in own.products:
                product.refresh()
        self._head.refresh()

    def _bind_layer(self, layer: Any) -> _Layer:
        weights = [_fuse([getattr(getattr(layer, part), name) for name in names]) for part, names in _FUSED]
        (qkv, bias), (gate_up, _) = weights
        return _Layer(
            norm=layer.input_layernorm.weight.data,
            qkv=self._product(qkv, bias),
            head_norm=self._head_norm(layer.self_attn),
            out=self._product(layer.self_attn.o_proj.weight.data),
            mlp_norm=layer.post_attention_layernorm.weight.data,
            gate_up=self._product(gate_up),
            down=self._product(layer.mlp.down_proj.weight.data),
        )

    def _product(self, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Product:
        packs = self.pack_from is not None and weight.numel() >= self.pack_from
        return Product(weight, bias, (dtype or self.packed_dtype) if packs else None)

    def _head_norm(self, attention: Any) -> Tensor | None:
        """Return the (H + G, D) weights of the norms of queries and keys; None if the model has none."""
        if not hasattr(attention, "q_norm"):
            return None
        query, key = attention.q_norm.weight.data, attention.k_norm.weight.data
        return torch.cat([query.expand(self.num_heads, -1), key.expand(self.num_groups, -1)])

    @torch.inference_mode()
    def decode(self, token_ids: Tensor, positions: Tensor, slabs: Sequence[tuple[Slab, int, int]]) -> Tensor:
        """
        Run one token of each row, and write its keys and values.

        Args:
            token_ids: (B,).
            positions: (B,), the number of tokens before each.
            slabs: for each slab its number of rows and the longest of them, this token included; the rows of the batch
                are the first rows of the first slab, then of the second, and so on.

        Returns:
            (B, V) logits.
        """
        parts, start = [], 0
        for slab, num_rows, length in slabs:
            own = slice(start, start + num_rows)
            parts.append((own, self.operators.make_attend(slab, positions[own], length, self.num_heads)))
            start += num_rows

        def attend(layer: int, qkv: Tensor) -> Tensor:
            done = [attend_part(layer, qkv[own]) for own, attend_part in parts]
            return done[0] if len(done) == 1 else torch.cat(done)

        return self._logits(self._hidden(token_ids, positions, attend))

    @torch.inference_mode()
    def prefill(self, chunks: Sequence[Chunk]) -> Tensor:
        """Run chunks of several sequences, write their keys and values, and return (C, V) logits of their last ids."""
        device = self.model.device
        # Chunks of one place attend in one call; the answers to a task often have one.
        order = sorted(range(len(chunks)), key=lambda index: chunks[index].place)
        chunks = [chunks[index] for index in order]
        parts = list(_equal_chunks(chunks, device))
        counts = [len(chunk.token_ids) for chunk in chunks]
        token_ids = torch.tensor([token for chunk in chunks for token in chunk.token_ids], device=device)
        positions = torch.cat(
            [torch.arange(part.past, part.past + part.shape[1], device=device).repeat(part.shape[0]) for part in parts]
        )
        sizes = [part.shape[0] * part.shape[1] for part in parts]

        def attend(layer: int, qkv: Tensor) -> Tensor:
            own = zip(parts, torch.split(qkv, sizes), strict=True)
            return torch.cat([self._attend_chunks(each, part, layer) for part, each in own])

        last = torch.tensor(counts, device=device).cumsum(0) - 1
        logits = self._logits(self._hidden(token_ids, positions, attend)[last])
        return logits if order == sorted(order) else logits[np.argsort(order)]

    def _hidden(self, token_ids: Tensor, positions: Tensor, attend: AttendRows) -> Tensor:
        """Return (N, hidden) states after the last layer."""
        operators, epsilon = self.operators, self.model.config.rms_norm_eps
        num_keyed, num_all = self.num_heads + self.num_groups, self.num_heads + 2 * self.num_groups
        rotate = operators.make_rotate(self._rotary, positions)
        states = embedding(token_ids, self.model.model.embed_tokens.weight)
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(operators.norm(states, layer.norm, epsilon))
            qkv = qkv.view(-1, num_all, self.depth)
            rotate(qkv[:, :num_keyed], layer.head_norm, epsilon)
            states = layer.out.added(attend(index, qkv), states)
            gate_up = layer.gate_up(operators.norm(states, layer.mlp_norm, epsilon))
            states = layer.down.added(operators.gate(gate_up), states)
        return states

    def _logits(self, states: Tensor) -> Tensor:
        norm = self.model.model.norm.weight
        return self._head(self.operators.norm(states, norm, self.model.config.rms_norm_eps))

    def _attend_chunks(self, qkv: Tensor, part: _EqualChunks, layer: int) -> Tensor:
        """Attend from (R * Q, H + 2 G, D) projections of some chunks; returns (R * Q, H * D)."""
        heads, data, end = self.num_heads, part.slab.data[layer], part.past + part.shape[1]
        qkv = qkv.view(*part.shape, -1, self.depth)
        new = qkv[:, :, heads:].reshape(*part.shape, 2, self.num_groups, self.depth).transpose(1, 2)
        data[part.rows, :, part.past : end] = new
        keys, values = (data[part.rows, :, :end] if part.past else new).transpose(2, 3).unbind(1)
        out = scaled_dot_product_attention(
            qkv[:, :, :heads].transpose(1, 2),
            keys,
            values,
            attn_mask=part.mask,
            is_causal=part.mask is None and part.shape[1] > 1,
            enable_gqa=True,
        )
        return out.transpose(1, 2).flatten(0, 1).flatten(1)


def _equal_chunks(chunks: Sequence[Chunk], device: Any) -> Iterator[_EqualChunks]:
    """Divide ordered chunks by their place, and so that the keys of several chunks stay few."""
    for (_, (_, past, count)), run in groupby(chunks, lambda chunk: (id(chunk.slab), chunk.place)):
        mask = _causal_mask(past, past + count, device)
        equal = list(run)
        size = max(1, _MOST_KEYS // (past + count))
        for own in (equal[start : start + size] for start in range(0, len(equal), size)):
            row = own[0].row
            rows = slice(row, row + 1) if len(own) == 1 else torch.tensor([each.row for each in own], device=device)
            yield _EqualChunks(own[0].slab, rows, (len(own), count), past, mask)


def _causal_mask(past: int, end: int, device: Any) -> Tensor | None:
    """Return the (Q, K) visibility of tokens after a past; None if causal order or one token needs no mask."""
    if not past or end - past == 1:
        return None
    return torch.ones(end - past, end, dtype=torch.bool, device=device).tril_(past)


def _fuse(modules: Sequence[object]) -> tuple[Tensor, Tensor | None]:
    """Return the fused weights and biases of linear modules, whose parameters become views of them."""
    fused: list[Tensor | None] = []
    for name in ("weight", "bias"):
        parameters = [getattr(module, name) for module in modules]
        if parameters[0] is None:
            fused.append(None)
            continue
        whole = torch.cat([parameter.data for parameter in parameters])
        for parameter, part in zip(parameters, torch.split(whole, [len(each) for each in parameters]), strict=True):
            parameter.data = part
        fused.append(whole)
    return cast(Tensor, fused[0]), fused[1]
