"""
The agent `torl_python`: a turn of the model ends when it opens an output block, and its program's output follows.

A turn may take several requests, because engines stop at token ids (see `stop_finder`): after a false alarm the model
continues. All sampled tokens are actions, including the stop string and the rest of its last token. A checkpoint needs
the record and `Episode.memory`, which holds JSON values:

    turn_start     index in the record at which the model's turn starts
    rounds         output blocks that have an output
    calls          programs that ran
    successes      programs that ran without error
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import numpy as np

from turnwise import Episode, GenerateResult, Message, Resources, State, Task, ToolCall, ToolResult
from turnwise.errors import BudgetExhausted, ConfigError
from turnwise.messages import encode_beside_loop, text_of_result
from turnwise.types import MediaTokens, TokenArray
from turnwise_torl_python.blocks import extract_last_python_block
from turnwise_torl_python.config import TorlPythonConfig
from turnwise_torl_python.observation import format_observation
from turnwise_torl_python.prompt import encode_prompt
from turnwise_torl_python.stop_finder import StopMatch, cached_stop_finder

STOP: Final = "```output"
"""The model writes it to have its program run."""

_CLOSING: Final = "\n```\n"
_SAMPLE: Final = """\
To find the number of outcomes, we count the pairs and let the computer put them together. Note that `n` is not prime.
```python
from itertools import product
from sympy import symbols, solve

def count(limit):
    total = 0
    for pair in product(range(limit), repeat=2):
        if sum(pair) % 3 == 0:
            total += 1
    return total

print(count(100))
```
```output
3334
```
So the probability is $\\frac{3334}{10000}$, in lowest terms $\\boxed{\\frac{1667}{5000}}$.
"""
"""A typical response. The stop finder chooses an anchor that causes few false alarms in it."""


class TorlPython:
    """
    Runs turns with programs. It keeps no state, so one agent serves concurrent episodes.

    Args:
        config: limits, prompt, and format of outputs.
        resources: chat template, and the tool that runs code.

    Raises:
        ConfigError: the run has no chat template, or not the tool.
    """

    def __init__(self, config: TorlPythonConfig, resources: Resources) -> None:
        if resources.chat is None:
            raise ConfigError("agent 'torl_python' needs a tokenizer: the run needs a model with a chat template")
        if config.max_tool_calls and config.tool not in resources.tools:
            raise ConfigError(f"agent 'torl_python' runs code with the tool {config.tool!r}: add it to tools")
        self._config = config
        self._chat = resources.chat
        self._tokenizer = resources.chat.tokenizer
        self._finder = cached_stop_finder(self._tokenizer, STOP, _SAMPLE)
        ends = frozenset(resources.chat.stop_token_ids)
        self._stop_ids = tuple(token_id for token_id in self._finder.stop_token_ids if token_id not in ends)

    async def step(self, episode: Episode) -> State:
        match episode.state:
            case State.PENDING:
                return await self._start(episode)
            case State.GENERATING:
                return await self._generate(episode)
            case State.PROCESSING_TOOLS:
                return await self._run_block(episode)
        raise ValueError(f"torl_python has no state {episode.state!r}")

    async def _start(self, episode: Episode) -> State:
        messages = episode.messages
        self._add_system_prompt(messages)
        encode = partial(encode_prompt, messages, self._config, self._chat)
        episode.begin(await encode_beside_loop(messages, encode))
        episode.memory.update(turn_start=len(episode.trajectory), rounds=0, calls=0, successes=0)
        return State.GENERATING

    def first_prompt(self, task: Task) -> TokenArray | MediaTokens:
        """Return the prompt that `step` begins with; see `turnwise.protocols.PromptingAgent`."""
        messages = list(task.messages)
        self._add_system_prompt(messages)
        return encode_prompt(messages, self._config, self._chat)

    def _add_system_prompt(self, messages: list[Message]) -> None:
        config = self._config
        if config.template == "chat" and config.system_prompt and messages[0].get("role") != "system":
            messages.insert(0, {"role": "system", "content": config.system_prompt})

    async def _generate(self, episode: Episode) -> State:
        try:
            called = await self._write_turn(episode)
        finally:
            # The reward also reads a turn that a budget or a deadline has truncated.
            ids = self._turn_ids(episode)
            if len(ids):
                episode.messages.append({"role": "assistant", "content": self._chat.text(ids)})
        return State.PROCESSING_TOOLS if called else State.TERMINATED

    async def _write_turn(self, episode: Episode) -> bool:
        """Let the model write until it opens an output block or ends its turn; return whether it opened one."""
        if episode.memory["rounds"] >= self._config.max_tool_calls:
            await episode.generate()
            return False
        match = StopMatch.NONE
        while match is not StopMatch.COMPLETE:
            one_token = match is StopMatch.PARTIAL
            result = await episode.generate(max_tokens=1 if one_token else None, stop_token_ids=self._stop_ids)
            match = self._finder.match(self._tokenizer.decode(self._turn_ids(episode)))
            if match is not StopMatch.COMPLETE:
                if not self._is_unfinished(result, one_token=one_token):
                    return False
                if not episode.remaining_tokens:
                    raise BudgetExhausted("no token is left for the rest of the model's turn")
        return True

    def _is_unfinished(self, result: GenerateResult, *, one_token: bool) -> bool:
        """Return whether the agent's own stop or limit ended the request, and not the end of the turn."""
        last = int(result.token_ids[-1]) if len(result.token_ids) else -1
        if result.finish_reason.is_cut:
            return one_token and last not in self._chat.stop_token_ids
        return last in self._stop_ids

    async def _run_block(self, episode: Episode) -> State:
        needed = len(self._encode_output("")) + 1
        if episode.remaining_tokens < needed:
            # A program has side effects, so it must not run when the model could not read its output.
            text = f"an output of the model's program needs {needed} tokens at least"
            raise BudgetExhausted(f"{text}, and {episode.remaining_tokens} were left")
        memory = episode.memory
        memory["rounds"] += 1
        written = self._tokenizer.decode(self._turn_ids(episode)).partition(STOP)[0]
        code = extract_last_python_block(written)
        result = None if code is None else await self._run_program(episode, code)
        if result is not None and result.ends_episode:
            return State.TERMINATED
        shown = self._config.no_code_output if result is None else format_observation(result, self._config)
        output = self._encode_output(shown)
        episode.observe(output)
        episode.record_metric("tool_output_tokens", len(output))
        episode.messages.append({"role": "tool", "name": self._config.tool, "content": shown})
        memory["turn_start"] = len(episode.trajectory)
        return State.GENERATING

    async def _run_program(self, episode: Episode, code: str) -> ToolResult:
        """Run a program, and count it."""
        memory: dict[str, Any] = episode.memory
        result = await episode.call_tool(ToolCall(name=self._config.tool, arguments={"code": code}, raw=code))
        text_of_result(result, "torl_python")  # it refuses pictures
        memory["calls"] += 1
        memory["successes"] += not result.error
        episode.record_metric("programs_passed", not result.error)
        return result

    def _encode_output(self, shown: str) -> TokenArray:
        """Return the ids of an output and its closing fence, tokenized as a continuation of the stop string."""
        text = self._chat.guard(f"\n{shown}{_CLOSING}")
        opening, block = self._tokenizer.encode(STOP), self._tokenizer.encode(STOP + text)
        # SentencePiece tokenizers insert a space before every text, which does not belong here.
        ids = block[len(opening) :] if block[: len(opening)] == opening else self._tokenizer.encode(text)
        return np.array(ids, np.int32)

    def _turn_ids(self, episode: Episode) -> TokenArray:
        return episode.trajectory.input_ids[episode.memory["turn_start"] :]
