"""The supervisor when fork servers die, stall or misbehave: retries, replacements, and errors for the callers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from turnwise_python_sandbox import Status, supervisor
from turnwise_python_sandbox.box.messages import Ready, Started
from turnwise_python_sandbox.job import Job


def fail_with(error: Exception) -> Callable[..., None]:
    """Return a function that raises an error."""

    def fail(*_arguments: object) -> None:
        raise error

    return fail


def test_servers_that_die_at_start_fail_the_job(make_pool) -> None:
    """After three failed starts in a row the job fails, with the standard error of the last server."""
    pool = make_pool()
    job = pool.submit()
    for number in range(3):
        server = pool.next_server(ready=False)
        server.errors = f"error {number}"
        server.die()
    result = job.future.result()

    assert result.status is Status.INFRA_ERROR
    assert "no fork server can be started: the fork server died: error 2" == result.stderr
    assert len(pool.servers) == 3


def test_a_started_program_resets_the_count_of_failed_starts(make_pool) -> None:
    """Failures before and after a program that started are not added up."""
    pool = make_pool()
    first = pool.submit()
    for _ in range(2):
        pool.next_server(ready=False).die()
    server = pool.next_server()
    server.run_program()
    assert first.future.result().status is Status.OK
    server.die()
    server.stopped.wait()
    second = pool.submit()
    pool.next_server(ready=False).die()
    pool.next_server().run_program()

    assert second.future.result().status is Status.OK


def test_one_working_server_is_enough(make_pool) -> None:
    """If further servers fail to start, the jobs wait for the server that works."""
    pool = make_pool(num_servers=3)
    first, second = pool.submit(), pool.submit()
    server = pool.next_server()
    launch = server.start_program()
    for _ in range(4):
        pool.next_server(ready=False).die()
    server.end_program(launch)
    server.run_program()

    assert [Status.OK] * 2 == [first.future.result().status, second.future.result().status]


def test_a_job_is_retried_once(make_pool) -> None:
    """A job whose program has not started survives the death of one server, not of two."""
    pool = make_pool()
    job = pool.submit()
    for number in range(2):
        server = pool.next_server()
        server.errors = f"error {number}"
        server.receive()
        server.die()
    result = job.future.result()

    assert (Status.INFRA_ERROR, "the fork server died: error 1") == (result.status, result.stderr)


def test_a_retried_job_comes_first(make_pool) -> None:
    """The job of a dead server does not lose its place to the jobs behind it."""
    pool = make_pool(capacity=1)
    first, second = pool.submit(), pool.submit()
    server = pool.next_server()
    server.receive()
    server.die()
    server = pool.next_server()

    assert [first.id, second.id] == [server.run_program().job_id, server.run_program().job_id]


def test_a_retried_job_has_only_the_output_of_its_second_attempt(make_pool) -> None:
    """The pipes of the first attempt are closed, so that nothing printed there is in the result."""
    pool = make_pool()
    job = pool.submit()
    server = pool.next_server()
    server.receive()
    server.die()
    server = pool.next_server()
    launch = server.start_program()
    server.print(launch, b"second")
    server.end_program(launch)

    assert "second" == job.future.result().stdout


def test_a_started_program_is_not_retried(make_pool) -> None:
    """The death of a server fails a program that has started, because it may have had effects."""
    pool = make_pool()
    job = pool.submit()
    server = pool.next_server()
    server.start_program()
    server.die()
    result = job.future.result()

    assert (Status.INFRA_ERROR, "the fork server died", 1) == (result.status, result.stderr, job.attempts)


def test_the_death_of_a_server_fails_only_its_own_jobs(make_pool) -> None:
    """A program on another server is not affected."""
    pool = make_pool(num_servers=3)
    lost, kept = pool.submit(), pool.submit()
    first = pool.next_server()
    first.start_program()
    second = pool.next_server()
    launch = second.start_program()
    first.die()
    assert lost.future.result().status is Status.INFRA_ERROR
    second.end_program(launch)

    assert kept.future.result().status is Status.OK


def test_a_server_killed_between_calls_costs_no_job(make_pool) -> None:
    """The job after the death of an idle server runs on a new one, at its first attempt."""
    pool = make_pool()
    first = pool.submit()
    server = pool.next_server()
    server.run_program()
    first.future.result()
    server.die()
    server.stopped.wait()
    second = pool.submit()
    pool.next_server().run_program()

    assert (Status.OK, 1) == (second.future.result().status, second.attempts)


def test_a_server_that_does_not_reap_is_stopped(make_pool, monkeypatch) -> None:
    """A server that never reports the exit of an overdue program is replaced."""
    monkeypatch.setattr(supervisor, "_GRACE_S", 0.01)
    monkeypatch.setattr(supervisor, "_REAP_TIMEOUT_S", 0.05)
    pool = make_pool()
    job = pool.submit(timeout_s=0.05)
    server = pool.next_server()
    server.start_program()
    assert job.future.result().status is Status.TIMEOUT
    server.stopped.wait()
    after = pool.submit()
    pool.next_server().run_program()

    assert after.future.result().status is Status.OK


def test_a_killed_session_that_is_not_reaped_stops_the_server(make_pool, monkeypatch) -> None:
    """An idle session that does not die is reported as `timeout`, and its server is replaced."""
    monkeypatch.setattr(supervisor, "_REAP_TIMEOUT_S", 0.05)
    pool = make_pool()
    job = pool.submit_session(idle_s=0.05)
    server = pool.next_server()
    server.start_program()

    assert job.future.result().status is Status.TIMEOUT
    server.stopped.wait()
    after = pool.submit()
    pool.next_server().run_program()
    assert after.future.result().status is Status.OK


def limit_first_server(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Give the first server little time for something, and the later ones enough."""
    limits = [0.05]
    monkeypatch.setattr(supervisor, name, 0.0)

    def start(spec):
        # On the supervisor's thread, which reads the limit after this.
        setattr(supervisor, name, limits.pop() if limits else 60.0)
        return spec.start()

    monkeypatch.setattr(supervisor, "start_server", start)


def test_a_server_that_never_starts_a_program_is_replaced(make_pool, monkeypatch) -> None:
    """Without `Started` in time the server is stopped, and another one runs the job."""
    pool = make_pool()
    limit_first_server(monkeypatch, "_LAUNCH_TIMEOUT_S")
    job = pool.submit()
    pool.next_server().stopped.wait()
    pool.next_server().run_program()

    assert (Status.OK, 2) == (job.future.result().status, job.attempts)


def test_two_programs_that_never_start_end_their_server_once(make_pool, monkeypatch) -> None:
    """Both jobs are overdue in one round; both run on the next server."""
    pool = make_pool()
    jobs = [pool.submit(), pool.submit()]
    server = pool.next_server()
    monkeypatch.setattr(supervisor, "_LAUNCH_TIMEOUT_S", 0.2)
    for _ in jobs:
        server.receive()
    replacement = pool.next_server(ready=False)
    monkeypatch.setattr(supervisor, "_LAUNCH_TIMEOUT_S", 60.0)
    replacement.send(Ready(7, ()))
    for _ in jobs:
        replacement.run_program()

    assert [Status.OK] * 2 == [job.future.result().status for job in jobs]


def test_a_server_that_is_never_ready_is_replaced(make_pool, monkeypatch) -> None:
    """Without `Ready` in time the server is stopped, and another one is started."""
    pool = make_pool()
    limit_first_server(monkeypatch, "_READY_TIMEOUT_S")
    job = pool.submit()
    pool.next_server(ready=False).stopped.wait()
    pool.next_server().run_program()

    assert (Status.OK, 1) == (job.future.result().status, job.attempts)


@pytest.mark.parametrize("datagram", [b"junk", b"[]", b'["Exited", 1]', b'["Launch"]', b"\xff" * 2000])
def test_an_invalid_message_ends_the_server(make_pool, datagram: bytes) -> None:
    """A server that sends anything but messages is stopped, and its programs fail with the reason."""
    pool = make_pool()
    job = pool.submit()
    server = pool.next_server()
    server.start_program()
    server.socket.send(datagram)
    result = job.future.result()

    assert server.stopped.is_set()
    assert result.stderr.startswith("the fork server is broken: invalid message")


def test_a_server_that_stops_reading_is_stopped(make_pool) -> None:
    """If the socket to a server is full, the server is replaced instead of blocking the supervisor."""
    pool = make_pool()
    running = pool.submit()
    server = pool.next_server()
    server.start_program()
    for _ in range(10_000):
        pool.supervisor.kill(running, 0)
    result = running.future.result()

    assert server.stopped.is_set()
    assert result.stderr.startswith("the fork server receives no messages: ")


def test_closing_fails_every_job(make_pool) -> None:
    """`close` fails running and waiting jobs, stops every server, and may be called again."""
    pool = make_pool(capacity=1)
    jobs = [pool.submit(), pool.submit()]
    server = pool.next_server()
    server.start_program()
    pool.supervisor.close()
    pool.supervisor.close()
    results = [job.future.result() for job in jobs]

    assert [(Status.INFRA_ERROR, "the sandbox was closed")] * 2 == [(each.status, each.stderr) for each in results]
    assert server.stopped.is_set()
    assert pool.supervisor.server_pids == ()


def test_closing_resolves_a_program_that_has_timed_out(make_pool, monkeypatch) -> None:
    """`close` leaves the result of a job that is resolved already."""
    monkeypatch.setattr(supervisor, "_GRACE_S", 0.01)
    pool = make_pool()
    job = pool.submit(timeout_s=0.05)
    pool.next_server().start_program()
    assert job.future.result().status is Status.TIMEOUT
    pool.supervisor.close()

    assert job.future.result().status is Status.TIMEOUT


def test_files_that_cannot_be_opened_fail_the_job_only(make_pool, monkeypatch) -> None:
    """A lack of descriptors fails the job with the reason, and later jobs run."""
    pool = make_pool()
    with monkeypatch.context() as broken:
        broken.setattr(Job, "open_files", fail_with(OSError(24, "Too many open files")))
        job = pool.submit()
        server = pool.next_server()
        assert "cannot open the files of the run: [Errno 24] Too many open files" == job.future.result().stderr
    after = pool.submit()
    server.run_program()

    assert after.future.result().status is Status.OK


def test_a_bug_in_the_supervisor_fails_all_jobs_but_not_its_thread(make_pool, monkeypatch) -> None:
    """An unexpected exception resolves every job with its text, and the supervisor continues with new servers."""
    pool = make_pool()
    running = pool.submit()
    first = pool.next_server()
    first.start_program()
    with monkeypatch.context() as broken:
        broken.setattr(Job, "open_files", fail_with(RuntimeError("a bug")))
        pool.submit()
        assert "the supervisor failed: RuntimeError: a bug" == running.future.result().stderr
    after = pool.submit()
    pool.next_server().run_program()

    assert first.stopped.is_set()
    assert after.future.result().status is Status.OK


def test_a_server_may_report_start_and_exit_in_any_batch(make_pool) -> None:
    """Messages that arrive together are handled in their order."""
    pool = make_pool(capacity=3)
    jobs = [pool.submit() for _ in range(3)]
    server = pool.next_server()
    launches = [server.receive() for _ in jobs]
    for launch in launches:
        server.send(Started(launch.job_id, 0))
    for number, launch in enumerate(launches):
        server.end_program(launch, number << 8)

    assert [0, 1, 2] == [job.future.result().exit_code for job in jobs]
