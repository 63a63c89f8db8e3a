"""
Rollouts in the form of TRL: rows of ids, masks and log-probabilities, one for each prompt that a trainer asks for.

The record of an episode is the only source: nothing is decoded and tokenised again, so what TRL trains is what was
sampled. An episode that failed, or that was cut before its first token, still has a row, with no token in its loss and
no reward: a trainer that asks for N completions gets N.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
from attrs import define, field

from turnwise import EpisodeResult, RolloutBatch, RolloutManager, Task, Trajectory, manager_of
from turnwise.errors import ConfigError, DataError

if TYPE_CHECKING:
    from datasets import Dataset

UID = "turnwise_uid"
"""Column of the data set that names a row's task."""
REWARD = "turnwise_reward"
"""Key under which a row's reward reaches TRL's reward functions; None when the episode was not scored."""


def dataset_of(tasks: Iterable[Task]) -> Dataset:
    """Return the data set that a TRL trainer goes through: a column `prompt` of messages, and one with the uid."""
    from datasets import Dataset

    return Dataset.from_list([{"prompt": [dict(m) for m in task.messages], UID: task.uid} for task in tasks])


def turnwise_reward(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """Return what turnwise's reward gave: the reward function for TRL's trainer."""
    found = columns.get(REWARD)
    return list(found) if found is not None else [None] * len(completions)


@define(eq=False)
class Rollouts:
    """
    Runs the tasks that a TRL trainer asks for. It is itself a `rollout_func` of `trl.GRPOTrainer`.

    Attributes:
        manager: running; every task that it is given is one episode.
        tasks: by uid.
    """

    manager: RolloutManager
    tasks: Mapping[str, Task]
    _by_prompt: dict[str, str] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        """Note which prompt belongs to which task, for trainers that tell only the prompt."""
        for uid, task in self.tasks.items():
            key = _prompt_key(task.messages)
            self._by_prompt[key] = "" if key in self._by_prompt else uid

    @classmethod
    def of(cls, config: Any, tasks: Iterable[Task]) -> Rollouts:
        """
        Build the manager of a run's config, whose `rollout.n` the trainer takes over; start it with `manager.start()`.

        Raises:
            ConfigError: log-probabilities would not be those that TRL computes: top-k or top-p is set.
        """
        sampling = config.rollout.sampling
        if sampling.top_p != 1.0 or sampling.top_k != -1:
            raise ConfigError(
                "rollout.sampling: TRL computes log-probabilities of the whole vocabulary, so top_p must be 1.0 and"
                f" top_k -1, got top_p={sampling.top_p:g} and top_k={sampling.top_k}"
            )
        one_each = attrs.evolve(config, rollout=attrs.evolve(config.rollout, n=1, validation_n=1))
        return cls(manager_of(one_each), {task.uid: task for task in tasks})

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """Run one episode for each prompt, on the main process, and return this process's share as TRL wants it."""
        from accelerate.utils import broadcast_object_list, gather_object

        uids = getattr(trainer, "turnwise_uids", None) or [self.uid_of(prompt) for prompt in prompts]
        asked = gather_object(list(uids))
        rows: list[Any] = [None]
        if trainer.accelerator.is_main_process:
            rows = [self.rows(asked, global_step=trainer.state.global_step, validation=not trainer.model.training)]
        broadcast_object_list(rows)
        first = trainer.accelerator.process_index * len(prompts)
        return {name: values[first : first + len(prompts)] for name, values in rows[0].items()}

    def uid_of(self, prompt: Sequence[Any] | str) -> str:
        """Return the uid of the task with this prompt; `DataError` when there is none or more than one."""
        messages: Sequence[Any] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        uid = self._by_prompt.get(_prompt_key(messages))
        if uid is None:
            raise DataError(f"no task has the prompt {messages!r}: make the trainer's data set with dataset_of(tasks)")
        if not uid:
            raise DataError(f"several tasks have the prompt {messages!r}: use TurnwiseGRPOTrainer, which goes by uid")
        return uid

    def rows(self, uids: Sequence[str], *, global_step: int, validation: bool = False) -> dict[str, list[Any]]:
        """
        Run one episode for each uid; a uid that stands n times is a group of n.

        Returns:
            Lists of one item a row: `prompt_ids`, `completion_ids`, `env_mask` (1 on what the policy sampled and may
            be trained), `logprobs`, the reward, and `position_ids`, `block_start` and `path_start` of the whole row,
            without padding.
        """
        missing = [uid for uid in uids if uid not in self.tasks]
        if missing:
            raise DataError(f"no task has the uid {missing[0]!r}")
        tasks = [self.tasks[uid] for uid in uids]
        results = self.manager.rollout(tasks, global_step=global_step, validation=validation)
        if len(results) != len(tasks):
            raise DataError("data.prompt_policy drop leaves prompts without completions, which TRL cannot train on")
        return rows_of(self.manager.collate([self._with_one_row(result) for result in results]))

    def _with_one_row(self, result: EpisodeResult) -> EpisodeResult:
        """Return an episode that fills exactly one row."""
        if len(result.trajectories) > 1:
            raise ConfigError(
                f"agent {result.agent_name!r} made {len(result.trajectories)} trajectories of one episode: TRL's"
                " GRPOTrainer takes one row for each completion; use the AsyncGRPOTrainer"
            )
        if result.trajectories and result.trajectories[0].num_response_tokens:
            return result
        return attrs.evolve(result, trajectories=(self._blank(result),), scores=())

    def _blank(self, result: EpisodeResult) -> Trajectory:
        """Return the prompt and one forced token: TRL looks at the last token of every completion."""
        chat = self.manager.chat
        if chat is None:
            raise ConfigError("TRL needs a tokenizer: set model.path")
        prompt_ids = result.trajectories[0].prompt_ids if result.trajectories else chat.prompt(result.task.messages)
        trajectory = Trajectory(prompt_ids)
        end = chat.tokenizer.eos_token_id
        trajectory.add_forced(np.asarray([0 if end is None else end], np.int32))
        return trajectory


def rows_of(batch: RolloutBatch) -> dict[str, list[Any]]:
    """Return a batch as lists without padding, by the names that TRL gives them."""
    real = batch.attention_mask.bool()
    in_prompt, in_response = real[:, : batch.prompt_length], real[:, batch.prompt_length :]
    starts = batch.prompt_length - batch.prompt_lens
    rewards = batch.rm_scores.sum(1).tolist()

    def lists(values: Any, mask: Any) -> list[list[Any]]:
        return [row[kept].tolist() for row, kept in zip(values, mask, strict=True)]

    def unpadded(values: Any) -> list[list[int]]:
        """Layout indices count columns; without the padding on the left they are less by its width."""
        return lists((values - starts[:, None]).clamp(min=0), real)

    return {
        "prompt_ids": lists(batch.prompts, in_prompt),
        "completion_ids": lists(batch.responses, in_response),
        "env_mask": lists(batch.loss_mask, in_response),
        "logprobs": lists(batch.rollout_log_probs, in_response),
        REWARD: [reward if scored else None for reward, scored in zip(rewards, batch.scored.tolist(), strict=True)],
        "position_ids": lists(batch.position_ids, real),
        "block_start": unpadded(batch.block_start),
        "path_start": unpadded(batch.path_start),
    }


def _prompt_key(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a text that equal prompts share, also after a data set filled missing keys with None."""
    told = [{key: value for key, value in message.items() if value is not None} for message in messages]
    return json.dumps(told, sort_keys=True, ensure_ascii=False)
