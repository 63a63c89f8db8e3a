"""
Rollouts for TRL: one row of ids, masks and log-probabilities for each prompt of a trainer.

Rows come from the token records. Text is never tokenized again, so TRL trains on exactly the sampled tokens. An episode
that failed or has no response token still has a row, with no token in the loss: a trainer that requests N completions
receives N. The row of a failed or unscored episode has no reward. A score without a response token counts in the group.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
from attrs import define, field

from turnwise import Chat, EpisodeResult, Message, RolloutBatch, RolloutManager, Task, Trajectory, TrajectoryScore
from turnwise.errors import ConfigError, DataError
from turnwise.media import MediaTokens, is_picture_part
from turnwise.protocols import PictureChat
from turnwise.record.pictures import cut_out
from turnwise.types import Placement, TokenArray
from turnwise_result_files.messages import shows_picture

if TYPE_CHECKING:
    from datasets import Dataset

UID = "turnwise_uid"
"""Column of the data set with the uid of a row's task."""
REWARD = "turnwise_reward"
"""Key of a row's reward for TRL's reward functions; the reward is None for an episode without a score."""
PICTURES = "turnwise_pictures"
"""Key of a row's pictures, with their places among its own tokens; rows without any are without it."""


def build_dataset(tasks: Iterable[Task]) -> Dataset:
    """
    Build a trainer's data set, with the messages in the column `prompt` and the uid in `turnwise_uid`.

    If a task has pictures, contents are texts with `<picture>` in the place of each: the episodes show the task itself.
    """
    from datasets import Dataset

    tasks = list(tasks)
    prompts = [[dict(message) for message in task.messages] for task in tasks]
    if any(map(shows_picture, (message for prompt in prompts for message in prompt))):
        prompts = [[_as_text(message) for message in prompt] for prompt in prompts]
    return Dataset.from_list([{"prompt": prompt, UID: task.uid} for prompt, task in zip(prompts, tasks, strict=True)])


def _as_text(message: Message) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return dict(message)
    texts = ["<picture>" if is_picture_part(part) else str(part.get("text", "")) for part in content]
    return {**message, "content": "".join(texts)}


def turnwise_reward(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """Return turnwise's rewards: a reward function for TRL's trainer."""
    rewards = columns.get(REWARD)
    return list(rewards) if rewards is not None else [None] * len(completions)


@define(eq=False)
class Rollouts:
    """
    Runs episodes for a TRL trainer; an instance is a `rollout_func` of `trl.GRPOTrainer`.

    Attributes:
        manager: a running manager that runs one episode per task.
        tasks: tasks by uid.
        model: directory of the model that the run starts with; `TurnwiseGRPOTrainer` needs it for pictures.
    """

    manager: RolloutManager
    tasks: Mapping[str, Task]
    model: Path | None = None
    _by_prompt: dict[str, str] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        """Index tasks by prompt, for trainers that pass only the prompt."""
        for uid, task in self.tasks.items():
            key = _prompt_key(task.messages)
            self._by_prompt[key] = "" if key in self._by_prompt else uid

    @classmethod
    def from_config(cls, config: Any, tasks: Iterable[Task]) -> Rollouts:
        """
        Build the manager of a run's config; start it with `manager.start()`.

        The trainer forms the groups, so the manager runs one episode per task whatever `rollout.n` is.

        Raises:
            ConfigError: top-k, top-p or an option of the engine is set, so TRL's log-probabilities would differ from
                the sampled ones.
        """
        sampling = config.rollout.sampling
        if sampling.top_p != 1.0 or sampling.top_k != -1:
            raise ConfigError(
                f"rollout.sampling has top_p={sampling.top_p:g} and top_k={sampling.top_k}: set top_p=1.0 and top_k=-1,"
                " because TRL computes log-probabilities over the full vocabulary"
            )
        if sampling.extra:
            raise ConfigError(
                f"rollout.sampling.extra has {min(sampling.extra)}: remove it, because TRL computes log-probabilities"
                " of the model's own distribution"
            )
        one_each = attrs.evolve(config, rollout=attrs.evolve(config.rollout, n=1, validation_n=1))
        model = None if config.model.path is None else config.model_spec().path
        return cls(RolloutManager.from_config(one_each), {task.uid: task for task in tasks}, model)

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """Run one episode per prompt of all processes, on the main process; return this process's rows."""
        from accelerate.utils import broadcast_object_list, gather_object

        uids = getattr(trainer, "turnwise_uids", None) or [self.find_uid(prompt) for prompt in prompts]
        all_uids = gather_object(list(uids))
        rows: list[Any] = [None]
        if trainer.accelerator.is_main_process:
            rows = [self.run(all_uids, global_step=trainer.state.global_step, validation=not trainer.model.training)]
        broadcast_object_list(rows)
        if PICTURES in rows[0] and not getattr(trainer, "takes_pictures", False):
            raise ConfigError(
                "the rows have pictures, and TRL's rollout_func has no place for them: use TurnwiseGRPOTrainer with"
                " Qwen2.5-VL or Qwen3-VL"
            )
        first = trainer.accelerator.process_index * len(prompts)
        return {name: values[first : first + len(prompts)] for name, values in rows[0].items()}

    def find_uid(self, prompt: Sequence[object] | str) -> str:
        """Return the uid of the task with this prompt; raise `DataError` for none or more than one."""
        messages: Sequence[Any] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        uid = self._by_prompt.get(_prompt_key(messages))
        if uid is None:
            raise DataError(f"no task has the prompt {messages!r}: build the data set with build_dataset(tasks)")
        if not uid:
            raise DataError(f"several tasks have the prompt {messages!r}: use TurnwiseGRPOTrainer, which uses uids")
        return uid

    def run(self, uids: Sequence[str], *, global_step: int, validation: bool = False) -> dict[str, list[Any]]:
        """
        Run one episode per uid; n copies of a uid are a group of n.

        Returns:
            Lists with one item per row, without padding: `prompt_ids`, `completion_ids`, `env_mask` (1 on trainable
            sampled tokens), `logprobs`, the reward, and `position_ids`, `block_start` and `path_start` of the full row.
            If any row has pictures, also `turnwise_pictures`.
        """
        missing = [uid for uid in uids if uid not in self.tasks]
        if missing:
            raise DataError(f"no task has the uid {missing[0]!r}")
        tasks = [self.tasks[uid] for uid in uids]
        results = self.manager.rollout(tasks, global_step=global_step, validation=validation)
        if len(results) != len(tasks):
            raise DataError("data.prompt_policy is drop, but TRL needs a completion per prompt: choose another policy")
        batch = self.manager.collate([self._ensure_one_row(result) for result in results])
        if len(batch) != len(results):
            raise ConfigError("the engine accepts no layouts, so parallel paths are several rows, but TRL expects one")
        pictures = batch.column("pictures")
        return to_rows(batch) | ({PICTURES: list(pictures)} if any(pictures) else {})

    def _ensure_one_row(self, result: EpisodeResult) -> EpisodeResult:
        """Return the episode with exactly one trajectory to train, which has a response."""
        trained = list(compress(result.trajectories, result.trained))
        if len(trained) > 1:
            raise ConfigError(
                f"agent {result.agent_name!r} made {len(trained)} trajectories in one episode, but TRL's"
                " GRPOTrainer expects 1: use the AsyncGRPOTrainer"
            )
        if trained and trained[0].num_response_tokens:
            return result
        scores = () if result.reward is None else (TrajectoryScore(value=result.reward, at=Placement.LAST_TOKEN),)
        return attrs.evolve(result, trajectories=(self._build_placeholder(result),), scores=scores, lineage=())

    def _build_placeholder(self, result: EpisodeResult) -> Trajectory:
        """Return the prompt and one forced token: TRL reads the last token of every completion."""
        chat = self.manager.chat
        if chat is None:
            raise ConfigError("model.path is not set: TRL needs its tokenizer")
        trajectory = Trajectory(_prompt_of(result, chat))
        end = chat.tokenizer.eos_token_id
        trajectory.add_forced(np.asarray([0 if end is None else end], np.int32))
        return trajectory


def _prompt_of(result: EpisodeResult, chat: Chat) -> TokenArray | MediaTokens:
    """Return the prompt of an episode; of its messages, if it has ended before."""
    if result.trajectories:
        record = result.trajectories[0]
        return cut_out(record, 0, record.num_prompt_tokens)
    render = chat.picture_prompt if isinstance(chat, PictureChat) else chat.prompt
    return render(result.task.messages)


def to_rows(batch: RolloutBatch) -> dict[str, list[Any]]:
    """
    Return a batch as lists without padding, under TRL's names, and its fields under their own.

    Raises:
        ConfigError: a field has a name of TRL's.
    """
    real = batch.attention_mask.bool()
    in_prompt, in_response = real[:, : batch.prompt_length], real[:, batch.prompt_length :]
    starts = batch.prompt_length - batch.prompt_lens
    rewards = batch.episode_rewards.tolist()

    def lists(values: Any, mask: Any) -> list[list[Any]]:
        return [row[kept].tolist() for row, kept in zip(values, mask, strict=True)]

    def unpadded(values: Any) -> list[list[int]]:
        # Layout indices are column indices, so removing the padding on the left shifts them.
        return lists((values - starts[:, None]).clamp(min=0), real)

    own: dict[str, list[Any]] = {
        "prompt_ids": lists(batch.prompts, in_prompt),
        "completion_ids": lists(batch.responses, in_response),
        "env_mask": lists(batch.loss_mask, in_response),
        "logprobs": lists(batch.rollout_log_probs, in_response),
        REWARD: [reward if scored else None for reward, scored in zip(rewards, batch.scored.tolist(), strict=True)],
        "position_ids": lists(batch.position_ids, real),
        "block_start": unpadded(batch.block_start),
        "path_start": unpadded(batch.path_start),
    }
    if taken := sorted(own.keys() & batch.fields.keys()):
        raise ConfigError(f"the column or field {taken[0]!r} has a name of the rows for TRL: choose another")
    return own | {
        name: field.tolist() if field.ndim == 1 else lists(field, _places(field, real, in_response))
        for name, field in batch.fields.items()
    }


def _places(field: Any, real: Any, in_response: Any) -> Any:
    """Return the mask of the real tokens that a field has values for: of responses, or of all."""
    return in_response if field.shape[:2] == in_response.shape else real


def _prompt_key(messages: Sequence[Mapping[str, object]]) -> str:
    """Return a key that is equal for equal prompts; data sets fill missing keys with None, so it ignores these."""
    present = [{key: value for key, value in message.items() if value is not None} for message in messages]
    return json.dumps(present, sort_keys=True, ensure_ascii=False)
