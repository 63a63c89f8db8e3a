"""The conformance suite of environments: `turnwise_testing.checks.environment`, one test each."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from turnwise.types import Task, ToolCall
from turnwise_testing.checks.environment import ENVIRONMENT_CHECKS, EnvironmentProbe
from turnwise_testing.probes.agent import make_task
from turnwise_testing.suites.plugin import CheckedSuite


class EnvironmentSuite(CheckedSuite):
    """
    The conformance suite of environments. A plugin's whole file::

        class TestMaze(EnvironmentSuite):
            episode = ("right", "down", "down")

            def make_environment(self):
                return Maze(width=3)

    Must be set:
        episode: actions, texts or `ToolCall`s, that end an episode of `task` with `seed`.
        make_environment: returns a new environment, as its registered class does.

    May be overridden: `task`, `seed`, and `check_timeout_s`, the seconds that one check may take.
    """

    episode: ClassVar[tuple[str | ToolCall, ...]]
    task: ClassVar[Task] = make_task()
    seed: ClassVar[int] = 0
    checks = ENVIRONMENT_CHECKS

    def make_environment(self) -> Any:
        """Return a new environment; must be overridden."""
        raise NotImplementedError("override 'make_environment'")

    @pytest.fixture
    def probe(self) -> EnvironmentProbe:
        """The probe of the environment."""
        return EnvironmentProbe(
            make_environment=self.make_environment, episode=self.episode, task=self.task, seed=self.seed
        )
