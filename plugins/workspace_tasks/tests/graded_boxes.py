"""Grades tasks in boxes, without a run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from turnwise import Report, Resources
from turnwise_task_files.rows import task_from_row
from turnwise_workspace_tasks.changes import find_changes
from turnwise_workspace_tasks.config import RewardConfig
from turnwise_workspace_tasks.graded_task import GradedTask
from turnwise_workspace_tasks.grading import Grade, grade
from turnwise_workspace_tasks.harbor import read_harbor_task
from turnwise_workspaces import Command, Workspace
from turnwise_workspaces.config import WorkspaceToolsConfig
from turnwise_workspaces.tools import make_tools

Agent = Callable[[Workspace], Awaitable[object]]


def shell(text: str) -> Agent:
    """Return an agent that runs a shell's text, which must succeed."""

    async def run(workspace: Workspace) -> None:
        done = await workspace.exec(Command(argv=("/bin/sh", "-c", f"set -e\n{text}"), timeout_s=20.0))
        assert done.exit_code == 0, done.stdout.decode()

    return run


def grade_agent(folder: Path, agent: Agent) -> Grade:
    """Return the grade of an agent in the task of a folder in Harbor's form."""
    return grade_task(read_harbor_task(folder), agent)


def grade_task(task: GradedTask, agent: Agent, **options: Any) -> Grade:
    """Return the grade of an agent in a task, whose tools have options."""
    (tool, *_) = make_tools(WorkspaceToolsConfig(**options), Resources())

    async def run() -> Grade:
        async with tool.use.owner.workspace(tool.use.spec(task_from_row(task.row()))) as workspace:
            await agent(workspace)
            return await grade(workspace, task.tests, RewardConfig())

    return asyncio.run(run())


def report_changes(agent: Agent, files: Mapping[str, str], **options: Any) -> Report:
    """Return the report of what an agent changed in a box with some files."""
    (tool, *_) = make_tools(WorkspaceToolsConfig(files=files, **options), Resources())

    async def run() -> Report:
        async with tool.use.owner.workspace(tool.use.spec()) as workspace:
            await agent(workspace)
            return await find_changes(workspace, tool.use.spec())

    return asyncio.run(run())
