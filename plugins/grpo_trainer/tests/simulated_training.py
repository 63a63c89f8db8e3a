"""
Simulated trainings: the real loop, collectors, buffer, group reward and files of episodes; no model.

Interrupts come at random moments, and the training resumes from its last checkpoint as in a new process. A crash loses
the steps since then.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

from attrs import define, evolve, field

from turnwise import Task
from turnwise.errors import EngineError
from turnwise_grpo_trainer.config import BufferConfig, CheckpointConfig, TrainConfig
from turnwise_grpo_trainer.loop.async_collector import AsyncCollector
from turnwise_grpo_trainer.loop.checkpoints import TrainingState, _read_episodes, _write_episodes
from turnwise_grpo_trainer.loop.interrupts import Interrupt, TrainingInterruptedError
from turnwise_grpo_trainer.loop.loop import TrainLoop
from turnwise_grpo_trainer.loop.sync_collector import SyncCollector
from turnwise_result_files import load_unfinished, save_unfinished
from turnwise_rollout_buffer import GroupReward, GroupRewardConfig, TaskStream, TrajectoryBuffer
from turnwise_testing.simulation.run_parts import (
    EpisodeOutcome,
    Ledger,
    Pace,
    RunContent,
    make_engine,
    make_manager,
    make_program,
)
from turnwise_testing.simulation.tracing import check_episode

EpisodeName = tuple[str, int, int]
"""Task, number in the group, and training step of the request."""


class Rank(GroupReward):
    """Scores each member by its rank among all members, so that a missing one changes the score of others."""

    def score_group(self, episodes):
        sizes = [sum(record.num_response_tokens for record in each.trajectories) for each in episodes]
        return [1.0 + sorted(sizes).index(size) + 10.0 * len(episodes) for size in sizes]


class CrashError(Exception):
    """A process was killed between two steps."""


@define
class Store:
    """The last checkpoint, in memory or through the files of a real one."""

    folder: Path | None
    state: TrainingState | None = None
    saves: int = 0

    def save(self, training):
        self.saves += 1
        state = training.state_dict()
        if self.folder is not None:
            state = self._through_files(state)
        self.state = state

    def _through_files(self, state):
        folder = self.folder / str(self.saves)
        folder.mkdir()
        _write_episodes(folder / "waiting.parquet", state.waiting)
        _write_episodes(folder / "partial.parquet", state.partial)
        save_unfinished(folder / "unfinished.jsonl", state.unfinished)
        return evolve(
            state,
            waiting=_read_episodes(folder / "waiting.parquet"),
            partial=_read_episodes(folder / "partial.parquet"),
            unfinished=load_unfinished(folder / "unfinished.jsonl"),
        )


@define(eq=False, kw_only=True)
class SimulatedLoop(TrainLoop):
    """A loop whose policy is a ledger of weights; it notes the groups of each step."""

    trained: dict[int, list] = field(factory=dict)
    pace: object = None
    crash_after: int | None = None

    def _update_policy(self, episodes, timer):
        time.sleep(self.pace())
        self.trained[self.step + 1] = list(episodes)
        return {"actor/trained_tokens": 1.0}

    def _report(self, metrics, timer):
        if self.crash_after == self.step:
            raise CrashError


class Trainings:
    """
    A training of a few steps, in mode `sync` or `async`.

    Each step trains whole groups, each episode once, with the rewards of an undisturbed group. In mode `sync`, each
    step has the groups of the undisturbed training.
    """

    def __init__(self, rng: random.Random) -> None:
        content = RunContent.draw(rng, max_tasks=4)
        tasks = tuple(_with_failures(task, rng) for task in content.tasks)
        self._content = evolve(content, tasks=tasks, n=rng.randint(2, 4))
        self._mode = rng.choice(("sync", "async"))
        self._min_fraction = rng.choice((0.25, 0.75, 1.0))
        self._num_steps = rng.randint(1, 3)
        self._tasks_per_step = rng.randint(1, len(tasks))
        self._staleness = rng.randint(0, 2)
        self._checkpoint_every = rng.choice((0, 1, 2))

    def run(self, faults: random.Random | None) -> dict:
        ledger = Ledger()
        if faults is None:
            return {"alone": self._outcomes_alone(ledger), "steps": self._steps(self._train(None, ledger))}
        return {"steps": self._steps(self._train(faults, ledger)), "trained": self._checked(faults, ledger)}

    def compare(self, undisturbed: dict, disturbed: dict) -> None:
        for name, found in disturbed["trained"].items():
            wanted = undisturbed["alone"][name]
            if wanted != found:
                raise AssertionError(f"episode {name} is not trained as it is without faults:\n  {wanted}\n  {found}")
        if self._mode == "sync" and undisturbed["steps"] != disturbed["steps"]:
            raise AssertionError(f"the steps have other groups: {undisturbed['steps']}, {disturbed['steps']}")

    def _checked(self, faults: random.Random, ledger: Ledger) -> dict[EpisodeName, EpisodeOutcome]:
        found: dict[EpisodeName, EpisodeOutcome] = {}
        for step, episodes in self._trained.items():
            for episode in episodes:
                check_episode(episode, ledger.digests)
                name = (episode.task.uid, episode.rollout_n, episode.global_step)
                if name in found:
                    raise AssertionError(f"episode {name} is trained twice, the second time in step {step}")
                found[name] = EpisodeOutcome.of(episode)
        return found

    def _steps(self, trained: dict[int, list]) -> dict[int, list[str]]:
        self._trained = trained
        for step, episodes in trained.items():
            groups = {(each.task.uid, each.global_step) for each in episodes}
            if len(groups) * self._content.n != len(episodes):
                raise AssertionError(f"step {step} trains a part of a group: {sorted(e.uid for e in episodes)}")
        return {step: [each.uid for each in episodes] for step, episodes in trained.items()}

    def _outcomes_alone(self, ledger: Ledger) -> dict[EpisodeName, EpisodeOutcome]:
        """Return the outcomes of groups that nothing disturbs."""
        manager = make_manager(
            self._content,
            make_engine(self._content, None, ledger),
            make_program(None),
            group_reward=self._group_reward(),
        )
        found = {}
        with manager:
            for step in range(1, self._num_steps + self._staleness + 2):
                for result in manager.iterate(self._content.tasks, global_step=step):
                    found[result.task.uid, result.rollout_n, step] = EpisodeOutcome.of(result)
        return found

    def _group_reward(self) -> Rank:
        return Rank(GroupRewardConfig(min_fraction=self._min_fraction))

    def _train(self, faults: random.Random | None, ledger: Ledger) -> dict[int, list]:
        """Train to the end, over interrupts and crashes; return the episodes of each step."""
        through_files = faults is not None and faults.random() < 0.2
        folder = Path(tempfile.mkdtemp()) if through_files else None
        store, trained = Store(folder), {}
        try:
            for attempt in range(8):
                interrupted = faults is not None and attempt < 3 and faults.random() < 0.6
                if self._train_once(store, trained, faults, ledger, interrupted):
                    return trained
        finally:
            if folder is not None:
                shutil.rmtree(folder)
        raise AssertionError("the training did not end after its interrupts")

    def _train_once(self, store, trained, faults, ledger, interrupted) -> bool:
        """Train until the end or an interrupt; return whether it has ended."""
        loop = self._make_loop(store, faults, ledger)
        first = store.state.progress["step"] if store.state else 0
        for step in [step for step in trained if step > first]:
            del trained[step]
        loop.trained = trained
        if interrupted and faults.random() < 0.3:
            loop.crash_after = faults.randint(1, self._num_steps)
        with loop.manager:
            if store.state is not None:
                loop.load_state_dict(store.state)
            if loop.step >= self._num_steps:
                return True
            if interrupted and loop.crash_after is None:
                seconds = faults.random() * faults.choice((0.01, 1.0, 10.0))
                threading.Thread(target=_interrupt, args=(loop, seconds), daemon=True).start()
            try:
                loop.run()
            except (TrainingInterruptedError, CrashError):
                return False
            except EngineError:  # all episodes of a step have failed, which ends a training
                return True
        return True

    def _make_loop(self, store: Store, faults: random.Random | None, ledger: Ledger) -> SimulatedLoop:
        train = TrainConfig(
            num_steps=self._num_steps,
            tasks_per_step=self._tasks_per_step,
            mode=self._mode,
            buffer=BufferConfig(max_staleness=self._staleness, stale="correct"),
            checkpoint=CheckpointConfig(every=self._checkpoint_every, keep_best=False),
        )
        engine = make_engine(self._content, faults, ledger)
        manager = make_manager(self._content, engine, make_program(faults), group_reward=self._group_reward())
        limit = (self._staleness + 1) * self._tasks_per_step
        buffer = TrajectoryBuffer(self._content.n, limit, max_staleness=self._staleness, stale="correct")
        stop, stream = Interrupt(), TaskStream(self._content.tasks, 0)
        make = AsyncCollector.create if self._mode == "async" else SyncCollector
        sync = SimpleNamespace(
            start=lambda: None,
            finish=lambda: None,
            before_update=dict,
            update_weights=lambda version: _update(manager, ledger, version),
        )
        return SimulatedLoop(
            setup=SimpleNamespace(train=train, validation_tasks=()),
            manager=manager,
            trainer=None,
            source=make(manager, stream, buffer, train, stop, lambda _episode: None),
            sync=sync,
            store=store,
            episodes=None,
            buffer=buffer,
            log=None,
            view=SimpleNamespace(activity=lambda _name: nullcontext()),
            stop=stop,
            pace=Pace.draw(faults),
        )


def _with_failures(task: Task, rng: random.Random) -> Task:
    fails = [number for number in range(4) if rng.random() < 0.15]
    return evolve(task, extra={**task.extra, "fails": fails})


def _update(manager, ledger: Ledger, version: int) -> dict:
    manager.update_weights(ledger.next(version), version=version)
    return {}


def _interrupt(loop: SimulatedLoop, seconds: float) -> None:
    time.sleep(seconds)
    loop.interrupt()
