"""
Counts the bytes of pictures that each process of a run on Ray receives; `picture_cost.py --ray` prints the table.

Each episode shows half of its pictures in its prompt and takes the others with a tool, one after each turn. Two
episodes of a task show the same pictures, on any worker and replica. The engines sample one token a turn, and decode
no picture.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
from attrs import evolve, field, frozen
from claims import Claim

from turnwise import Episode, EpisodeResult, GenerateRequest, GenerateResult, State, Task, ToolCall, ToolResult
from turnwise.config.runtime import RuntimeConfig
from turnwise.episode.driver import EpisodeProgram
from turnwise.episode.setup import EngineClient, Limits
from turnwise.media import Picture, PictureName, find_picture, picture_part, read_picture_part
from turnwise.protocols import Engine, Router
from turnwise.runtime.manager import RolloutManager
from turnwise.runtime.plan import RolloutPlan
from turnwise.runtime.ray.runtime import RayRuntime
from turnwise.runtime.worker import WorkerComponents
from turnwise.tools.toolbox import ToolBox
from turnwise.types import FinishReason, MediaTokens, PlacedPicture
from turnwise_routers import LeastTokens, LeastTokensConfig
from turnwise_testing.engines.scripted import ScriptedEngine

PER_TASK = 2
"""Episodes of a task."""
PLACEHOLDERS = 16


def draw(name: str, num_bytes: int) -> Picture:
    """Return a picture of random bytes, the same ones for the same name."""
    seed = hashlib.sha256(name.encode()).digest()
    head = b"\x89PNG\r\n\x1a\n"
    return find_picture(head + random.Random(seed).randbytes(num_bytes - len(head)), "image/png")


def show(pictures: list[Picture]) -> MediaTokens:
    """Return tokens that show pictures one after the other, and a token behind them."""
    places = [
        PlacedPicture(start=PLACEHOLDERS * number, num_tokens=PLACEHOLDERS, picture=picture)
        for number, picture in enumerate(pictures)
    ]
    return MediaTokens(token_ids=np.zeros(PLACEHOLDERS * len(pictures) + 1, np.int32), pictures=places)


class Seeing(ScriptedEngine):
    """Answers with one token, and knows the pictures that it got."""

    def __init__(self) -> None:
        super().__init__()
        self.capabilities = evolve(self.capabilities, pictures=True)
        self.seen: dict[PictureName, int] = {}

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Note the pictures of a request."""
        self.seen |= {place.picture.name: len(place.picture.data) for place in request.pictures}
        return GenerateResult(token_ids=[1], logprobs=[-0.5], finish_reason=FinishReason.STOP)

    def stats(self) -> dict[str, float]:
        """Return the bytes of the pictures, each once."""
        return {**super().stats(), "seen_bytes": float(sum(self.seen.values()))}


@frozen
class Camera:
    """Takes a picture of a name."""

    num_bytes: int
    schema: dict[str, Any] = field(
        factory=lambda: {
            "type": "function",
            "function": {"name": "camera", "description": "", "parameters": {"type": "object"}},
        }
    )

    async def create(self, task: Task) -> None:
        """Need no session."""

    async def execute(self, session: object, arguments: dict[str, Any]) -> ToolResult:
        """Return the picture."""
        return ToolResult(text="", pictures=(draw(arguments["name"], self.num_bytes),))

    async def release(self, session: object) -> None:
        """Close nothing."""


@frozen
class Looks:
    """Takes a picture after each of some turns."""

    num_turns: int

    async def step(self, episode: Episode) -> State:
        """Begin, or take a turn and a picture."""
        if episode.state == State.PENDING:
            episode.begin(show([read_picture_part(part) for part in episode.task.messages[0]["content"]]))
            return State.GENERATING
        await episode.generate(max_tokens=1)
        turn = len(episode.trajectory.turns())
        if turn > self.num_turns:
            return State.TERMINATED
        name = f"{episode.task.uid}-{turn}"
        (picture,) = (await episode.call_tool(ToolCall(name="camera", arguments={"name": name}))).pictures
        episode.observe(show([picture]))
        episode.messages.append({"role": "user", "content": [picture_part(picture)]})
        return State.GENERATING


@frozen
class PictureBlueprint:
    """Builds the parts of every process."""

    num_pictures: int
    num_bytes: int

    def make_engine(self) -> Engine:
        """Build an engine."""
        return Seeing()

    def make_components(self, engine: EngineClient, judge: EngineClient | None = None) -> WorkerComponents:
        """Build a worker with the agent and the camera."""
        agent = Looks(self.num_pictures - self.num_pictures // 2)
        program = EpisodeProgram(agent=agent, tools=ToolBox([Camera(self.num_bytes)]))
        return WorkerComponents(
            engine=engine, programs={"looks": program}, limits=Limits(prompt_length=1 << 16, response_length=1 << 16)
        )

    def make_router(self) -> Router:
        """Build the default router."""
        return LeastTokens(LeastTokensConfig())


def make_tasks(blueprint: PictureBlueprint, num_episodes: int) -> list[Task]:
    """Return a task for each episode; two have the same pictures."""
    tasks = []
    for number in range(num_episodes):
        uid = f"t{number // PER_TASK}"
        shown = range(blueprint.num_pictures // 2)
        parts = [picture_part(draw(f"{uid}-prompt-{place}", blueprint.num_bytes)) for place in shown]
        tasks.append(Task(messages=({"role": "user", "content": parts},), uid=uid, sample_index=number))
    return tasks


def check(results: list[EpisodeResult], num_pictures: int) -> None:
    """Raise `AssertionError` if an episode has not shown all pictures."""
    for result in results:
        assert result.fault is None, result.fault
        assert len(result.trajectories[0].pictures) == num_pictures


def measure_claims(num_episodes: int, num_pictures: int, num_bytes: int) -> list[Claim]:
    """Run episodes on two workers and two replicas, print the table and return the claims."""
    blueprint = PictureBlueprint(num_pictures, num_bytes)
    runtime = RayRuntime(blueprint, RuntimeConfig(name="ray", num_workers=2, num_replicas=2))
    manager = RolloutManager(runtime, RolloutPlan(default_agent="looks", agents={"looks": None}))
    with manager:
        check(manager.rollout(make_tasks(blueprint, num_episodes)), num_pictures)
        stats = manager._thread.call(runtime.stats())  # type: ignore[union-attr]  # noqa: SLF001 - running; `stats` has sums alone
        counted = manager.stats()["picture_bytes"]
    replicas = [each for each in stats if "seen_bytes" in each]
    workers = [each for each in stats if "packet_bytes_in" in each]
    assert (len(replicas), len(workers)) == (2, 2)
    assert counted == sum(each["picture_bytes_in"] for each in (*replicas, *workers)) > 0
    tasks = -(-num_episodes // PER_TASK)
    prompts = tasks * (num_pictures // 2) * num_bytes
    print(f"{num_episodes} episodes of {tasks} tasks on Ray, {num_pictures} pictures of {num_bytes / 1e3:g} kB each")
    print(f"{'':10s} {'received':>10s} {'pictures':>10s} {'distinct':>10s}  in MB")
    rows = [("replica", each["bytes_in"], each["picture_bytes_in"], each["seen_bytes"]) for each in replicas]
    rows += [("worker", each["packet_bytes_in"], each["picture_bytes_in"], prompts) for each in workers]
    for name, received, pictures, distinct in rows:
        print(f"{name:10s} {received / 1e6:10.2f} {pictures / 1e6:10.2f} {distinct / 1e6:10.2f}")
    worst = {
        name: max(received / distinct for each, received, _pictures, distinct in rows if each == name)
        for name in ("replica", "worker")
    }
    return [
        Claim("bytes that a replica receives, for each byte of its pictures", [worst["replica"]], 1.05),
        Claim("bytes of tasks that a worker receives, for each byte of all prompts", [worst["worker"]], 1.05),
    ]
