"""The checks of scorers accept the shipped one and a simple one, and find each broken promise."""

from __future__ import annotations

import numpy as np
import pytest
from attrs import evolve

from turnwise import ColumnSpec, Resources, TrajectoryScore
from turnwise.errors import PluginError
from turnwise_distillation.config import TeacherConfig
from turnwise_distillation.teacher import Teacher
from turnwise_testing.checks.check import run_check
from turnwise_testing.checks.part import Part
from turnwise_testing.checks.scorer import SCORER_CHECKS, SCORERS, policy_resources

SPEC = ColumnSpec(name="places", dtype="float32", fill=float("nan"), tokens="none")


class Places:
    """A right scorer: the number of response tokens before each sampled one."""

    spec = SPEC

    def check(self, run):
        pass

    def start(self, run):
        pass

    def values(self, record):
        return np.where(record.response_mask == 1, np.arange(record.num_response_tokens), np.nan)

    def fill(self, episode):
        records = [each.with_column(self.spec, self.values(each)) for each in episode.trajectories]
        return evolve(episode, trajectories=tuple(records))

    def score(self, episodes):
        return [self.fill(each) for each in episodes]


class Without(Places):
    score = None


class Unfilled(Places):
    def score(self, episodes):
        return list(episodes)


class Nothing(Places):
    def values(self, record):
        return np.full(record.num_response_tokens, np.nan)


class Infinite(Places):
    def values(self, record):
        return super().values(record) - np.inf


class Taken(Places):
    spec = ColumnSpec(name="logprobs", dtype="float32", tokens="none")


class Reordering(Places):
    def score(self, episodes):
        return super().score(episodes)[::-1]


class Rewarding(Places):
    def fill(self, episode):
        return evolve(
            super().fill(episode), scores=tuple(TrajectoryScore(value=1.0) for _record in episode.trajectories)
        )


class Sampling(Places):
    def fill(self, episode):
        filled = super().fill(episode)
        for record in filled.trajectories:
            record.add_action([1], [-0.5])
        return filled


class Counting(Places):
    def __init__(self):
        self.num_steps = 0

    def score(self, episodes):
        self.num_steps += 1
        return super().score(episodes)

    def values(self, record):
        return super().values(record) + self.num_steps


class Numbering(Places):
    def score(self, episodes):
        spec, scored = ColumnSpec(name="number", dtype="int32", tokens="none"), []
        for number, each in enumerate(episodes, 1):
            records = [r.with_column(spec, np.full(r.num_response_tokens, number)) for r in each.trajectories]
            scored.append(evolve(each, trajectories=tuple(records)))
        return scored


class Hasty(Places):
    def score(self, episodes):
        most = max(len(record) for each in episodes for record in each.trajectories)
        return super().score(episodes) if most else list(episodes)


@pytest.fixture(scope="module")
def resources(tmp_path_factory):
    """The tiny policy, written once."""
    return policy_resources(tmp_path_factory.mktemp("scorers"))


def probe_of(make, resources: Resources):
    return SCORERS.probe(Part(make=make, name="places", resources=resources))


@pytest.mark.parametrize("check", list(SCORER_CHECKS.values()), ids=list(SCORER_CHECKS))
def test_right_scorers_pass(check, resources):
    """A scorer without a model, and the teacher, which may be the policy itself."""
    assert run_check(check, probe_of(Places, resources)) is None
    teacher = TeacherConfig(path=resources.model.path, top_k=3, device="cpu")
    assert run_check(check, probe_of(lambda: Teacher(teacher), resources)) is None


@pytest.mark.parametrize(
    ("scorer", "check", "message"),
    [
        (Without, "fulfils_the_protocol", "Without lacks one of the methods"),
        (Unfilled, "fills_columns", "no record has a column"),
        (Nothing, "fills_columns", "a completed episode of three turns has no value"),
        (Infinite, "fills_columns", "column 'places' is infinite"),
        (Taken, "fills_columns", "every record or batch has something of that name"),
        (Reordering, "changes_nothing_else", "the names of the episodes"),
        (Rewarding, "changes_nothing_else", "its records apart"),
        (Sampling, "changes_nothing_else", "the tokens of a record of"),
        (Counting, "is_repeatable", "scored again,"),
        (Numbering, "order_changes_nothing", "in another order,"),
        (Hasty, "odd_steps", "max"),
    ],
)
def test_broken_promises_are_found(scorer, check, message, resources):
    """Each by the check of its promise."""
    with pytest.raises((AssertionError, PluginError, ValueError), match=message):
        run_check(SCORER_CHECKS[check], probe_of(scorer, resources))
