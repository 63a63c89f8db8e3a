"""Settings of every test, and a comparison that the suites of several engines share."""

import gc
import os
import platform
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from argparse import ArgumentTypeError
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from zlib import crc32

import pytest
import structlog
from hypothesis import settings

EXAMPLES = Path(__file__).parent / "examples"

# Before a test imports numpy or torch. Tiny models are slower with more threads, and two workers share two cores.
for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

# One token for every Ray cluster of a test session. By default only some ways to start a cluster ask for one, and a
# process that has started one of them refuses messages of the others.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", uuid.uuid4().hex)

# No test asks the hub of Hugging Face; those of downloads have a hub on loopback, and say so to their processes.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Ray runs its actors at a lower priority, and then they wait for the tests beside theirs to leave a core.
os.environ.setdefault("RAY_worker_niceness", "0")

# A shell lets the programs that it starts in the background ignore Ctrl-C, and `nohup` lets them ignore SIGHUP. They
# pass this on to every process that a test starts and interrupts.
if threading.current_thread() is threading.main_thread():
    for _signal, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(_signal) is signal.SIG_IGN:
            signal.signal(_signal, _handler)

if sys.version_info < (3, 12):
    # At the end of each `asyncio.run`, Python 3.11 looks for a member of an enum that equals the handler of Ctrl-C. The
    # error that there is none has the `repr` of the whole result, which takes a twentieth of the time of the tests.
    # Later versions look for numbers alone, as this does; there is no public way to say so.
    _as_member = signal._int_to_enum  # noqa: SLF001 - see above

    def _number_as_member(value: object, members: type) -> object:
        return _as_member(value, members) if isinstance(value, int) else value

    signal._int_to_enum = _number_as_member  # noqa: SLF001 - see above

# No deadlines: how long an example takes depends on the machine. `make test` uses "fast" and `make quick` "quick". Both
# run no more examples of a property that sets max_examples itself: properties take a fifth of the time of `make test`.
# `make test-slow` runs all of them again with "thorough", or with their own number, but for those whose own number
# `make test` has run.
settings.register_profile("quick", deadline=None, max_examples=5)
settings.register_profile("fast", deadline=None, max_examples=5)
settings.register_profile("thorough", deadline=None, max_examples=100)
# "long" is for `make test-long`. Its number replaces smaller ones of the properties.
settings.register_profile("long", deadline=None, max_examples=1000)
settings.load_profile("fast")
OWN_PROCESS = "TURNWISE_TEST_OWN_PROCESS"
"""Set in the process of a test that is marked `own_process`."""
OWN_SETTINGS = "_hypothesis_internal_use_settings"
"""Attribute of a property with settings; hypothesis has no public way to read them."""
MAX_CASES = 6
"""Cases of a test with the marker `many_cases` in `make test`, if the marker has no number; the others are slow."""
QUICK_CPU_S = 60.0
"""Most processor seconds of `make quick`."""
STARTS = frozenset({"Popen", "ProcessPoolExecutor", "create_subprocess_exec", "multiprocessing", "subprocess"})
"""Names by which a test, or a function or fixture that it uses, starts a process."""
START_EVENTS = frozenset({"os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "subprocess.Popen"})
"""What Python reports when a process starts, whoever starts it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that shuffle the tests and choose a part of them."""
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run files, and the tests of each, in a random order")
    parser.addoption("--quick", action="store_true", help="refuse tests that start a process; for `make quick`")
    parser.addoption("--part", type=read_part, metavar="K/N", help="run the K-th of N parts of the tests, from 1")


def read_part(text: str) -> tuple[int, int]:
    """Return the number of a part, from 1, and how many there are."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise ArgumentTypeError(f"expected K/N with 1 <= K <= N, not {text!r}")
    return int(number), int(count)


def choose_part(items: list[pytest.Item], number: int, count: int) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """
    Return the tests of a part, and those of the others.

    The name decides: a test stays in its part when others are added. Tests with the marker `one_part` go by the name of
    their file, so that the run or the cluster that they share starts in one part alone.
    """
    chosen, left = [], []
    for item in items:
        name = item.nodeid.partition("::")[0] if item.get_closest_marker("one_part") else item.nodeid
        (chosen if crc32(name.encode()) % count == number - 1 else left).append(item)
    return chosen, left


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Print the seed, with which the same order can be run again."""
    seed = config.getoption("shuffle")
    return [] if seed is None else [f"random order: --shuffle {seed}"]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """
    Keep the garbage collector away from modules and tests, which live as long as the process.

    There are millions of these objects: they cost a fifth of the collection of the tests, and then a second for each
    full collection while the tests run.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def shuffled(items: list[pytest.Item], seed: int) -> list[pytest.Item]:
    """
    Return the tests in an order that depends on the seed and the tests alone.

    A file stays together, because its tests share fixtures that take seconds. So do the tests of a class.
    """

    def places(item: pytest.Item) -> list[float]:
        names = (str(item.path), f"{item.path} {getattr(item, 'cls', None)}", item.nodeid)
        return [random.Random(f"{seed} {name}").random() for name in names]

    return sorted(items, key=places)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by what they do, choose a part, and shuffle."""
    mark_rare_cases(items)
    mark_processes(items)
    if part := config.getoption("part"):
        items[:], left = choose_part(items, *part)
        config.hook.pytest_deselected(items=left)
    seed = config.getoption("shuffle")
    if seed is not None:
        items[:] = shuffled(items, seed)
    for item in items:
        if item.name == "test_is_built_in_a_ray_actor":  # plugins outside this repository have no such markers
            item.add_marker(pytest.mark.ray)
            item.add_marker(pytest.mark.slow)
        test = getattr(item, "obj", None)
        function = getattr(test, "__func__", test)  # of a method
        own = getattr(function, OWN_SETTINGS, None)
        if own is None:
            continue
        if settings().max_examples != own.max_examples <= settings.get_profile("fast").max_examples:
            item.add_marker(pytest.mark.sized)
        chosen = {"long": max, "fast": min, "quick": min}.get(settings.get_current_profile_name())
        if chosen:
            number = chosen(own.max_examples, settings().max_examples)
            setattr(function, OWN_SETTINGS, settings(own, max_examples=number))


def mark_rare_cases(items: list[pytest.Item]) -> None:
    """
    Mark the cases of a test that has many similar ones as slow, but for some that their names decide.

    So a case stays where it is when others are added.
    """
    families: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.name.startswith("test_holds_under_delays["):  # plugins outside this repository have no such markers
            item.add_marker(pytest.mark.many_cases(3))
        if item.get_closest_marker("many_cases"):
            families[item.nodeid.partition("[")[0]].append(item)
    for cases in families.values():
        marker = cases[0].get_closest_marker("many_cases")
        num_kept = marker.args[0] if marker and marker.args else MAX_CASES
        for item in sorted(cases, key=lambda item: crc32(item.nodeid.encode()))[num_kept:]:
            item.add_marker(pytest.mark.slow)


def mark_processes(items: list[pytest.Item]) -> None:
    """Mark the tests that start a process, as far as their code and their fixtures tell."""
    for item in items:
        if any(map(starts_process, functions_of(item))) or "starts_a_process" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.process)


def functions_of(item: pytest.Item) -> Iterator[Callable[..., object]]:
    """Yield the function of a test, and those of its fixtures."""
    if isinstance(item, pytest.Function):
        yield item.function
        info = getattr(item, "_fixtureinfo")  # noqa: B009 - pytest has no public way to read the fixtures of a test
        for definitions in info.name2fixturedefs.values():
            yield from (each.func for each in definitions)


_starting: dict[object, bool] = {}


def starts_process(function: object) -> bool:
    """Return whether a function, or one of the tests' functions that it uses, names something that starts a process."""
    function = getattr(getattr(function, "hypothesis", None), "inner_test", function)
    function = getattr(function, "__func__", function)
    if hasattr(function, "cache_info"):
        function = getattr(function, "__wrapped__", function)
    if not isinstance(function, FunctionType) or "site-packages" in function.__code__.co_filename:
        return False
    if function not in _starting:
        _starting[function] = False  # while it is read: functions may call each other
        names = set(names_in(function.__code__))
        if any(part in function.__code__.co_filename for part in ("/tests/", "/testing/", "conftest.py")):
            used = (function.__globals__.get(name) for name in names)
            forks = {"os", "fork"} <= names  # a record has a method of this name too
            _starting[function] = forks or bool(names & STARTS) or any(map(starts_process, used))
    return _starting[function]


def names_in(code: CodeType) -> Iterator[str]:
    """Yield the names that a function uses, also in the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


@pytest.fixture
def starts_a_process() -> None:
    """Marks the tests of a fixture that asks for it as `process`: for one whose process the code under test starts."""


class QuickTests:
    """Watches `make quick`: no test starts a process, and all of them together take little processor time."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.num_tests = 0

    def hear(self, event: str, arguments: tuple[object, ...]) -> None:
        """Note the start of a process."""
        if event in START_EVENTS:
            self.started.append(f"{event} {str(arguments)[:200]}")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, None, None]:
        """Fail a test that started a process."""
        yield
        self.num_tests += 1
        started, self.started = self.started, []
        if started:
            pytest.fail(f"starts a process: let its fixture ask for `starts_a_process` ({started[0]})", pytrace=False)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a session that took too long."""
        if time.process_time() > QUICK_CPU_S and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say how much of its time the session took."""
        seconds = time.process_time()
        verdict = "" if seconds <= QUICK_CPU_S else f": more than {QUICK_CPU_S:.0f} s, see --durations=30"
        terminalreporter.write_line(f"quick: {self.num_tests} tests, {seconds:.0f} s of processor{verdict}")


def pytest_configure(config: pytest.Config) -> None:
    """Watch the tests of `make quick`."""
    if config.getoption("quick", default=False):
        platform.processor()  # asks a program once, and libraries ask for it at any time
        watcher = QuickTests()
        config.pluginmanager.register(watcher, "quick tests")
        sys.addaudithook(watcher.hear)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that reads memory, threads or descriptors of its process in a process that runs nothing else."""
    if pyfuncitem.get_closest_marker("own_process") is None or OWN_PROCESS in os.environ:
        return None
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", pyfuncitem.nodeid]
    options = {"cwd": pyfuncitem.config.rootpath, "env": os.environ | {OWN_PROCESS: "1"}}
    done = subprocess.run(command, **options, capture_output=True, text=True, check=False)
    if done.returncode == 0 and "\nSKIPPED [1] " in done.stdout:
        # The reason is the one that the test gave in its own process.
        pytest.skip(done.stdout.partition("\nSKIPPED [1] ")[2].partition("\n")[0])
    assert done.returncode == 0, f"in its own process:\n{done.stdout}{done.stderr}"
    return True


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """
    Give the next test structlog's defaults: a run that a test starts in this process configures the log.

    Between files, keep the garbage collector away from what the tests have imported so far, as after the collection.
    """
    if structlog.is_configured():
        structlog.reset_defaults()
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def mean_rewards(config: str, out: Path, *changes: str) -> dict[str, float]:
    """Run an example with 8 episodes for each of its 32 tasks, and return the (32,) mean rewards by task."""
    import numpy as np

    from turnwise.cli import main
    from turnwise.record.invariants import check_trajectory
    from turnwise.types import Status
    from turnwise_result_files import read_results

    assert main(["rollout", str(EXAMPLES / config), "rollout.n=8", *changes, "--out", str(out)]) == 0
    results = read_results(out / "trajectories.parquet")
    by_task: dict[str, list[float]] = {}
    assert len(results) == 256
    assert {each.status for each in results} <= {Status.COMPLETED, Status.TRUNCATED}
    for each in results:
        check_trajectory(each.trajectories[0])
        by_task.setdefault(each.task.uid, []).append(each.reward)
    return {uid: float(np.mean(values)) for uid, values in by_task.items()}


@pytest.fixture
def expect_rewards_of_the_embedded_engine(tmp_path: Path) -> Callable[[str], None]:
    """A function that runs an example with replicas of this environment and compares it with the embedded engine."""
    import numpy as np

    def expect(config: str) -> None:
        served = mean_rewards(config, tmp_path / "served", f"runtime.ray.replica_python={sys.executable}")
        embedded = mean_rewards("calculator.yaml", tmp_path / "embedded")
        differences = np.array([served[uid] - embedded[uid] for uid in embedded])
        error = float(differences.std(ddof=1) / np.sqrt(len(differences)))
        mean = float(differences.mean())
        assert abs(mean) < 3 * error, f"the mean reward differs by {mean:.4f}, with a standard error of {error:.4f}"

    return expect
