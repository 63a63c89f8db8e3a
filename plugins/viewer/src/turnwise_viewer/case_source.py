"""An episode as the source of a test: its task, records and scores, on which a reward or another part can be run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pprint import pformat
from typing import Any, Final

import numpy as np
from attrs import asdict, define, field

from turnwise.errors import DataError
from turnwise.record.open_columns import to_plain
from turnwise.record.result import EpisodeResult
from turnwise.types import Score, TrajectoryScore
from turnwise_result_files.episode_rows import read_texts
from turnwise_result_files.media import DECLARATION

_WIDTH: Final = 100
_SOURCE: Final = '''\
"""An episode of a run, copied from `turnwise view`. Run it with pytest."""

{imports}

EPISODE = {episode}


def test_the_records_are_whole() -> None:
    """Masks, positions and log-probabilities of each record agree with its segments."""
    for record in EPISODE.trajectories:
        check_trajectory(record)


def test_the_reward() -> None:
    """The reward is the recorded one. Put the check here that the episode should pass."""
    assert EPISODE.reward == {reward}
'''
_MODULES: Final = {
    **dict.fromkeys(("EpisodeResult", "Status", "Task", "Trajectory"), "turnwise"),
    **dict.fromkeys(("TokenScore", "TrajectoryScore", "TurnScore"), "turnwise"),
    **dict.fromkeys(("Fault", "Placement"), "turnwise.types"),
    "check_trajectory": "turnwise.record.invariants",
    "OutsideCall": "turnwise.record.outside_call",
    "Report": "turnwise",
    "ReachedLimit": "turnwise.record.limit",
    "RecordLineage": "turnwise.record.lineage",
    **dict.fromkeys(("inf", "nan"), "math"),
}


def write_case(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the source of a test about the episode of some rows: a row per record, with columns of JSON as text."""
    if any(each["declaration"] == DECLARATION for row in rows for each in row.get("open_columns") or ()):
        raise DataError("the source of a test has no place for pictures")
    episode = read_texts([dict(row) for row in rows])
    writer = _Writer()
    body, reward = writer.episode(episode), writer.literal(episode.reward)
    return _SOURCE.format(imports=writer.imports(), episode=body, reward=reward)


@define
class _Writer:
    """Writes values as expressions, and remembers the names that these use."""

    names: set[str] = field(factory=lambda: {"check_trajectory"})

    def imports(self) -> str:
        modules: dict[str, list[str]] = {}
        for name in sorted(self.names):
            modules.setdefault(_MODULES[name], []).append(name)
        return "\n".join(f"from {module} import {', '.join(modules[module])}" for module in sorted(modules))

    def episode(self, episode: EpisodeResult) -> str:
        task, fault = episode.task, episode.fault
        arguments = {
            "task": self.call("Task", self.literals(asdict(task, recurse=False))),
            **self.literals({name: getattr(episode, name) for name in ("rollout_n", "global_step", "validation")}),
            "agent_name": self.literal(episode.agent_name),
            "status": self.call("Status", {"": self.literal(str(episode.status))}),
            "objective": self.literal(str(episode.objective)),
            "messages": self.literal(episode.messages),
            "trajectories": self.sequence([self.record(each.to_dict()) for each in episode.trajectories]),
            "scores": self.sequence([self.score(each) for each in episode.scores]),
            "lineage": self.sequence(
                [self.call("RecordLineage", self.literals(asdict(each))) for each in episode.lineage]
            ),
        }
        if episode.outside_calls:
            calls = [self.call("OutsideCall", self.literals(asdict(each))) for each in episode.outside_calls]
            arguments["outside_calls"] = self.sequence(calls)
        if episode.reports:
            reports = [self.call("Report", self.literals(asdict(each))) for each in episode.reports]
            arguments["reports"] = self.sequence(reports)
        if fault is not None:
            arguments["fault"] = self.call("Fault", self.literals(asdict(fault) | {"traceback": ""}))
        if episode.limit is not None:
            arguments["limit"] = self.call("ReachedLimit", self.literals(asdict(episode.limit)))
        return self.call("EpisodeResult", arguments)

    def record(self, saved: Mapping[str, Any]) -> str:
        values = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in saved.items()}
        # Short decimals of 32 bits: reading them gives the same values.
        values["logprobs"] = [float(str(each)) for each in saved["logprobs"]]
        values["segments"] = [tuple(int(each) for each in segment) for segment in saved["segments"]]
        first = {name: values.pop(name) for name in ("num_prompt_tokens", "segments")}
        whole = {**first, **to_plain(values)}
        return self.call("Trajectory.from_dict", {"": self.literal(whole)})

    def score(self, score: Score) -> str:
        values = self.literals(asdict(score, recurse=False))
        if isinstance(score, TrajectoryScore):
            values["at"] = self.call("Placement", {"": self.literal(str(score.at))})
        return self.call(type(score).__name__, values)

    def call(self, name: str, arguments: Mapping[str, str]) -> str:
        self.names.add(name.partition(".")[0])
        if len(arguments) == 1 and "" in arguments:
            return f"{name}({arguments['']})"
        lines = [_indent(f"{key}={value}," if key else f"{value},") for key, value in arguments.items()]
        return f"{name}(\n{chr(10).join(lines)}\n)"

    def sequence(self, items: Sequence[str]) -> str:
        return f"(\n{chr(10).join(_indent(f'{each},') for each in items)}\n)" if items else "()"

    def literals(self, values: Mapping[str, object]) -> dict[str, str]:
        return {name: self.literal(value) for name, value in values.items()}

    def literal(self, value: object) -> str:
        """Return a value of JSON as an expression; a text is written with escapes, on lines without its line breaks."""
        self._note_numbers(value)
        return pformat(value, width=_WIDTH, compact=True, sort_dicts=False)

    def _note_numbers(self, value: object) -> None:
        if isinstance(value, float) and not math.isfinite(value):
            self.names.add("nan" if math.isnan(value) else "inf")
        elif isinstance(value, Mapping):
            self._note_numbers([*value.values()])
        elif isinstance(value, list | tuple):
            for each in value:
                self._note_numbers(each)


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.split("\n"))
