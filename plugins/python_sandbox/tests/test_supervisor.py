"""The supervisor, with fork servers that the test plays: launches, results, limits, assignment."""

from __future__ import annotations

import logging
import math
import os
import signal

import pytest

from turnwise_python_sandbox import Status, Tier, supervisor
from turnwise_python_sandbox.box.messages import Exited, Launch, Ready, Signal, Started
from turnwise_python_sandbox.job import Job


def test_a_launch_carries_the_limits_and_the_files(make_pool) -> None:
    """The server receives the limits in bytes, and the code and the input as files at offset 0."""
    pool = make_pool()
    job = pool.submit(b"print(1)")
    server = pool.next_server()
    launch = server.receive()
    code, stdin, *_ = server.files[job.id]

    assert (job.id, pool.limits.timeout_s, 60, 64 * 2**20, 8 * 2**20, 9, False) == launch
    assert (b"print(1)", b"input") == (os.read(code, 100), os.read(stdin, 100))


def test_nothing_is_launched_before_the_server_is_ready(make_pool) -> None:
    """A server that is not ready receives no message."""
    pool = make_pool()
    pool.submit()
    server = pool.next_server(ready=False)
    server.socket.setblocking(False)
    with pytest.raises(BlockingIOError):
        server.receive()
    server.socket.setblocking(True)
    server.send(Ready(7, ()))

    assert isinstance(server.receive(), Launch)


@pytest.mark.parametrize(
    ("wait_status", "status", "exit_code"),
    [(0, Status.OK, 0), (3 << 8, Status.ERROR, 3), (signal.SIGSEGV, Status.CRASHED, 128 + signal.SIGSEGV)],
)
def test_an_exit_becomes_the_result(make_pool, wait_status: int, status: Status, exit_code: int) -> None:
    """The result has the status, the exit code as a shell reports it, the measurements and both streams."""
    pool = make_pool()
    job = pool.submit()
    server = pool.next_server()
    launch = server.start_program()
    server.print(launch, b"out\n")
    server.print(launch, b"err\n", stream=2)
    server.end_program(launch, wait_status)
    result = job.future.result()

    assert (status, exit_code, "out\n", "err\n") == (result.status, result.exit_code, result.stdout, result.stderr)
    assert (1.5, 0.5, 2048, Tier.LANDLOCK) == (result.wall_s, result.cpu_s, result.max_rss_kb, result.tier)


def test_output_up_to_the_exit_is_complete(make_pool) -> None:
    """Output that is still in the pipes when `Exited` arrives belongs to the result."""
    pool = make_pool()
    job = pool.submit(max_output_bytes=200_000)
    server = pool.next_server()
    launch = server.start_program()
    for _ in range(60):
        server.print(launch, b"x" * 1000)
    server.end_program(launch)

    assert "x" * 60_000 == job.future.result().stdout


def test_a_closed_stream_does_not_end_the_run(make_pool) -> None:
    """A program may close its standard output and still print errors."""
    pool = make_pool()
    job = pool.submit()
    server = pool.next_server()
    launch = server.start_program()
    code, stdin, stdout, stderr = server.files[launch.job_id]
    os.close(stdout)
    server.files[launch.job_id] = [code, stdin, stderr]
    os.write(stderr, b"still here")
    server.end_program(launch)

    assert (Status.OK, "still here") == (job.future.result().status, job.future.result().stderr)


def test_output_above_the_limit_kills_the_program(make_pool) -> None:
    """The supervisor sends SIGKILL, and the result has exactly the limit of both streams together."""
    pool = make_pool()
    job = pool.submit()
    server = pool.next_server()
    launch = server.start_program()
    server.print(launch, b"e" * 400, stream=2)
    server.print(launch, b"o" * 900)

    assert Signal(job.id, signal.SIGKILL) == server.receive()
    server.end_program(launch, signal.SIGKILL, cause="asked")
    result = job.future.result()
    assert result.status is Status.OUTPUT_LIMIT
    assert len(result.stdout) + len(result.stderr) == 1000


def test_a_program_that_did_not_start_is_an_infrastructure_error(make_pool) -> None:
    """Without `Started` any exit is `infra_error`, with the server's reason and the traceback of the fork."""
    pool = make_pool()
    job = pool.submit()
    server = pool.next_server()
    launch = server.receive()
    server.print(launch, b"Traceback: no Landlock\n", stream=2)
    server.end_program(launch, 1 << 8, error="cannot fork")
    result = job.future.result()

    assert result.status is Status.INFRA_ERROR
    assert "cannot fork\nTraceback: no Landlock" == result.stderr


def test_a_silent_server_does_not_delay_the_timeout(make_pool, monkeypatch) -> None:
    """After its limit and the grace a run is `timeout`, with its output, although the server sends nothing."""
    monkeypatch.setattr(supervisor, "_GRACE_S", 0.01)
    pool = make_pool()
    job = pool.submit(timeout_s=0.05)
    server = pool.next_server()
    launch = server.receive()
    server.print(launch, b"so far\n")
    server.send(Started(launch.job_id, 0))
    result = job.future.result()

    assert (Status.TIMEOUT, "so far\n", 137) == (result.status, result.stdout, result.exit_code)
    assert not server.stopped.is_set()


def test_the_exit_after_a_timeout_changes_no_result(make_pool, monkeypatch) -> None:
    """A late `Exited` only makes room for the next job."""
    monkeypatch.setattr(supervisor, "_GRACE_S", 0.01)
    pool = make_pool(capacity=1)
    job = pool.submit(timeout_s=0.05)
    server = pool.next_server()
    launch = server.start_program()
    assert job.future.result().status is Status.TIMEOUT
    second = pool.submit()
    server.end_program(launch)
    server.run_program()

    assert second.future.result().status is Status.OK
    assert job.future.result().status is Status.TIMEOUT


def test_a_job_submitted_while_the_supervisor_ends_has_a_result(make_pool, monkeypatch) -> None:
    """The thread has left its loop, but not yet closed it: such a job fails, as later ones do."""
    pool = make_pool()
    late: list[Job] = []
    end_all = supervisor.Supervisor._end_all

    def submit_and_end(self: supervisor.Supervisor, reason: str) -> None:
        end_all(self, reason)
        late.append(pool.submit())

    monkeypatch.setattr(supervisor.Supervisor, "_end_all", submit_and_end)
    pool.supervisor.close()
    late.append(pool.submit())

    assert ["the sandbox was closed"] * 2 == [job.future.result(60.0).stderr for job in late]


def test_messages_about_unknown_jobs_are_ignored(make_pool) -> None:
    """`Started` and `Exited` with the id of no running job change nothing."""
    pool = make_pool()
    job = pool.submit()
    server = pool.next_server()
    launch = server.receive()
    for job_id in (0, -1, job.id + 1):
        server.send(Started(job_id, 0))
        server.send(Exited(job_id, 0, "", False, 0.0, 0.0, 0, ""))
    server.send(Started(launch.job_id, 0))
    server.end_program(launch, 7 << 8)

    assert job.future.result().exit_code == 7


def test_capacity_limits_the_programs_at_a_time(make_pool) -> None:
    """A job above the capacity is launched only when another exits, in the order of submission."""
    pool = make_pool(capacity=2)
    jobs = [pool.submit() for _ in range(4)]
    server = pool.next_server()
    first, second = server.start_program(), server.start_program()
    server.end_program(second)
    third = server.start_program()
    server.end_program(first)
    fourth = server.start_program()

    assert [job.id for job in jobs] == [launch.job_id for launch in (first, second, third, fourth)]


def test_a_second_server_starts_only_if_the_first_is_busy(make_pool) -> None:
    """Jobs one after another share a server; two at a time get two, each at its own server."""
    pool = make_pool(num_servers=4)
    job = pool.submit()
    first = pool.next_server()
    first.run_program()
    job.future.result()
    for _ in range(2):
        job = pool.submit()
        first.run_program()
        job.future.result()
    assert len(pool.servers) == 1
    jobs = [pool.submit(), pool.submit()]
    on_first = first.start_program()
    on_second = pool.next_server().start_program()

    assert [job.id for job in jobs] == [on_first.job_id, on_second.job_id]
    assert len(pool.servers) == 2


def test_a_job_goes_to_the_least_busy_server(make_pool, wait_until) -> None:
    """With all servers started, the one with the fewest programs receives the next job."""
    pool = make_pool(num_servers=2)
    job = pool.submit()
    first = pool.next_server()
    first.start_program()
    wait_until(lambda: job.started_at)
    pool.submit()
    second = pool.next_server()
    ended = second.start_program()
    for server in (first, second, first):
        pool.submit()
        server.start_program()
    # The first has three programs, the second two, and soon one.
    second.end_program(ended)
    for _ in range(2):
        pool.submit()
        second.start_program()


def test_no_more_servers_than_programs(make_pool) -> None:
    """With a capacity of one, a second server would never have work, so it is never started."""
    pool = make_pool(num_servers=8, capacity=1)
    jobs = [pool.submit() for _ in range(3)]
    server = pool.next_server()
    for job in jobs:
        server.run_program()
        job.future.result()

    assert len(pool.servers) == 1


def test_sessions_do_not_count_as_programs(make_pool) -> None:
    """A session takes no place of a program, and `max_sessions` limits the sessions."""
    pool = make_pool(capacity=1, max_sessions=1)
    first, second = pool.submit_session(), pool.submit_session()
    server = pool.next_server()
    session = server.start_program()
    pool.supervisor.kill(second)
    assert "the run was cancelled before it started" == second.future.result().stderr
    run = pool.submit()
    program = server.start_program()

    assert (first.id, run.id) == (session.job_id, program.job_id)
    assert (True, False) == (session.session, program.session)
    server.end_program(program)
    server.end_program(session)
    assert (Status.OK, Status.OK) == (run.future.result().status, first.future.result().status)


def test_an_idle_session_is_killed(make_pool) -> None:
    """A session that is idle for its limit receives SIGKILL, once."""
    pool = make_pool()
    job = pool.submit_session(idle_s=0.05)
    server = pool.next_server()
    session = server.start_program()

    assert Signal(job.id, signal.SIGKILL) == server.receive()
    server.end_program(session, signal.SIGKILL, cause="asked")
    job.future.result()
    assert not server.stopped.is_set()


def test_a_session_has_no_deadline_during_a_call(make_pool, wait_until) -> None:
    """Its idle time starts when the call ends, and the supervisor wakes up for it only then."""
    pool = make_pool()
    job = pool.submit_session(idle_s=30.0)
    pool.next_server().start_program()
    wait_until(lambda: job.started_at)
    job.idle_since = math.inf
    assert pool.supervisor._get_deadline(job) == math.inf
    assert pool.supervisor._select_timeout_s() is None
    job.idle_since = 5.0

    assert pool.supervisor._get_deadline(job) == 35.0


def test_a_cancelled_job_is_not_launched(make_pool) -> None:
    """A job whose future is cancelled while it waits takes no place."""
    pool = make_pool(capacity=1)
    first, cancelled, third = pool.submit(), pool.submit(), pool.submit()
    cancelled.future.cancel()
    server = pool.next_server()

    assert [first.id, third.id] == [server.run_program().job_id, server.run_program().job_id]


def test_killing_a_running_job_sends_the_signal(make_pool) -> None:
    """`kill` sends SIGKILL to the program, or the signal that it is given."""
    pool = make_pool()
    job = pool.submit()
    server = pool.next_server()
    launch = server.start_program()
    pool.supervisor.kill(job, signal.SIGINT)
    pool.supervisor.kill(job)

    assert [Signal(job.id, 2), Signal(job.id, 9)] == [server.receive(), server.receive()]
    server.end_program(launch, signal.SIGKILL, cause="asked")
    assert job.future.result().status is Status.CRASHED


def test_missing_preload_modules_are_logged(make_pool, caplog) -> None:
    """A module that a server cannot preload is a warning with the reason, and no failure."""
    pool = make_pool()
    with caplog.at_level(logging.WARNING):
        job = pool.submit()
        server = pool.next_server(ready=False)
        server.send(Ready(3, ("numpy: no module named numpy",)))
        server.run_program()
        assert job.future.result().status is Status.OK

    assert "the sandbox cannot preload numpy: no module named numpy" in caplog.text
