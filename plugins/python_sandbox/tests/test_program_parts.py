"""Parts that run inside the box, tested outside of it: preloading, confinement, one program per process."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise_python_sandbox import Sandbox, SandboxUnavailableError, Status
from turnwise_python_sandbox.box import confinement, preload
from turnwise_python_sandbox.box.program import OUT_OF_MEMORY_SIGNAL
from turnwise_python_sandbox.config import SandboxConfig
from turnwise_python_sandbox.job import Job
from turnwise_python_sandbox.limits import Limits
from turnwise_python_sandbox.result import Tier
from turnwise_python_sandbox.subprocess_backend import SubprocessBackend

# Until a forked child executes its program, it counts the pages of the test process, so the limit is far beyond them.
LIMITS = Limits(timeout_s=60.0, memory_mb=64 * 1024, max_output_bytes=10**5, cpu_s=60, disk_mb=1, max_files=10)


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules can be imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("wanted", "hard", "expected"),
    [
        (0, resource.RLIM_INFINITY, None),
        (1024, resource.RLIM_INFINITY, 1024),
        (1024, 80_000, 1024),
        (1024, 800, 700),
        (0, 800, 700),
        (16, 10, 9),
    ],
)
def test_threads_leave_processes_to_the_server(wanted: int, hard: int, expected: int | None) -> None:
    """The limit of a program is below the hard limit of its user, unless there is none."""
    assert expected == confinement.compute_max_threads(wanted, hard)


def test_missing_modules_do_not_stop_the_preload(modules: Path) -> None:
    """Each module that fails has a line with its error, in order, and the others are imported."""
    (modules / "preload_good.py").write_text("")
    (modules / "preload_raising.py").write_text("raise ValueError('no license')")
    missing = preload.preload_modules(["no_such_module", "preload_raising", "preload_good"])

    assert ("no_such_module: No module named 'no_such_module'", "preload_raising: no license") == missing
    assert sys.modules.pop("preload_good")


def test_a_first_use_that_fails_is_reported(modules: Path, monkeypatch) -> None:
    """A library that is imported but does not work counts as missing."""
    (modules / "preload_broken.py").write_text("")
    monkeypatch.setitem(preload._FIRST_USES, "preload_broken", lambda module: module.solve())

    (line,) = preload.preload_modules(["preload_broken"])
    assert line.startswith("preload_broken: module 'preload_broken' has no attribute 'solve'")
    del sys.modules["preload_broken"]


def test_the_first_uses_work() -> None:
    """The installed numpy and sympy can be imported and used as the preload does."""
    assert () == preload.preload_modules(["numpy", "sympy"])


def test_a_limit_is_never_raised(run_in_child) -> None:
    """A hard limit of the surroundings stays, and a lower one is set for good."""

    def probe() -> list[tuple[int, int]]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (50, 100))
        found = []
        for value in (200, 80):
            confinement.set_limit(resource.RLIMIT_NOFILE, value)
            found.append(resource.getrlimit(resource.RLIMIT_NOFILE))
        confinement.set_limit(resource.RLIMIT_NOFILE, 20, 30)
        return [*found, resource.getrlimit(resource.RLIMIT_NOFILE)]

    assert [[100, 100], [80, 80], [20, 30]] == run_in_child(probe)


@settings(max_examples=25)
@given(kept=st.sets(st.integers(0, 29), max_size=8))
def test_only_kept_descriptors_stay_open(run_in_child, kept: set[int]) -> None:
    """Every other descriptor above 2 is closed, whichever are kept."""

    def probe() -> list[int]:
        first = max(map(int, os.listdir("/proc/self/fd"))) + 1
        fds = list(range(first, first + 30))
        for fd in fds:
            os.dup2(1, fd)
        # The pipe of the answer is below `first`.
        confinement.close_descriptors_except([*range(first), *(fds[index] for index in kept)])
        return [index for index, fd in enumerate(fds) if is_open(fd)]

    assert sorted(kept) == run_in_child(probe)


def is_open(fd: int) -> bool:
    """Return whether a descriptor is open."""
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_the_address_space_is_measured(run_in_child) -> None:
    """Without /proc the result is the size that /proc reports, up to 2 MiB, and the limit is as before."""

    def probe() -> list[object]:
        before = resource.getrlimit(resource.RLIMIT_AS)
        measured = confinement.measure_address_space()
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        return [measured - pages * os.sysconf("SC_PAGE_SIZE"), resource.getrlimit(resource.RLIMIT_AS) == before]

    difference, restored = run_in_child(probe)

    assert abs(difference) <= 2 * 2**20
    assert restored


@pytest.fixture
def backend():
    """A backend that runs each job in a new process, without isolation."""
    made = SubprocessBackend(SandboxConfig(unsafe_subprocess=True), Tier.UNSAFE_SUBPROCESS)
    yield made
    made.close()


def submit(backend: SubprocessBackend, code: str, **changes: object) -> Job:
    """Submit a job and return it."""
    job = Job(code=code.encode(), stdin=b"in\n", limits=LIMITS, tier=Tier.UNSAFE_SUBPROCESS, **changes)
    backend.submit(job)
    return job


def test_a_subprocess_has_streams_and_limits(backend: SubprocessBackend) -> None:
    """The program reads its input, and has the limits for processor, files and core dumps."""
    code = (
        "import resource\nprint(input())\n"
        "print([resource.getrlimit(getattr(resource, 'RLIMIT_' + n))[0] for n in ('CPU', 'FSIZE', 'CORE')])"
    )

    assert f"in\n[60, {2**20}, 0]\n" == submit(backend, code).future.result().stdout


def test_a_subprocess_has_no_variables_of_the_host(backend: SubprocessBackend, monkeypatch) -> None:
    """Also without isolation the environment is built from nothing."""
    monkeypatch.setenv("API_KEY", "secret")
    result = submit(
        backend, "import os\nprint('API_KEY' in os.environ, os.environ['HOME'] == os.getcwd())"
    ).future.result()

    assert "False True\n" == result.stdout


def test_memory_errors_end_with_their_own_signal(backend: SubprocessBackend) -> None:
    """The status is `memory`, and standard error has the exception."""
    result = submit(backend, "x = bytearray(10**12)").future.result()

    assert (Status.MEMORY, 128 + OUT_OF_MEMORY_SIGNAL) == (result.status, result.exit_code)
    assert result.stderr.endswith("MemoryError\n")


def test_killing_a_subprocess_ends_its_group(backend: SubprocessBackend, wait_until) -> None:
    """`kill` ends a running program, and does nothing for one that has ended."""
    job = submit(backend, "print('up', flush=True)\nwhile True: pass")
    wait_until(lambda: job.output.size)
    backend.kill(job)
    assert (Status.CRASHED, 137) == (job.future.result().status, job.future.result().exit_code)
    backend.kill(job)


def test_closing_ends_running_and_waiting_subprocesses(wait_until) -> None:
    """`close` kills the running program and fails the waiting one."""
    config = SandboxConfig(unsafe_subprocess=True, max_in_flight=1)
    backend = SubprocessBackend(config, Tier.UNSAFE_SUBPROCESS)
    running, waiting = submit(backend, "print('up', flush=True)\nwhile True: pass"), submit(backend, "print(1)")
    wait_until(lambda: running.output.size)
    backend.close()

    assert Status.CRASHED is running.future.result().status
    assert (Status.INFRA_ERROR, "the sandbox was closed") == (
        waiting.future.result().status,
        waiting.future.result().stderr,
    )


def test_a_subprocess_that_cannot_start_is_an_infrastructure_error(backend: SubprocessBackend, monkeypatch) -> None:
    """A failed start becomes the reason of the result, and leaves no directory."""

    def fail(*_arguments: object, **_options: object) -> None:
        raise OSError("no more processes")

    with monkeypatch.context() as broken:
        broken.setattr(subprocess, "Popen", fail)
        result = submit(backend, "print(1)").future.result()

    assert (Status.INFRA_ERROR, "OSError: no more processes") == (result.status, result.stderr)
    assert backend._running == {}


def test_seatbelt_needs_its_program() -> None:
    """Without `sandbox-exec` there is no tier 3, and the error names it."""
    with pytest.raises(SandboxUnavailableError, match="sandbox-exec is missing"):
        SubprocessBackend(SandboxConfig(), Tier.SEATBELT)


def test_seatbelt_allows_the_interpreter_and_the_workspace(monkeypatch) -> None:
    """The profile denies by default, reads the library, and writes only in the program's directory."""
    monkeypatch.setattr("turnwise_python_sandbox.subprocess_backend.shutil.which", lambda name: f"/usr/bin/{name}")
    backend = SubprocessBackend(SandboxConfig(readable=("/usr/share",)), Tier.SEATBELT)
    program, *_, profile = backend._prefix
    backend.close()

    assert "/usr/bin/sandbox-exec" == program
    assert "(deny default)" in profile
    assert '(subpath "/usr/share")' in profile
    assert [line for line in profile.splitlines() if "file-write" in line] == [
        '(allow file-write* (literal "/dev/null") (subpath (param "PLACE")))'
    ]


def test_a_sandbox_without_isolation_survives_a_fork(run_in_child) -> None:
    """Parent and child can run programs with the same object."""
    with Sandbox(tier=5, unsafe_subprocess=True) as sandbox:
        sandbox.run("pass")

        assert "child\n" == run_in_child(lambda: sandbox.run("print('child')").stdout)
        assert "parent\n" == sandbox.run("print('parent')").stdout
