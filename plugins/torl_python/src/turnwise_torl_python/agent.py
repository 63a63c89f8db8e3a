"""
The agent: turns of the model that end where it opens an output block, each answered by what its program prints.

A turn may take several requests: the stop string is looked for on tokens (see `stop_finder`), and where the engine
stopped for nothing the model goes on. All that it samples is an action, the stop string and whatever follows it in the
same token included. What a checkpoint needs besides the record is in `Episode.memory`, as JSON values:

    turn_start     index in the record at which the model's turn begins
    rounds         output blocks that were answered
    calls          programs that were run
    successes      those that ran without error
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from turnwise import Episode, FinishReason, GenerateResult, Resources, State, ToolCall
from turnwise.errors import BudgetExhausted, ConfigError
from turnwise.types import TokenArray
from turnwise_torl_python.blocks import last_python_block
from turnwise_torl_python.config import TorlPythonConfig
from turnwise_torl_python.observation import observation
from turnwise_torl_python.prompt import prompt_ids
from turnwise_torl_python.stop_finder import Sight, stop_finder

STOP: Final = "```output"
"""What the model writes where it wants its program to be run."""

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
"""What a model writes, in kind: by it the stop string is looked for where the model seldom passes by."""


class TorlPython:
    """
    Serves any number of episodes at once and keeps nothing about any.

    Args:
        config: limits, prompt, and what the model reads.
        resources: with a chat template and the tool that runs code.

    Raises:
        ConfigError: the chat template or the tool is missing.
    """

    def __init__(self, config: TorlPythonConfig, resources: Resources) -> None:
        if resources.chat is None:
            raise ConfigError("agent 'torl_python' needs a tokenizer: the run needs a model with a chat template")
        if config.max_tool_calls and config.tool not in resources.tools:
            raise ConfigError(f"agent 'torl_python' runs code with the tool {config.tool!r}: add it to tools")
        self._config = config
        self._chat = resources.chat
        self._tokenizer = resources.chat.tokenizer
        self._finder = stop_finder(self._tokenizer, STOP, _SAMPLE)
        ends = frozenset(resources.chat.stop_token_ids)
        self._stop_ids = tuple(token_id for token_id in self._finder.stop_token_ids if token_id not in ends)

    async def step(self, episode: Episode) -> State:
        """Make one transition."""
        match episode.state:
            case State.PENDING:
                return self._begin(episode)
            case State.GENERATING:
                return await self._generate(episode)
            case State.PROCESSING_TOOLS:
                return await self._answer(episode)
        raise ValueError(f"torl_python has no state {episode.state!r}")

    def _begin(self, episode: Episode) -> State:
        messages, config = episode.messages, self._config
        if config.template == "chat" and config.system_prompt and messages[0].get("role") != "system":
            messages.insert(0, {"role": "system", "content": config.system_prompt})
        episode.begin(prompt_ids(messages, config, self._chat))
        episode.memory.update(turn_start=len(episode.trajectory), rounds=0, calls=0, successes=0)
        return State.GENERATING

    async def _generate(self, episode: Episode) -> State:
        try:
            called = await self._turn(episode)
        finally:
            # A turn that a budget or a deadline cut counts for the reward as far as it went.
            ids = self._turn_ids(episode)
            if len(ids):
                episode.messages.append({"role": "assistant", "content": self._chat.text(ids)})
        return State.PROCESSING_TOOLS if called else State.TERMINATED

    async def _turn(self, episode: Episode) -> bool:
        """Let the model write until it opens an output block, or to its end; return whether it opened one."""
        if episode.memory["rounds"] >= self._config.max_tool_calls:
            await episode.generate()
            return False
        sight = Sight.NONE
        while sight is not Sight.FOUND:
            one_only = sight is Sight.OPEN
            result = await episode.generate(max_tokens=1 if one_only else None, stop_token_ids=self._stop_ids)
            sight = self._finder.look(self._tokenizer.decode(self._turn_ids(episode)))
            if sight is not Sight.FOUND:
                if not self._goes_on(result, one_only=one_only):
                    return False
                if not episode.remaining_tokens:
                    raise BudgetExhausted("no token is left for the rest of the model's turn")
        return True

    def _goes_on(self, result: GenerateResult, *, one_only: bool) -> bool:
        """Return whether the engine stopped for a reason of this agent's, rather than at the end of the turn."""
        last = int(result.token_ids[-1]) if len(result.token_ids) else -1
        if result.finish_reason is FinishReason.LENGTH:
            return one_only and last not in self._chat.stop_token_ids
        return last in self._stop_ids

    async def _answer(self, episode: Episode) -> State:
        if not episode.remaining_tokens:
            # A program must not act for an output that nobody could read.
            raise BudgetExhausted("no token is left for an answer to the model's output block")
        memory = episode.memory
        memory["rounds"] += 1
        written = self._tokenizer.decode(self._turn_ids(episode)).partition(STOP)[0]
        code = last_python_block(written)
        shown = self._config.no_code_output if code is None else await self._run(episode, code)
        episode.observe(self._block_ids(shown))
        episode.messages.append({"role": "tool", "name": self._config.tool, "content": shown})
        memory["turn_start"] = len(episode.trajectory)
        return State.GENERATING

    async def _run(self, episode: Episode, code: str) -> str:
        """Run a program and return what the model reads of it."""
        memory: dict[str, Any] = episode.memory
        result = await episode.call_tool(ToolCall(name=self._config.tool, arguments={"code": code}, raw=code))
        memory["calls"] += 1
        memory["successes"] += not result.error
        return observation(result, self._config)

    def _block_ids(self, shown: str) -> TokenArray:
        """Return the ids of an output and its closing fence, cut as they would be behind the stop string."""
        text = f"\n{shown}{_CLOSING}"
        opening, block = self._tokenizer.encode(STOP), self._tokenizer.encode(STOP + text)
        # Tokenizers of the SentencePiece kind begin every text with a space, which does not belong here.
        ids = block[len(opening) :] if block[: len(opening)] == opening else self._tokenizer.encode(text)
        return np.array(ids, np.int32)

    def _turn_ids(self, episode: Episode) -> TokenArray:
        return episode.trajectory.input_ids[episode.memory["turn_start"] :]
