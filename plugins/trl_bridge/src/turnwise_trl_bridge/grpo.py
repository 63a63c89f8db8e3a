"""
TRL's GRPOTrainer, trained on the tokens that turnwise sampled.

What the subclass adds to a `rollout_func`: the old policy of the PPO ratio is the one that sampled (TRL would compute
its log-probabilities again with the trainer's numerics), rows go by uid and not by prompt, the trainer's weights reach
the engines before each rollout, layouts of parallel paths are seen by the model as positions and a 4-D mask, and
advantages may differ from token to token.

It overrides private methods of TRL 1.16; `tests/test_trl_grpo.py` runs the real trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from turnwise.errors import ConfigError
from turnwise_trl_bridge.policy import policy_weights
from turnwise_trl_bridge.rollouts import UID, Rollouts, dataset_of, turnwise_reward

_LAYOUT = ("position_ids", "block_start", "path_start")

TokenAdvantages = Callable[[dict[str, Any], Tensor], Tensor]
"""From what TRL is about to train on and its (B,) advantages to (B, C) ones, C being the completion's width."""


class TurnwiseGRPOTrainer(GRPOTrainer):  # type: ignore[misc]  # TRL's classes are Any to mypy
    """
    GRPO on turnwise rollouts.

    Args:
        model: as for TRL; the engines begin with the model of the run's config and get this one's weights.
        rollouts: a running manager with the tasks.
        args: `trl.GRPOConfig`; `temperature` must be that of the run's sampling.
        reward_funcs: more rewards than turnwise's own, which is always the first.
        token_advantages: replaces the (B,) advantages by (B, C) ones.
        train_dataset: made from the rollouts' tasks when None.

    Raises:
        ConfigError: a setting under which TRL would not train what was sampled.
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
                f"temperature is {args.temperature:g} in the GRPOConfig and {sampling.temperature:g} in"
                " rollout.sampling: log-probabilities are divided by one and were sampled at the other"
            )
        if args.use_vllm:
            raise ConfigError("use_vllm must be false: the run's own engine samples")
        self.turnwise_rollouts = rollouts
        self.turnwise_uids: list[str] | None = None
        self._token_advantages = token_advantages
        self._pushed_step = -1
        self._layout: dict[str, Tensor] | None = None
        super().__init__(
            model=model,
            reward_funcs=[turnwise_reward, *reward_funcs],
            args=args,
            train_dataset=dataset_of(rollouts.tasks.values()) if train_dataset is None else train_dataset,
            rollout_func=rollouts,
            **options,
        )

    def push_weights(self) -> None:
        """Bring the trained weights to the engines, unless they have those of this step."""
        if self._pushed_step == self.state.global_step:
            return
        self._pushed_step = self.state.global_step
        weights = policy_weights(self)
        if self.accelerator.is_main_process:
            self.turnwise_rollouts.manager.update_weights(weights)
        for _ in weights:  # what the main process did not take, and all of it in the others: gathering needs everyone
            pass
        self.accelerator.wait_for_everyone()

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self.push_weights()
        self.turnwise_uids = [row[UID] for row in inputs] if UID in inputs[0] else None
        self._layout = None
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        output["old_per_token_logps"] = output["sampling_per_token_logps"]
        if self._layout is not None:
            output.update(self._layout)
        if self._token_advantages is not None:
            output["advantages"] = self._checked(self._token_advantages(output, output["advantages"]), output)
        return output

    def _generate(self, prompts: list[Any]) -> Any:
        generated = super()._generate(prompts)
        prompt_ids, completion_ids, extra = generated[0], generated[1], generated[5]
        layout = {name: extra.pop(name) for name in _LAYOUT if name in extra}
        if layout and any(any(starts) for starts in layout["path_start"]):
            self._layout = self._padded(layout, prompt_ids, completion_ids)
        return generated

    def _padded(self, layout: dict[str, Any], prompt_ids: list[Any], completion_ids: list[Any]) -> dict[str, Tensor]:
        """Return (B, P + C) tensors, laid out as TRL lays out ids: prompts end, completions begin, at column P."""
        if self.pad_to_multiple_of is not None:
            raise ConfigError("pad_to_multiple_of cannot be used with parallel paths: their layout counts columns")
        width = max(map(len, prompt_ids))
        shape = (len(prompt_ids), width + max(map(len, completion_ids)))
        padded = {name: torch.zeros(shape, dtype=torch.long) for name in _LAYOUT}
        for row, prompt in enumerate(prompt_ids):
            first = width - len(prompt)
            for name, columns in padded.items():
                values = torch.tensor(layout[name][row])
                # Where a path or block starts is a column; 0 says that a token is in none.
                shifted = values if name == "position_ids" else torch.where(values > 0, values + first, 0)
                columns[row, first : first + len(values)] = shifted
        return {name: columns.to(self.accelerator.device) for name, columns in padded.items()}

    def _checked(self, advantages: Tensor, output: dict[str, Any]) -> Tensor:
        wanted = output["completion_ids"].shape
        if advantages.shape != wanted:
            raise ConfigError(f"token_advantages returned shape {list(advantages.shape)}, expected {list(wanted)}")
        return advantages.to(output["completion_ids"].device)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        self._layout = {name: inputs[name] for name in _LAYOUT} if "path_start" in inputs else None
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
        **more: Any,
    ) -> Any:
        if self._layout is None:
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
            layout = {name: values[rows] for name, values in self._layout.items()}
            with self.accelerator.autocast():
                outputs = model(
                    input_ids=input_ids[rows],
                    attention_mask=path_mask(attention_mask[rows], layout, model.config._attn_implementation),
                    position_ids=layout["position_ids"],
                    labels=labels,
                    fused_lm_head=True,
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


def path_mask(attention_mask: Tensor, layout: dict[str, Tensor], implementation: str) -> Tensor:
    """
    Return what each token sees as (B, 1, T, T): boolean for `sdpa`, added to the scores for `eager`.

    Raises:
        ConfigError: another attention implementation, which would take such a mask for something else or not at all.
    """
    index = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    query, key = index[None, :, None], index[None, None, :]
    block, path = layout["block_start"][:, :, None], layout["path_start"][:, :, None]
    real = attention_mask.bool()
    visible = (key <= query) & ((key < block) | (key >= path)) & real[:, None, :] & real[:, :, None]
    visible = (visible | (key == query))[:, None]  # a pad sees itself: a row of nothing but -inf has no softmax
    if implementation == "sdpa":
        return visible
    if implementation == "eager":
        return torch.zeros(visible.shape, device=visible.device).masked_fill(~visible, torch.finfo(torch.float32).min)
    raise ConfigError(f"parallel paths need attn_implementation sdpa or eager, got {implementation!r}")
