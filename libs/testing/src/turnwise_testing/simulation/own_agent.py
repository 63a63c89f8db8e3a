"""Simulated rollouts of a registered agent, for `turnwise check --simulate agent:NAME`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any, Final
from zlib import crc32

import numpy as np
from attrs import define, evolve

from turnwise.config.parts import Choice
from turnwise.config.resolve import build_part, load_resolved
from turnwise.episode.driver import EpisodeProgram
from turnwise.plugin.host import Host, load
from turnwise.protocols import Chat
from turnwise.tools.toolbox import ToolBox
from turnwise.types import GenerateRequest, TokenArray
from turnwise_testing.probes.agent import TURNS, make_task, probe_chat, probe_resources
from turnwise_testing.simulation.agents import Length
from turnwise_testing.simulation.rollouts import Rollouts
from turnwise_testing.simulation.tracing import SEED_STRIDE

_START: Final = "<|im_start|>assistant\n"


@define
class TextPolicy:
    """
    Writes one of some texts in each turn, chosen by the context before the turn and the request's seed.

    A turn that an interrupt has cut continues with the rest of its text.

    Attributes:
        chat: of the agent; a turn starts after the last head of an assistant's message.
        texts: of the turns.
    """

    chat: Chat
    texts: Sequence[str] = TURNS
    vocab_size: int = 512
    end_token_id: int | None = None

    @cached_property
    def _start(self) -> list[int]:
        return list(self.chat.tokenizer.encode(_START))

    @cached_property
    def _scripts(self) -> list[list[int]]:
        end = self.chat.stop_token_ids[0]
        return [[*self.chat.tokenizer.encode(text), end] for text in self.texts]

    def sample(self, request: GenerateRequest, num_tokens: int) -> TokenArray:
        """Return at most (num_tokens,) int32 ids."""
        ids = request.token_ids.tolist()
        begin = _end_of_last(self._start, ids)
        seed = ((request.sampling.seed or 0) - SEED_STRIDE * (len(ids) - begin)) % 2**31
        chosen = crc32(np.array([seed, *ids[:begin]], "<i8").tobytes())
        script = self._scripts[chosen % len(self._scripts)]
        num_said = len(ids) - begin
        if ids[begin:] != script[:num_said]:  # the agent has written into the turn itself
            num_said = 0
        return np.array(script[num_said : num_said + num_tokens] or script[-1:], np.int32)


def _end_of_last(part: list[int], ids: list[int]) -> int:
    for stop in range(len(ids), len(part) - 1, -1):
        if ids[stop - len(part) : stop] == part:
            return stop
    return len(ids)


class AgentRollouts(Rollouts):
    """
    A registered agent in the calls, interrupts, resumes and weight updates of `Rollouts`.

    The model writes good, wrong and malformed calls of the tool `add`, and answers.
    """

    def __init__(self, rng: random.Random, name: str, config: str | None = None) -> None:
        super().__init__(rng)
        self._agent = _build(name, config)
        tasks = tuple(make_task(number) for number in range(len(self._content.tasks)))
        chat = probe_chat()
        self._content = evolve(
            self._content,
            tasks=tasks,
            policy=TextPolicy(chat),
            stop_token_ids=tuple(chat.stop_token_ids),
            response_length=4096,
            max_tokens=512,
        )

    def _make_program(self, faults: random.Random | None) -> EpisodeProgram:
        return EpisodeProgram(agent=self._agent, reward=Length(), tools=ToolBox(probe_resources().tools))


@cache
def _load_host() -> Host:
    return load()


def _build(name: str, config: str | None) -> Any:
    """Return the agent with the options of the config's section `agent`, if it names this agent."""
    choice = Choice(name)
    if config is not None:
        run, host = load_resolved(config, ())
        chosen = run.agent
        choice = chosen if isinstance(chosen, Choice) and chosen.name == name else choice
    else:
        host = _load_host()
    return build_part(host, "agents", choice, probe_resources(), path=name)
