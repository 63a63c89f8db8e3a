"""Sessions, with an interpreter that the test plays: replies, limits, broken streams, death."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise_python_sandbox import RunResult, SandboxConfig, Session, Status, Tier, session
from turnwise_python_sandbox.box.frames import FrameReader, encode_frame
from turnwise_python_sandbox.job import Job
from turnwise_python_sandbox.session_interpreter import parse_exit_code

READY = encode_frame(b'{"exit_code": 0}')


class FakeSupervisor:
    """Gives the files of each job to a function of the test, which plays the interpreter on a thread."""

    tier = Tier.LANDLOCK

    def __init__(self, interpret: Callable[[FakeInterpreter], None]) -> None:
        self._interpret = interpret
        self.session_threads = ThreadPoolExecutor(4)
        self.signals: list[int] = []
        self.interrupted = threading.Event()
        self.num_interpreters = 0

    def submit(self, job: Job) -> None:
        """Start an interpreter with the files of the job."""
        self.num_interpreters += 1
        job.begin(0)
        interpreter = FakeInterpreter(self, job)
        self.session_threads.submit(interpreter.run, self._interpret)

    def kill(self, job: Job, number: int = signal.SIGKILL) -> None:
        """Record the signal; SIGKILL ends the job."""
        self.signals.append(number)
        self.interrupted.set()
        if number == signal.SIGKILL:
            job.resolve(RunResult(status=Status.CRASHED, tier=self.tier, exit_code=137))


class FakeInterpreter:
    """The interpreter's ends of the files of a session."""

    def __init__(self, supervisor: FakeSupervisor, job: Job) -> None:
        self.supervisor = supervisor
        self.job = job
        stream, self.stdout, self.stderr = map(os.dup, job.session_fds)
        self.stream = socket.socket(fileno=stream)
        self._reader = FrameReader()

    def run(self, interpret: Callable[[FakeInterpreter], None]) -> None:
        """Play the interpreter, and close its files at the end."""
        with contextlib.suppress(ConnectionError):
            interpret(self)
        self.close()

    def close(self) -> None:
        """Close the files, as the death of the process does. Idempotent."""
        self.stream.close()
        while self.stdout is not None:
            os.close(self.stdout)
            os.close(self.stderr)
            self.stdout = None

    def receive(self) -> str:
        """Wait for the code of a call; empty when the session is closed."""
        while data := self.stream.recv(65536):
            for payload in self._reader.feed(data):
                return payload.decode()
        return ""

    def reply(self, exit_code: int = 0) -> None:
        """Send the exit code of a call."""
        self.stream.sendall(encode_frame(json.dumps({"exit_code": exit_code}).encode()))

    def exit(self, result: RunResult) -> None:
        """End the process with a result."""
        self.close()
        self.job.resolve(result)


@pytest.fixture
def make_session() -> Iterator[Callable[..., Session]]:
    """Makes a session whose interpreter a function plays, and closes it at the end."""
    made: list[Session] = []

    def make(interpret: Callable[[FakeInterpreter], None], **options: object) -> Session:
        made.append(Session(FakeSupervisor(interpret), SandboxConfig(**options)))
        return made[-1]

    yield make
    for each in made:
        each.close()
        each._supervisor.session_threads.shutdown()


def echo(interpreter: FakeInterpreter) -> None:
    """Print the code of each call."""
    interpreter.stream.sendall(READY)
    while code := interpreter.receive():
        os.write(interpreter.stdout, code.encode())
        interpreter.reply(0)


def test_a_reply_ends_a_call(make_session) -> None:
    """Each call has its own output, and all calls one interpreter."""
    made = make_session(echo)
    results = [made.run("first"), made.run("second")]

    assert [("first", Status.OK, 0), ("second", Status.OK, 0)] == [(r.stdout, r.status, r.exit_code) for r in results]
    assert made._supervisor.num_interpreters == 1


def test_an_exit_code_is_an_error(make_session) -> None:
    """A reply other than 0 is `error`, and the session is not lost."""

    def fail(interpreter: FakeInterpreter) -> None:
        interpreter.stream.sendall(READY)
        interpreter.receive()
        os.write(interpreter.stderr, b"Traceback")
        interpreter.reply(3)

    result = make_session(fail).run("x")

    assert (Status.ERROR, 3, "Traceback", False) == (
        result.status,
        result.exit_code,
        result.stderr,
        result.session_lost,
    )


def test_a_reply_may_arrive_in_pieces(make_session) -> None:
    """A frame is complete only with its last byte, however the stream cuts it."""

    def dribble(interpreter: FakeInterpreter) -> None:
        for byte in READY:
            interpreter.stream.send(bytes([byte]))
        interpreter.receive()
        for byte in encode_frame(b'{"exit_code": 7}'):
            interpreter.stream.send(bytes([byte]))

    assert make_session(dribble).run("x").exit_code == 7


def test_output_before_the_reply_is_complete(make_session) -> None:
    """Everything that was written before the reply belongs to the call, also what is still in the pipes."""

    def print_much(interpreter: FakeInterpreter) -> None:
        interpreter.stream.sendall(READY)
        interpreter.receive()
        os.write(interpreter.stdout, b"o" * 60_000)
        os.write(interpreter.stderr, b"e" * 60_000)
        interpreter.reply()

    result = make_session(print_much).run("x")

    assert (60_000, 60_000) == (len(result.stdout), len(result.stderr))


def test_an_interpreter_that_does_not_start_is_an_infrastructure_error(make_session, monkeypatch) -> None:
    """The result has the reason that the supervisor gave."""
    monkeypatch.setattr(session, "_START_TIMEOUT_S", 0.05)
    failed = RunResult(status=Status.INFRA_ERROR, tier=Tier.LANDLOCK, stderr="no fork server")
    made = make_session(echo)
    made._supervisor.submit = lambda job: job.resolve(failed)
    result = made.run("x")

    assert (Status.INFRA_ERROR, True) == (result.status, result.session_lost)
    assert "no interpreter for the session: no fork server" in result.stderr


def test_a_start_that_takes_too_long_is_an_infrastructure_error(make_session, monkeypatch) -> None:
    """The interpreter is killed, and the result says that it did not start in time."""
    monkeypatch.setattr(session, "_START_TIMEOUT_S", 0.05)
    # It waits for the code, without having said that it is ready.
    made = make_session(FakeInterpreter.receive)
    result = made.run("x")

    assert Status.INFRA_ERROR is result.status
    assert [signal.SIGKILL] == made._supervisor.signals


def test_a_timeout_interrupts_first(make_session) -> None:
    """If the interrupt ends the call, the result is `timeout` and the interpreter stays."""

    def stop_on_interrupt(interpreter: FakeInterpreter) -> None:
        interpreter.stream.sendall(READY)
        interpreter.receive()
        interpreter.supervisor.interrupted.wait()
        os.write(interpreter.stderr, b"KeyboardInterrupt")
        interpreter.reply(130)
        interpreter.receive()
        interpreter.reply(0)

    made = make_session(stop_on_interrupt)
    stopped, after = made.run("x", timeout_s=0.05), made.run("y")

    assert (Status.TIMEOUT, False, "KeyboardInterrupt") == (stopped.status, stopped.session_lost, stopped.stderr)
    assert (Status.OK, [signal.SIGINT]) == (after.status, made._supervisor.signals)


def test_a_call_that_survives_the_interrupt_is_killed(make_session, monkeypatch) -> None:
    """The interpreter receives SIGINT, then SIGKILL, and the result has the output and the loss."""
    monkeypatch.setattr(session, "_INTERRUPT_S", 0.05)

    def ignore(interpreter: FakeInterpreter) -> None:
        interpreter.stream.sendall(READY)
        interpreter.receive()
        os.write(interpreter.stdout, b"so far")
        interpreter.receive()

    made = make_session(ignore)
    result = made.run("x", timeout_s=0.2)

    assert (Status.TIMEOUT, True, "so far") == (result.status, result.session_lost, result.stdout)
    assert [signal.SIGINT, signal.SIGKILL] == made._supervisor.signals


def test_too_much_output_kills_without_an_interrupt(make_session) -> None:
    """The output is cut at the limit, and an interrupt would only let the code print more."""

    def shout(interpreter: FakeInterpreter) -> None:
        interpreter.stream.sendall(READY)
        interpreter.receive()
        os.write(interpreter.stdout, b"x" * 100)
        interpreter.receive()

    made = make_session(shout, max_output_bytes=60)
    result = made.run("x")

    assert (Status.OUTPUT_LIMIT, True, "x" * 60) == (result.status, result.session_lost, result.stdout)
    assert [signal.SIGKILL] == made._supervisor.signals


def test_output_between_calls_counts_for_the_next(make_session) -> None:
    """A thread that prints after its call cannot exceed the limit unseen."""
    printed = threading.Event()

    def print_late(interpreter: FakeInterpreter) -> None:
        interpreter.stream.sendall(READY)
        interpreter.receive()
        interpreter.reply()
        os.write(interpreter.stdout, b"late")
        printed.set()
        interpreter.receive()
        interpreter.reply()

    made = make_session(print_late)
    first = made.run("x")
    printed.wait()

    # The late output may still have been read with the first reply.
    assert "late" == first.stdout + made.run("y").stdout


@pytest.mark.parametrize(
    "junk",
    [b"\xff" * 100, (257).to_bytes(4, "big"), encode_frame(b"x" * 257), (2**31).to_bytes(4, "big") + b"{}"],
)
def test_an_oversized_reply_ends_the_session(make_session, junk: bytes) -> None:
    """Only code in the session can send one, so the status is `crashed` and not `infra_error`."""

    def forge(interpreter: FakeInterpreter) -> None:
        interpreter.stream.sendall(READY)
        interpreter.receive()
        interpreter.stream.sendall(junk)
        interpreter.receive()

    made = make_session(forge)
    result = made.run("x")

    assert (Status.CRASHED, True) == (result.status, result.session_lost)
    assert "the session is broken: frame announces" in result.stderr
    assert [signal.SIGKILL] == made._supervisor.signals


def test_a_truncated_reply_is_not_a_reply(make_session) -> None:
    """A stream that ends inside a frame is the death of the interpreter."""

    def cut(interpreter: FakeInterpreter) -> None:
        interpreter.stream.sendall(READY)
        interpreter.receive()
        interpreter.stream.sendall(encode_frame(b'{"exit_code": 0}')[:-1])
        interpreter.exit(RunResult(status=Status.CRASHED, tier=Tier.LANDLOCK, exit_code=139))

    result = make_session(cut).run("x")

    assert (Status.CRASHED, 139, True) == (result.status, result.exit_code, result.session_lost)


def test_code_that_is_too_long_for_a_frame_is_refused(make_session) -> None:
    """More than 16 MiB of code fail with the limit in the text, and nothing is sent."""
    result = make_session(echo).run("#" * (16 * 2**20 + 1))

    assert (Status.CRASHED, True) == (result.status, result.session_lost)
    assert "a frame holds at most 16777216" in result.stderr


def test_the_exit_of_the_interpreter_ends_the_call(make_session) -> None:
    """Even exit code 0 is an `error`, because the call did not reply, and the next call has a new interpreter."""

    def leave(interpreter: FakeInterpreter) -> None:
        interpreter.stream.sendall(READY)
        if interpreter.receive():
            os.write(interpreter.stdout, b"bye")
            interpreter.exit(RunResult(status=Status.OK, tier=Tier.LANDLOCK, exit_code=0))

    made = make_session(leave)
    results = [made.run("x"), made.run("y")]

    assert [(Status.ERROR, 0, True, "bye")] * 2 == [(r.status, r.exit_code, r.session_lost, r.stdout) for r in results]
    assert made._supervisor.num_interpreters == 2


def test_a_death_without_a_report_is_an_infrastructure_error(make_session, monkeypatch) -> None:
    """If the server does not report how the interpreter ended, the program is not blamed."""
    monkeypatch.setattr(session, "_EXIT_TIMEOUT_S", 0.05)

    def vanish(interpreter: FakeInterpreter) -> None:
        interpreter.stream.sendall(READY)
        interpreter.receive()

    result = make_session(vanish).run("x")

    assert (Status.INFRA_ERROR, True) == (result.status, result.session_lost)
    assert "did not report how" in result.stderr


def test_an_interpreter_that_does_not_read_is_a_timeout(make_session, monkeypatch) -> None:
    """A call whose code does not fit into the stream ends at its limit, and kills the interpreter."""
    monkeypatch.setattr(session, "_INTERRUPT_S", 0.05)
    done = threading.Event()

    def block(interpreter: FakeInterpreter) -> None:
        interpreter.stream.sendall(READY)
        done.wait()

    made = make_session(block)
    result = made.run("#" * 10**7, timeout_s=0.1)
    done.set()

    assert (Status.TIMEOUT, True) == (result.status, result.session_lost)
    assert [signal.SIGINT, signal.SIGKILL] == made._supervisor.signals


def test_closing_kills_a_running_call(make_session) -> None:
    """`close` on another thread ends a call that would not end by itself."""
    running = threading.Event()

    def hang(interpreter: FakeInterpreter) -> None:
        interpreter.stream.sendall(READY)
        interpreter.receive()
        running.set()
        interpreter.supervisor.interrupted.wait()

    made = make_session(hang)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(made.run, "x")
        running.wait()
        made.close()

    assert (Status.CRASHED, 137) == (call.result().status, call.result().exit_code)


def test_calls_take_turns(make_session) -> None:
    """Calls on several threads reach the interpreter one at a time, and each has its own output."""
    made = make_session(echo)
    codes = [f"call {number}" for number in range(20)]
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda code: made.run(code).stdout, codes))

    assert codes == outputs


@pytest.mark.own_process
def test_descriptors_are_closed_with_the_session(make_session) -> None:
    """A session that has lost interpreters holds no descriptor of them."""

    def leave(interpreter: FakeInterpreter) -> None:
        interpreter.stream.sendall(READY)
        interpreter.receive()
        interpreter.exit(RunResult(status=Status.ERROR, tier=Tier.LANDLOCK, exit_code=1))

    made = make_session(leave)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        made.run("x")
    made.close()
    made._supervisor.session_threads.shutdown()

    assert len(os.listdir("/proc/self/fd")) == before


@given(
    st.binary(max_size=60)
    | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(lambda v: json.dumps({"exit_code": v}).encode())
)
def test_any_payload_has_an_exit_code(payload: bytes) -> None:
    """A forged reply is at most a wrong exit code between 0 and 255."""
    assert 0 <= parse_exit_code(payload) <= 255


@pytest.mark.parametrize(
    ("payload", "exit_code"),
    [(b'{"exit_code": 0}', 0), (b'{"exit_code": 256}', 0), (b'{"exit_code": "0"}', 1), (b"{}", 1), (b"[0]", 1)],
)
def test_a_malformed_reply_is_an_error(payload: bytes, exit_code: int) -> None:
    """A reply without an integer exit code counts as 1."""
    assert exit_code == parse_exit_code(payload)
