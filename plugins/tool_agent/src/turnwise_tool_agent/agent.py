"""
The agent `tool_agent`: turns of the model alternate with responses of tools or replies of the simulated user.

The model has the last turn: a response is appended only if the model has room for another turn. A checkpoint needs the
record and `Episode.memory`, which holds JSON values:

    assistant_turns, user_turns     counts so far
    tool_rewards, turn_rewards      rewards of tool calls, and of turns of the simulated user
    calls                           calls of the last turn that have no response yet
    ended_by                        "answer", "calls", "tool", "interaction", "max_assistant_turns" or "max_user_turns"

A task may bring its own tools, see `turnwise.task_tools`. A call of one that the run cannot execute ends the episode
by "calls".
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from turnwise import Episode, Message, Resources, State, Task, ToolCall, ToolResult
from turnwise.errors import BudgetExhausted, ConfigError, TemplateError
from turnwise.messages import UNNAMED_CALL, build_turn_message, encode_beside_loop, name_call, unknown_tool
from turnwise.naming import name_calls
from turnwise.protocols import PictureChat
from turnwise.showing import show_result
from turnwise.task_tools import parse_turn, read_later_tools, read_task_tools
from turnwise.types import MediaTokens, TokenArray, ToolSchema
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
        self._chat = chat = resources.chat
        self._render = chat.picture_prompt if isinstance(chat, PictureChat) else chat.prompt
        self._append = chat.picture_delta if isinstance(chat, PictureChat) else chat.delta
        self._parser = resources.parser
        self._split = None if resources.reasoning is None else resources.reasoning.split
        self._schemas = resources.tool_schemas
        self._names = frozenset(resources.tools)
        self._has_user = resources.interaction is not None
        if self._schemas and not config.tools_in_prompt:
            self._check_tools(self._schemas)
        if config.max_assistant_turns != 1:
            self._check_template()

    def _check_tools(self, tools: Sequence[ToolSchema]) -> None:
        """Raise `ConfigError` if the template shows no tools: the model would never call one."""
        try:
            self._chat.prompt([{"role": "user", "content": "?"}], tools)
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
                self._chat.delta([message], self._chat.stop_token_ids[0], with_tools=bool(self._schemas))
        except TemplateError as error:
            raise ConfigError(f"agent 'tool_agent': {error}") from error

    def _tools_of(self, task: Task) -> tuple[ToolSchema, ...]:
        """Return the tools of a task: its own, or the run's."""
        own = read_task_tools(task)
        if own and self._parser is None:
            raise ConfigError(
                f"agent 'tool_agent' cannot find calls of the tools that task {task.uid!r} (row {task.sample_index})"
                " brings: set parser in the config, such as 'hermes'"
            )
        return self._schemas if own is None else own

    def _prompt(self, messages: Sequence[Message], task: Task) -> TokenArray | MediaTokens:
        tools = self._tools_of(task)
        read_later_tools(task)  # a wrong column ends the run before its first episode
        if not tools or self._config.tools_in_prompt:
            return self._render(messages)
        try:
            return self._render(messages, tools)
        except TemplateError:
            # A template that shows no tools fails all tasks, so it ends the run; a message of this task fails it alone.
            self._check_tools(tools)
            raise

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
        episode.begin(await encode_beside_loop(messages, partial(self._prompt, messages, episode.task)))
        return State.GENERATING

    def first_prompt(self, task: Task) -> TokenArray | MediaTokens:
        """Return the prompt that `step` begins with; see `turnwise.protocols.PromptingAgent`."""
        messages = list(task.messages)
        self._add_system_prompt(messages)
        return self._prompt(messages, task)

    def _add_system_prompt(self, messages: list[Message]) -> None:
        system_prompt = self._config.system_prompt
        if system_prompt and messages[0].get("role") != "system":
            messages.insert(0, {"role": "system", "content": system_prompt})

    async def _generate(self, episode: Episode) -> State:
        result = await episode.generate()
        memory = episode.memory
        memory["assistant_turns"] += 1
        content, calls = self._parse_turn(result.token_ids, episode.task)
        ids = name_calls(calls, memory["assistant_turns"], self._chat, episode.messages)
        memory["calls"] = [_to_notes(call, call_id) for call, call_id in zip(calls, ids, strict=True)]
        episode.messages.append(build_turn_message(content, calls, ids, self._split))
        return self._next_state(episode)

    def _parse_turn(self, token_ids: TokenArray, task: Task) -> tuple[str, Sequence[ToolCall]]:
        if self._parser is None:
            return self._chat.text(token_ids), ()
        return parse_turn(self._parser, token_ids, (*self._tools_of(task), *read_later_tools(task)))

    def _next_state(self, episode: Episode) -> State:
        """Decide after a turn whether tools run, the user replies, or the episode ends."""
        memory, config = episode.memory, self._config
        if not memory["calls"] and not self._has_user:
            return _end(memory, "answer")
        if self._calls_outside(memory["calls"], episode.task):
            return _end(memory, "calls")
        if config.max_assistant_turns is not None and memory["assistant_turns"] >= config.max_assistant_turns:
            return _end_at_limit(episode, "max_assistant_turns", config.max_assistant_turns)
        if config.max_user_turns is not None and memory["user_turns"] >= config.max_user_turns:
            return _end_at_limit(episode, "max_user_turns", config.max_user_turns)
        if episode.remaining_tokens == 0:
            # A tool has side effects, so it must not run when the model could not read its response.
            raise BudgetExhausted("no token is left for a response to the model's turn")
        return State.PROCESSING_TOOLS if memory["calls"] else State.INTERACTING

    def _calls_outside(self, calls: Sequence[Mapping[str, object]], task: Task) -> bool:
        """Return whether a turn calls a tool of its task that the run cannot execute, or nothing that it can."""
        own = read_task_tools(task)
        if not calls or own is None:
            return False
        names = {*_names((*own, *read_later_tools(task)))}
        outside = names - self._names
        return outside == names or any(call["name"] in outside for call in calls)

    async def _process_tools(self, episode: Episode) -> State:
        calls = episode.memory["calls"]
        if len(calls) > self._config.max_parallel_calls:
            episode.record_metric("max_parallel_calls_hit", 1)
        results = await self._run(episode, [*self._limited_calls(calls, episode.task)])
        episode.memory["tool_rewards"] += [result.reward for result in results if result.reward is not None]
        if any(result.ends_episode for result in results):
            return _end(episode.memory, "tool")
        shown = self._limit_responses(results)
        messages = [self._tool_message(call, result) for call, result in zip(calls, shown, strict=False)]
        return await self._continue(episode, messages)

    def _limited_calls(self, calls: Sequence[Mapping[str, Any]], task: Task) -> Iterator[ToolCall]:
        """Yield the calls of a turn; each that must not run has an error."""
        limit, own = self._config.max_parallel_calls, read_task_tools(task)
        known = None if own is None else _names((*own, *read_later_tools(task)))
        for index, call in enumerate(calls):
            error = call["error"]
            if not error and known is not None and call["name"] not in known:
                error = unknown_tool(call["name"], _names(own or ()))
            if not error and index >= limit:
                error = f"Error: this call was not run: {_too_many(limit)}"
            sampled = call.get("sampled_id")
            yield ToolCall(name=call["name"], arguments=call["arguments"], error=error, raw=call["raw"], id=sampled)

    async def _run(self, episode: Episode, calls: Sequence[ToolCall]) -> list[ToolResult]:
        if len(calls) == 1:
            return [await episode.call_tool(calls[0])]
        # At most max_parallel_calls of them reach a tool. The others carry an error, which is returned at once.
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(episode.call_tool(call)) for call in calls]
        return [task.result() for task in tasks]

    def _tool_message(self, call: Mapping[str, Any], result: ToolResult) -> Message:
        config = self._config
        shown = truncate(result, config.max_tool_response_length, config.tool_response_truncate_side)
        name = call["name"] or UNNAMED_CALL
        content = show_result(shown, self._chat, name)
        return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}

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
        with_tools = bool(self._tools_of(episode.task))
        added = await encode_beside_loop(
            messages, partial(self._append, messages, last_token_id, with_tools=with_tools)
        )
        episode.observe(added)
        if messages[0]["role"] == "tool":
            episode.record_metric("tool_output_tokens", len(added))
        episode.messages.extend(messages)
        episode.memory["user_turns"] += 1
        episode.memory["calls"] = []
        return State.GENERATING


def _names(tools: Sequence[ToolSchema]) -> list[str]:
    return [schema["function"]["name"] for schema in tools]


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
