"""
Measures the first prompts of tasks before any episode starts.

Without it, a prompt that is too long ends a run when its task is drawn, perhaps hours later. Agents whose first prompt
depends on the task alone have `first_prompt`; for the others the prompt policy acts in their episodes, as before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import structlog
from attrs import frozen

from turnwise.errors import ConfigError, DataError, PromptTooLongError, TemplateError
from turnwise.runtime.plan import RolloutPlan
from turnwise.types import Capabilities, MediaTokens, Task

_CHUNK: Final = 64
_NUM_THREADS: Final = min(8, os.cpu_count() or 1)
_REPORT_S: Final = 10.0
_TREATMENTS: Final = {
    "drop": "are dropped",
    "truncate_left": "lose tokens at their start",
    "truncate_right": "lose tokens at their end",
}


@frozen
class MeasuredPrompt:
    """A task, the number of tokens of its first prompt, and whether this has pictures."""

    task: Task
    num_tokens: int
    has_pictures: bool


def check_prompts(plan: RolloutPlan, tasks: Sequence[Task], engine: Capabilities, *, key: str = "data.path") -> str:
    """
    Measure the first prompts of some tasks; log how many are too long, if the policy drops or cuts them.

    Returns the name of the first row whose prompt has pictures, for errors; empty if there is none.

    Args:
        plan: of the run; it has the agents, the longest prompt and the policy.
        tasks: of one data set.
        engine: what the engine of the run can do.
        key: of the config, which names the data set in the log.

    Raises:
        PromptTooLongError: a prompt is too long and the policy is `error`; the line names the first such row, counts
            the others and has the length of the longest.
        DataError: a task names an unknown agent, or has a picture that cannot be used.
        ConfigError: a prompt has pictures, and the engine takes none.
    """
    limit = plan.max_prompt_tokens
    if limit is None or not tasks:
        return ""
    for task in tasks:
        plan.check_agent(task, task.agent_name or plan.default_agent)
    measured = list(_measure(plan, tasks, key))
    pictured = next((row_of(each.task) for each in measured if each.has_pictures), "")
    check_pictures(pictured, engine)
    found = [each for each in measured if each.num_tokens > limit]
    if found:
        _handle_long(found, len(tasks), plan, limit, key)
    return pictured


def check_pictures(row: str, engine: Capabilities) -> None:
    """Raise `ConfigError` if a row has pictures and the engine takes none; an empty row has none."""
    if row and not engine.pictures:
        raise ConfigError(f"{row} has pictures, which need an engine with the capability pictures")


def _handle_long(found: Sequence[MeasuredPrompt], num_tasks: int, plan: RolloutPlan, limit: int, key: str) -> None:
    first, longest = found[0], max(each.num_tokens for each in found)
    if plan.prompt_policy != "error":
        structlog.get_logger().warning(
            f"prompts longer than rollout.prompt_length {_TREATMENTS[plan.prompt_policy]}",
            data=key,
            rows=len(found),
            of=num_tasks,
            first_row=first.task.sample_index,
            longest=longest,
            prompt_length=limit,
        )
        return
    others = f"{len(found)} of {num_tasks} rows are too long, the longest has {longest}"
    raise PromptTooLongError(
        f"{key}: prompt of task {first.task.uid!r} (row {first.task.sample_index}) has {first.num_tokens} tokens, more"
        f" than prompt_length={limit}; {others}; set rollout.prompt_length={longest}, or data.prompt_policy to drop,"
        " truncate_left or truncate_right",
        num_tokens=first.num_tokens,
        max_tokens=limit,
    )


def row_of(task: Task) -> str:
    """Return the name of a task's row, for errors."""
    return f"row {task.sample_index} (task {task.uid!r})"


def _measure(plan: RolloutPlan, tasks: Sequence[Task], key: str) -> Iterator[MeasuredPrompt]:
    """Yield the tasks with the lengths of their first prompts, in order, where these are known beforehand."""
    started = reported = time.monotonic()
    chunks = [tasks[at : at + _CHUNK] for at in range(0, len(tasks), _CHUNK)]
    # Threads, because a fast tokenizer leaves the interpreter lock, and processes would each load plugins and model.
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="prompts") as pool:
        num_done = 0
        for measured in pool.map(lambda chunk: _measure_chunk(plan, chunk), chunks):
            yield from measured
            num_done = min(num_done + _CHUNK, len(tasks))
            if time.monotonic() - reported > _REPORT_S:
                reported = time.monotonic()
                structlog.get_logger().info(
                    "measuring prompts", data=key, done=num_done, of=len(tasks), seconds=round(reported - started)
                )


def _measure_chunk(plan: RolloutPlan, tasks: Sequence[Task]) -> list[MeasuredPrompt]:
    found = []
    for task in tasks:
        program: object = plan.agents[task.agent_name or plan.default_agent]
        first_prompt: Callable[[Task], Any] | None = getattr(getattr(program, "agent", None), "first_prompt", None)
        if first_prompt is None:
            continue
        try:
            prompt = first_prompt(task)
        except TemplateError:  # fails the task's episodes alone, with this reason
            continue
        except DataError as error:
            raise DataError(f"{row_of(task)}: {error}") from error
        found.append(MeasuredPrompt(task, len(prompt), isinstance(prompt, MediaTokens)))
    return found
