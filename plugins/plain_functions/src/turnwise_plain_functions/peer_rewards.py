"""
Rewards as users of verl and TRL have them, recognised by the names of their parameters.

verl (0.9, `verl/workers/reward_manager`): `compute_score(data_source, solution_str, ground_truth, extra_info)` returns
a number, or a dictionary with `score` and values to log.

TRL (1.x, argument `reward_funcs` of `GRPOTrainer`): `reward(prompts, completions, **columns)` returns a list with a
number or None for each completion.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import update_wrapper
from numbers import Real
from typing import Any, Final

from turnwise import Chat, Episode, Message
from turnwise.errors import DataError
from turnwise_plain_functions.parts import is_async

Function = Callable[..., Any]

_NO_DEFAULT: Final = inspect.Parameter.empty
_VERL: Final = ("data_source", "solution_str", "ground_truth", "extra_info")


def is_peer_reward(func: Function) -> bool:
    """Return whether a function has the parameters of a reward of verl or TRL."""
    names = _names_of(func)
    return names >= {"solution_str", "ground_truth"} or "completions" in names


def adapt_peer_reward(func: Function, chat: Chat | None) -> Function:
    """
    Return a function of an episode for a reward of verl or TRL.

    Args:
        func: sync or async; the options of the config are bound to it already.
        chat: of the run, which decodes the text that verl's rewards get.
    """
    if "completions" in _names_of(func):
        return _of_episode(func, lambda episode: _trl_arguments(episode, chat, func), _take_trl_score)
    return _of_episode(func, lambda episode: _verl_arguments(episode, chat, func), _take_verl_score)


def _names_of(func: Function) -> frozenset[str]:
    return frozenset(inspect.signature(func).parameters)


def _of_episode(
    func: Function, arguments: Callable[[Episode], Mapping[str, Any]], take: Callable[[Episode, Any], Any]
) -> Function:
    async def score_async(episode: Episode) -> Any:
        return take(episode, await func(**arguments(episode)))

    def score(episode: Episode) -> Any:
        return take(episode, func(**arguments(episode)))

    # The name is for error texts; `inspect` must see the parameter `episode`.
    adapted = update_wrapper(score_async if is_async(func) else score, func)
    del adapted.__wrapped__
    return adapted


def _verl_arguments(episode: Episode, chat: Chat | None, func: Function) -> Mapping[str, Any]:
    task = episode.task
    if task.ground_truth is None and inspect.signature(func).parameters["ground_truth"].default is _NO_DEFAULT:
        raise DataError(
            f"task {task.uid!r} (row {task.sample_index}) has no ground truth, which the reward needs; name its column"
            " in data.columns.ground_truth"
        )
    values = (task.data_source, _response_text(episode, chat), task.ground_truth, task.extra.get("extra_info") or {})
    return _accepted(func, dict(zip(_VERL, values, strict=True)))


def _accepted(func: Function, arguments: Mapping[str, object]) -> Mapping[str, Any]:
    """Return the arguments that a function has parameters for: all of them, if it takes `**kwargs`."""
    parameters = inspect.signature(func).parameters
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    return {name: value for name, value in arguments.items() if takes_all or name in parameters}


def _take_verl_score(episode: Episode, result: object) -> Any:
    """Return the score of a dictionary, and record its other numbers as metrics of the episode."""
    if not isinstance(result, Mapping):
        return result
    if "score" not in result:
        raise TypeError(f"the reward returned a dictionary without 'score'; it has {', '.join(map(str, result))}")
    for name, value in result.items():
        if name != "score" and isinstance(value, Real):
            episode.record_metric(str(name), float(value))
    return result["score"]


def _trl_arguments(episode: Episode, chat: Chat | None, func: Function) -> Mapping[str, Any]:
    task = episode.task
    columns = {**task.extra, "ground_truth": task.ground_truth, "data_source": task.data_source}
    ids = episode.trajectories[-1].response_ids.tolist() if episode.trajectories else []
    given: dict[str, object] = {
        **{name: [value] for name, value in columns.items() if value is not None},
        "prompts": [[dict(message) for message in task.messages]],
        "completions": [_completion(episode, chat)],
        "completion_ids": [ids],
    }
    return _accepted(func, given)


def _take_trl_score(_episode: Episode, result: object) -> Any:
    """Return the only score; None leaves the episode unscored."""
    if not isinstance(result, Sequence) or isinstance(result, str) or len(result) != 1:
        raise TypeError(
            f"the reward returned {result!r}; a reward with completions returns a list with one number each"
        )
    return [] if result[0] is None else result[0]


def _completion(episode: Episode, chat: Chat | None) -> list[Message]:
    """Return the messages behind the prompt; an agent that keeps none has one message with the text of the record."""
    messages, prompt = list(episode.messages), list(episode.task.messages)
    for start in range(len(messages) - len(prompt) + 1):  # an agent may have inserted a system message
        if messages[start : start + len(prompt)] == prompt and messages[start + len(prompt) :]:
            return messages[start + len(prompt) :]
    return [{"role": "assistant", "content": _response_text(episode, chat)}]


def _response_text(episode: Episode, chat: Chat | None) -> str:
    """Return the text of the last record's response, tool results included and special tokens left out, as in verl."""
    if chat is None or not episode.trajectories:
        contents = [each.get("content") for each in episode.messages if each.get("role") == "assistant"]
        return next((text for text in reversed(contents) if isinstance(text, str)), "")
    tokenizer = chat.tokenizer
    text = tokenizer.decode(episode.trajectories[-1].response_ids)
    find_spans = getattr(tokenizer, "special_spans", None)  # of tokenizers of transformers
    for start, end in reversed(find_spans(text) if find_spans else []):
        text = text[:start] + text[end:]
    return text
