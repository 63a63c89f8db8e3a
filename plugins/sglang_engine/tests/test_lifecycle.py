"""SGLang's process: start, death and stop, without leftovers."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from turnwise.errors import ConfigError, EngineError, ReplicaDiedError
from turnwise.protocols import ModelSpec, Resources
from turnwise.types import FinishReason
from turnwise_sglang_engine import SglangConfig, SglangEngine
from turnwise_testing.engines.scenarios import failure_of

pytestmark = pytest.mark.usefixtures("starts_a_process")


def group_of(engine):
    """Return the ids of the processes in SGLang's group."""
    leader, found = engine._server._process.pid, []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == leader and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def start_failure(make, kind=EngineError, **options):
    engine = make(**options)
    return str(asyncio.run(failure_of(engine.start(), kind)))


def test_a_missing_sglang_is_reported(small_model, monkeypatch):
    """The error contains the install command."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    engine = SglangEngine(SglangConfig(model=small_model, device="cpu"), Resources())

    assert str(asyncio.run(failure_of(engine.start(), ConfigError))).startswith(
        "SGLang is not installed in this virtual environment: pip install 'turnwise-sglang-engine[cuda]'"
    )


def test_a_wrong_model_directory_is_refused(tmp_path):
    """The error names the option, the directory, or what the directory lacks."""

    def make(path):
        return lambda: SglangEngine(SglangConfig(device="cpu"), Resources(model=ModelSpec(path=path)))

    assert start_failure(make(None), ConfigError) == "the sglang engine has no model: set model.path, or engine.model"
    missing = tmp_path / "no"
    assert start_failure(make(missing), ConfigError) == f"the model directory '{missing}' does not exist"
    assert start_failure(make(tmp_path), ConfigError) == f"'{tmp_path}' is not a model directory: it has no config.json"
    (tmp_path / "config.json").write_text("{}")
    no_size = start_failure(make(tmp_path), ConfigError)
    assert no_size == f"'{tmp_path}' is not a language model: its config.json has no vocab_size"


def test_an_unknown_argument_is_named(make_fake_engine):
    """The error has the version of SGLang and the closest known name."""
    text = start_failure(make_fake_engine, engine_args={"schedule_polcy": "lpm"})

    assert text == "SGLang 0.0 has no argument 'schedule_polcy' (engine_args); did you mean 'schedule_policy'?"


@pytest.mark.parametrize(
    ("mood", "expected"),
    [
        ("raise", "SGLang did not start: RuntimeError: no memory for the cache"),
        ("die", "SGLang did not start: ValueError: this model cannot be loaded"),
    ],
)
def test_a_failed_start_has_a_cause(make_fake_engine, monkeypatch, mood, expected):
    """SGLang's exception, or the last error in its log if it killed itself."""
    monkeypatch.setenv("FAKE_SGLANG", mood)

    assert start_failure(make_fake_engine) == expected


def test_a_slow_start_is_stopped(make_fake_engine):
    """The process is killed."""
    engine = make_fake_engine(start_timeout_s=0.001)

    text = str(asyncio.run(failure_of(engine.start())))

    assert text == "SGLang did not start within 0.001 s (start_timeout_s)"
    assert group_of(engine) == []


def test_a_cache_smaller_than_one_context_is_refused(make_fake_engine):
    """SGLang would truncate a long request silently."""
    text = start_failure(make_fake_engine, max_context=4096)

    assert text.startswith("the KV cache has 4096 tokens, but max_context needs 4096: raise mem_fraction_static")


def test_starting_twice_is_refused(serve):
    """An engine starts once, and not again after a stop."""

    async def scenario(engine):
        again = await failure_of(engine.start())
        await engine.stop()
        return str(again), str(await failure_of(engine.start()))

    assert serve(scenario) == ("the sglang engine has been started already", "the sglang engine was stopped")


def test_stopping_while_starting_leaves_no_process(make_fake_engine):
    """`start` raises, and the process is killed."""

    async def scenario():
        engine = make_fake_engine()
        async with asyncio.TaskGroup() as group:
            start = group.create_task(failure_of(engine.start()))
            while engine._server is None or engine._server._link is None:  # noqa: ASYNC110 - an engine has no event for it
                await asyncio.sleep(0)
            await engine.stop()
        return str(start.result()), str(await failure_of(engine.generate(None))), group_of(engine)

    assert asyncio.run(scenario()) == (
        "the sglang engine was stopped while it was starting",
        "the sglang engine was stopped",
        [],
    )


def test_stopping_ends_only_its_own_children(make_fake_engine, monkeypatch):
    """SGLang's own shutdown would kill every child of its process."""
    monkeypatch.setenv("FAKE_SGLANG", "child")

    async def scenario():
        engine = make_fake_engine()
        await engine.start()
        before = group_of(engine)
        await engine.stop()
        assert group_of(engine) == []
        return len(before)

    with subprocess.Popen(["sleep", "1000"]) as bystander:
        try:
            assert asyncio.run(scenario()) == 2
            assert bystander.poll() is None
        finally:
            bystander.kill()


def test_a_dead_process_fails_all_requests(serve, ask):
    """Running and later requests raise with the cause; `stop` still works."""

    async def scenario(engine):
        async with asyncio.TaskGroup() as group:
            requests = [ask(str(i), max_tokens=200) for i in range(5)]
            tasks = [group.create_task(failure_of(engine.generate(each))) for each in requests]
            await asyncio.sleep(0.05)
            os.kill(engine._server._process.pid, signal.SIGKILL)
        later = [await failure_of(engine.generate(ask())), await failure_of(engine.update_weights([], 1))]
        return [task.result() for task in tasks] + later, engine.stats()["num_running"]

    failures, num_running = serve(scenario)

    assert [type(each) for each in failures] == [ReplicaDiedError] * 7
    assert {str(each) for each in failures} == {"SGLang's process died: it left no error"}
    assert num_running == 0


def test_requests_keep_their_tokens_at_stop(serve, ask):
    """They end like aborted ones."""

    async def scenario(engine):
        async with asyncio.TaskGroup() as group:
            task = group.create_task(engine.generate(ask(max_tokens=200)))
            await asyncio.sleep(0.1)
            await engine.stop()
        return task.result()

    result = serve(scenario)

    assert result.finish_reason is FinishReason.ABORT
    assert len(result.token_ids) > 0


ABANDON = """
import asyncio, os, sys
from pathlib import Path
from turnwise.protocols import Resources
from turnwise_sglang_engine import SglangConfig, SglangEngine, arguments

arguments.check_installed = lambda: None

async def main():
    engine = SglangEngine(SglangConfig(model=Path(sys.argv[1]), device="cuda", max_context=64), Resources())
    await engine.start()
    print(engine._server._process.pid, flush=True)
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), 9)

asyncio.run(main())
"""


@pytest.mark.parametrize("end", ["killed", "forgotten"])
def test_an_abandoned_engine_leaves_no_process(fake_sglang, small_model, monkeypatch, end):
    """SGLang ends with the process that holds the engine, even if that was killed."""
    monkeypatch.setenv("FAKE_SGLANG", "child")
    command = [sys.executable, "-W", "ignore", "-c", ABANDON, str(small_model), end]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    leader = int(done.stdout)

    for _ in range(500):
        try:
            os.killpg(leader, 0)
        except ProcessLookupError:
            break
        if not Path(f"/proc/{leader}").exists() or "Z" in Path(f"/proc/{leader}/stat").read_text().rpartition(")")[2]:
            break
        time.sleep(0.01)
    else:
        pytest.fail(f"process {leader} is still there")
