"""Fixtures of the agent's tests: a tokenizer with the tags, and a model with scripted turns."""

import asyncio
from collections import defaultdict, deque

import pytest
from attrs import define, evolve, field

from turnwise import Resources
from turnwise_chat_templates.template import ChatTemplate
from turnwise_parallel_thinking import make_parallel_thinking
from turnwise_parallel_thinking.config import ParallelThinkingConfig, Tags
from turnwise_testing.engines.scripted import SCRIPTED_CAPABILITIES, ScriptedEngine
from turnwise_testing.inputs.tokenizers import byte_tokenizer
from turnwise_testing.probes.agent import AgentProbe, make_task

TAGS = ("<Parallel>", "</Parallel>", "<Path>", "</Path>", "<Summary>", "</Summary>")
EXACT = evolve(SCRIPTED_CAPABILITIES, layouts=True)


@pytest.fixture(scope="session")
def chat():
    """A chat template over bytes and the tags."""
    return ChatTemplate(byte_tokenizer(tags=TAGS))


@define
class Script:
    """A model with scripted turns for each kind of request: `main`, `summary`, or the number of a path."""

    chat: ChatTemplate
    turns: dict[object, deque[str]]
    asked: list[tuple[object, object]] = field(factory=list)

    def kind(self, request):
        stops = {self.chat.tokenizer.decode([i]) for i in request.sampling.stop_token_ids}
        if "</Path>" in stops:
            return int(request.trajectory_id.rpartition(".")[2])
        return "summary" if "</Summary>" in stops else "main"

    def __call__(self, request):
        kind = self.kind(request)
        self.asked.append((kind, request))
        text = self.turns[kind].popleft()
        end = [self.chat.stop_token_ids[0]] if text.endswith("$") else []
        return [*(self.chat.tokenizer.encode(text.removesuffix("$")) if text.strip("$") else []), *end]


@pytest.fixture
def play(chat):
    """
    A function that runs an episode with given turns, where `$` ends a turn, and returns the run and the script.

    Options of the agent are keyword arguments; `response_length`, `capabilities` and `task` belong to the run, and
    `connect` returns the client of a started engine.
    """

    def run(
        main, paths=(), summaries=(), *, response_length=400, capabilities=EXACT, task=None, connect=None, **options
    ):
        config = ParallelThinkingConfig(**options)
        resources = Resources(chat=chat)
        turns = defaultdict(deque, {"main": deque(main), "summary": deque(summaries)})
        for block in paths:
            for index, text in enumerate(block):
                turns[index].append(text)
        script = Script(chat, turns)
        probe = AgentProbe(make_agent=lambda: make_parallel_thinking(config, resources), resources=resources)
        engine = ScriptedEngine(script, capabilities=capabilities)

        async def go():
            await engine.start()
            limits = probe.limits(response_length=response_length)
            async with asyncio.TaskGroup() as group:
                client = engine if connect is None else connect(engine, group)
                return await probe.run(task or make_task(), engine=client, limits=limits)

        return asyncio.run(go()), script

    return run


@pytest.fixture
def shown(chat):
    """A function that returns a record's response as text, with forced tokens in brackets."""

    def show(trajectory):
        parts, start = [], trajectory.num_prompt_tokens
        for segment in trajectory.segments:
            text = chat.tokenizer.decode(trajectory.input_ids[segment.start : segment.stop])
            parts.append(text if segment.origin == 1 else f"[{text}]")
        assert start <= len(trajectory)
        return "".join(parts)

    return show


@pytest.fixture(scope="session")
def tags():
    """The tags."""
    return Tags()
