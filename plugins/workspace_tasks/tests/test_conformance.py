"""The task source and the reward pass the conformance suites."""

from __future__ import annotations

import pytest
from attrs import evolve
from boxes import why_no_boxes
from task_folders import EXAMPLES, write_task

from turnwise import Resources
from turnwise_task_files.rows import task_from_row
from turnwise_testing import RewardExample, RewardSuite, TaskSourceExample, TaskSourceSuite
from turnwise_testing.probes.agent import probe_chat
from turnwise_workspace_tasks.harbor import read_harbor_task
from turnwise_workspaces.config import WorkspaceToolsConfig
from turnwise_workspaces.tools import make_tools


class TestHarborSource(TaskSourceSuite):
    """The examples of the repository, two of them, and texts that are refused."""

    entry_point = "workspace_tasks"
    module = "turnwise_workspace_tasks"
    registered = "harbor"

    @pytest.fixture
    def examples(self):
        """Absolute folders, because the suite has no config."""
        names = [each.name for each in EXAMPLES.iterdir()]
        return (
            TaskSourceExample(text=str(EXAMPLES), num_rows=len(names)),
            TaskSourceExample(text=f"{EXAMPLES}?tasks=fix-a-bug,write-a-parser&result=exit_code", num_rows=2),
            TaskSourceExample(text=f"{EXAMPLES}?tasks=fix-a-bag", error="did you mean 'fix-a-bug'?"),
            TaskSourceExample(text=f"{EXAMPLES}?result=json", error="result"),
            TaskSourceExample(text="/nowhere", error="cannot be read"),
        )


@pytest.mark.slow
@pytest.mark.skipif(bool(why_no_boxes()), reason=why_no_boxes())
class TestWorkspaceTests(RewardSuite):
    """Episodes that do nothing, in a task that is done and in one that is not."""

    entry_point = "workspace_tasks"
    module = "turnwise_workspace_tasks"
    registered = "workspace_tests"

    @pytest.fixture
    def resources(self):
        """The tools of workspaces."""
        tools = {each.schema["function"]["name"]: each for each in make_tools(WorkspaceToolsConfig(), Resources())}
        return Resources(chat=probe_chat(), tools=tools)

    @pytest.fixture
    def examples(self, tmp_path):
        """The answer does not count."""
        undone = task_from_row(read_harbor_task(write_task(tmp_path / "undone")).row())
        done = task_from_row(
            read_harbor_task(write_task(tmp_path / "done", {"environment/answer.txt": "done\n"})).row()
        )
        return (
            RewardExample(answer="Done.", task=undone, expected=0.0),
            RewardExample(answer="", task=evolve(done, sample_index=1), expected=1.0),
        )
