"""The plan of a run: turns tasks into episodes, and has the settings of batches."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from attrs import field, frozen

from turnwise.errors import ConfigError, DataError, PluginError, describe
from turnwise.options import GroupOptions, PromptPolicy
from turnwise.plugin.registry import did_you_mean
from turnwise.protocols import EngineCheckingAgent, Postprocessor
from turnwise.record.column_specs import NO_COLUMNS, ColumnSpec
from turnwise.record.spec import EpisodeSpec, UnfinishedEpisode
from turnwise.types import Capabilities, Task

if TYPE_CHECKING:
    from turnwise.batch.packed_batch import PackedBatch
    from turnwise.batch.padding import Widths
    from turnwise.batch.rollout_batch import RolloutBatch
    from turnwise.batch.rows import Rows


class DescribedEngine(Protocol):
    """An engine, or a runtime with engines."""

    @property
    def capabilities(self) -> Capabilities: ...


@frozen(kw_only=True)
class RolloutPlan(GroupOptions):
    """
    Turns tasks into episodes, and has the settings of batches. The driver builds one plan for a run.

    Attributes:
        default_agent: agent of the tasks that name none.
        agents: programs by agent name. Looking one up builds the agent, so a broken agent stops a call at once, and
            only if a task names it.
        prompt_policy: treatment of a prompt that is too long.
        max_prompt_tokens: most tokens of a prompt; None if nobody checks them before the episodes.
        pad_token_id: fills padded batches.
        prompt_length: width of a batch's prompts; None for the longest one.
        response_length: width of a batch's responses; None for the longest one.
        postprocessors: add fields to a batch, in this order; the keys name them in errors.
        engine_checks: agents of the config that check the engine.
        columns: the open columns that plugins declare, by name.
    """

    default_agent: str
    agents: Mapping[str, object]
    prompt_policy: PromptPolicy = "error"
    max_prompt_tokens: int | None = None
    pad_token_id: int = 0
    prompt_length: int | None = None
    response_length: int | None = None
    postprocessors: Mapping[str, Postprocessor] = field(factory=dict)
    engine_checks: Sequence[EngineCheckingAgent] = ()
    columns: Mapping[str, ColumnSpec] = NO_COLUMNS

    def check_engine(self, engine: DescribedEngine) -> None:
        """Raise `ConfigError` if the options of an agent exclude the engine, or no plugin declares a column of it."""
        for agent in self.engine_checks:
            agent.check_engine(engine.capabilities)
        if undeclared := sorted(engine.capabilities.columns - set(self.columns)):
            known = ", ".join(sorted(self.columns)) or "none"
            raise ConfigError(
                f"engine: its results have the column {undeclared[0]!r}, which no loaded plugin declares; install the"
                f" plugin of the column, or turn the option of the engine off; declared: {known}"
            )

    def specs(
        self, tasks: Iterable[Task], resumed: Sequence[UnfinishedEpisode] = (), *, global_step: int, validation: bool
    ) -> list[EpisodeSpec]:
        """
        Return one spec per episode: resumed episodes, then in the order of the tasks. A group is adjacent.

        A repeated task continues the count of its rollouts, so that its episodes have other seeds.

        Raises:
            DataError: there is nothing to run, an agent is unknown, or an episode is resumed twice.
        """
        for unfinished in resumed:
            self.check_agent(unfinished.spec.task, unfinished.spec.agent_name)
        if len(set(map(id, resumed))) < len(resumed):
            raise DataError("resume: an unfinished episode is given more than once, and would count twice")
        rollouts = self.count_rollouts()
        new = [
            spec
            for task in tasks
            for spec in self.task_specs(task, rollouts, global_step=global_step, validation=validation)
        ]
        if not new and not resumed:
            raise DataError("there are no tasks to run")
        return _group([*(unfinished.resumed_spec for unfinished in resumed), *new]) if resumed else new

    def count(self, validation: bool) -> int:
        """Return the number of episodes of a task."""
        return self.validation_n if validation else self.n

    def count_rollouts(self) -> defaultdict[str, Iterator[int]]:
        """Return the counts of the rollouts of each uid, for the tasks of one call."""
        # By uid and not by row: two rows with one uid are one group, and equal numbers would give equal seeds.
        return defaultdict(itertools.count)

    def task_specs(
        self,
        task: Task,
        rollouts: Mapping[str, Iterator[int]],
        rollout_n: int | None = None,
        *,
        global_step: int,
        validation: bool,
    ) -> list[EpisodeSpec]:
        """Return the specs of a task, whose numbers continue `rollouts`; with `rollout_n`, the one of this number."""
        agent_name = self._choose_agent(task)
        new = itertools.islice(rollouts[task.uid], self.count(validation) if rollout_n is None else 0)
        return [
            EpisodeSpec(
                task=task,
                agent_name=agent_name,
                rollout_n=number,
                global_step=global_step,
                validation=validation,
                seed=self.seed,
                tries=self.episode_tries,
                sampling=self.validation_sampling if validation else self.sampling,
            )
            for number in (new if rollout_n is None else (rollout_n,))
        ]

    def check_agent(self, task: Task, name: str) -> None:
        """Raise `DataError` for an unknown agent, and `PluginError` or `ConfigError` for one that cannot be built."""
        if name not in self.agents:
            known = did_you_mean(name, tuple(sorted(self.agents)))
            raise DataError(f"row {task.sample_index} (task {task.uid!r}) names the unknown agent {name!r}{known}")
        self.agents[name]  # builds it

    def pack(self, rows: Rows) -> PackedBatch:
        """Return rows as a batch without pads, with the fields of the postprocessors."""
        from turnwise.batch.packed_batch import pack_rows  # torch is only needed here

        return self.postprocessed(pack_rows(rows, pad_token_id=self.pad_token_id))

    def pad(self, rows: Rows) -> RolloutBatch:
        """Return rows as a padded batch, with the fields of the postprocessors."""
        from turnwise.batch.rollout_batch import RolloutBatch  # torch is only needed here

        widths: Widths = {"prompt_length": self.prompt_length, "response_length": self.response_length}
        if self.postprocessors:
            return RolloutBatch.from_packed(self.pack(rows), **widths)
        return RolloutBatch.from_rows(rows, pad_token_id=self.pad_token_id, **widths)

    def postprocessed(self, batch: PackedBatch) -> PackedBatch:
        """Return a batch with the fields of the postprocessors; `PluginError` names one that fails."""
        for where, postprocessor in self.postprocessors.items():
            try:
                batch = batch.with_fields(postprocessor.process(batch))
            except PluginError as error:
                raise type(error)(f"{where}: {error}") from error
            except Exception as error:
                raise PluginError(f"{where}: {describe(error)}") from error
        return batch

    def _choose_agent(self, task: Task) -> str:
        name = task.agent_name or self.default_agent
        self.check_agent(task, name)
        return name


def _group(specs: Iterable[EpisodeSpec]) -> list[EpisodeSpec]:
    """Return specs with the episodes of each group together, groups in order of appearance."""
    groups: dict[object, list[EpisodeSpec]] = {}
    for spec in specs:
        groups.setdefault(spec.group, []).append(spec)
    return [spec for group in groups.values() for spec in group]
