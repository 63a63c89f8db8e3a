"""
TRL's GRPOTrainer on the tokens that turnwise sampled.

The subclass adds to a `rollout_func`:

- the PPO ratio uses the sampled log-probabilities (TRL would compute them again with the trainer's numerics);
- rows are matched by uid and not by prompt;
- the engines receive the trainer's weights before each rollout;
- the model receives layouts of parallel paths as positions and a 4-D mask;
- a vision-language model receives the pictures of the records, also from tools;
- advantages may differ between tokens.

It overrides private methods of TRL 1.16; `tests/test_trl_grpo.py` runs the real trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from turnwise.errors import ConfigError
from turnwise.types import PlacedPicture
from turnwise_engine_support.picture_families import check_grids, placeholders_at, supports_grids
from turnwise_engine_support.pictures import PictureReader
from turnwise_trl_bridge.picture_inputs import PaddedRow, picture_inputs
from turnwise_trl_bridge.policy import policy_weights
from turnwise_trl_bridge.rollouts import PICTURES, UID, Rollouts, build_dataset, turnwise_reward

_LAYOUT = ("position_ids", "block_start", "path_start")

TokenAdvantages = Callable[[dict[str, Any], Tensor], Tensor]
"""Maps TRL's training inputs and (B,) advantages to (B, C) advantages, where C is the completions' width."""


class TurnwiseGRPOTrainer(GRPOTrainer):  # type: ignore[misc]  # TRL's classes are Any to mypy
    """
    GRPO on turnwise rollouts.

    Args:
        model: as for TRL; the engines start with the model of the run's config and then receive this model's weights.
        rollouts: a running manager with the tasks.
        args: `trl.GRPOConfig`; its `temperature` must equal the run's.
        reward_funcs: rewards in addition to turnwise's, which is always the first.
        token_advantages: replaces the (B,) advantages by (B, C) advantages.
        train_dataset: None builds it from the rollouts' tasks.

    Raises:
        ConfigError: TRL would not train on the sampled distribution with these settings.
    """

    def __init__(
        self,
        model: Any,
        *,
        rollouts: Rollouts,
        args: Any,
        reward_funcs: Sequence[Any] = (),
        token_advantages: TokenAdvantages | None = None,
        train_dataset: Any = None,
        **options: Any,
    ) -> None:
        sampling = rollouts.manager.plan.sampling
        if args.temperature != sampling.temperature:
            raise ConfigError(
                f"temperature is {args.temperature:g} in the GRPOConfig but {sampling.temperature:g} in"
                " rollout.sampling: set both to the same value"
            )
        if args.use_vllm:
            raise ConfigError("use_vllm is true in the GRPOConfig: set it to false, because the run's engine samples")
        self.turnwise_rollouts = rollouts
        self.turnwise_uids: list[str] | None = None
        self._token_advantages = token_advantages
        self._pushed_step = -1
        self._layout: dict[str, Tensor] | None = None
        directory = rollouts.model
        check_grids(directory, "TurnwiseGRPOTrainer")
        self._reader = PictureReader(directory) if directory is not None and supports_grids(directory) else None
        self._pictures: Sequence[Sequence[PlacedPicture]] | None = None
        super().__init__(
            model=model,
            reward_funcs=[turnwise_reward, *reward_funcs],
            args=args,
            train_dataset=build_dataset(rollouts.tasks.values()) if train_dataset is None else train_dataset,
            rollout_func=rollouts,
            **options,
        )

    @property
    def takes_pictures(self) -> bool:
        """Whether the model reads pictures."""
        return self._reader is not None

    def push_weights(self) -> None:
        """Send the trained weights to the engines, once per step."""
        if self._pushed_step == self.state.global_step:
            return
        self._pushed_step = self.state.global_step
        weights = policy_weights(self)
        if self.accelerator.is_main_process:
            self.turnwise_rollouts.manager.update_weights(weights)
        # Gathering a sharded parameter needs every process, so the other processes must iterate over all weights too.
        for _ in weights:
            pass
        self.accelerator.wait_for_everyone()

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self.push_weights()
        self.turnwise_uids = [row[UID] for row in inputs] if UID in inputs[0] else None
        self._layout = self._pictures = None
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        output["old_per_token_logps"] = output["sampling_per_token_logps"]
        if self._layout is not None:
            output.update(self._layout)
        if self._pictures is not None:
            output[PICTURES] = list(self._pictures)
        if self._token_advantages is not None:
            output["advantages"] = self._check_advantages(self._token_advantages(output, output["advantages"]), output)
        return output

    def _generate(self, prompts: list[Any]) -> Any:
        generated = super()._generate(prompts)
        prompt_ids, completion_ids, extra = generated[0], generated[1], generated[5]
        layout = {name: extra.pop(name) for name in _LAYOUT if name in extra}
        if layout and any(any(starts) for starts in layout["path_start"]):
            self._layout = self._pad_layout(layout, prompt_ids, completion_ids)
        if self._reader is not None:
            # Rows of texts need them, too: the model would keep positions of the pictures before.
            self._pictures = extra.pop(PICTURES, [()] * len(prompt_ids))
            if self._layout is not None:
                raise ConfigError("a vision-language model has no positions for parallel paths: use an agent without")
        return generated

    def _pad_layout(
        self, layout: dict[str, Any], prompt_ids: list[Any], completion_ids: list[Any]
    ) -> dict[str, Tensor]:
        """Return (B, P + C) tensors padded like TRL's ids: prompts on the left, completions on the right."""
        if self.pad_to_multiple_of is not None:
            raise ConfigError("pad_to_multiple_of is set, but parallel paths do not support it: unset it")
        width = max(map(len, prompt_ids))
        shape = (len(prompt_ids), width + max(map(len, completion_ids)))
        padded = {name: torch.zeros(shape, dtype=torch.long) for name in _LAYOUT}
        for row, prompt in enumerate(prompt_ids):
            first = width - len(prompt)
            for name, columns in padded.items():
                values = torch.tensor(layout[name][row])
                # Starts of blocks and paths are column indices, so padding shifts them; 0 means outside of any block.
                shifted = values if name == "position_ids" else torch.where(values > 0, values + first, 0)
                columns[row, first : first + len(values)] = shifted
        return {name: columns.to(self.accelerator.device) for name, columns in padded.items()}

    def _check_advantages(self, advantages: Tensor, output: dict[str, Any]) -> Tensor:
        expected = output["completion_ids"].shape
        if advantages.shape != expected:
            raise ConfigError(f"token_advantages returned shape {list(advantages.shape)}, expected {list(expected)}")
        return advantages.to(output["completion_ids"].device)

    def _compute_loss(self, model: object, inputs: dict[str, Any]) -> Any:
        self._layout = {name: inputs[name] for name in _LAYOUT} if "path_start" in inputs else None
        self._pictures = inputs.get(PICTURES)
        return super()._compute_loss(model, inputs)

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **more: object,
    ) -> Any:
        if self._layout is None and self._pictures is None:
            return super()._get_per_token_logps_and_entropies(
                model,
                input_ids,
                attention_mask,
                logits_to_keep,
                batch_size=batch_size,
                compute_entropy=compute_entropy,
                compute_aux_loss=compute_aux_loss,
                **more,
            )
        logps, entropies, aux = [], [], []
        for first in range(0, len(input_ids), batch_size or len(input_ids)):
            rows = slice(first, first + (batch_size or len(input_ids)))
            labels = input_ids[rows].masked_fill(attention_mask[rows] == 0, -100)
            labels[:, :-logits_to_keep] = -100
            with self.accelerator.autocast(), self._row_inputs(model, rows, input_ids, attention_mask) as inputs:
                outputs = model(
                    input_ids=input_ids[rows],
                    labels=labels,
                    fused_lm_head=True,
                    **inputs,
                    **({"output_router_logits": True} if compute_aux_loss else {}),
                )
            logps.append(outputs.log_probs[:, -logits_to_keep:])
            if compute_entropy:
                entropies.append(outputs.entropy[:, -logits_to_keep:])
            if compute_aux_loss:
                aux.append(outputs.aux_loss)
        return (
            torch.cat(logps),
            torch.cat(entropies) if compute_entropy else None,
            torch.stack(aux).mean() if compute_aux_loss else None,
        )

    @contextmanager
    def _row_inputs(
        self, model: Any, rows: slice, input_ids: Tensor, attention_mask: Tensor
    ) -> Iterator[dict[str, Tensor]]:
        """Yield the mask and the positions of some rows, and the pixels of their pictures."""
        ids, mask = input_ids[rows], attention_mask[rows]
        if self._layout is not None:
            layout = {name: values[rows] for name, values in self._layout.items()}
            visible = build_path_mask(mask, layout, model.config._attn_implementation)
            yield {"attention_mask": visible, "position_ids": layout["position_ids"]}
            return
        assert self._pictures is not None
        assert self._reader is not None
        inner = self.accelerator.unwrap_model(model)
        # A truncated completion may be outside of the mask, and has its pictures all the same.
        starts = mask.argmax(dim=1).tolist()
        padded = [
            PaddedRow("a row for TRL", start, ids.shape[1], pictures)
            for start, pictures in zip(starts, self._pictures[rows], strict=True)
        ]
        inputs, placeholders = picture_inputs(inner, self._reader, ids, padded)
        with nullcontext() if placeholders is None else placeholders_at(inner, placeholders):
            yield {"attention_mask": mask, **inputs}


def build_path_mask(attention_mask: Tensor, layout: dict[str, Tensor], implementation: str) -> Tensor:
    """
    Return the (B, 1, T, T) attention mask of a layout: boolean for `sdpa`, additive for `eager`.

    Raises:
        ConfigError: the attention implementation does not support a 4-D mask.
    """
    index = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    query, key = index[None, :, None], index[None, None, :]
    block, path = layout["block_start"][:, :, None], layout["path_start"][:, :, None]
    real = attention_mask.bool()
    visible = (key <= query) & ((key < block) | (key >= path)) & real[:, None, :] & real[:, :, None]
    visible = (visible | (key == query))[:, None]  # padding attends to itself: a row of only -inf has a softmax of nan
    if implementation == "sdpa":
        return visible
    if implementation == "eager":
        return torch.zeros(visible.shape, device=visible.device).masked_fill(~visible, torch.finfo(torch.float32).min)
    raise ConfigError(f"parallel paths need attn_implementation sdpa or eager, got {implementation!r}")
