"""
An index of the episodes of a run: the numbers and short texts of each, without messages and tokens.

It reads a few columns of the file, about 150 bytes an episode, so 100,000 episodes take some 15 MB. Filters, sorting
and groups need nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from attrs import field, frozen
from numpy.typing import NDArray

from turnwise.errors import DataError
from turnwise.types import Status
from turnwise_result_files.row_checks import check_table
from turnwise_viewer.row_groups import RowGroups

COLUMNS: Final = (
    *("uid", "rollout_n", "global_step", "validation", "trajectory_index", "sample_index", "agent_name"),
    *("data_source", "status", "fault_owner", "reward", "num_turns", "num_tool_calls", "num_tool_errors"),
    *("total_s", "llm_s", "tool_s", "reward_s", "num_tokens"),
)
SORTS: Final = (
    *("row", "uid", "global_step", "sample_index", "status", "reward", "num_turns", "num_tool_calls"),
    *("num_tool_errors", "action_tokens", "response_tokens", "total_s", "llm_s", "tool_s"),
)
_ORIGINS: Final = ("prompt", "action", "observation", "forced", "replayed", "constrained")


@frozen(kw_only=True)
class Filter:
    """
    Conditions on episodes, which all must hold.

    Attributes:
        status: one of these, when there are any.
        min_reward, max_reward: bounds of the reward, both included.
        tools: `used`, `unused` or `errors`; empty for all.
        step: the step of the training.
        validation: held-out episodes only, or training episodes only.
        uid: start of the task's uid.
    """

    status: tuple[str, ...] = field(default=())
    min_reward: float | None = None
    max_reward: float | None = None
    tools: str = ""
    step: int | None = None
    validation: bool | None = None
    uid: str = ""

    def __attrs_post_init__(self) -> None:
        if unknown := set(self.status) - set(Status):
            raise DataError(f"status: {min(unknown)!r} is none of {', '.join(Status)}")
        if self.tools not in ("", "used", "unused", "errors"):
            raise DataError(f"tools: {self.tools!r} is none of used, unused, errors")


class EpisodeIndex:
    """The episodes of the rows so far. `update` adds those of new groups of rows."""

    def __init__(self) -> None:
        self._num_groups = 0
        self._rows = pa.schema([]).empty_table()
        self.table = pa.schema([]).empty_table()
        """A row per episode: `COLUMNS`, and `row`, `num_records`, `key`, `action_tokens` and `response_tokens`."""
        self.row_of_group: NDArray[np.int64] = np.zeros(1, np.int64)
        """(groups + 1,) the first row of each group, and the number of rows."""

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def update(self, groups: RowGroups) -> bool:
        """Read the groups that the index does not have yet; return whether there were any."""
        groups.refresh()
        new = range(self._num_groups, len(groups.sizes))
        # The last group of a file of JSON lines grows.
        grown = int(self.row_of_group[-1]) != sum(groups.sizes[: self._num_groups])
        if not new and not grown and self.table.num_columns:
            return False
        if grown:
            self._rows, new = pa.schema([]).empty_table(), range(len(groups.sizes))
        read = groups.read(new, (*COLUMNS, "training_step") if groups.is_training else COLUMNS)
        check_table(read)
        self._rows = pa.concat_tables([self._rows, read]) if self._rows.num_columns else read
        self._num_groups = len(groups.sizes)
        self.row_of_group = np.concatenate([[0], np.cumsum(groups.sizes, dtype=np.int64)])
        self.table = _episodes(self._rows.combine_chunks())
        return True

    def find(self, key: str) -> int:
        """Return the number of the episode with a key, the newest one if the file has several; `DataError` if none."""
        found = self.numbers(key)
        if not found:
            raise DataError(f"the run has no episode {key!r}")
        return found[-1]

    def numbers(self, key: str) -> list[int]:
        """Return the numbers of the episodes with a key, in the order of the file."""
        if not len(self):
            return []
        found: list[int] = np.flatnonzero(pc.equal(self.table["key"], key).to_numpy()).tolist()
        return found

    def select(self, wanted: Filter) -> NDArray[np.int64]:
        """Return the numbers of the episodes that a filter keeps, in the order of the file."""
        keep = np.ones(len(self), bool)
        if wanted.status:
            keep &= _mask(pc.is_in(self.table["status"], pa.array(wanted.status)))
        if wanted.min_reward is not None:
            keep &= self.column("reward") >= wanted.min_reward
        if wanted.max_reward is not None:
            keep &= self.column("reward") <= wanted.max_reward
        if wanted.tools:
            name = "num_tool_errors" if wanted.tools == "errors" else "num_tool_calls"
            keep &= (self.column(name) > 0) != (wanted.tools == "unused")
        if wanted.step is not None:
            keep &= self.column("global_step") == wanted.step
        if wanted.validation is not None:
            keep &= _mask(self.table["validation"]) == wanted.validation
        if wanted.uid:
            keep &= _mask(pc.starts_with(self.table["uid"], wanted.uid))
        return np.flatnonzero(keep)

    def sort(self, numbers: NDArray[np.int64], by: str, *, descending: bool) -> NDArray[np.int64]:
        """Return episodes sorted by a column of `SORTS`; those without a value come last."""
        if by not in SORTS:
            raise DataError(f"sort: {by!r} is none of {', '.join(SORTS)}")
        chosen = self.table.select([by]).take(numbers)
        order = "descending" if descending else "ascending"
        places = pc.sort_indices(chosen, sort_keys=[(by, order)])
        sorted_numbers: NDArray[np.int64] = numbers[places.to_numpy()]
        return sorted_numbers

    def column(self, name: str) -> NDArray[Any]:
        """Return a column of numbers; nan for no value."""
        values: NDArray[Any] = self.table[name].to_numpy()
        return values

    def rows(self, numbers: NDArray[np.int64]) -> list[dict[str, Any]]:
        """Return episodes as the API has them."""
        hidden = {"num_tokens", "row", "trajectory_index"}
        names = [name for name in self.table.column_names if name not in hidden]
        return list(self.table.select(names).take(numbers).to_pylist())


def _mask(values: Any) -> NDArray[np.bool_]:
    mask: NDArray[np.bool_] = (
        values.to_numpy(zero_copy_only=False) if isinstance(values, pa.Array) else (values.to_numpy())
    )
    return mask.astype(bool)


def _episodes(rows: pa.Table) -> pa.Table:
    """Return a row per episode; its reward is the sum over its records."""
    if "training_step" in rows.column_names:
        # A reader looks for the step that learned from an episode, which can be later than the one that asked for it.
        step = rows.column_names.index("global_step")
        rows = rows.set_column(step, "global_step", rows["training_step"]).drop_columns(["training_step"])
    index = pc.fill_null(rows["trajectory_index"], 0).to_numpy()
    first = np.flatnonzero(index == 0)
    # A record follows the one before it, so a row that starts no episode has the next number.
    if lost := np.flatnonzero((index != 0) & (index != np.append(-1, index[:-1]) + 1)).tolist():
        raise ValueError(f"row {lost[0]}: record {index[lost[0]]} does not follow the one before it")
    counts = np.diff(first, append=len(index))
    episodes = rows.take(first)
    rewards = rows["reward"].to_numpy()
    if len(first) and (counts > 1).any():
        with np.errstate(over="ignore", invalid="ignore"):  # of rewards that no float can hold the sum of
            summed = np.add.reduceat(np.where(np.isnan(rewards), 0.0, rewards), first)
        scored = np.add.reduceat(~np.isnan(rewards), first) > 0
        values = pa.array(summed, mask=~scored)
        episodes = episodes.set_column(episodes.column_names.index("reward"), "reward", values)
    tokens = {name: _count(episodes["num_tokens"], name) for name in _ORIGINS}
    response = sum((tokens[name] for name in _ORIGINS[1:]), np.zeros(len(first), np.int64))
    added = {
        "row": first.astype(np.int64),
        "num_records": np.where(episodes["trajectory_index"].is_null().to_numpy(), 0, counts),
        "key": _keys(episodes),
        "prompt_tokens": tokens["prompt"],
        "action_tokens": tokens["action"],
        "response_tokens": response,
    }
    for name, values in added.items():
        episodes = episodes.append_column(name, values if isinstance(values, pa.ChunkedArray) else pa.array(values))
    return episodes.combine_chunks()


def _count(texts: pa.ChunkedArray, origin: str) -> NDArray[np.int64]:
    """Return the number of tokens of an origin from `num_tokens`, which is JSON text."""
    found = pc.extract_regex(texts, rf'"{origin}": (?P<count>\d+)')
    counts = pc.fill_null(pc.cast(pc.struct_field(found, "count"), pa.int64()), 0)
    values: NDArray[np.int64] = counts.to_numpy()
    return values


def _keys(episodes: pa.Table) -> pa.ChunkedArray:
    """Return the name of each episode in the run: `UID/N`, with `@STEP` in a training and `@STEP-held-out`."""
    text = [pc.cast(episodes[name], pa.string()) for name in ("rollout_n", "global_step")]
    step = pc.binary_join_element_wise("@", text[1], "")
    step = pc.if_else(pc.equal(episodes["global_step"], 0), "", step)
    held_out = pc.if_else(episodes["validation"], "-held-out", "")
    return pc.binary_join_element_wise(pc.binary_join_element_wise(episodes["uid"], text[0], "/"), step, held_out, "")


def group_numbers(index: EpisodeIndex, numbers: Sequence[int] | NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return the episodes of each task and step, in the order in which the groups appear."""
    chosen = index.table.select(["uid", "global_step", "validation"]).take(pa.array(numbers, pa.int64()))
    names = pc.binary_join_element_wise(
        pc.cast(chosen["global_step"], pa.string()), pc.cast(chosen["validation"], pa.string()), chosen["uid"], "\n"
    )
    codes = names.combine_chunks().dictionary_encode().indices.to_numpy()
    order = np.argsort(codes, kind="stable")
    return np.split(np.asarray(numbers)[order], np.flatnonzero(np.diff(codes[order])) + 1) if len(codes) else []
