"""Options of the scorer and of the losses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from attrs import field, frozen, validators


@frozen(kw_only=True)
class TeacherConfig:
    """
    Options of the scorer `teacher`: frozen causal models of transformers.

    Attributes:
        path: folder of the teacher; null with `teachers`.
        teachers: folder of each of several teachers, by the value that a task has in `column`.
        column: of a task, which chooses its teacher: `data_source`, `agent_name`, or any other column.
        top_k: most probable ids that the columns `teacher_topk_ids` and `teacher_topk_logprobs` get; 0 fills neither.
        dtype: data type of the weights.
        device: any torch device; `auto` is a GPU if there is one, else the CPU.
        offload: keep the weights in host memory while the teacher does not score, if it computes on another device.
        max_tokens_per_pass: most tokens in one forward pass, pads included; a longer row is a pass by itself.
        logits_mib: MiB of the float32 logits in memory at once; 0 computes all of a pass, for models that change the
            logits after their output head.
    """

    path: Path | None = None
    teachers: Mapping[str, Path] = field(factory=dict)
    column: str = "data_source"
    top_k: int = field(default=0, validator=validators.ge(0))
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "auto"
    offload: bool = True
    max_tokens_per_pass: int = field(default=8192, validator=validators.ge(1))
    logits_mib: float = field(default=256, validator=validators.ge(0))

    def __attrs_post_init__(self) -> None:
        if (self.path is None) == (not self.teachers):
            raise ValueError("'path' must be set for one teacher, or 'teachers' for several, and not both")


@frozen(kw_only=True)
class MixtureConfig:
    """
    Weights of the parts of a distillation loss.

    Attributes:
        weight: of the divergence from the teacher.
        reward_weight: of PPO's clipped loss on the reward's advantages; 0 learns from the teacher alone.
        clip_ratio_low: in that loss, the ratio is clipped below 1 minus this.
        clip_ratio_high: in that loss, the ratio is clipped above 1 plus this.
    """

    weight: float = field(default=1.0, validator=validators.gt(0))
    reward_weight: float = field(default=0.0, validator=validators.ge(0))
    clip_ratio_low: float = field(default=0.2, validator=[validators.gt(0), validators.le(1)])
    clip_ratio_high: float = field(default=0.2, validator=validators.gt(0))


@frozen(kw_only=True)
class ReverseKlConfig(MixtureConfig):
    """Options of the loss `reverse_kl`."""


@frozen(kw_only=True)
class TopkKlConfig(MixtureConfig):
    """
    Options of the loss `topk_kl`.

    Attributes:
        direction: `reverse` is the KL from the policy to the teacher, which seeks a mode of the teacher; `forward` that
            from the teacher to the policy, which covers all that the teacher may say.
    """

    direction: Literal["reverse", "forward"] = "reverse"
