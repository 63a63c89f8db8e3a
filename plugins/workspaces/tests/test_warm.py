"""Workspaces that start before an episode asks: each serves at most one, and their faults are none of episodes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

import pytest
from attrs import define, evolve, field
from hypothesis import given
from hypothesis import strategies as st

from turnwise.errors import InfrastructureError
from turnwise.messages import record_metric
from turnwise_testing.probes.faulty_workspaces import MemoryBackend, PassingBackend, PassingWorkspace, hang_with
from turnwise_workspaces import Command, Workspace, WorkspaceSpec
from turnwise_workspaces import owner as owner_module
from turnwise_workspaces import warm as warm_module
from turnwise_workspaces.owner import OwnedWorkspace, WorkspaceOwner
from turnwise_workspaces.slots import Slots

SPEC: Final = WorkspaceSpec(boot_s=0.2, files={"task.txt": b"one"})
OTHER: Final = evolve(SPEC, image="other")
COMMAND: Final = Command(argv=("echo", "hello"), timeout_s=5.0)
FAULTS: Final = ("", "fails", "hangs", "raises", "dies", "mute", "full", "stays")


@define(eq=False)
class Scripted(PassingBackend):
    """A backend whose starts have faults, in this order; later ones have none."""

    faults: list[str] = field(factory=list)
    kinds: list[str] = field(factory=list)

    async def start(self, spec: WorkspaceSpec) -> Workspace:
        self.kinds.append(spec.image)
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "fails":
            raise InfrastructureError("no machine is free")
        if fault == "raises":
            raise asyncio.CancelledError  # a backend's mistake: nobody has cancelled it
        workspace = await self.inner.start(spec)
        if fault == "hangs":
            await hang_with(workspace)
        if fault == "dies":
            workspace.kill()
        return Faulty(workspace, fault)


@define(eq=False)
class Faulty(PassingWorkspace):
    """A workspace that does not answer, cannot be written, or does not end."""

    fault: str

    async def end_processes(self) -> None:
        if self.fault == "mute":
            await asyncio.Event().wait()
        await super().end_processes()

    async def write(self, path: str, data: bytes) -> None:
        if self.fault == "full":
            raise OSError("no space")
        await super().write(path, data)

    async def close(self) -> None:
        if self.fault == "stays":
            await asyncio.Event().wait()
        await super().close()


async def until(holds: Callable[[], bool]) -> None:
    """Wait for something that sets no event."""
    while not holds():  # noqa: ASYNC110 - no event tells it
        await asyncio.sleep(0.001)


class Setup:
    """An owner with warm workspaces, and what is left."""

    def __init__(self, folder: Path, faults: Sequence[str] = (), number: int = 4, warm: int = 1):
        self.memory, self.metrics = MemoryBackend(), Counter()
        self.backend = Scripted(self.memory, list(faults))
        slots = Slots(folder, number, 5.0)
        self.owner = WorkspaceOwner(self.backend, slots, boot_tries=1, close_s=0.05, grace_s=0.05, num_warm=warm)
        record_metric.set(lambda name, value: self.metrics.update({name.removeprefix("workspace_warm_"): value}))

    async def until_ready(self, number: int) -> None:
        await until(lambda: self.owner.warm.num_ready == number)

    async def expect_nothing_left(self) -> None:
        await self.owner.warm.close()
        assert (self.memory.running, self.owner.num_open) == (set(), 0)
        slots = evolve(self.owner.slots, wait_s=0.5)
        for taken in [await slots.take() for _ in range(slots.number)]:
            taken.free()


async def use(setup: Setup, spec: WorkspaceSpec = SPEC) -> OwnedWorkspace:
    """Run one command in a workspace that has its files, and return it."""
    async with setup.owner.workspace(spec) as workspace:
        assert (await workspace.exec(COMMAND)).stdout == b"echo hello"
        assert await workspace.read("task.txt", max_bytes=9) == spec.files["task.txt"]
    return workspace


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    """Look often, and wait little for what hangs."""
    monkeypatch.setattr(warm_module, "_POLL_S", 0.001)
    monkeypatch.setattr(warm_module, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(owner_module, "_ANSWER_S", 0.05)
    monkeypatch.setattr(owner_module, "_FILE_S", 3600.0)  # no warm workspace may have so long


def run_with(setup: Setup, body: Callable[[], Awaitable[None]]) -> None:
    """Run a test, and expect that nothing is left."""

    async def run():
        async with asyncio.timeout(30):
            await body()
            await setup.expect_nothing_left()

    asyncio.run(run())


def test_an_episode_gets_a_workspace_that_has_started(tmp_path):
    """With the files of its own task; the next episode gets another workspace, and so do two at once."""
    setup = Setup(tmp_path, warm=2)

    async def body():
        used = [await use(setup)]
        for number in range(3):
            await setup.until_ready(min(number + 1, 2))
            num_started = setup.memory.num_started
            used.append(await use(setup, evolve(SPEC, files={"task.txt": f"{number}".encode()})))
            assert setup.memory.num_started <= num_started + 1  # the one that replaces it
        assert len(set(used)) == len(used)
        assert setup.metrics == {"misses": 1.0, "hits": 3.0}

    run_with(setup, body)


@pytest.mark.parametrize(
    ("fault", "metrics"),
    [
        ("fails", {"failures": 1.0}),
        ("hangs", {"failures": 1.0}),
        ("raises", {"failures": 1.0}),
        ("dies", {"losses": 1.0}),
        ("mute", {"losses": 1.0}),
        ("full", {"losses": 1.0}),
    ],
)
def test_a_fault_of_a_warm_workspace_is_none_of_an_episode(fault, metrics, tmp_path):
    """It is thrown away and counted, and the episode works in another one."""
    setup = Setup(tmp_path, ["", fault])

    async def body():
        await use(setup)
        await until(lambda: setup.owner.warm.num_ready == 1 or setup.owner.warm._num_failed == 1)
        await use(setup)
        assert metrics.items() <= setup.metrics.items(), setup.metrics

    run_with(setup, body)


def test_the_kinds_are_those_of_the_last_episodes(tmp_path):
    """A workspace of a kind that no late episode asked for ends, and its place goes to one of another kind."""
    setup = Setup(tmp_path, warm=2)

    async def body():
        await use(setup)
        await use(setup)
        await setup.until_ready(2)
        await use(setup, OTHER)
        await use(setup, OTHER)
        await until(lambda: [kind.image for kind, _ in setup.owner.warm._ready] == ["other", "other"])
        assert len(setup.memory.running) <= 3
        await use(setup, OTHER)
        assert setup.metrics["hits"] >= 1.0

    run_with(setup, body)


@pytest.mark.parametrize("others", [False, True], ids=["of this process", "of another one"])
def test_a_warm_workspace_gives_its_slot_to_an_episode_that_waits(others, tmp_path):
    """However many are warm, an episode of another kind, or of another owner with the same folder, gets a slot."""
    setup = Setup(tmp_path, number=2, warm=2)
    other = Setup(tmp_path, number=2, warm=0) if others else setup

    async def body():
        await use(setup)
        await use(setup)
        await setup.until_ready(2)
        async with other.owner.workspace(OTHER) as first, other.owner.workspace(OTHER) as second:
            assert first is not second
            await asyncio.sleep(0.01)  # ten looks of the keeper, none of which may take a slot
            assert len(setup.memory.running | other.memory.running) == 2
        await other.expect_nothing_left()

    run_with(setup, body)


def test_failing_starts_are_tried_less_and_less(tmp_path, monkeypatch):
    """A backend that is broken is not asked without an end; one that works again is asked at once."""
    monkeypatch.setattr(warm_module, "_FIRST_PAUSE_S", 30.0)
    setup = Setup(tmp_path, ["", "fails"])

    async def body():
        await use(setup)
        await until(lambda: setup.owner.warm._num_failed == 1)
        await asyncio.sleep(0.02)
        assert len(setup.backend.kinds) == 2
        await use(setup)
        assert setup.metrics["failures"] == 1.0

    run_with(setup, body)


def test_one_that_does_not_end_is_killed(tmp_path):
    """The end of the run waits for it no longer than for any other workspace."""
    setup = Setup(tmp_path, ["", "stays"])

    async def body():
        await use(setup)
        await setup.until_ready(1)

    run_with(setup, body)


def test_they_end_with_their_loop(tmp_path):
    """Also without `close`; another loop starts others, and the exit of the process kills those that are left."""
    setup = Setup(tmp_path)

    async def body():
        await use(setup)
        await setup.until_ready(1)

    for _ in range(2):
        asyncio.run(body())
        assert (setup.memory.running, setup.owner.num_open) == (set(), 0)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(body())
    assert len(setup.memory.running) == 1
    setup.owner.kill_all()
    assert setup.memory.running == set()
    asyncio.run(setup.expect_nothing_left())
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


@given(
    faults=st.lists(st.sampled_from(FAULTS), max_size=6),
    episodes=st.lists(st.tuples(st.sampled_from([SPEC, OTHER]), st.integers(0, 12)), min_size=1, max_size=6),
    warm=st.integers(0, 3),
    number=st.integers(1, 3),
)
def test_whatever_happens_nothing_is_left(faults, episodes, warm, number, tmp_path_factory):
    """Whatever fails, and wherever episodes are cancelled; the slots bound all, and no workspace serves twice."""

    async def run():
        setup = Setup(tmp_path_factory.mktemp("slots"), faults, number, warm)
        setup.owner.close_s = setup.owner.grace_s = 0.01
        used, running = [], []

        async def episode(spec):
            workspace = await setup.owner.open(spec)
            try:
                used.append(workspace)
                assert setup.owner.num_open <= number
                await workspace.exec(COMMAND)
            finally:
                await setup.owner.close(workspace)

        for spec, steps in episodes:
            running.append(asyncio.ensure_future(episode(evolve(spec, boot_s=0.01))))
            for _ in range(steps):
                await asyncio.sleep(0)
            if steps % 3 == 0:
                running[-1].cancel()
        await asyncio.wait(running)
        for each in running:
            assert each.cancelled() or not each.exception() or isinstance(each.exception(), InfrastructureError)
        assert len(set(used)) == len(used)
        await setup.expect_nothing_left()

    asyncio.run(run())
