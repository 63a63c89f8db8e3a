"""
The agent `environment`: turns of the model alternate with steps of an environment.

A turn is an action: its text, its calls where the environment has tools, or the whole turn where it asks for that. The
record ends with a turn of the model: the last observation is appended only if the environment continues and the model
has room for another turn.

`Episode.memory`, JSON values, holds all that a step needs:

    turns             number of turns of the model
    turn              text and calls of the last turn
    actions           all actions so far, from which a repeatable environment is made again
    reported_score    {"turns": [...]}, the reward of each turn; the core's reward `reported` returns it
    ended_by          "environment", "environment_limit", "tool" or "max_turns"
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, Final

from turnwise import Episode, Message, Resources, State, Task, ToolCall
from turnwise.errors import BudgetExhausted, ConfigError, ToolError
from turnwise.messages import UNNAMED_CALL, build_turn_message, encode_beside_loop
from turnwise.naming import name_calls
from turnwise.protocols import PictureChat
from turnwise.showing import show_result
from turnwise.types import TokenArray, ToolSchema
from turnwise_environments.config import EnvironmentConfig
from turnwise_environments.discovery import find_factory
from turnwise_environments.live import EnvironmentFailedError, LiveEnvironment
from turnwise_environments.protocol import Action, Observation, Turn
from turnwise_environments.shown import Content, join_contents, show_observation

ACTING: Final = "acting"
"""The state in which the environment takes a step."""
SCORE_KEY: Final = "reported_score"
"""The key that the reward `reported` reads."""


class EnvironmentAgent:
    """
    Plays episodes in environments.

    Args:
        config: the environment, and limits.
        resources: chat template, and optionally tools of the run and parsers.

    Raises:
        ConfigError: the run has no chat template, the environment cannot be made, or there are tools but no parser.
    """

    def __init__(self, config: EnvironmentConfig, resources: Resources) -> None:
        if resources.chat is None:
            raise ConfigError("agent 'environment' writes prompts: the run needs a model with a chat template")
        self._config, self._resources, self._chat = config, resources, resources.chat
        chat = resources.chat
        self._render = chat.picture_prompt if isinstance(chat, PictureChat) else chat.prompt
        self._append = chat.picture_delta if isinstance(chat, PictureChat) else chat.delta
        self._build = find_factory(config, resources.find_code)
        sample = self._build()
        self.resumable = bool(getattr(sample, "repeatable", False))
        self._check_parser(getattr(sample, "tools", ()) or resources.tools)
        if resources.tools and getattr(sample, "whole_turns", False):
            raise ConfigError(
                f"environment {config.environment!r} runs the calls of a turn itself: remove tools from the config"
            )
        # Weak, so that an episode which ends outside of `step` takes its environment with it.
        self._live: weakref.WeakKeyDictionary[Episode, LiveEnvironment] = weakref.WeakKeyDictionary()

    async def step(self, episode: Episode) -> State | str:
        try:
            state = await self._step(episode)
        except BudgetExhausted:
            try:
                await self._finish(episode)
            finally:
                await self._close(episode)
            raise
        except BaseException as error:
            # A cancelled episode has little time left to end.
            await self._close(episode, wait=not isinstance(error, asyncio.CancelledError))
            raise
        if state == State.TERMINATED:
            await self._close(episode)
        return state

    async def _step(self, episode: Episode) -> State | str:
        match episode.state:
            case State.PENDING:
                return await self._start(episode)
            case State.GENERATING:
                return await self._generate(episode)
            case "acting":
                return await self._act(episode)
        raise ValueError(f"environment has no state {episode.state!r}")

    async def _start(self, episode: Episode) -> State:
        live = self._new(episode)
        observation = await live.reset(episode.task, self._seed_of(episode.task))
        self._check_parser(live.tools or self._resources.tools)
        shown = show_observation(observation, self._chat, live.name)
        episode.messages[:] = self._write_prompt(episode.messages, observation, shown)
        episode.memory.update(turns=0, turn={}, actions=[])
        episode.memory[SCORE_KEY] = {"turns": []}
        encode = partial(self._render, episode.messages, (*live.tools, *self._resources.tool_schemas))
        episode.begin(await encode_beside_loop(episode.messages, encode))
        return State.GENERATING

    def _write_prompt(self, messages: Sequence[Message], observation: Observation, shown: Content) -> list[Message]:
        prompt = list(observation.messages or messages)
        if self._config.system_prompt and prompt[0].get("role") != "system":
            prompt.insert(0, {"role": "system", "content": self._config.system_prompt})
        if observation.messages or not shown:
            return prompt
        last = prompt[-1]
        if last.get("role") == "user":
            # Many chat templates refuse two messages of the user in a row.
            prompt[-1] = {**last, "content": join_contents(last["content"], shown)}
        else:
            prompt.append({"role": "user", "content": shown})
        return prompt

    async def _generate(self, episode: Episode) -> State | str:
        memory = episode.memory
        try:
            result = await episode.generate()
        finally:
            # A turn that a deadline cuts short is in the record, so it needs a reward too.
            rewards = memory[SCORE_KEY]["turns"]
            rewards += [0.0] * (len(episode.turn_records) - len(rewards))
        memory["turns"] += 1
        content, calls = await self._parse_turn(episode, result.token_ids)
        ids = name_calls(calls, memory["turns"], self._chat, episode.messages)
        reasoning = self._resources.reasoning
        episode.messages.append(build_turn_message(content, calls, ids, None if reasoning is None else reasoning.split))
        if result.finish_reason.is_cut and episode.remaining_tokens == 0:
            raise BudgetExhausted("the budget ended within the model's turn, which is no action")
        notes = [_note_call(call, call_id) for call, call_id in zip(calls, ids, strict=True)]
        memory["turn"] = {"text": self._without_reasoning(content), "calls": notes}
        return ACTING

    async def _parse_turn(self, episode: Episode, token_ids: TokenArray) -> tuple[str, tuple[ToolCall, ...]]:
        parser = self._resources.parser
        has_tools = bool(self._resources.tools or (await self._open(episode)).tools)
        return parser.parse(token_ids) if parser is not None and has_tools else (self._chat.text(token_ids), ())

    def _without_reasoning(self, content: str) -> str:
        parser = self._resources.reasoning
        return content if parser is None else parser.split(content)[1]

    async def _act(self, episode: Episode) -> State:
        memory, live = episode.memory, await self._open(episode)
        if live.whole_turns:
            messages, last = await self._say(episode, live, _read_action(memory["turn"]))
        elif memory["turn"]["calls"]:
            messages, last = await self._run_calls(episode, live, memory["turn"]["calls"])
        else:
            messages, last = await self._say(episode, live, memory["turn"]["text"])
        if last.ends:
            return _end(memory, "environment" if last.done else "environment_limit")
        if memory.get("ended_by") == "tool":
            await self._finish(episode)
            return State.TERMINATED
        if self._config.max_turns is not None and memory["turns"] >= self._config.max_turns:
            await self._finish(episode)
            episode.note_limit("max_turns", self._config.max_turns)
            return _end(memory, "max_turns")
        # `observe` raises when there is no room, before the messages are changed.
        has_tools = bool(live.tools or self._resources.tool_schemas)
        last_token_id = int(episode.trajectory.input_ids[-1])
        encode = partial(self._append, messages, last_token_id, with_tools=has_tools)
        episode.observe(await encode_beside_loop(messages, encode))
        episode.messages.extend(messages)
        return State.GENERATING

    async def _finish(self, episode: Episode) -> None:
        """End an episode that its environment did not end."""
        live, rewards = self._live.get(episode), episode.memory.get(SCORE_KEY, {"turns": []})["turns"]
        if live is not None and rewards:
            observation = await live.finish()
            rewards[-1] += observation.reward
            _record_metrics(episode, observation)

    async def _say(
        self, episode: Episode, live: LiveEnvironment, action: Action | Turn
    ) -> tuple[Sequence[Message], Observation]:
        observation = await self._apply(episode, live, action)
        if observation.ends:  # which the model does not see
            return (), observation
        shown = show_observation(observation, self._chat, live.name)
        return observation.messages or ({"role": "user", "content": shown},), observation

    async def _run_calls(
        self, episode: Episode, live: LiveEnvironment, calls: Sequence[Mapping[str, object]]
    ) -> tuple[Sequence[Message], Observation]:
        """Run the calls in order, up to one that ends the environment or the episode."""
        messages: list[Message] = []
        observation = Observation()
        shown: Content
        names = {schema["function"]["name"] for schema in live.tools}
        for noted in calls:
            call = _read_call(noted)
            answers: Sequence[Message] = ()
            if call.name in names:
                observation = await self._call_environment(episode, live, call)
                if observation.ends:
                    break
                shown, answers = show_observation(observation, self._chat, live.name), observation.messages
            elif call.error or call.name in self._resources.tools:
                result = await episode.call_tool(call)
                if result.ends_episode:
                    _end(episode.memory, "tool")
                    break
                shown = show_result(result, self._chat, call.name or UNNAMED_CALL)
            else:
                known = ", ".join([*names, *self._resources.tools]) or "none"
                shown = f"Error: there is no tool {call.name[:64]!r}; the tools are: {known}"
            name = call.name or UNNAMED_CALL
            messages += answers or [{"role": "tool", "tool_call_id": noted["id"], "name": name, "content": shown}]
        return messages, observation

    async def _call_environment(self, episode: Episode, live: LiveEnvironment, call: ToolCall) -> Observation:
        complaint = call.error or live.complaint(call.name, call.arguments)
        return Observation(text=complaint) if complaint else await self._apply(episode, live, call)

    async def _apply(self, episode: Episode, live: LiveEnvironment, action: Action | Turn) -> Observation:
        """Take a step of the environment, and note its reward."""
        memory = episode.memory
        try:
            observation = await live.step(action)
        except ToolError as error:
            observation = Observation(text=str(error))
        memory["actions"].append(_note_action(action))
        memory[SCORE_KEY]["turns"][-1] += observation.reward
        episode.record_metric("environment/steps", 1)
        _record_metrics(episode, observation)
        return observation

    # Environments of episodes

    def _new(self, episode: Episode) -> LiveEnvironment:
        live = LiveEnvironment(self._config.environment, self._config, self._build)
        self._live[episode] = live
        weakref.finalize(episode, live.abandon).atexit = False
        return live

    async def _open(self, episode: Episode) -> LiveEnvironment:
        """Return the environment of an episode; after a resume it is made again from its seed and its actions."""
        live = self._live.get(episode)
        if live is not None:
            return live
        live, rewards = self._new(episode), 0.0
        await live.reset(episode.task, self._seed_of(episode.task))
        for noted in episode.memory["actions"]:
            try:
                rewards += (await live.step(_read_action(noted))).reward
            except ToolError:  # as before
                continue
        if abs(rewards - sum(episode.memory[SCORE_KEY]["turns"])) > 1e-6 * max(1.0, abs(rewards)):
            raise EnvironmentFailedError(f"environment {live.name!r} gave other rewards when it was repeated")
        return live

    async def _close(self, episode: Episode, *, wait: bool = True) -> None:
        live = self._live.pop(episode, None)
        if live is not None:
            await live.close(wait=wait)

    def _seed_of(self, task: Task) -> int:
        """Return the seed of a task, which the episodes of its group share."""
        given = task.extra.get("seed")
        if isinstance(given, int) and not isinstance(given, bool) and 0 <= given < 2**31:
            return given
        key = f"{self._resources.seed}/{task.uid}".encode()
        return int.from_bytes(blake2b(key, digest_size=4).digest()) >> 1

    def _check_parser(self, tools: Sequence[ToolSchema] | Mapping[str, object]) -> None:
        if tools and self._resources.parser is None:
            raise ConfigError("agent 'environment' cannot find tool calls: set parser in the config, such as 'hermes'")


def _end(memory: dict[str, Any], why: str) -> State:
    memory["ended_by"] = why
    return State.TERMINATED


def _record_metrics(episode: Episode, observation: Observation) -> None:
    for name, value in observation.metrics.items():
        episode.record_metric(f"environment/{name}", value)


def _note_action(action: Action | Turn) -> str | dict[str, Any]:
    """Return an action as JSON values; `_read_action` is the inverse."""
    if isinstance(action, Turn):
        return {
            "text": action.text,
            "calls": [_note_call(call, call_id) for call, call_id in zip(action.calls, action.ids, strict=True)],
        }
    return action if isinstance(action, str) else _note_call(action)


def _read_action(noted: str | Mapping[str, Any]) -> Action | Turn:
    if isinstance(noted, str):
        return noted
    if "calls" in noted:
        calls = tuple(_read_call(call) for call in noted["calls"])
        return Turn(text=noted["text"], calls=calls, ids=tuple(call["id"] for call in noted["calls"]))
    return _read_call(noted)


def _read_call(noted: Mapping[str, Any]) -> ToolCall:
    return ToolCall(
        name=noted["name"],
        arguments=noted["arguments"],
        error=noted["error"],
        raw=noted["raw"],
        id=noted.get("sampled_id"),
    )


def _note_call(call: ToolCall, call_id: str = "") -> dict[str, Any]:
    """Return a call as JSON values, for the agent's notes."""
    notes = {"name": call.name, "arguments": dict(call.arguments), "error": call.error, "raw": call.raw}
    return {"id": call_id, "sampled_id": call.id, **notes} if call_id else {"sampled_id": call.id, **notes}
