"""How tasks become episodes and episodes a batch, decided once by the driver."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator

from attrs import field, frozen

from turnwise.episode_setup import EpisodeSpec
from turnwise.errors import DataError
from turnwise.protocols import Postprocessor
from turnwise.registry import did_you_mean
from turnwise.types import SamplingParams, Task


@frozen(kw_only=True)
class RolloutPlan:
    """
    How tasks become episodes and episodes a batch.

    Attributes:
        default_agent: runs tasks that name no agent.
        agent_names: the agents that there are.
        n: episodes per task.
        validation_n: episodes per task in validation.
        seed: of the run.
        sampling: how tokens are drawn.
        validation_sampling: the same in validation.
        prompt_policy: what a prompt that is too long does to the run.
        pad_token_id: fills padded batches.
        prompt_length: width of a batch's prompts; None for the longest in it.
        response_length: likewise of its responses.
        postprocessors: add fields to batches, in this order.
    """

    default_agent: str
    agent_names: frozenset[str]
    n: int = 1
    validation_n: int = 1
    seed: int = 0
    sampling: SamplingParams = field(factory=SamplingParams)
    validation_sampling: SamplingParams = field(factory=lambda: SamplingParams(temperature=0.0))
    prompt_policy: str = "error"
    pad_token_id: int = 0
    prompt_length: int | None = None
    response_length: int | None = None
    postprocessors: tuple[Postprocessor, ...] = ()

    def specs(self, tasks: Iterable[Task], *, global_step: int, validation: bool) -> list[EpisodeSpec]:
        """
        Return one spec per episode: the rollouts of a task stand together, in task order.

        A task that stands there again has its rollouts counted on, so that no two episodes are the same one.

        Raises:
            DataError: there is no task, or one names an agent that is not there.
        """
        count = self.validation_n if validation else self.n
        sampling = self.validation_sampling if validation else self.sampling
        rollouts: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        specs = [
            EpisodeSpec(
                task=task,
                agent_name=self._agent_of(task),
                rollout_n=next(rollouts[task.uid]),
                global_step=global_step,
                validation=validation,
                seed=self.seed,
                sampling=sampling,
            )
            for task in tasks
            for _ in range(count)
        ]
        if not specs:
            raise DataError("there are no tasks to run")
        return specs

    def _agent_of(self, task: Task) -> str:
        name = task.agent_name or self.default_agent
        self._refuse_unknown(task, name)
        return name

    def refuse_unknown_agent(self, spec: EpisodeSpec) -> None:
        """Raise `DataError` when an episode of another run needs an agent that is not there."""
        self._refuse_unknown(spec.task, spec.agent_name)

    def _refuse_unknown(self, task: Task, name: str) -> None:
        if name not in self.agent_names:
            known = did_you_mean(name, tuple(sorted(self.agent_names)))
            raise DataError(f"row {task.sample_index} (task {task.uid!r}) names the unknown agent {name!r}{known}")
