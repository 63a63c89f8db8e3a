"""
Requirements of the scorers that plugins register with the trainer, as plain functions without pytest.

A check takes a `ScorerProbe`. It starts the scorer as a training does, with a tiny policy, and gives it a step of
episodes: several turns, tool results, forced tokens, parallel paths, a branch, a record that is not trained, a failed
episode and an empty one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from attrs import asdict, evolve, frozen
from numpy.typing import NDArray

from turnwise import EpisodeResult, Resources, Status, Task, Trajectory
from turnwise.protocols import ModelSpec
from turnwise.record.column_specs import check_open
from turnwise.record.invariants import check_trajectory
from turnwise.record.lineage import RecordLineage
from turnwise_grpo_trainer.config import PolicyConfig
from turnwise_grpo_trainer.objective.scorers import Scorer, ScoringRun
from turnwise_testing.checks.check import Check, register
from turnwise_testing.checks.part import Part, PartChecks, vocab_size_of
from turnwise_testing.inputs.tiny_chat import make_tiny_model
from turnwise_testing.probes.engine import expect, expect_equal

_MOST_IDS: Final = 200
_ATOL: Final = 1e-4
"""Forward passes of other shapes round differently."""
Columns = Mapping[str, NDArray[Any]]


def policy_resources(folder: Path) -> Resources:
    """Return resources with a tiny policy: random weights, and a tokenizer of bytes."""
    return Resources(model=ModelSpec(path=make_tiny_model(folder / "policy")))


@frozen(kw_only=True)
class ScorerProbe:
    """
    The probe of a scorer.

    Attributes:
        make_scorer: builds it, as the registered factory does.
        run: the training that it serves.
    """

    make_scorer: Callable[[], Any]
    run: ScoringRun

    def start(self) -> Scorer:
        """Return a scorer that can score."""
        made: Scorer = self.make_scorer()
        made.check(self.run)
        made.start(self.run)
        return made

    def step(self) -> list[EpisodeResult]:
        """Return the episodes of a step; see `make_step`."""
        return make_step(_num_ids(self.run.model))

    def score(self, episodes: Sequence[EpisodeResult]) -> list[EpisodeResult]:
        """Return the episodes that a new scorer returns."""
        return list(self.start().score(episodes))


def _probe(part: Part) -> ScorerProbe:
    model = part.resources.model or ModelSpec()
    tasks = [each.task for each in make_step(_num_ids(model))]
    run = ScoringRun(model=model, policy=PolicyConfig(device="cpu"), temperature=1.25, tasks=tasks)
    return ScorerProbe(make_scorer=part.make, run=run)


SCORER_CHECKS: dict[str, Check] = {}
"""Every check by the name of its function without `check_`."""
SCORERS = PartChecks(checks=SCORER_CHECKS, probe=_probe, resources=policy_resources)
_check = register(SCORER_CHECKS)


def _num_ids(model: ModelSpec) -> int:
    return min(_MOST_IDS, vocab_size_of(model) or _MOST_IDS)


def make_step(num_ids: int) -> list[EpisodeResult]:
    """Return the episodes of a step, in two groups: one of each kind that a training has."""
    rng = np.random.default_rng(0)

    def sample(num: int) -> tuple[list[int], list[float]]:
        return rng.integers(0, num_ids, num).tolist(), (-rng.random(num)).tolist()

    turns = Trajectory(sample(4)[0])
    turns.add_action(*sample(3))
    mark, num_shared = turns.mark(), len(turns)
    turns.add_observation(sample(2)[0])
    turns.add_action(*sample(2), constrained=True)
    turns.add_forced(sample(1)[0])
    turns.add_action(*sample(4))
    branch = turns.branched(mark)
    branch.add_action(*sample(2))
    paths = Trajectory(sample(3)[0])
    paths.add_action(*sample(1))
    block = paths.fork(3)
    for path in block:
        path.add_action(*sample(int(rng.integers(1, 5))))
    paths.join(block)
    paths.add_action(*sample(2))
    cut = Trajectory(sample(5)[0])
    cut.add_action(*sample(6))
    served = Trajectory(sample(2)[0])
    served.add_action(*sample(2))
    lineage = (
        RecordLineage(),
        RecordLineage(parent=0, num_shared_tokens=num_shared),
        RecordLineage(parent=0, kind="auxiliary", trained=False),
    )
    found = [
        (Status.COMPLETED, (turns, branch, served)),
        (Status.COMPLETED, (paths,)),
        (Status.TRUNCATED, (cut,)),
        (Status.COMPLETED, (Trajectory(sample(2)[0]),)),
        (Status.FAILED, (cut,)),
        (Status.FAILED, ()),
    ]
    return [
        EpisodeResult(
            task=Task(messages=({"role": "user", "content": "hi"},), uid=f"t{index // 3}"),
            rollout_n=index % 3,
            status=status,
            trajectories=records,
            lineage=lineage[: len(records)] if len(records) > 1 else (),
            agent_name="a",
        )
        for index, (status, records) in enumerate(found)
    ]


def _columns(episodes: Sequence[EpisodeResult]) -> dict[str, list[Columns]]:
    """Return the columns of each record, by the name of its episode."""
    return {
        each.uid: [{name: record.column(name) for name in record.columns} for record in each.trajectories]
        for each in episodes
    }


def _expect_close(actual: Sequence[Columns], expected: Sequence[Columns], text: str) -> None:
    for found, wanted in zip(actual, expected, strict=True):
        expect_equal(sorted(found), sorted(wanted), f"the names of the columns {text}")
        for name, values in wanted.items():
            same = np.allclose(found[name], values, rtol=0, atol=_ATOL, equal_nan=True)
            expect(same, f"column {name!r} {text} is {found[name].tolist()}, expected {values.tolist()}")


@_check
def check_fulfils_the_protocol(probe: ScorerProbe) -> None:
    """The factory returns an object with the methods of a scorer."""
    made = probe.make_scorer()
    expect(isinstance(made, Scorer), f"{type(made).__name__} lacks one of the methods `check`, `start` and `score`")


@_check
def check_fills_columns(probe: ScorerProbe) -> None:
    """Sampled tokens get values: columns with free names, in the declared type, none of them infinite."""
    scored = probe.score(probe.step())
    records = [record for each in scored for record in each.trajectories]
    expect(any(record.columns for record in records), "no record has a column")
    for record in records:
        check_trajectory(record)
        for name, spec in record.columns.items():
            check_open(spec)
            values = record.column(name)
            expect(not np.isinf(values.astype(np.float64)).any(), f"column {name!r} is infinite: {values.tolist()}")
    turns = scored[0].trajectories[0]
    filled = {name: ~spec.is_fill(turns.column(name)) for name, spec in turns.columns.items()}
    expect(any(each.any() for each in filled.values()), "a completed episode of three turns has no value")


@_check
def check_changes_nothing_else(probe: ScorerProbe) -> None:
    """The episodes come back in their order, and only their columns are new; the given ones are not changed."""
    given, untouched = probe.step(), probe.step()
    scored = probe.score(given)
    expect_equal([each.uid for each in scored], [each.uid for each in given], "the names of the episodes")
    for each, own, before in zip(scored, given, untouched, strict=True):
        expect_equal(len(each.trajectories), len(before.trajectories), f"the number of records of {before.uid!r}")
        for episode, place in ((own, "given"), (each, "returned")):
            found, expected = (asdict(evolve(one, trajectories=()), recurse=False) for one in (episode, before))
            expect_equal(found, expected, f"the {place} episode {before.uid!r}, its records apart")
        for record, kept, first in zip(each.trajectories, own.trajectories, before.trajectories, strict=True):
            expect_equal(dict(kept.columns), {}, f"the columns of a given record of {before.uid!r}")
            expect_equal(_tokens(record), _tokens(first), f"the tokens of a record of {before.uid!r}")


def _tokens(record: Trajectory) -> dict[str, object]:
    """Return all of a record that no scorer changes."""
    arrays = {name: getattr(record, name).tolist() for name in ("input_ids", "logprobs", "origins", "weight_versions")}
    return {**arrays, "prompt": record.num_prompt_tokens, "segments": list(record.segments)}


@_check
def check_is_repeatable(probe: ScorerProbe) -> None:
    """A step has the same values when it is scored again: a training that is resumed repeats its last step."""
    scorer = probe.start()
    first, again = (_columns(scorer.score(probe.step())) for _ in range(2))
    for uid, columns in first.items():
        _expect_close(again[uid], columns, f"of {uid!r}, scored again,")


@_check
def check_order_changes_nothing(probe: ScorerProbe) -> None:
    """The order of the episodes of a step has no effect on their values."""
    scorer, step = probe.start(), probe.step()
    expected, found = _columns(scorer.score(step)), _columns(scorer.score(step[::-1]))
    for uid, columns in expected.items():
        _expect_close(found[uid], columns, f"of {uid!r}, in another order,")


@_check
def check_odd_steps(probe: ScorerProbe) -> None:
    """A step without episodes, and one whose episodes have all failed, are returned."""
    scorer, failed = probe.start(), [each for each in probe.step() if each.status is Status.FAILED]
    expect_equal(list(scorer.score([])), [], "the episodes of an empty step")
    expect_equal([each.uid for each in scorer.score(failed)], [each.uid for each in failed], "the failed episodes")
