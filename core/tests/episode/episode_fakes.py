"""A fake engine, agent, reward and tool, and a function that runs one episode with them."""

import asyncio
from collections.abc import Callable

import numpy as np
from attrs import define, field

from turnwise import Capabilities, FinishReason, GenerateRequest, GenerateResult, SamplingParams, State, Task
from turnwise.episode.driver import EpisodeProgram, run_episode
from turnwise.episode.live import LiveEpisode
from turnwise.episode.setup import EpisodeContext, Limits
from turnwise.events.dispatch import Observers
from turnwise.record.spec import EpisodeSpec
from turnwise.tools.toolbox import ToolBox

EOS = 2


@define
class TinyEngine:
    """Answers each request with `turn`, up to max_tokens; with `hangs` it waits for an abort and returns one token."""

    turn: list[int] = field(factory=lambda: [7, 8, EOS])
    hangs: bool = False
    error: Exception | None = None
    max_context: int | None = None
    requests: list[GenerateRequest] = field(factory=list)
    aborted: set[str] = field(factory=set)
    num_capability_lookups: int = 0

    @property
    def capabilities(self) -> Capabilities:
        self.num_capability_lookups += 1
        return Capabilities(max_context=self.max_context)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.requests.append(request)
        if self.error:
            raise self.error
        while self.hangs:
            await asyncio.sleep(0.001)
            if request.request_id in self.aborted:
                return self.answer(self.turn[:1], FinishReason.ABORT)
        ids = self.turn[: request.sampling.max_tokens]
        return self.answer(ids, FinishReason.STOP if ids[-1:] == [EOS] else FinishReason.LENGTH)

    def answer(self, ids: list[int], reason: FinishReason) -> GenerateResult:
        return GenerateResult(token_ids=ids, logprobs=[-0.5] * len(ids), finish_reason=reason, weight_version=3)

    async def abort(self, request_id: str) -> None:
        self.aborted.add(request_id)


@define
class LoopAgent:
    """Generates and observes `num_turns` times, or calls `after` after the first turn."""

    num_turns: int = 2
    after: Callable | None = None
    observation: tuple[int, ...] = (5, 5)

    async def step(self, episode):
        if episode.state == State.PENDING:
            episode.begin(np.array([1, 1, 1]))
            return State.GENERATING
        await episode.generate()
        episode.memory["turns"] = episode.memory.get("turns", 0) + 1
        if self.after is not None:
            return await self.after(episode) or State.TERMINATED
        if episode.memory["turns"] >= self.num_turns:
            return State.TERMINATED
        episode.observe(np.array(self.observation))
        return State.GENERATING


@define
class ConstantReward:
    """Returns, raises or calls its value."""

    value: object = 1.0

    def score(self, episode):
        if isinstance(self.value, BaseException):
            raise self.value
        return self.value(episode) if callable(self.value) else self.value


class LookTool:
    """The tool `look`, which calls a function of the test."""

    def __init__(self, execute):
        self.schema = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
        self.run = execute
        self.released = 0

    async def create(self, task):
        return None

    async def execute(self, session, arguments):
        return await self.run()

    async def release(self, session):
        self.released += 1
        return 0.25


def run(agent=None, engine=None, *, limits=None, observers=(), interaction=None, use=None, tools=None, **program):
    """Run an episode with `program` on its own event loop, beside the function `use`, and return its result."""

    async def main():
        async with asyncio.TaskGroup() as background:
            context = EpisodeContext(
                engine=engine or TinyEngine(),
                spawn=background.create_task,
                observers=Observers.of(observers),
                interaction=interaction,
            )
            task = Task(messages=({"role": "user", "content": "hi"},), uid="t")
            spec = EpisodeSpec(task=task, agent_name="loop", sampling=SamplingParams(stop_token_ids=(EOS,)))
            episode = LiveEpisode(spec, limits or Limits(), context)
            box = ToolBox(tools) if tools else None
            recipe = EpisodeProgram(agent=agent or LoopAgent(), tools=box, **program)
            async with asyncio.TaskGroup() as group:
                running = group.create_task(run_episode(episode, recipe))
                if use is not None:
                    group.create_task(use(episode))
            return running.result()

    return asyncio.run(main())


class ScriptedAgent:
    """Runs one coroutine function as its only step."""

    def __init__(self, script):
        self.script = script

    async def step(self, episode):
        await self.script(episode)
        return "terminated"
