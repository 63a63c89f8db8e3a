"""
Requirements of every postprocessor, as plain functions without pytest.

A check takes a `PostprocessorProbe`, whose batches are made of real episodes of a scripted model. It needs torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import chain, zip_longest
from typing import Any

from attrs import evolve, frozen

from turnwise.batch.packed_batch import PackedBatch, collate_packed
from turnwise.protocols import Postprocessor
from turnwise.record.result import EpisodeResult
from turnwise.types import TrajectoryScore
from turnwise_testing.checks.check import Check, register
from turnwise_testing.checks.part import PartChecks, chat_resources
from turnwise_testing.probes.agent import AgentProbe, ReplayAgent, probe_chat
from turnwise_testing.probes.engine import expect, expect_equal

_GROUP_SIZE = 2


@lru_cache(maxsize=1)
def example_results() -> tuple[EpisodeResult, ...]:
    """Return scored episodes in groups of two, made once."""

    async def run() -> list[EpisodeResult]:
        probe = AgentProbe(make_agent=lambda: ReplayAgent(probe_chat()))
        return [(await probe.run(task)).result for task in probe.tasks]

    results = asyncio.run(run())
    return tuple(
        evolve(
            result,
            task=results[number - number % _GROUP_SIZE].task,
            rollout_n=number % _GROUP_SIZE,
            scores=(TrajectoryScore(value=float(number % 3)),) * len(result.trajectories),
        )
        for number, result in enumerate(results)
    )


@frozen(kw_only=True)
class PostprocessorProbe:
    """
    The probe of a postprocessor.

    Attributes:
        make_postprocessor: builds it, as the registered factory does.
        make_batches: returns the batches that it processes.
    """

    make_postprocessor: Callable[[], Postprocessor]
    make_batches: Callable[[], tuple[PackedBatch, ...]] = lambda: (
        collate_packed(example_results(), pad_token_id=0),
        collate_packed(example_results()[:1], pad_token_id=0),
        # An unscored episode: its reward has never run.
        collate_packed([evolve(example_results()[0], scores=())], pad_token_id=0),
    )

    def process(self, batch: PackedBatch) -> Mapping[str, Any]:
        """Return the new fields of a batch."""
        new: object = self.make_postprocessor().process(batch)
        if not isinstance(new, Mapping):
            text = f"process returned a {type(new).__name__}, expected a mapping of name to tensor"
            raise AssertionError(text)  # noqa: TRY004 - the failure of a check
        return new


POSTPROCESSOR_CHECKS: dict[str, Check] = {}
"""Every check by the name of its function without `check_`."""
POSTPROCESSORS = PartChecks(
    checks=POSTPROCESSOR_CHECKS,
    probe=lambda part: PostprocessorProbe(make_postprocessor=part.make),
    resources=chat_resources,
)
_check = register(POSTPROCESSOR_CHECKS)


@_check
def check_fulfils_the_protocol(probe: PostprocessorProbe) -> None:
    """The factory returns an object with the method of a postprocessor."""
    made = probe.make_postprocessor()
    expect(isinstance(made, Postprocessor), f"{type(made).__name__} has no method `process`")


@_check
def check_fields_fit_the_batch(probe: PostprocessorProbe) -> None:
    """Each new field has a value for each row, or a tensor for each row, under a name that is free."""
    import torch

    for batch in probe.make_batches():
        new = probe.process(batch)
        for name, values in new.items():
            expect(isinstance(name, str), f"the name of a field is {name!r}, expected text")
            for tensor in _tensors_of(values):
                expected = "expected a tensor, or one for each row"
                expect(isinstance(tensor, torch.Tensor), f"field {name!r} has a {type(tensor).__name__}, {expected}")
        batch.with_fields(new)


@_check
def check_batch_stays_unchanged(probe: PostprocessorProbe) -> None:
    """No tensor of the batch changes: a trainer reads it later."""
    for batch in probe.make_batches():
        before = {name: tensor.clone() for name, tensor in batch.tensors.items()}
        probe.process(batch)
        changed = [name for name, tensor in batch.tensors.items() if not _same(tensor, before[name])]
        expect_equal(changed, [], "the changed tensors")


@_check
def check_is_repeatable(probe: PostprocessorProbe) -> None:
    """The same batch has the same fields."""
    for batch in probe.make_batches():
        first, again = probe.process(batch), probe.process(batch)
        expect_equal(sorted(again), sorted(first), "the names of the fields")
        different = [name for name in first if not _same(first[name], again[name])]
        expect_equal(different, [], "the fields that differ the second time")


def _tensors_of(values: object) -> list[Any]:
    """Return the tensors of a field: one of a value for each row, or one for each row."""
    return list(values) if isinstance(values, list | tuple) else [values]


def _same(first: object, second: object) -> bool:
    import torch

    pairs = list(zip_longest(_tensors_of(first), _tensors_of(second)))
    return None not in chain(*pairs) and all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)
