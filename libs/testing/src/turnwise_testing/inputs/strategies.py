"""Hypothesis strategies for token records."""

from __future__ import annotations

from typing import Any

from attrs import evolve, field, frozen
from hypothesis import strategies as st

from turnwise.record.columns import TokenRecord
from turnwise.record.trajectory import Trajectory
from turnwise.types import MediaTokens, Picture, PlacedPicture

TOKEN_IDS = st.integers(min_value=0, max_value=2**20)
LOGPROBS = st.floats(min_value=-30, max_value=0, width=32)


@frozen
class Append:
    """
    One append: `kind` is action, observation or forced; the lists have one length.

    `pictures` are the starts and stops of pictures of an observation.
    """

    kind: str
    token_ids: list[int]
    logprobs: list[float] = field(factory=list)
    weight_version: int = 0
    pictures: list[tuple[int, int]] = field(factory=list)

    def apply(self, record: TokenRecord) -> None:
        """Append to a trajectory or a path."""
        if self.kind in ("action", "constrained"):
            constrained = self.kind == "constrained"
            record.add_action(self.token_ids, self.logprobs, self.weight_version, constrained=constrained)
        elif self.kind == "observation":
            record.add_observation(_with_pictures(self.token_ids, self.pictures))
        else:
            record.add_forced(self.token_ids)


@frozen
class Block:
    """A fork: the appends of each path, then the join."""

    paths: list[list[Append]]

    def apply(self, trajectory: Trajectory) -> None:
        """Fork, append to every path, and join."""
        paths = trajectory.fork(len(self.paths))
        for path, appends in zip(paths, self.paths, strict=True):
            for append in appends:
                append.apply(path)
        trajectory.join(paths)


@frozen
class Script:
    """Steps that build a record; building twice gives equal records."""

    prompt_ids: list[int]
    steps: list[Append | Block]
    pictures: list[tuple[int, int]] = field(factory=list)

    def build(self, num_steps: int | None = None) -> Trajectory:
        """Build the record, or only its first steps."""
        trajectory = Trajectory(_with_pictures(self.prompt_ids, self.pictures))
        for step in self.steps[:num_steps]:
            step.apply(trajectory)
        return trajectory


def _with_pictures(token_ids: list[int], spans: list[tuple[int, int]]) -> MediaTokens | list[int]:
    """Return ids with a picture in each span; few pictures, so that records have one more than once."""
    if not spans:
        return token_ids
    placed = [
        PlacedPicture(
            start=start,
            num_tokens=stop - start,
            picture=Picture(data=b"picture %d" % ((stop + start) % 3), media_type="image/png"),
        )
        for start, stop in spans
    ]
    return MediaTokens(token_ids=token_ids, pictures=placed)


@st.composite
def _spans(draw: st.DrawFn, num_tokens: int) -> list[tuple[int, int]]:
    """Draw spans that do not overlap."""
    cuts = sorted(draw(st.sets(st.integers(0, num_tokens), max_size=6)))
    return list(zip(cuts[::2], cuts[1::2], strict=False))


@st.composite
def picture_scripts(draw: st.DrawFn, *, with_blocks: bool = True) -> Script:
    """Draw how to build a record with pictures in its prompt, its observations and its paths."""
    script = draw(scripts(with_blocks=with_blocks))
    script = evolve(script, pictures=draw(_spans(len(script.prompt_ids))))
    for step in script.steps:
        for append in [each for path in step.paths for each in path] if isinstance(step, Block) else [step]:
            if append.kind == "observation":
                append.pictures.extend(draw(_spans(len(append.token_ids))))
    return script


@st.composite
def appends(draw: st.DrawFn, max_tokens: int = 6) -> Append:
    """Draw one append of 0 to `max_tokens` tokens."""
    token_ids = draw(st.lists(TOKEN_IDS, max_size=max_tokens))
    kind = draw(st.sampled_from(["action", "observation", "forced", "constrained"]))
    is_turn = kind in ("action", "constrained")
    logprobs = draw(st.lists(LOGPROBS, min_size=len(token_ids), max_size=len(token_ids))) if is_turn else []
    return Append(kind, token_ids, logprobs, draw(st.integers(0, 5)))


def blocks(max_paths: int = 8) -> st.SearchStrategy[Block]:
    """Draw a block of 1 to `max_paths` paths, empty ones included."""
    return st.lists(st.lists(appends(), max_size=3), min_size=1, max_size=max_paths).map(Block)


def scripts(*, max_steps: int = 8, with_blocks: bool = True) -> st.SearchStrategy[Script]:
    """Draw how to build a record: linear, or with several blocks."""
    step: Any = st.one_of(appends(), blocks()) if with_blocks else appends()
    return st.builds(Script, st.lists(TOKEN_IDS, max_size=8), st.lists(step, max_size=max_steps))


def trajectories(*, max_steps: int = 8, with_blocks: bool = True) -> st.SearchStrategy[Trajectory]:
    """Draw a token record: linear, with several blocks of 1 to 8 paths, or a branch of such a record."""
    drawn = scripts(max_steps=max_steps, with_blocks=with_blocks)
    return drawn.map(Script.build) | st.builds(_branch, drawn, drawn)


def _branch(parent: Script, continuation: Script) -> Trajectory:
    record = parent.build()
    branch = record.branched(record.mark())
    for step in continuation.steps:
        step.apply(branch)
    return branch
