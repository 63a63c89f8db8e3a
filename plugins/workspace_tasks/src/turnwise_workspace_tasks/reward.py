"""The reward `workspace_tests`."""

from __future__ import annotations

from typing import cast

import structlog

from turnwise import Episode, Resources, Score, Task
from turnwise.errors import ConfigError
from turnwise.types import TrajectoryScore
from turnwise_workspace_tasks.changes import find_changes
from turnwise_workspace_tasks.config import RewardConfig
from turnwise_workspace_tasks.graded_task import Tests, read_tests
from turnwise_workspace_tasks.grading import grade
from turnwise_workspaces import Workspace
from turnwise_workspaces.use import find_tools


class WorkspaceTests:
    """
    Runs the hidden tests of a task in the workspace of its episode, when the agent has ended.

    An episode whose agent never used its workspace gets one now, so that doing nothing has a score, too.
    """

    def __init__(self, config: RewardConfig, resources: Resources) -> None:
        self._config = config
        tools = find_tools(resources)
        if tools is None:
            raise ConfigError("the reward 'workspace_tests' needs the tools 'workspace'; the run has none")
        self._use, self._tool = tools

    def grading_s(self, task: Task) -> float:
        """Return the seconds for the tests of a task and all that they need; `DataError` when it has none."""
        tests = _tests_of(task)
        return (self._config.timeout_s or tests.timeout_s) + self._config.spare_s

    async def score(self, episode: Episode) -> list[Score]:
        """
        Return the grade as the score of the last record that is trained.

        Raises:
            InfrastructureError: the workspace does not start, or is lost.
        """
        tests = _tests_of(episode.task)
        workspace = cast("Workspace", await episode.open_tool(self._tool))
        if self._config.show_changes:
            await workspace.end_processes()
            episode.note_report(await find_changes(workspace, self._use.spec(episode.task)))
        result = await grade(workspace, tests, self._config)
        episode.note_report(result.report(self._config.max_output_bytes))
        for name, value in result.metrics.items():
            episode.record_metric(name, value)
        log = structlog.get_logger()
        log.debug(
            "tests ended",
            reward=result.value,
            problem=result.problem,
            output=result.output[: self._config.max_output_bytes],
        )
        last = _last_trained(episode)
        return [
            TrajectoryScore(value=result.value if number == last else 0.0)
            for number in range(len(episode.trajectories))
        ]


def _tests_of(task: Task) -> Tests:
    return read_tests(task.extra, f"task {task.uid!r} (row {task.sample_index})")


def _last_trained(episode: Episode) -> int:
    trained = [number for number, line in enumerate(episode.lineage) if line.trained]
    return trained[-1] if trained else len(episode.trajectories) - 1
