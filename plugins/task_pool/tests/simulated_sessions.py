"""
A simulated scenario of gateway sessions: the real agent, server, control port and pool, over a network in memory.

Each turn that a client has read is trained exactly once, and no other turn is. Tokens follow the context of their
record, scores lie on the turn that they name, and samples are independent. If no client leaves a request, the sampled
turns do not depend on the order of events.
"""

import asyncio
import os
import random
import sys
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch
from zlib import crc32

sys.path.append(str(Path(__file__).parents[2] / "gateway/tests"))  # another process runs this file alone

from attrs import define, evolve, field, frozen
from simulated_checks import check
from simulated_clients import Attempt, Control, Plan, Player
from simulated_network import Network

from turnwise import RolloutManager, SamplingParams
from turnwise.episode.driver import EpisodeProgram
from turnwise.episode.setup import Limits
from turnwise.events.dispatch import Observers
from turnwise.runtime.local import LocalRuntime
from turnwise.runtime.plan import RolloutPlan
from turnwise.runtime.service import DriverServices
from turnwise.runtime.worker import WorkerComponents
from turnwise.types import GenerateRequest
from turnwise_gateway import make_external
from turnwise_gateway.config import ExternalConfig
from turnwise_gateway.session.options import TrainedKinds
from turnwise_reported_reward.reward import ReportedReward
from turnwise_task_pool import make_agent
from turnwise_task_pool.config import PoolConfig
from turnwise_testing.engines.scripted import SCRIPTED_CAPABILITIES
from turnwise_testing.probes.agent import make_task, probe_chat, probe_resources
from turnwise_testing.simulation.run_parts import Pace
from turnwise_testing.simulation.tracing import TracingEngine

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
ENDS = (".", " \n", " and more text.", f" {CALL}", f"\n{CALL}{CALL}")
SECRET = "the secret of the control port"
KINDS = ("none", "session", "records", "turns", "turns")


@frozen(kw_only=True)
class Content:
    """
    The content of a run.

    Attributes:
        num_episodes: one task each.
        pulls: outside agents lease the episodes; else a function is the agent.
        plans: clients of each session.
        kinds: of the scores of each episode.
        num_workers: outside agents.
    """

    num_episodes: int
    pulls: bool
    plans: tuple[Plan, ...]
    kinds: tuple[str, ...]
    num_workers: int

    @classmethod
    def draw(cls, rng: random.Random) -> "Content":
        plans = [_plan(rng, "main", "Question 0?", rng.randint(1, 3))]
        for part in range(rng.choice((0, 1, 2))):
            plans.append(_plan(rng, f"sub {part}", f"Part {part}?", rng.randint(1, 2)))
        if rng.random() < 0.5:
            turns = rng.randint(1, 2)
            plans += [_plan(rng, f"sample {each}", "The same?", turns) for each in range(rng.randint(2, 3))]
        if rng.random() < 0.3:
            plans += [evolve(_plan(rng, "again", "Once more?", 1), repeats=rng.randint(2, 3))]
        number = rng.randint(1, 2)
        return cls(
            num_episodes=number,
            pulls=rng.random() < 0.6,
            plans=tuple(plans),
            kinds=tuple(rng.choice(KINDS) for _ in range(number)),
            num_workers=rng.randint(1, 2),
        )


def _plan(rng: random.Random, name: str, prompt: str, turns: int) -> Plan:
    stream, keyed, marks = (rng.random() < share for share in (0.3, 0.2, 0.7))
    keeps = rng.choice(("one", "all", "none"))
    return Plan(name=name, prompt=prompt, turns=turns, stream=stream, keyed=keyed, marks=marks, keeps=keeps)


def choose(request: GenerateRequest) -> list[int]:
    """Return the model's turn for a context and a seed; no two have the same text."""
    number = crc32(f"{request.sampling.seed}".encode() + request.token_ids.astype("<i4").tobytes())
    text = f"T{number:08x}{ENDS[number % len(ENDS)]}"
    return [*probe_chat().tokenizer.encode(text), probe_chat().stop_token_ids[0]]


@define(eq=False)
class World:
    """One run: its network, its sessions and the history of their clients."""

    content: Content
    network: Network
    attempts: list[Attempt] = field(factory=list)
    is_over: bool = False
    _background: set[asyncio.Task[None]] = field(factory=set)

    def spawn(self, code: Any) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(code)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def stop(self) -> None:
        """Let the outside agents read their last responses, and end everything."""
        self.is_over = True
        if self._background:
            await asyncio.wait(self._background, timeout=60.0)
        for task in list(self._background):
            task.cancel()
        if self._background:
            await asyncio.wait(self._background)

    async def play(self, player: Player) -> None:
        """Run the clients of a session until all have ended, or sometimes the first; others may outlive the agent."""
        tasks = [self.spawn(player.play(plan)) for plan in self.content.plans]
        try:
            if self.network.draws(0.15):
                player.attempt.is_altered = True
                await asyncio.wait(tasks[:1])
                if self.network.draws(0.5):
                    for task in tasks[1:]:
                        task.cancel()
            else:
                await asyncio.wait(tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            raise
        for task in tasks:
            if task.done() and not task.cancelled():
                task.result()

    async def call_function(self, task: Any, client: Any) -> float | None:
        """Act as the agent of an episode in the worker's process."""
        attempt = Attempt(task.uid, client.openai_base_url.split("/")[-2], self.kind_of(task.uid))
        self.attempts.append(attempt)
        await self.play(Player(self.network, attempt, client.openai_base_url, client.api_key))
        attempt.required = list(attempt.reads)
        attempt.is_ending = attempt.is_completed = True
        if attempt.kind == "none":
            return None
        attempt.kind, attempt.scores = "session", {"": 0.5}
        return 0.5

    async def work(self, control: Control) -> None:
        """Act as an outside agent, which runs one episode after the other."""
        with suppress(ConnectionError):
            while not self.is_over:
                response = await control.send("/tasks/lease", {"worker": "w", "wait_s": 20})
                if response.status == 200:
                    await self._run_lease(control, response.json())

    async def _run_lease(self, control: Control, leased: dict[str, Any]) -> None:
        uid = leased["task"]["uid"]
        lease = leased["lease"]
        attempt = Attempt(uid, lease["id"], self.kind_of(uid), lease["fence"])
        self.attempts.append(attempt)
        access = leased["session"]
        player = Player(self.network, attempt, access["openai_base_url"], access["api_key"], control)
        if not self.network.draws(0.3):
            await self._finish(control, player)
            return
        attempt.is_altered = True
        task = self.spawn(self._finish(control, player))
        await asyncio.wait([task], timeout=self.network.delay(3.0))
        if self.network.draws(0.4):  # the agent reports that it fails
            task.cancel()
            report = {"fence": attempt.fence, "reason": "lost", "owner": "infra"}
            await control.send(f"/leases/{attempt.session}/fail", report)
        elif self.network.draws(0.5):  # it dies; else it continues, and reports late
            task.cancel()

    async def _finish(self, control: Control, player: Player) -> None:
        attempt = player.attempt
        await self.play(player)
        reads = list(attempt.reads)
        if attempt.kind == "turns":
            for read in reads:
                if not self.network.draws(0.3):
                    await player.score_turn(read)
        elif attempt.kind == "records" and reads:
            await player.score_record(reads[0])
        attempt.required, attempt.is_ending = list(attempt.reads), True
        if attempt.kind == "session":
            await player.score_session()
            attempt.is_completed = "" in attempt.scores
        else:
            response = await control.send(f"/leases/{attempt.session}/complete", {"fence": attempt.fence})
            attempt.is_completed = response.status == 200

    def kind_of(self, uid: str) -> str:
        return self.content.kinds[int(uid.rpartition("-")[2])]


@define(eq=False)
class SimulatedAgent:
    """The agent `external`, with its servers in the network."""

    inner: Any
    world: World
    control_url: str = ""
    resumable = False

    def make_service(self) -> Any:
        return SimulatedService(self, self.inner.make_service())

    def connect(self, service: Any) -> None:
        if self.world.content.pulls:
            self.inner.connect(service)

    async def open(self) -> dict[str, str]:
        self.world.network.install()
        addresses: dict[str, str] = await self.inner.open()
        if self.control_url:
            control = Control(self.world.network, self.control_url, SECRET)
            for _ in range(self.world.content.num_workers):
                self.world.spawn(self.world.work(control))
        return addresses

    async def close(self) -> None:
        await self.world.stop()
        await self.inner.close()

    async def step(self, episode: Any) -> str:
        return await self.inner.step(episode)


@define(eq=False)
class SimulatedService:
    """The agent's service, with its control port in the network."""

    agent: SimulatedAgent
    inner: Any

    async def open(self, host: str) -> dict[str, str]:
        self.agent.world.network.install()
        addresses: dict[str, str] = await self.inner.open(host)
        self.agent.control_url = addresses["control"]
        return addresses

    async def call(self, method: str, arguments: Any) -> object:
        return await self.inner.call(method, arguments)

    async def close(self) -> None:
        await self.inner.close()


class Sessions:
    """The scenario; see the module."""

    def __init__(self, rng: random.Random) -> None:
        self._content = Content.draw(rng)

    def run(self, faults: random.Random | None) -> Any:
        world = World(self._content, Network(faults))
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            stack.enter_context(patch.dict(os.environ, TURNWISE_CONTROL_SECRET=SECRET))
            agent = SimulatedAgent(self._make_agent(folder), world)
            if not self._content.pulls:
                agent.inner._function = world.call_function  # in place of an importable one
            with self._manager(agent, faults) as manager:
                results = list(manager.iterate([make_task(each) for each in range(self._content.num_episodes)]))
        for result in results:
            check(result, world.attempts, world.network.handed)
        # A second attempt at an episode has other seeds than the first.
        is_altered = any(attempt.is_altered for attempt in world.attempts)
        is_altered |= len(world.attempts) > self._content.num_episodes
        return is_altered, {attempt.uid: _conversations(attempt) for attempt in world.attempts}

    def compare(self, undisturbed: Any, disturbed: Any) -> None:
        if not disturbed[0] and undisturbed[1] != disturbed[1]:
            raise AssertionError(f"order of events: other turns were read\n{undisturbed[1]}\n{disturbed[1]}")

    def _make_agent(self, folder: Path) -> Any:
        config = self._config(folder)
        make = make_external if isinstance(config, ExternalConfig) else make_agent
        return make(config, probe_resources())

    def _config(self, folder: Path) -> ExternalConfig | PoolConfig:
        train = TrainedKinds(auxiliary=True)
        if not self._content.pulls:
            return ExternalConfig(function="simulated_sessions:choose", train=train)
        return PoolConfig(control_file=folder / "control.json", lease_s=6.0, score_s=200.0, train=train)

    def _manager(self, agent: SimulatedAgent, faults: random.Random | None) -> RolloutManager:
        engine = TracingEngine(
            choose,
            capabilities=SCRIPTED_CAPABILITIES,
            latency_s=Pace.draw(faults) if faults else 0.0,
            token_latency_s=evolve(Pace.draw(faults), scale_s=0.01) if faults and faults.random() < 0.5 else 0.0,
            record=False,
        )
        program = EpisodeProgram(agent=agent, reward=ReportedReward())
        stops = probe_chat().stop_token_ids
        sampling = SamplingParams(stop_token_ids=stops)
        plan = RolloutPlan(default_agent="external", agents={"external": program}, n=1, sampling=sampling)
        parts = WorkerComponents(
            engine=engine,
            programs={"external": program},
            limits=Limits(prompt_length=1 << 14, response_length=1 << 14),
            stop_token_ids=stops,
            default_agent="external",
        )
        services = DriverServices({"external": agent.make_service()} if self._content.pulls else {})
        return RolloutManager(LocalRuntime(engine, parts, 1, services=services), plan, Observers())


def _conversations(attempt: Attempt) -> list[tuple[str, ...]]:
    """Return the prompt and the mark of each turn that was read, sorted, because samples may come in any order."""
    return sorted((read.request.partition(".")[0].split()[0], read.mark) for read in attempt.reads)
