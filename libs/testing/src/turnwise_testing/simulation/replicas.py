"""Simulated replicas: the Ray runtime with lost links, dying actors, updates, sleep and aborts at random moments."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import Any, Final

from attrs import frozen

from turnwise import EpisodeResult, RolloutManager, SamplingParams, Task
from turnwise.config.runtime import RayConfig, RuntimeConfig
from turnwise.episode.driver import EpisodeProgram
from turnwise.errors import DataError, EngineError
from turnwise.runtime.placement import PoolPlacement, RunPlacement
from turnwise.runtime.plan import RolloutPlan
from turnwise.runtime.ray.replica_actor import ReplicaActor
from turnwise.runtime.ray.runtime import RayRuntime
from turnwise.runtime.ray.weights import GroupWeights
from turnwise.runtime.ray.worker_actor import WorkerActor
from turnwise.runtime.remote.weight_updates import WeightUpdater
from turnwise_testing.simulation.agents import Wanderer
from turnwise_testing.simulation.interrupts import interrupted_after
from turnwise_testing.simulation.network import Loss, Network
from turnwise_testing.simulation.replica_blueprint import SimulatedBlueprint
from turnwise_testing.simulation.replica_parts import SimulatedTransport, Trainer
from turnwise_testing.simulation.run_parts import (
    NAMES,
    EpisodeOutcome,
    Pace,
    RunContent,
    compare_outcomes,
    outcomes_of,
)
from turnwise_testing.simulation.scheduler import running
from turnwise_testing.simulation.simulated_ray import SimulatedActor, SimulatedRay

_ALL: Final = ("weights", "kv_cache")
_ASLEEP: Final = ("every replica is asleep", "the weights were dropped")
"""Texts in the faults of episodes that run while the replicas sleep, or have no weights after a sleep at level 2."""
_ABORT_S: Final = 10.0
"""Longest time in which all episodes end that were asked to: a message takes a second at most."""
_LATE_STEPS: Final = 15
"""Most steps of tasks on the way to these ends that a disturbance makes late."""
_MAX_KILLS: Final = 2
"""
Most replicas, and most workers, that a run kills.

With a third death, the run may rightly blame a request (`max_deaths`) or an episode (`max_kills`).
"""


class _SimulatedRuntime(RayRuntime):
    """The Ray runtime on a simulated cluster."""

    simulated: SimulatedRay
    note_violation: Callable[[str], None]
    abort_s: float

    async def start(self) -> None:
        self.simulated.prepare(asyncio.get_running_loop())
        await super().start()

    async def abort(self) -> None:
        asked = set(self.dispatcher.keys)
        await super().abort()
        asyncio.get_running_loop().call_later(self.abort_s, self._check_ended, asked)

    def _check_ended(self, asked: set[int]) -> None:
        if left := asked.intersection(self.dispatcher.keys):
            self.note_violation(f"abort: {len(left)} episodes still run {self.abort_s:g} s after it")


@frozen(kw_only=True)
class PoolContent:
    """Settings of a simulated pool; the same for the undisturbed and the disturbed run."""

    num_replicas: int
    num_workers: int
    max_in_flight: int
    coalesce_s: float
    keep_last: bool
    lends: bool
    lasting: bool
    timeout_s: float
    random_router: bool

    @classmethod
    def draw(cls, rng: random.Random) -> PoolContent:
        lends = rng.random() < 0.3
        return cls(
            num_replicas=rng.randint(1, 3),
            num_workers=rng.randint(1, 2),
            max_in_flight=rng.choice((1, 3, 1024)),
            coalesce_s=rng.choice((0.0, 0.02)),
            keep_last=rng.random() < 0.8,
            lends=lends,
            lasting=not lends and rng.random() < 0.5,
            timeout_s=rng.choice((4.0, 600.0)),
            random_router=rng.random() < 0.5,
        )


class Replicas:
    """
    Episodes over a pool of replicas, in the real runtime of a cluster.

    Every token was sampled after the tokens of its record and from the weights that its version names. A replica that
    serves a version has all of its weights, and its versions only rise. No episode and no request is lost, none is
    returned twice, and each episode has the outcome of the undisturbed run.
    """

    def __init__(self, rng: random.Random) -> None:
        self.content = RunContent.draw(rng)
        self.pool = PoolContent.draw(rng)
        self._num_calls = rng.randint(1, 2)

    def run(self, faults: random.Random | None) -> dict[str, EpisodeOutcome]:
        run = _Run(self.content, self.pool, faults)
        with ExitStack() as stack:
            stack.enter_context(run.ray.installed())
            stack.enter_context(run.manager)
            calls = [self.content.tasks[number :: self._num_calls] for number in range(self._num_calls)]
            threads = [threading.Thread(target=run.call, args=(tasks,)) for tasks in calls if tasks]
            if faults is not None:
                threads += [threading.Thread(target=each) for each in (run.break_things, run.change_weights)]
            for thread in threads:
                thread.start()
            run.finish(threads)
        return run.outcomes()

    def compare(self, undisturbed: dict[str, EpisodeOutcome], disturbed: dict[str, EpisodeOutcome]) -> None:
        asleep = {name for name, each in disturbed.items() if any(text in each.fault for text in _ASLEEP)}
        # An episode that ran while the replicas slept may fail; it must still be there.
        compare_outcomes(undisturbed, disturbed | {name: undisturbed[name] for name in asleep & undisturbed.keys()})


class _Run:
    """One run: the manager, and the threads that use and disturb it."""

    def __init__(self, content: RunContent, pool: PoolContent, faults: random.Random | None) -> None:
        self.faults, self.trainer, self.results = faults, Trainer(), list[EpisodeResult]()
        self._slow_reads, self._keep_last, self._has_ended = 4, pool.keep_last, threading.Event()
        self._kills_left: list[type] = [WorkerActor, ReplicaActor] * _MAX_KILLS
        late = Pace.draw(faults)
        self.network = Network(late, lambda: 25.0 + late())
        self.ray = SimulatedRay(
            self.network, Pace.draw(faults), Pace(faults, faults.choice((0.0, 1.0, 20.0)) if faults else 0.0)
        )
        transport = SimulatedTransport(self._read_s, lends=pool.lends, lasting=pool.lasting)
        self.blueprint = SimulatedBlueprint(content, faults, self.trainer, transport, pool.random_router)
        options = RayConfig(
            max_in_flight=pool.max_in_flight,
            coalesce_s=pool.coalesce_s,
            max_restarts=100,
            max_starts=100,
            backoff_s=0.1,
            # Without kept weights, one start after another may die with its update. An episode waits for all of them.
            start_timeout_s=3600.0,
        )
        self.runtime = _SimulatedRuntime(
            self.blueprint,
            RuntimeConfig(name="ray", num_workers=pool.num_workers, num_replicas=pool.num_replicas, ray=options),
            placement=RunPlacement(
                runtime="ray",
                address=None,
                pools=(PoolPlacement(num_replicas=pool.num_replicas, max_in_flight=pool.max_in_flight),),
                num_workers=pool.num_workers,
            ),
            weights=GroupWeights(
                WeightUpdater(transport, "simulated", timeout_s=pool.timeout_s), keep_last=pool.keep_last
            ),
        )
        self.runtime.simulated, self.runtime.note_violation = self.ray, self.trainer.note_violation
        simulated = running()
        late_s = simulated[0].disturbance.late_s if simulated else 0.0
        self.runtime.abort_s = _ABORT_S + _LATE_STEPS * late_s
        plan = RolloutPlan(
            default_agent="wanderer",
            agents={"wanderer": EpisodeProgram(agent=Wanderer())},
            n=content.n,
            sampling=SamplingParams(max_tokens=24),
        )
        self.manager = RolloutManager(self.runtime, plan)

    def call(self, tasks: Sequence[Task]) -> None:
        """Run tasks."""
        options: dict[str, Any] = {}
        if self.faults is not None and self.faults.random() < 0.3:
            options = {"min_fraction": self.faults.choice((0.25, 0.5)), "grace_s": self.faults.choice((0.0, 0.1))}
        for result in self.manager.iterate(tasks, **options):
            self._take(result)

    def change_weights(self) -> None:
        """Update the weights, sleep and wake up, at random moments."""
        faults = self._faults()
        for _ in range(faults.randint(0, 4)):
            self._wait()
            faults.choice((self._update, self._update, self._interrupt_update, self._nap))()
        while not self._keep_last and not self._has_ended.wait(30.0):
            self._update(NAMES)  # new replicas wait for an update

    def break_things(self) -> None:
        """Lose links, kill, move, add and remove actors, and abort, at random moments."""
        faults = self._faults()
        for _ in range(faults.randint(0, 5)):
            self._wait()
            action = faults.choice(
                (self._lose_link, self._lose_link, self._kill, self._drain, self._resize, self.manager.abort)
            )
            action()

    def finish(self, threads: Sequence[threading.Thread]) -> None:
        """Wait for all threads, of which the last may be the trainer's, and resume until every episode has finished."""
        *others, last = threads
        for thread in others:
            thread.join()
        if self._keep_last:
            last.join()
        self._resume()
        self._has_ended.set()
        last.join()
        self._resume()
        self._check_idle()

    def _resume(self) -> None:
        for _ in range(20):
            if not self.manager.unfinished:
                break
            with suppress(DataError):
                for result in self.manager.iterate([], resume=True):
                    self._take(result)
        else:
            raise AssertionError(f"these episodes stay unfinished: {[each.uid for each in self.manager.unfinished]}")

    def _check_idle(self) -> None:
        time.sleep(60.0)  # longer than the keepalive of a dead connection
        for actor in [each for each in self.ray.live(ReplicaActor) if each.instance is not None]:
            load = self.manager.call(actor.instance.ping())
            if load.num_requests or load.num_tokens:
                self.trainer.note_violation(
                    f"leak: {actor.name} still counts {load.num_requests} requests with {load.num_tokens} tokens"
                )

    def outcomes(self) -> dict[str, EpisodeOutcome]:
        """Check everything, and return the outcomes of the episodes by name."""
        digests = dict(self.trainer.digests)
        mixed = {digest for engine in self.blueprint.engines for digest in engine.served}.difference(digests.values())
        digests |= {-1 - number: digest for number, digest in enumerate(sorted(mixed))}
        if self.trainer.violations:
            kinds = {text.partition(":")[0]: text for text in reversed(self.trainer.violations)}
            raise AssertionError("; ".join(kinds.values()))  # the first of each kind
        return outcomes_of(self.results, digests)

    def _take(self, result: EpisodeResult) -> None:
        if result.unfinished is None:
            self.results.append(result)

    def _faults(self) -> random.Random:
        assert self.faults is not None
        return self.faults

    def _wait(self) -> None:
        faults = self._faults()
        time.sleep(faults.random() * faults.choice((0.01, 1.0, 10.0)))

    def _read_s(self) -> float:
        """Return the seconds in which a reader reads a weight; some of them are slow."""
        if self.faults is None or not self._slow_reads or self.faults.random() < 0.7:
            return 0.0
        self._slow_reads -= 1
        return self.faults.random() * self.faults.choice((0.01, 1.0, 5.0))

    # Weights

    def _names(self) -> Sequence[str]:
        faults = self._faults()
        return NAMES if faults.random() < 0.6 else faults.sample(NAMES, faults.randint(1, 2))

    def _update(self, names: Sequence[str] | None = None) -> bool:
        weights = self.trainer.step(names or self._names())
        version = self.trainer.version
        try:
            self.manager.update_weights(weights, version=version)
        except EngineError:
            return False
        self.trainer.note_success(version)
        return True

    def _interrupt_update(self) -> None:
        with suppress(KeyboardInterrupt), self._ctrl_c():
            self._update()

    def _nap(self) -> None:
        """Abort, sleep, update and wake up, as a trainer does."""
        faults = self._faults()
        level = faults.choice((1, 2))
        self.manager.abort()
        with suppress(EngineError, KeyboardInterrupt), self._ctrl_c() if faults.random() < 0.2 else nullcontext():
            self.manager.sleep(level)
        self._wait()
        self._until_done(lambda: self.manager.wake_up(("weights",)))
        # The update fails if every replica has died: none starts before the pool is awake.
        is_done = (level == 1 and faults.random() < 0.5) or self._update(NAMES)
        self._wait()
        self._until_done(lambda: self.manager.wake_up(_ALL))
        if not is_done:
            self._until_done(lambda: self._update(NAMES))

    def _until_done(self, call: Callable[[], bool | None]) -> None:
        """Call until the call neither raises `EngineError` nor returns False."""
        for _ in range(50):
            with suppress(EngineError):
                if call() is not False:
                    return
            time.sleep(1.0)
        raise AssertionError("the replicas neither wake up nor accept weights")

    def _ctrl_c(self) -> AbstractContextManager[None]:
        """Interrupt the calls of this thread after a random time."""
        return interrupted_after(self._faults().random() * self._faults().choice((0.01, 1.0)))

    # Faults of the cluster

    def _on_loop(self, act: Callable[[], None]) -> None:
        async def call() -> None:
            act()

        self.manager.call(call())

    def _resize(self) -> None:
        with suppress(EngineError):
            self.manager.resize(self._faults().randint(1, 3))

    def _lose_link(self) -> None:
        faults = self._faults()

        def lose() -> None:
            if clients := self.network.clients:
                self.network.lose(faults.choice(clients), faults.choice(list(Loss)), Pace(faults, 0.05))

        self._on_loop(lose)

    def _kill(self) -> None:
        def kill() -> None:
            kind = self._faults().choice(self._kills_left) if self._kills_left else None
            if kind and (actors := self.ray.live(kind)):
                self._kills_left.remove(kind)
                self._faults().choice(actors).die()

        self._on_loop(kill)

    def _drain(self) -> None:
        """Announce that a node with a replica will be removed."""
        if not self.ray.draining:
            actors: list[SimulatedActor] = self.ray.live(ReplicaActor)
            if actors:
                deadline = time.time() + self._faults().choice((1.0, 60.0))
                self.ray.draining[self._faults().choice(actors).node] = int(deadline * 1000)
