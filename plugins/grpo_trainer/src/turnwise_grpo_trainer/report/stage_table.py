"""The duration of each stage of a step on shared devices, as a table for the terminal and for the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Final

from rich.table import Table

_TITLE: Final = "stages of a step, medians"
_HEADINGS: Final = ("", "seconds", "MiB on the device")
_SWITCH: Final = {
    "sleep": "put engine to sleep",
    "onload": "load trainer",
    "offload_optimizer": "offload optimizer",
    "wake_up_weights": "wake up engine's weights",
    "sync_weights": "update weights",
    "offload_parameters": "offload parameters",
    "wake_up_kv_cache": "wake up engine's KV cache",
}
"""The stages of the memory switch, in order; the update of the policy is after the second."""
_MIB: Final = 1 << 20

Row = tuple[str, str, str]


def stage_rows(metrics: Sequence[Mapping[str, Any]]) -> list[Row]:
    """
    Return rows of stage, median seconds, and median MiB added to the device (negative: freed).

    Args:
        metrics: lines of `metrics.jsonl`.

    Returns:
        The stages in order, and their total; empty if no step switched memory.
    """
    steps = [line for line in metrics if line.get("switch/sleep_s") is not None]
    if not steps:
        return []

    def median_of(name: str) -> float:
        return median(line.get(name) or 0.0 for line in steps)

    def switch_row(stage: str, text: str) -> Row:
        moved = median_of(f"switch/{stage}_bytes") / _MIB
        sent = f" ({median_of('sync/bytes') / _MIB:.1f} sent)" if stage == "sync_weights" else ""
        return text, f"{median_of(f'switch/{stage}_s'):.3f}", f"{moved:+.1f}{sent}"

    rows = [switch_row(stage, text) for stage, text in _SWITCH.items()]
    whole = median(sum(line.get(f"switch/{stage}_s") or 0.0 for stage in _SWITCH) for line in steps)
    return [
        ("roll out", f"{median_of('seconds/rollout'):.3f}", ""),
        *rows[:2],
        ("train", f"{median_of('seconds/update'):.3f}", ""),
        *rows[2:],
        (f"all memory switches, {len(steps)} steps", f"{whole:.3f}", ""),
        ("whole step", f"{median_of('seconds/step'):.3f}", ""),
    ]


def stages_as_table(rows: Sequence[Row]) -> Table:
    """Return the rows for a terminal."""
    table = Table(title=_TITLE)
    for heading in _HEADINGS:
        table.add_column(heading, justify="right" if heading else "left")
    for row in rows:
        table.add_row(*row)
    return table


def stages_as_markdown(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown; an empty text without rows."""
    if not rows:
        return ""
    lines = [f"| {_TITLE} | {_HEADINGS[1]} | {_HEADINGS[2]} |", "| --- | ---: | ---: |"]
    return "\n".join(["", *lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"
