"""
Trajectories and results for people, on a terminal or in a log.

Text from a model or a tool is shown literally: markup in it stays text, and control characters, which could move the
cursor or hide other text, are shown as escapes. Without colour, markers show the origin of tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Final

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from turnwise.record.columns import Origin, Segment
from turnwise.record.result import EpisodeResult
from turnwise.record.trajectory import Trajectory
from turnwise.report import Report
from turnwise.terminal import literal, one_line
from turnwise.types import JsonObject, PlacedPicture, TokenArray

STYLES: Final[Mapping[Origin, str]] = {
    Origin.PROMPT: "dim",
    Origin.ACTION: "bold green",
    Origin.OBSERVATION: "cyan",
    Origin.FORCED: "magenta",
    Origin.REPLAYED: "green",
    Origin.CONSTRAINED: "yellow",
}
"""The colour style of tokens of each origin."""

MARKERS: Final[Mapping[Origin, str]] = {
    Origin.PROMPT: "⟦prompt⟧",
    Origin.ACTION: "⟦act⟧",
    Origin.OBSERVATION: "⟦obs⟧",
    Origin.FORCED: "⟦forced⟧",
    Origin.REPLAYED: "⟦replayed⟧",
    Origin.CONSTRAINED: "⟦constrained⟧",
}
"""The marker before tokens of each origin when there is no colour."""

_PATH_STYLE: Final = "bold yellow"
_STATUS_STYLES: Final[Mapping[str, str]] = {"completed": "green", "truncated": "yellow", "failed": "bold red"}
_REPORT_LINES: Final = 40
_BRACKETS: Final = re.compile("[⟦⟧]")

Decode = Callable[[TokenArray], str]
"""Token ids to text, special tokens included, such as `Tokenizer.decode`."""


def trajectory_view(trajectory: Trajectory, decode: Decode, *, color: bool = True) -> Group:
    """
    Show a record under a line that explains the styles or markers; paths of a block are side by side in columns.

    Args:
        trajectory: the record.
        decode: token ids to text.
        color: show origins by style; otherwise by `MARKERS`, which text of the model cannot imitate.
    """
    parts: list[RenderableType] = [_legend(trajectory, color), Text()]
    for block, runs in groupby(_runs(trajectory), key=lambda run: run.block):
        if block < 0:
            parts.append(_joined(trajectory, runs, decode, color=color))
            continue
        columns = Table.grid(expand=True)
        panels = []
        for path, own in groupby(runs, key=lambda run: run.path):
            columns.add_column(ratio=1)
            title = Text(f"path {path}", _PATH_STYLE if color else "")
            text = _joined(trajectory, own, decode, color=color)
            # A word that is wider than its column would lose its end otherwise.
            text.overflow = "fold"
            panels.append(Panel(text, title=title))
        columns.add_row(*panels)
        parts.append(columns)
    return Group(*parts)


def results_table(results: Sequence[EpisodeResult], limit: int | None = None) -> Table:
    """
    Return a line for each episode: uid, status, reward, turns, tool calls, tokens of the response, seconds.

    If a limit ended one of them, a last column names the limits and the reasons.
    """
    shown = results[:limit]
    caption = f"{len(shown)} of {len(results)} episodes" if len(shown) < len(results) else None
    table = Table(caption=caption)
    # The only column that may shrink; its texts keep to one line by themselves.
    table.add_column("episode")
    table.add_column("status", no_wrap=True)
    for name in ("reward", "turns", "tools", "tokens", "s"):
        table.add_column(name, justify="right", no_wrap=True)
    with_limits = any(result.limit for result in shown)
    if with_limits:
        table.add_column("ended by", ratio=1)
    for result in shown:
        uid = Text(one_line(result.uid), no_wrap=True, overflow="ellipsis")
        reason = f"{result.limit.name}: {result.limit.reason}" if result.limit else ""
        end = [Text(one_line(reason))] if with_limits else []
        table.add_row(uid, _status(result), *map(Text, _numbers(result)), *end)
    return table


def summary_table(summary: JsonObject) -> Table:
    """Return a table with one row per entry of a summary (see `turnwise_result_files.summarize`)."""
    table = Table(show_header=False)
    table.add_column("name", no_wrap=True)
    table.add_column("value")
    for name, value in summary.items():
        if value != {}:
            table.add_row(Text(one_line(str(name))), Text(one_line(_shown_value(value))))
    return table


def _shown_value(value: object) -> str:
    """Return a value as text; of a section, the values by name, and the ones of its sections in brackets."""
    if not isinstance(value, Mapping):
        return _number(value)
    items = [
        (key, f"({_shown_value(item)})" if isinstance(item, Mapping) else _number(item)) for key, item in value.items()
    ]
    return "  ".join(f"{key} {item}" for key, item in items)


def _runs(trajectory: Trajectory) -> Iterable[Segment]:
    """Yield prompt and segments, neighbours of one origin and path together."""
    if trajectory.num_prompt_tokens:
        yield Segment(Origin.PROMPT, 0, trajectory.num_prompt_tokens, -1, -1)
    for (origin, block, path), group in groupby(trajectory.segments, key=attrgetter("origin", "block", "path")):
        segments = list(group)
        yield Segment(origin, segments[0].start, segments[-1].stop, block, path)


def _joined(trajectory: Trajectory, runs: Iterable[Segment], decode: Decode, *, color: bool) -> Text:
    return Text().join(_shown(trajectory, run, decode, color=color) for run in runs)


def _shown(trajectory: Trajectory, run: Segment, decode: Decode, *, color: bool) -> Text:
    text = literal(decode(trajectory.input_ids[run.start : run.stop]))
    if color:
        return Text(text, STYLES[run.origin])
    return Text(MARKERS[run.origin] + _BRACKETS.sub(_escape, text))


def _legend(trajectory: Trajectory, color: bool) -> Text:
    rare = (Origin.REPLAYED, Origin.CONSTRAINED)
    origins = [o for o in Origin if o not in rare or (trajectory.origins == o).any()]
    if color:
        names = [Text(origin.name.lower(), STYLES[origin]) for origin in origins]
        return Text(" ").join(names)
    return Text("  ".join(f"{MARKERS[origin]} {origin.name.lower()}" for origin in origins))


def _status(result: EpisodeResult) -> Text:
    name = str(result.status)
    owner = f" ({result.fault.owner})" if result.fault else ""
    return Text(name + owner, _STATUS_STYLES.get(name, ""))


def _numbers(result: EpisodeResult) -> list[str]:
    metrics = result.metrics
    return [
        "-" if result.reward is None else f"{result.reward:.3g}",
        str(metrics.num_turns),
        str(metrics.num_tool_calls),
        str(sum(trajectory.num_response_tokens for trajectory in result.trajectories)),
        f"{metrics.total_s:.1f}",
    ]


def _number(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


def picture_line(place: PlacedPicture) -> Text:
    """Show the tokens of a picture, its type and size, and the beginning of the name of its file."""
    picture = place.picture
    name, _dot, ending = picture.file_name.partition(".")
    size = f"{len(picture.data):,} bytes"
    return Text(f"picture: tokens {place.start}:{place.stop}, {picture.media_type}, {size}, {name[:12]}….{ending}")


def report_view(report: Report) -> Text:
    """Show a report under a line with its title and its facts; of a long text the end is shown."""
    facts = "".join(f", {one_line(name)} {one_line(_number(value))}" for name, value in report.facts.items())
    view = Text(f"── {one_line(report.title)}{facts}\n", style="bold red" if report.failed else "bold")
    lines = report.text.splitlines()
    if len(lines) > _REPORT_LINES:
        view.append(f"… {len(lines) - _REPORT_LINES} lines before\n", style="dim")
    view.append("\n".join(map(literal, lines[-_REPORT_LINES:])), style="not bold default")
    return view
