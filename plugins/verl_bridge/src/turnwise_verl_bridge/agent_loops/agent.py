"""The agent `verl`: one step runs an agent loop of verl from the task to its output."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from itertools import pairwise
from numbers import Real
from typing import Any, Final

import numpy as np

from turnwise import Chat, Episode, Resources, State, Task, Trajectory
from turnwise.errors import ConfigError
from turnwise.record.columns import is_sampled
from turnwise_verl_bridge.agent_loops.classes import find_loop, make_loop, make_worker_arguments
from turnwise_verl_bridge.agent_loops.records import LoopOutput, LoopRecords
from turnwise_verl_bridge.agent_loops.server import EpisodeServer, TokenList, to_verl_params
from turnwise_verl_bridge.class_files import accepted
from turnwise_verl_bridge.config import VerlAgentConfig

_SCORE: Final = "reported_score"
"""Key of `Episode.memory` that the reward `reported` reads."""


class VerlLoopAgent:
    """
    Runs a class with verl's `run(sampling_params, **columns)`, or with `run(messages, sampling_params)` of verl 0.5.

    A loop has no states to continue from, so an interrupted episode starts again from its task.

    Args:
        config: the class and its options.
        resources: model and lengths of the run.

    Raises:
        ConfigError: as in `find_loop` and `make_worker_arguments`.
    """

    resumable = False

    def __init__(self, config: VerlAgentConfig, resources: Resources) -> None:
        if resources.chat is None:
            raise ConfigError("agent 'verl' needs a model with a tokenizer: set model.path")
        self._loop = find_loop(config)
        self._arguments = make_worker_arguments(config, resources)
        self._chat = resources.chat

    async def step(self, episode: Episode) -> State:
        records = LoopRecords(episode)
        # A loop of verl 0.5 takes the messages, and gets plain ids.
        is_old = "messages" in inspect.signature(self._loop.found.run).parameters
        server = EpisodeServer(records, TokenList if is_old else self._arguments.make_output)
        loop = make_loop(self._loop, self._arguments, server)
        given = {**columns_of(episode), "sampling_params": to_verl_params(episode.sampling)}
        try:
            outputs = _as_list(await loop.run(**accepted(loop.run, given)))
        except BaseException:
            records.keep_samples()
            raise
        records.finish([LoopOutput(each.prompt_ids, each.response_ids, each.response_mask) for each in outputs])
        _note_score(episode, outputs)
        if trained := _last_trained(episode):
            episode.messages.extend(_read_messages(trained, self._chat))
        return State.TERMINATED


def columns_of(episode: Episode) -> dict[str, Any]:
    """Return the columns of a task's row as verl's data set has them; `messages` is the prompt for verl 0.5."""
    task: Task = episode.task
    extra_info = task.extra.get("extra_info")
    own = {
        "raw_prompt": [dict(message) for message in task.messages],
        "messages": [dict(message) for message in task.messages],
        "data_source": task.data_source,
        "agent_name": task.agent_name,
        "reward_model": {"style": "rule", "ground_truth": task.ground_truth},
        "index": task.sample_index,
        "uid": task.uid,
        "global_steps": episode.global_step,
    }
    nested = extra_info if isinstance(extra_info, Mapping) else {}
    shared = {name: nested.get(name, {}) for name in ("tools_kwargs", "interaction_kwargs")}
    return {"extra_info": dict(nested), **shared, **task.extra, **own}


def _as_list(output: object) -> list[Any]:
    outputs = list(output) if isinstance(output, list | tuple) else [output]
    names = ("prompt_ids", "response_ids", "response_mask")
    for each in outputs:
        if missing := [name for name in names if not isinstance(getattr(each, name, None), Sequence)]:
            raise TypeError(f"run returned {type(each).__name__}, expected an AgentLoopOutput: it has no {missing[0]}")
    if not outputs:
        raise TypeError("run returned an empty list, expected at least one AgentLoopOutput")
    return outputs


def _note_score(episode: Episode, outputs: Sequence[Any]) -> None:
    """Keep the last output's score for the reward `reported`, and its numbers as metrics of the episode."""
    last = outputs[-1]
    if getattr(last, "reward_score", None) is not None:
        episode.memory[_SCORE] = float(last.reward_score)
    extra = getattr(last, "extra_fields", None) or {}
    for name, value in (extra.get("reward_extra_info") or {}).items():
        if isinstance(value, Real):
            episode.record_metric(str(name), float(value))


def _last_trained(episode: Episode) -> Trajectory | None:
    lineage = episode.lineage
    records = [each for number, each in enumerate(episode.trajectories) if not lineage or lineage[number].trained]
    return records[-1] if records else None


def _read_messages(record: Trajectory, chat: Chat) -> list[dict[str, Any]]:
    """Return the turns of the model, and the texts between them, which the loop has encoded, as user messages."""
    sampled = is_sampled(record.origins)
    edges = [0, *(np.flatnonzero(sampled[1:] != sampled[:-1]) + 1).tolist(), len(sampled)]
    messages = []
    for start, stop in pairwise(edges):
        ids = record.response_ids[start:stop]
        if not len(ids):
            continue
        if sampled[start]:
            messages.append({"role": "assistant", "content": chat.text(ids)})
        else:
            messages.append({"role": "user", "content": chat.tokenizer.decode(ids)})
    return messages
