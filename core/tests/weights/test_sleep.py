"""Sleep of one engine: legal calls, calls that reach the engine, failures, and a state that the engine shares."""

import asyncio
import re
from pathlib import Path

import pytest
from attrs import define, field

import turnwise
from turnwise.errors import AsleepError, EngineError
from turnwise.types import Capabilities
from turnwise.weights.sleep import EngineMemory, SleepState


@define(eq=False)
class FakeEngine:
    """Records its calls, and raises the next of `errors` in `sleep`."""

    capabilities = Capabilities(sleep_levels=frozenset({1, 2}))
    calls: list = field(factory=list)
    errors: list = field(factory=list)

    async def sleep(self, level):
        self.calls.append(("sleep", level))
        if self.errors:
            raise self.errors.pop(0)

    async def wake_up(self, tags):
        self.calls.append(("wake_up", *tags))

    async def update_weights(self, weights, version):
        self.calls.append(("update_weights", version))


class SharingEngine(FakeEngine):
    """Has a separate sleep state, and may have freed memory before an error."""

    def __init__(self):
        super().__init__()
        self.sleep_state = SleepState("the sharing engine")

    async def sleep(self, level):
        with self.sleep_state.falling_asleep(level):
            self.sleep_state.mark_asleep(level)
            await super().sleep(level)


def serves(state):
    try:
        state.check_serving()
    except AsleepError:
        return False
    return True


def test_the_engine_is_called_only_for_changes():
    """Repeated calls reach the engine once, a deeper sleep reaches it again, and updates need awake weights."""
    engine = FakeEngine()

    async def main():
        memory = EngineMemory(engine)
        for level in (1, 1, 2, 1):
            await memory.sleep(level)
        with pytest.raises(EngineError, match="the engine cannot wake up kv_cache before weights"):
            await memory.wake_up(["kv_cache"])
        with pytest.raises(EngineError, match="the weights of the engine are asleep: wake them up before an update"):
            await memory.update_weights([], 1)
        await memory.wake_up(["weights"])
        await memory.update_weights([], 1)
        assert not serves(memory.state)
        for _ in range(2):
            await memory.wake_up(["weights", "kv_cache"])
        assert serves(memory.state)

    asyncio.run(main())

    assert engine.calls == [
        ("sleep", 1),
        ("sleep", 2),
        ("wake_up", "weights"),
        ("update_weights", 1),
        ("wake_up", "kv_cache"),
    ]


def test_an_unknown_level_or_tag_is_named():
    """The error contains the supported levels or tags."""

    async def main():
        memory = EngineMemory(FakeEngine())
        with pytest.raises(EngineError, match=r"the engine has no sleep level 3; it has 1 and 2$"):
            await memory.sleep(3)
        with pytest.raises(EngineError, match="the engine cannot wake up 'graphs', only weights and kv_cache"):
            await memory.wake_up(["graphs"])

    asyncio.run(main())
    with pytest.raises(EngineError, match=r"the engine has no sleep level 1; it has none: it needs a GPU$"):
        SleepState().check_level(1, (), "it needs a GPU")


def test_requests_are_refused_from_the_start_of_a_sleep_to_the_end_of_the_wake_up():
    """Senders hear of it before memory is freed, and again when all memory is allocated."""

    class Watched(FakeEngine):
        async def sleep(self, level):
            log.append("memory is freed")

        async def wake_up(self, tags):
            log.append(f"{tags[0]} allocated")

    log = []

    async def main():
        async def announce():
            log.append("serving" if serves(memory.state) else "refusing")

        memory = EngineMemory(Watched(), announce)
        await memory.sleep(1)
        await memory.wake_up(["kv_cache", "weights"])

    asyncio.run(main())

    assert log == ["refusing", "memory is freed", "weights allocated", "kv_cache allocated", "serving"]


@pytest.mark.parametrize(
    ("level", "awake", "text"),
    [
        (1, (), r"^the engine is asleep \(level 1\): wake up weights and kv_cache$"),
        (2, ("weights",), r"^the engine is asleep \(level 2\): wake up kv_cache$"),
    ],
)
def test_the_error_of_a_refused_request_names_the_sleeping_memory(level, awake, text):
    """It has the level, and the tags to wake up."""
    state = SleepState()
    state.mark_asleep(level)
    state.mark_awake(*awake)

    with pytest.raises(AsleepError, match=text):
        state.check_serving()


def test_a_failed_sleep_leaves_the_state_before_it():
    """The engine serves as before, and the same call reaches it again."""
    engine = FakeEngine(errors=[RuntimeError("busy")])

    async def main():
        memory = EngineMemory(engine)
        with pytest.raises(RuntimeError, match="busy"):
            await memory.sleep(1)
        assert serves(memory.state)
        await memory.sleep(1)
        engine.errors.append(RuntimeError("busy again"))
        with pytest.raises(RuntimeError, match="busy again"):
            await memory.sleep(2)
        assert memory.state.level == 1
        await memory.sleep(2)
        assert memory.state.level == 2

    asyncio.run(main())

    assert engine.calls == [("sleep", 1), ("sleep", 1), ("sleep", 2), ("sleep", 2)]


def test_an_engine_shares_its_state():
    """After a failure in which the engine may have freed memory, waking up reaches the engine."""
    engine = SharingEngine()
    engine.errors.append(RuntimeError("half of it"))

    async def main():
        memory = EngineMemory(engine)
        assert memory.state is engine.sleep_state
        with pytest.raises(RuntimeError, match="half of it"):
            await memory.sleep(1)
        with pytest.raises(AsleepError, match="the sharing engine is asleep"):
            memory.state.check_serving()
        await memory.wake_up(["weights", "kv_cache"])
        assert serves(memory.state)
        await memory.sleep(2)
        assert memory.state.level == 2

    asyncio.run(main())

    assert engine.calls == [("sleep", 1), ("wake_up", "weights"), ("wake_up", "kv_cache"), ("sleep", 2)]


class GatedEngine(FakeEngine):
    """Each call waits until the test opens the gate; an update then reads its weights."""

    def __init__(self):
        super().__init__()
        self.entered, self.gate = asyncio.Event(), asyncio.Event()

    async def _wait(self, *call):
        self.entered.set()
        await self.gate.wait()
        self.calls.append(call)

    async def sleep(self, level):
        await self._wait("sleep", level)

    async def wake_up(self, tags):
        await self._wait("wake_up", *tags)

    async def update_weights(self, weights, version):
        await self._wait("read", version)
        self.calls.append(("update_weights", version, *weights))


@pytest.mark.parametrize(
    ("name", "argument", "level"),
    [("sleep", 2, 2), ("wake_up", ("weights", "kv_cache"), 0), ("update_weights", (), 0)],
)
def test_a_cancelled_call_ends_before_the_next_begins(name, argument, level):
    """The engine has finished the call, and the state says so; a cancelled update cannot land later."""

    async def main():
        engine = GatedEngine()
        memory = EngineMemory(engine)
        if name == "wake_up":
            memory.state.mark_asleep(2)
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            extra = () if name != "update_weights" else (1,)
            first = group.create_task(getattr(memory, name)(argument, *extra))
            await engine.entered.wait()
            first.cancel()
            second = group.create_task(memory.wake_up(("weights", "kv_cache")))
            for _ in range(10):
                await asyncio.sleep(0)
            assert not first.done()
            assert not second.done()
            assert engine.calls == []
            engine.gate.set()
            with pytest.raises(asyncio.CancelledError):
                await first
            seen = memory.state.level
        return seen, engine.calls[0]

    seen, call = asyncio.run(main())

    assert level == seen
    assert call[0] == {"update_weights": "read"}.get(name, name)


def test_a_cancelled_update_is_not_read_on():
    """It fails where the engine reads the next weight, which changes nothing by the contract of engines."""

    async def main():
        engine = GatedEngine()
        memory = EngineMemory(engine)
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            task = group.create_task(memory.update_weights([("w", 1)], 1))
            await engine.entered.wait()
            task.cancel()
            await asyncio.sleep(0)
            engine.gate.set()
        assert task.cancelled()
        await memory.update_weights([("w", 2)], 2)
        return engine.calls

    assert [("read", 1), ("read", 2), ("update_weights", 2, ("w", 2))] == asyncio.run(main())


@pytest.mark.parametrize(
    ("versions", "served"),
    [
        ([1, 2, 1], [1, 2]),  # the late one was given up
        ([2, 2], [2]),  # sent twice
        ([1, "error", 1], [1]),  # a newer one has started, although it failed
        (["error", 2], [2]),  # a failed update may be repeated
        ([2, "sleep", 2], [2, 2]),  # the sleep has dropped them
    ],
)
def test_versions_only_rise(versions, served):
    """An update that comes after a newer one is refused, and says so; the newer weights stay."""

    class Failing(FakeEngine):
        async def update_weights(self, weights, version):
            if weights_fail:
                raise EngineError("no such weight")
            await super().update_weights(weights, version)

    engine, refused = Failing(), []

    async def main():
        nonlocal weights_fail
        memory = EngineMemory(engine)
        for version in versions:
            weights_fail = version == "error"
            if version == "sleep":
                await memory.sleep(2)
                await memory.wake_up(["weights", "kv_cache"])
                continue
            try:
                await memory.update_weights([], 2 if weights_fail else version)
            except EngineError as error:
                refused.append(str(error))

    weights_fail = False
    asyncio.run(main())

    assert served == [call[1] for call in engine.calls if call[0] == "update_weights"]
    assert len(versions) - len(served) - versions.count("sleep") == len(refused)


def test_a_late_update_is_refused_also_if_the_newer_one_waits():
    """Both wait for a wake-up; the order in which they continue does not matter."""

    async def main():
        engine = GatedEngine()
        memory = EngineMemory(engine)
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            group.create_task(memory.wake_up(()))
            sleeping = group.create_task(memory.update_weights([], 1))
            await engine.entered.wait()
            newer = group.create_task(memory.update_weights([], 3))
            await asyncio.sleep(0)
            with pytest.raises(EngineError, match="weight version 2 came after version 3, and was dropped"):
                await memory.update_weights([], 2)
            engine.gate.set()
        assert sleeping.done()
        assert newer.done()
        return [call[1] for call in engine.calls if call[0] == "update_weights"]

    assert [1, 3] == asyncio.run(main())


def test_only_one_module_puts_engines_to_sleep():
    """No module of the core but `turnwise.weights.sleep` calls `sleep` or `wake_up` of an engine."""
    source = Path(turnwise.__file__).parent
    calling = re.compile(r"\bengine\.(sleep|wake_up)\(")
    callers = {str(path.relative_to(source)) for path in source.rglob("*.py") if calling.search(path.read_text())}

    assert {"weights/sleep.py"} == callers
