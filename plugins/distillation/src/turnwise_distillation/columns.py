"""The open columns that a teacher fills, of the tokens that the policy sampled in a record; others have the fill."""

from __future__ import annotations

from typing import Final

from turnwise import ColumnSpec

LOGPROBS: Final = ColumnSpec(
    name="teacher_logprobs", dtype="float32", fill=float("nan"), tokens="sampled", on_branch="fill"
)
"""Log-probability of the sampled token by the teacher, at the sampling temperature."""


def topk_columns(top_k: int) -> tuple[ColumnSpec, ColumnSpec]:
    """Return the columns of the teacher's most probable ids, in falling order, and of their log-probabilities."""
    return (
        ColumnSpec(name="teacher_topk_ids", dtype="int32", shape=(top_k,), fill=-1, tokens="sampled", on_branch="fill"),
        ColumnSpec(
            name="teacher_topk_logprobs",
            dtype="float32",
            shape=(top_k,),
            fill=float("nan"),
            tokens="sampled",
            on_branch="fill",
        ),
    )
