"""
The agent `tool_agent`: turns of the model alternate with responses of tools or replies of the simulated user.

The model has the last turn: a response is appended only if the model has room for another turn. A checkpoint needs the
record and `Episode.memory`, which holds JSON values:

    assistant_turns, user_turns     counts so far
    tool_rewards, turn_rewards      rewards of tool calls, and of turns of the simulated user
    calls                           calls of the last turn that have no response yet
    ended_by                        "answer", "interaction", "max_assistant_turns" or "max_user_turns"
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from turnwise import Episode, Message, Resources, State, Task, ToolCall, ToolResult
from turnwise.errors import BudgetExhausted, ConfigError, TemplateError
from turnwise.messages import UNNAMED_CALL, build_turn_message, encode_beside_loop, name_call
from turnwise.naming import name_calls
from turnwise.types import TokenArray
from turnwise_tool_agent.config import ToolAgentConfig
from turnwise_tool_agent.truncation import truncate

MAX_RESPONSES: Final = 32
"""Most tool messages of one turn; the last of them covers all remaining calls."""


class ToolAgent:
    """
    Runs turns with tools and a simulated user. It keeps no state, so one agent serves concurrent episodes.

    Args:
        config: limits, and truncation of responses.
        resources: chat template, tools with their parser, and optionally a simulated user.

    Raises:
        ConfigError: the run has no chat template, or tools but no parser; or the template cannot append results of
            tools or replies of the user.
    """

    def __init__(self, config: ToolAgentConfig, resources: Resources) -> None:
        if resources.chat is None:
            raise ConfigError("agent 'tool_agent' writes prompts: the run needs a model with a chat template")
        if resources.tools and resources.parser is None:
            raise ConfigError("agent 'tool_agent' cannot find tool calls: set parser in the config, such as 'hermes'")
        self._config = config
        self._chat = resources.chat
        self._parser = resources.parser
        self._split = None if resources.reasoning is None else resources.reasoning.split
        self._schemas = resources.tool_schemas
        self._shown = () if config.tools_in_prompt else self._schemas
        self._has_user = resources.interaction is not None
        self._check_tools()
        if config.max_assistant_turns != 1:
            self._check_template()

    def _check_tools(self) -> None:
        """Raise `ConfigError` if the template shows no tools: the model would never call one."""
        if not self._shown:
            return
        try:
            self._chat.prompt([{"role": "user", "content": "?"}], self._shown)
        except TemplateError as error:
            hint = "or name a template in model.chat_template, or set tools_in_prompt if the tasks describe the tools"
            raise ConfigError(f"agent 'tool_agent': {error}; {hint}") from error

    def _check_template(self) -> None:
        """Raise `ConfigError` for messages that the template cannot append, before every episode fails by them."""
        messages: list[Message] = []
        if self._schemas:
            messages.append({"role": "tool", "tool_call_id": name_call(1, 0), "name": "tool", "content": ""})
        if self._has_user:
            messages.append({"role": "user", "content": ""})
        try:
            for message in messages:
                self._delta([message], self._chat.stop_token_ids[0])
        except TemplateError as error:
            raise ConfigError(f"agent 'tool_agent': {error}") from error

    def _delta(self, messages: Sequence[Message], last_token_id: int) -> TokenArray:
        return self._chat.delta(messages, last_token_id, with_tools=bool(self._schemas))

    async def step(self, episode: Episode) -> State:
        match episode.state:
            case State.PENDING:
                return await self._start(episode)
            case State.GENERATING:
                return await self._generate(episode)
            case State.PROCESSING_TOOLS:
                return await self._process_tools(episode)
            case State.INTERACTING:
                return await self._interact(episode)
        raise ValueError(f"tool_agent has no state {episode.state!r}")

    async def _start(self, episode: Episode) -> State:
        messages = episode.messages
        self._add_system_prompt(messages)
        episode.memory.update(assistant_turns=0, user_turns=0, tool_rewards=[], turn_rewards=[], calls=[])
        episode.begin(await encode_beside_loop(messages, partial(self._chat.prompt, messages, self._shown)))
        return State.GENERATING

    def first_prompt(self, task: Task) -> TokenArray:
        """Return the prompt that `step` begins with; see `turnwise.protocols.PromptingAgent`."""
        messages = list(task.messages)
        self._add_system_prompt(messages)
        return self._chat.prompt(messages, self._shown)

    def _add_system_prompt(self, messages: list[Message]) -> None:
        system_prompt = self._config.system_prompt
        if system_prompt and messages[0].get("role") != "system":
            messages.insert(0, {"role": "system", "content": system_prompt})

    async def _generate(self, episode: Episode) -> State:
        result = await episode.generate()
        memory = episode.memory
        memory["assistant_turns"] += 1
        content, calls = self._parse_turn(result.token_ids)
        ids = name_calls(calls, memory["assistant_turns"], self._chat, episode.messages)
        memory["calls"] = [_to_notes(call, call_id) for call, call_id in zip(calls, ids, strict=True)]
        episode.messages.append(build_turn_message(content, calls, ids, self._split))
        return self._next_state(episode)

    def _parse_turn(self, token_ids: TokenArray) -> tuple[str, tuple[ToolCall, ...]]:
        return (self._chat.text(token_ids), ()) if self._parser is None else self._parser.parse(token_ids)

    def _next_state(self, episode: Episode) -> State:
        """Decide after a turn whether tools run, the user replies, or the episode ends."""
        memory, config = episode.memory, self._config
        if not memory["calls"] and not self._has_user:
            return _end(memory, "answer")
        if config.max_assistant_turns is not None and memory["assistant_turns"] >= config.max_assistant_turns:
            return _end_at_limit(episode, "max_assistant_turns", config.max_assistant_turns)
        if config.max_user_turns is not None and memory["user_turns"] >= config.max_user_turns:
            return _end_at_limit(episode, "max_user_turns", config.max_user_turns)
        if episode.remaining_tokens == 0:
            # A tool has side effects, so it must not run when the model could not read its response.
            raise BudgetExhausted("no token is left for a response to the model's turn")
        return State.PROCESSING_TOOLS if memory["calls"] else State.INTERACTING

    async def _process_tools(self, episode: Episode) -> State:
        calls = episode.memory["calls"]
        if len(calls) > self._config.max_parallel_calls:
            episode.record_metric("max_parallel_calls_hit", 1)
        results = await self._run(episode, [self._limited_call(call, index) for index, call in enumerate(calls)])
        episode.memory["tool_rewards"] += [result.reward for result in results if result.reward is not None]
        shown = self._limit_responses(results)
        messages = [self._tool_message(call, result) for call, result in zip(calls, shown, strict=False)]
        return await self._continue(episode, messages)

    def _limited_call(self, call: Mapping[str, Any], index: int) -> ToolCall:
        limit = self._config.max_parallel_calls
        error = call["error"]
        if index >= limit and not error:
            error = f"Error: this call was not run: {_too_many(limit)}"
        sampled = call.get("sampled_id")
        return ToolCall(name=call["name"], arguments=call["arguments"], error=error, raw=call["raw"], id=sampled)

    async def _run(self, episode: Episode, calls: Sequence[ToolCall]) -> list[ToolResult]:
        if len(calls) == 1:
            return [await episode.call_tool(calls[0])]
        # At most max_parallel_calls of them reach a tool. The others carry an error, which is returned at once.
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(episode.call_tool(call)) for call in calls]
        return [task.result() for task in tasks]

    def _tool_message(self, call: Mapping[str, Any], result: ToolResult) -> Message:
        config = self._config
        text = truncate(result.text, config.max_tool_response_length, config.tool_response_truncate_side)
        name = call["name"] or UNNAMED_CALL
        return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": text}

    def _limit_responses(self, results: list[ToolResult]) -> list[ToolResult]:
        # A model that repeats itself may write thousands of calls. The chat template is verified once for each number
        # of messages, and thousands of messages would exhaust the budget.
        most = max(MAX_RESPONSES, self._config.max_parallel_calls + 1)
        if len(results) <= most:
            return results
        text = f"Error: this call and all after it were not run: {_too_many(self._config.max_parallel_calls)}"
        return [*results[: most - 1], ToolResult(text=text, error=True)]

    async def _interact(self, episode: Episode) -> State:
        reply = await episode.interact()
        if reply.reward is not None:
            episode.memory["turn_rewards"].append(reply.reward)
        if reply.should_terminate:
            return _end(episode.memory, "interaction")
        return await self._continue(episode, [{"role": "user", "content": reply.content}])

    async def _continue(self, episode: Episode, messages: Sequence[Message]) -> State:
        """Append messages after the model's turn. If they leave no room for another turn, the episode ends instead."""
        # `observe` raises when there is no room, before the messages are changed.
        last_token_id = int(episode.trajectory.input_ids[-1])
        added = await encode_beside_loop(messages, partial(self._delta, messages, last_token_id))
        episode.observe(added)
        if messages[0]["role"] == "tool":
            episode.record_metric("tool_output_tokens", len(added))
        episode.messages.extend(messages)
        episode.memory["user_turns"] += 1
        episode.memory["calls"] = []
        return State.GENERATING


def _too_many(limit: int) -> str:
    return f"at most {limit} of one turn are. Call again in a later turn."


def _end(memory: dict[str, Any], why: str) -> State:
    memory["ended_by"] = why
    return State.TERMINATED


def _end_at_limit(episode: Episode, name: str, value: int) -> State:
    episode.note_limit(name, value)
    return _end(episode.memory, name)


def _to_notes(call: ToolCall, call_id: str) -> dict[str, Any]:
    """Return a call as JSON values, for the agent's notes."""
    plain = {"name": call.name, "arguments": dict(call.arguments), "error": call.error, "raw": call.raw}
    return {"id": call_id, "sampled_id": call.id, **plain}
