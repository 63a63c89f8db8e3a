"""The owner ends every workspace, whatever fails, and says that the infrastructure failed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from turnwise.errors import ConfigError, InfrastructureError
from turnwise_testing.probes.faulty_workspaces import Faults, FaultyBackend, MemoryBackend
from turnwise_workspaces import Command, WorkspaceFileError, WorkspaceSpec
from turnwise_workspaces.owner import WorkspaceOwner
from turnwise_workspaces.slots import Slots, open_state

COMMAND = Command(argv=("echo", "hello"), timeout_s=0.05)
SPEC = WorkspaceSpec(boot_s=0.2)


class Setup:
    """An owner with faults, and what is left."""

    def __init__(self, folder: Path, faults: Faults, number: int = 2, **options):
        self.memory = MemoryBackend()
        self.backend = FaultyBackend(self.memory, faults)
        slots = Slots(folder, number, options.pop("wait_s", 5.0))
        self.owner = WorkspaceOwner(self.backend, slots, **{"close_s": 0.1, "grace_s": 0.05, **options})

    def expect_nothing_left(self):
        assert (self.memory.running, self.owner.num_open) == (set(), 0)

    async def expect_free_slots(self):
        """All slots can be taken at once."""
        slots = evolve(self.owner.slots, wait_s=0.5)
        for taken in [await slots.take() for _ in range(slots.number)]:
            taken.free()


async def use(setup: Setup) -> bytes:
    """Run one command in a workspace."""
    async with setup.owner.workspace(SPEC) as workspace:
        return (await workspace.exec(COMMAND)).stdout


@pytest.mark.parametrize(
    ("faults", "outcome"),
    [
        (Faults(), b"echo hello"),
        (Faults(failing_starts=1), b"echo hello"),
        (Faults(hanging_starts=1), b"echo hello"),
        (Faults(failing_starts=2), "did not start in 2 tries: InfrastructureError: no machine is free"),
        (Faults(failing_starts=1, hanging_starts=1), "did not start in 2 tries: it took more than 0.2 s"),
        (Faults(exec_hangs=True), "is lost: a command did not end within 0.1 s"),
        (Faults(exec_loses=True), "is lost: InfrastructureError: the workspace has ended"),
        (Faults(exec_raises=True), "is lost: RuntimeError: a mistake in a backend"),
        (Faults(close_fails=True), "did not end, and was killed: OSError: the machine does not answer"),
        (Faults(close_hangs=True), "did not end, and was killed: took more than 0.1 s"),
    ],
)
def test_faults(faults, outcome, tmp_path):
    """Every fault has its text, owned by the infrastructure, and leaves no workspace and no slot."""

    async def run():
        setup = Setup(tmp_path, faults)
        if isinstance(outcome, bytes):
            assert outcome == await use(setup)
        else:
            with pytest.raises(InfrastructureError, match=outcome):
                await use(setup)
        setup.expect_nothing_left()
        await setup.expect_free_slots()

    asyncio.run(run())


@given(
    faults=st.builds(
        Faults,
        failing_starts=st.integers(0, 2),
        hanging_starts=st.integers(0, 1),
        exec_hangs=st.booleans(),
        exec_loses=st.booleans(),
        close_fails=st.booleans(),
        close_hangs=st.booleans(),
    ),
    steps=st.integers(0, 12),
)
def test_a_cancellation_at_any_step_leaves_nothing(faults, steps, tmp_path_factory):
    """Whatever fails, and wherever the episode is cancelled, nothing is left."""
    folder = tmp_path_factory.mktemp("slots")

    async def run():
        setup = Setup(folder, faults, boot_tries=1)
        setup.owner.close_s = setup.owner.grace_s = 0.02
        task = asyncio.ensure_future(use(setup))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() or isinstance(task.exception(), InfrastructureError) or task.result() == b"echo hello"
        setup.expect_nothing_left()
        await setup.expect_free_slots()

    asyncio.run(run())


def test_a_lost_workspace_stays_lost(tmp_path):
    """After a loss each call fails at once, and none hangs."""

    async def run():
        setup = Setup(tmp_path, Faults(exec_hangs=True))
        async with setup.owner.workspace(SPEC) as workspace:
            for call in (workspace.exec(COMMAND), workspace.read("x", max_bytes=1), workspace.end_processes()):
                with pytest.raises(InfrastructureError, match="a command did not end"):
                    await call

    asyncio.run(run())


def test_a_mistake_of_the_caller_is_no_loss(tmp_path):
    """What `on_output` raises comes after the command, once, and the workspace can be used as before."""
    pieces = []

    def take(data: bytes) -> None:
        pieces.append(data)
        raise ZeroDivisionError

    async def run():
        setup = Setup(tmp_path, Faults())
        async with setup.owner.workspace(SPEC) as workspace:
            with pytest.raises(ZeroDivisionError):
                await workspace.exec(COMMAND, take)
            assert (await workspace.exec(COMMAND)).exit_code == 0

    asyncio.run(run())
    assert pieces == [b"echo hello"]


def test_errors_for_the_model_pass(tmp_path):
    """A missing file is no loss."""

    async def run():
        setup = Setup(tmp_path, Faults())
        async with setup.owner.workspace(SPEC) as workspace:
            with pytest.raises(WorkspaceFileError, match="No such file"):
                await workspace.read("x", max_bytes=1)
            assert (await workspace.exec(COMMAND)).exit_code == 0

    asyncio.run(run())


def test_further_episodes_wait_for_a_slot(tmp_path):
    """No more workspaces than slots run at once, in order, and two owners with one folder share them."""

    async def run():
        setups = [Setup(tmp_path, Faults(), number=3) for _ in range(2)]
        most, order = 0, []

        async def episode(number):
            nonlocal most
            setup = setups[number % 2]
            async with setup.owner.workspace(SPEC):
                order.append(number)
                most = max(most, sum(len(each.memory.running) for each in setups))
                await asyncio.sleep(0.05)

        async with asyncio.TaskGroup() as group:
            for number in range(12):
                group.create_task(episode(number))
        assert most == 3
        assert [n for n in order if n % 2 == 0] == [0, 2, 4, 6, 8, 10]
        for setup in setups:
            setup.expect_nothing_left()

    asyncio.run(run())


def test_no_slot_in_time_is_infrastructure(tmp_path):
    """An episode that waits too long is not to blame."""

    async def run():
        setup = Setup(tmp_path, Faults(), number=1, wait_s=0.1)
        async with setup.owner.workspace(SPEC):
            with pytest.raises(InfrastructureError, match=r"no workspace was free for 0.1 s: 1 are in use"):
                await setup.owner.open(SPEC)
        setup.expect_nothing_left()

    asyncio.run(run())


def test_the_end_of_the_process_kills_what_is_open(tmp_path):
    """What an exit hook calls needs no loop."""

    async def run():
        setup = Setup(tmp_path, Faults())
        await setup.owner.open(SPEC)
        return setup

    setup = asyncio.run(run())
    setup.owner.kill_all()

    setup.expect_nothing_left()


def test_state_folder_of_another_user_is_refused(tmp_path):
    """A link could lead anywhere; the error names the option."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").touch()

    for name in ("link", "file/below"):
        with pytest.raises(ConfigError, match="set 'state'"):
            open_state(tmp_path / name)
