"""Jobs: their files, and the one result that each has."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest

from turnwise_python_sandbox import RunResult, Status, Tier
from turnwise_python_sandbox.box.messages import Exited
from turnwise_python_sandbox.job import Job
from turnwise_python_sandbox.limits import Limits
from turnwise_python_sandbox.sealed_file import create_sealed_file

LIMITS = Limits(timeout_s=1.0, memory_mb=64, max_output_bytes=100, cpu_s=3, disk_mb=1, max_files=1)
OK = Exited(1, 0, "", False, 0.1, 0.1, 1000, "")


def make_job(**changes: object) -> Job:
    """Return a job that a server has started."""
    return Job(code=b"code", stdin=b"input", limits=LIMITS, tier=Tier.LANDLOCK, started_at=1.0, **changes)


def count_descriptors() -> int:
    """Return how many descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))


def test_ids_are_unique_across_threads() -> None:
    """Two jobs never share an id, so that a late message about one cannot reach the other."""
    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(lambda _: make_job().id, range(500)))

    assert len(set(ids)) == 500


def test_a_job_has_one_result() -> None:
    """The first result stays, whatever is reported later."""
    job = make_job()
    job.complete(OK)
    job.fail("the server died")
    job.time_out()
    job.resolve(RunResult(status=Status.ERROR, tier=Tier.LANDLOCK))

    assert job.future.result().status is Status.OK


def test_a_cancelled_job_stays_cancelled() -> None:
    """A result for a cancelled future is dropped, and raises nothing in the supervisor."""
    job = make_job()
    assert job.future.cancel()
    job.complete(OK)

    assert job.future.cancelled()


@pytest.mark.parametrize(("peak_kb", "expected"), [(150_000, Status.CRASHED), (140_000, Status.MEMORY)])
def test_memory_of_the_warm_interpreter_is_not_the_program_s(peak_kb: int, expected: Status) -> None:
    """A program that kills itself has not run out of memory because the fork shared many pages with its server."""
    warm_kb = {Status.CRASHED: 149_000, Status.MEMORY: 100_000}[expected]
    job = make_job(warm_rss_kb=warm_kb)
    job.complete(OK._replace(wait_status=signal.SIGKILL, max_rss_kb=peak_kb))

    assert expected is job.future.result().status
    assert peak_kb == job.future.result().max_rss_kb


@pytest.mark.own_process
def test_files_are_closed_with_the_result() -> None:
    """After the result a job holds no descriptor."""
    before = count_descriptors()
    job = make_job()
    for fd in job.open_files():
        os.close(fd)
    assert count_descriptors() == before + 2
    job.fail("no reason")

    assert count_descriptors() == before


@pytest.mark.own_process
def test_files_of_a_second_attempt_replace_the_first() -> None:
    """`open_files` closes the pipes of an earlier attempt, and only the new ones feed the output."""
    before = count_descriptors()
    job = make_job()
    first, second = job.open_files(), job.open_files()
    os.write(second[2], b"second")
    for fd in (*first, *second):
        os.close(fd)
    job.complete(OK)

    assert "second" == job.future.result().stdout
    assert count_descriptors() == before


@pytest.mark.own_process
def test_files_that_cannot_all_be_opened_leave_none(monkeypatch) -> None:
    """Whichever call finds no descriptor left, descriptors opened before it are closed."""
    for name in ("memfd_create", "pipe", "dup", "set_blocking", "lseek"):
        for num_before, session in product(range(4), (False, True)):
            check_files_that_cannot_all_be_opened(monkeypatch, name, num_before, session)


def check_files_that_cannot_all_be_opened(monkeypatch, name: str, num_before: int, session: bool) -> None:
    fds = tuple(os.open(os.devnull, os.O_RDWR) for _ in range(3))
    job = make_job(session_fds=fds if session else None)
    before = count_descriptors()
    working = getattr(os, name)
    num_calls = 0

    def fail_later(*arguments: object) -> object:
        nonlocal num_calls
        num_calls += 1
        if num_calls > num_before:
            raise OSError(errno.EMFILE, "too many open files")
        return working(*arguments)

    with monkeypatch.context() as broken:
        broken.setattr(os, name, fail_later)
        try:
            opened = job.open_files()
        except OSError:
            opened = []
    for fd in opened:
        os.close(fd)
    job.pipes.close()

    assert before == count_descriptors()
    for fd in fds:
        os.close(fd)


def test_a_session_passes_its_own_files() -> None:
    """The stream and the pipes of a session are duplicated, so that a server can close its copies."""
    fds = tuple(os.open(os.devnull, os.O_RDWR) for _ in range(3))
    opened = make_job(session_fds=fds).open_files()

    assert len(opened) == 4
    assert set(opened).isdisjoint(fds)
    assert [os.fstat(fds[0]).st_rdev] * 3 == [os.fstat(opened[index]).st_rdev for index in (0, 2, 3)]
    assert os.read(opened[1], 1) == b""
    for fd in (*fds, *opened):
        os.close(fd)


@pytest.mark.parametrize(("wait_status", "exit_code"), [(0, 0), (7 << 8, 7), (9, 137), (11 | 0x80, 139)])
def test_exit_codes_are_those_of_a_shell(wait_status: int, exit_code: int) -> None:
    """A signal is reported as 128 plus its number, with a core dump or without."""
    job = make_job()
    job.complete(OK._replace(wait_status=wait_status))

    assert exit_code == job.future.result().exit_code


def test_a_program_that_never_ran_has_no_exit_code() -> None:
    """`infra_error` has the reason in place of an exit code."""
    job = make_job()
    job.complete(OK._replace(wait_status=-1, error="no namespaces"))
    result = job.future.result()

    assert (Status.INFRA_ERROR, None, "no namespaces") == (result.status, result.exit_code, result.stderr)


def test_an_unexplained_failure_still_has_a_text() -> None:
    """A server that gives no reason leaves a line that says so."""
    job = Job(code=b"", stdin=b"", limits=LIMITS, tier=Tier.LANDLOCK)
    job.complete(OK)

    assert "the program could not be confined" == job.future.result().stderr


def test_queued_time_ends_when_the_job_is_sent() -> None:
    """`queued_s` is the time between submission and launch."""
    job = make_job(submitted_at=10.0, sent_at=12.5)
    job.complete(OK)

    assert job.future.result().queued_s == 2.5


@pytest.mark.parametrize("content", [b"", b"print(1)", bytes(range(256)) * 5000])
def test_a_sealed_file_holds_its_content(content: bytes) -> None:
    """It is read from offset 0, at any size."""
    fd = create_sealed_file(content)
    found = b"".join(iter(lambda: os.read(fd, 65536), b""))
    os.close(fd)

    assert content == found


@pytest.mark.parametrize(
    "change",
    [
        lambda fd: os.write(fd, b"x"),
        lambda fd: os.pwrite(fd, b"x", 0),
        lambda fd: os.ftruncate(fd, 0),
        lambda fd: os.ftruncate(fd, 100),
        lambda fd: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
    ],
)
def test_a_sealed_file_cannot_be_changed(change) -> None:
    """Writing, truncating, growing and unsealing all fail, also for the process that made it."""
    fd = create_sealed_file(b"code")
    with pytest.raises(PermissionError) as caught:
        change(fd)
    os.close(fd)

    assert caught.value.errno == errno.EPERM


def test_without_memfd_the_file_has_no_name(monkeypatch, tmp_path) -> None:
    """On other systems the code is in a deleted file, which leaves nothing on disk."""
    monkeypatch.setattr("turnwise_python_sandbox.sealed_file.sys.platform", "darwin")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    fd = create_sealed_file(b"code")
    content = os.read(fd, 100)
    os.close(fd)

    assert b"code" == content
    assert [] == list(tmp_path.iterdir())
