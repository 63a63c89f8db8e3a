"""The columns of files of episodes: their names, types and versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa
from attrs import fields as attributes_of

from turnwise.record.limit import ReachedLimit
from turnwise.types import Fault

_SEGMENT: Final = pa.struct(
    [("origin", pa.string()), *((name, pa.int32()) for name in ("start", "stop", "block", "path"))]
)
_LINEAGE: Final = pa.struct(
    [
        *((name, pa.int64()) for name in ("parent", "num_shared_tokens")),
        *((name, pa.string()) for name in ("kind", "label")),
        ("trained", pa.bool_()),
    ]
)
_OUTSIDE_CALL: Final = pa.struct(
    [
        *((name, pa.string()) for name in ("model", "path", "request", "response")),
        *((name, pa.int64()) for name in ("status", "num_turns")),
    ]
)
_REPORT: Final = pa.struct(
    [
        *((name, pa.string()) for name in ("title", "text", "facts")),
        ("failed", pa.bool_()),
        ("num_turns", pa.int64()),
    ]
)
_OPEN_COLUMN: Final = pa.struct([(name, pa.string()) for name in ("name", "declaration", "values")])
_IDS: Final = pa.list_(pa.int32())
ARRAYS: Final[Mapping[str, pa.DataType]] = {
    "prompt_ids": _IDS,
    "response_ids": _IDS,
    "response_mask": pa.list_(pa.uint8()),
    "logprobs": pa.list_(pa.float32()),
    "weight_versions": _IDS,
    "position_ids": _IDS,
    "block_start": _IDS,
    "path_start": _IDS,
}
COUNTS: Final = ("num_turns", "num_tool_calls", "num_tool_errors", "num_cached_tokens")
SECONDS: Final = ("total_s", "llm_s", "tool_s", "reward_s")
FAULT: Final = tuple(attribute.name for attribute in attributes_of(Fault))
LIMIT: Final = tuple(attribute.name for attribute in attributes_of(ReachedLimit))
JSON: Final = ("messages", "ground_truth", "task_messages", "task_extra", "score_extra", "num_tokens", "metrics_extra")
VERSION: Final = 6
"""Version of the columns, in the metadata of Parquet files under `turnwise_schema`; it rises with each change."""

ADDED: Final[Mapping[str, int]] = {
    "replicas": 2,
    **{f"limit_{name}": 3 for name in LIMIT},
    "outside_calls": 4,
    "open_columns": 5,
    "reports": 6,
}
"""Columns that files of earlier versions lack, with the version that added them; rows of such files have null."""

ATTEMPT: Final = ("key", "worker")
SCHEMA: Final = pa.schema(
    [
        *((name, pa.string()) for name in ("uid", "agent_name", "data_source", "status", "task_agent_name", *ATTEMPT)),
        *((name, pa.int64()) for name in ("sample_index", "rollout_n", "global_step", "trajectory_index")),
        ("replicas", _IDS),
        ("validation", pa.bool_()),
        ("objective", pa.string()),
        *((f"fault_{name}", pa.string()) for name in FAULT),
        *((f"limit_{name}", pa.int64() if name == "value" else pa.string()) for name in LIMIT),
        *ARRAYS.items(),
        ("segments", pa.list_(_SEGMENT)),
        ("lineage", _LINEAGE),
        ("outside_calls", pa.list_(_OUTSIDE_CALL)),
        ("reports", pa.list_(_REPORT)),
        ("open_columns", pa.list_(_OPEN_COLUMN)),
        *((name, pa.string()) for name in ("prompt_text", "response_text", "score_level", "score_at")),
        ("reward", pa.float64()),
        ("score_values", pa.list_(pa.float64())),
        *((name, pa.int64()) for name in COUNTS),
        *((name, pa.float64()) for name in (*SECONDS, "mask_ratio", "tool_reward")),
        *((name, pa.string()) for name in JSON),
    ],
    metadata={"turnwise_schema": str(VERSION)},
)
"""
Columns of `trajectories.parquet`. Every row repeats the columns of its episode; `reward` belongs to the row.

`lineage` is null for an episode without a described or branched record. `trajectory_index` is null for an episode
without a trajectory, whose other columns are kept. These columns hold JSON text: messages, ground_truth, task_messages,
task_extra, score_extra, num_tokens, metrics_extra. `key` names the attempt in logs, events, spans and the trace file.

`outside_calls` are the `turnwise.record.outside_call.OutsideCall` of the episode.

`reports` are the `turnwise.Report` of the episode; their `facts` are JSON text.

`open_columns` are the columns of plugins, null without any. `declaration` is the JSON text of a
`turnwise.record.column_specs.ColumnSpec`; `values` is base64 of (T, *shape) values of a column of all tokens, otherwise
(R, *shape), in the declared type, little-endian. A reader needs no plugin.

`limit_name`, `limit_value` and `limit_reason` are the `turnwise.record.limit.ReachedLimit` that ended a truncated
episode; null without one.
"""

TRAINING: Final[Mapping[str, pa.DataType]] = {"training_step": pa.int64(), "advantages": pa.list_(pa.float32())}
TRAINING_SCHEMA: Final = pa.schema([*SCHEMA, *TRAINING.items()], metadata=SCHEMA.metadata)
"""
Columns of the episodes of a training step: the ones in `SCHEMA`, and two more.

`training_step` is the step that trained on the episode; `global_step` is the one that asked for it. `advantages` has
one value for each response token, 0 outside the loss; it is null for a trajectory that was not trained.
"""

Row = dict[str, Any]
"""A row by column; `SCHEMA` gives the types."""
