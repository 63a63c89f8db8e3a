"""Real fork servers, with the test in place of the supervisor: launches, limits, signals, and the end."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from turnwise_python_sandbox import SandboxConfig, SandboxUnavailableError, Tier
from turnwise_python_sandbox.box import landlock, messages
from turnwise_python_sandbox.box.messages import Exited, Launch, Ready, Signal, Started
from turnwise_python_sandbox.output import CapturedOutput, OutputPipes
from turnwise_python_sandbox.sealed_file import create_sealed_file
from turnwise_python_sandbox.selftest import build_server_spec
from turnwise_python_sandbox.server_process import ServerProcess, start_server

pytestmark = pytest.mark.usefixtures("starts_a_process")

NEVER_S = 60.0
LAUNCH = Launch(1, NEVER_S, 60, 256 * 2**20, 16 * 2**20, 200, False)


class Server:
    """A fork server, and the programs that a test has launched on it."""

    def __init__(self, process: ServerProcess) -> None:
        self.process = process
        self.control = process.control
        self.control.settimeout(NEVER_S)
        self.pipes: dict[int, OutputPipes] = {}

    @property
    def pid(self) -> int:
        """The id of the process, which is the server itself or bubblewrap."""
        return self.process.process.pid

    def send(self, message: messages.Message, fds: list[int] | None = None) -> None:
        """Send a message with open files."""
        socket.send_fds(self.control, [messages.encode(message)], fds or [])

    def receive(self) -> messages.Message:
        """Wait for a message."""
        return messages.decode(self.control.recv(messages.MAX_DATAGRAM_BYTES))

    def launch(self, code: str, **changes: object) -> Launch:
        """Launch a program."""
        launch = LAUNCH._replace(**changes)
        pipes = self.pipes[launch.job_id] = OutputPipes()
        fds = [create_sealed_file(code.encode()), create_sealed_file(b""), *pipes.open()]
        self.send(launch, fds)
        for fd in fds:
            os.close(fd)
        return launch

    def expect_start(self, job_id: int) -> Started:
        """Wait for the message that a program has started."""
        started = self.receive()
        assert isinstance(started, Started)
        assert started.job_id == job_id
        return started

    def run(self, code: str, **changes: object) -> tuple[Exited, str]:
        """Run a program to its end, and return the report and its output."""
        launch = self.launch(code, **changes)
        self.expect_start(launch.job_id)
        return self.receive(), self.read_output(launch.job_id)

    def read_output(self, job_id: int) -> str:
        """Return what a program has printed."""
        output, pipes = CapturedOutput(10**6), self.pipes.pop(job_id)
        pipes.drain(output)
        pipes.close()
        return output.text("stdout") + output.text("stderr")

    def stop(self) -> None:
        """End the server."""
        self.process.stop()
        for pipes in self.pipes.values():
            pipes.close()


@pytest.fixture(params=[Tier.NAMESPACES, Tier.LANDLOCK], ids=["tier1", "tier2"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A fork server of each tier that has said it is ready."""
    config = SandboxConfig(preload=("no_such_module", "colorsys"))
    try:
        made = Server(start_server(build_server_spec(config, request.param)))
    except SandboxUnavailableError as error:
        pytest.skip(str(error))  # such as: bubblewrap is not installed
    data = made.control.recv(messages.MAX_DATAGRAM_BYTES)
    if not data:
        reason = made.process.read_errors()
        made.stop()
        pytest.skip(f"tier {request.param} does not work here: {reason}")  # the kernel or a container forbids it
    made.ready = messages.decode(data)
    yield made
    made.stop()


def test_the_first_message_is_ready(server: Server) -> None:
    """It has the kernel's Landlock ABI, and a line for each module that cannot be preloaded."""
    abi = landlock.detect_abi()

    assert isinstance(server.ready, Ready)
    assert abi == server.ready.landlock_abi
    assert ("no_such_module: No module named 'no_such_module'",) == server.ready.missing


def test_a_program_reports_start_and_exit(server: Server) -> None:
    """The report has the wait status, the time and the memory of the program."""
    exited, output = server.run("print('out')\nraise SystemExit(3)", job_id=7)

    assert (7, 3 << 8, "", False, "") == (*exited[:4], exited.error)
    assert "out\n" == output
    assert min(exited.wall_s, exited.cpu_s, exited.max_rss_kb) > 0


def test_programs_run_at_the_same_time(server: Server) -> None:
    """Each program is reported by its own id, in the order in which they end."""
    for job_id in (1, 2, 3):
        server.launch("import signal\nprint('up', flush=True)\nsignal.pause()", job_id=job_id)
        server.expect_start(job_id)
    exits = []
    for job_id in (2, 3, 1):
        server.send(Signal(job_id, signal.SIGKILL))
        exits.append(server.receive())

    assert [(2, "asked"), (3, "asked"), (1, "asked")] == [(exited.job_id, exited.cause) for exited in exits]
    assert {signal.SIGKILL} == {os.WTERMSIG(exited.wait_status) for exited in exits}


def test_the_time_limit_kills(server: Server) -> None:
    """A program at its limit is killed, and the cause says so."""
    server.launch("while True: pass", wall_s=0.05)
    exited = next(message for message in iter(server.receive, None) if not isinstance(message, Started))

    # On a slow machine the limit passes before the program has started, so there may be no `Started`.
    assert (signal.SIGKILL, "wall") == (exited.wait_status, exited.cause)


def test_the_processor_limit_ends_with_its_own_signal(server: Server) -> None:
    """The kernel ends the program with SIGXCPU, and the server gives no cause."""
    exited, _ = server.run("while True: pass", cpu_s=1)

    assert (signal.SIGXCPU, "") == (exited.wait_status, exited.cause)


def test_a_signal_other_than_sigkill_is_no_cause(server: Server) -> None:
    """An interrupt that ends the program is the program's own exit."""
    # The program computes: Python loses an interrupt that comes between its last check for signals and the system call
    # of a `time.sleep`.
    launch = server.launch("print('up', flush=True)\nwhile True: pass")
    server.expect_start(launch.job_id)
    (stdout, _stderr) = server.pipes[launch.job_id]
    os.set_blocking(stdout, True)
    assert b"up\n" == os.read(stdout, 10)
    os.set_blocking(stdout, False)
    server.send(Signal(launch.job_id, signal.SIGINT))
    exited = server.receive()

    assert (130 << 8, "") == (exited.wait_status, exited.cause)


def test_signals_to_programs_that_have_exited_are_ignored(server: Server) -> None:
    """A signal that comes too late, or for an unknown id, harms nothing."""
    server.run("pass")
    for job_id in (1, 99, -1):
        server.send(Signal(job_id, signal.SIGKILL))

    assert "still here\n" == server.run("print('still here')")[1]


def test_messages_for_the_other_side_are_ignored(server: Server) -> None:
    """A server does nothing about messages that only servers send."""
    for message in (Started(1, 0), Ready(1, ()), Exited(1, 0, "", False, 0.0, 0.0, 0, "")):
        server.send(message)

    assert "still here\n" == server.run("print('still here')")[1]


@pytest.mark.parametrize("num_files", [0, 1, 3])
def test_a_launch_without_its_four_files_is_ignored(server: Server, num_files: int) -> None:
    """No program starts, and the files that came are closed."""
    fds = [os.open(os.devnull, os.O_RDWR) for _ in range(num_files)]
    server.send(LAUNCH._replace(job_id=5), fds)
    for fd in fds:
        os.close(fd)
    exited, _ = server.run("pass", job_id=6)

    assert exited.job_id == 6


def test_an_invalid_message_ends_the_server_and_its_programs(server: Server) -> None:
    """A server that cannot trust its messages runs nothing more."""
    server.launch("while True: pass")
    assert isinstance(server.receive(), Started)
    server.control.send(b"junk")

    assert b"" == server.control.recv(10)
    server.process.process.wait()
    assert "invalid message" in server.process.read_errors()


def test_closing_the_socket_ends_everything(server: Server) -> None:
    """The server kills its programs, removes their files and exits."""
    server.launch("open('file', 'w').write('x')\nprint('up', flush=True)\nwhile True: pass")
    assert isinstance(server.receive(), Started)
    server.control.shutdown(socket.SHUT_RDWR)
    server.process.process.wait()

    directory = server.process.directory
    assert directory is None or not os.path.exists(directory)


def test_a_program_that_cannot_be_confined_does_not_run(server: Server) -> None:
    """If a limit cannot be set, no code runs, and the traceback goes to standard error."""
    # setrlimit needs whole seconds.
    launch = server.launch("print('ran')", cpu_s=1.5)
    exited = server.receive()

    assert isinstance(exited, Exited)
    assert exited.wait_status == 1 << 8
    output = server.read_output(launch.job_id)
    assert "Traceback" in output
    assert "ran" not in output.splitlines()


def test_the_start_reports_the_memory_of_the_server(server: Server) -> None:
    """A program that uses nothing has about the memory that it had at its start; one that uses much has more."""
    launch = server.launch("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    small = (server.expect_start(launch.job_id), server.receive())
    launch = server.launch("x = b'x' * 50_000_000", job_id=2)
    large = (server.expect_start(launch.job_id), server.receive())

    assert small[0].warm_rss_kb > 1000
    assert small[1].max_rss_kb - small[0].warm_rss_kb < 10_000
    assert large[1].max_rss_kb - large[0].warm_rss_kb > 40_000


def test_a_full_disk_is_reported(server: Server) -> None:
    """A program that fills its files to the limit ends with `disk_full`, or is killed for it."""
    code = "f = open('f', 'wb', 0)\nwhile True: f.write(b'x' * 10**5)"
    exited, _ = server.run(code, disk_bytes=2**20)

    assert exited.disk_full or exited.cause == "disk" or exited.wait_status == signal.SIGXFSZ


def test_an_empty_disk_is_not_full(server: Server) -> None:
    """Files below the limits leave room."""
    exited, _ = server.run("open('f', 'wb').write(b'x' * 1000)")

    assert exited.disk_full is False


def test_programs_leave_no_descriptors(server: Server, wait_until) -> None:
    """After many programs the server has as many descriptors as before."""
    server.run("pass")
    try:
        before = len(os.listdir(f"/proc/{server.pid}/fd"))
    except PermissionError:
        # The kernel shows the descriptors of a process in another user namespace to root alone.
        pytest.skip("only root may count the descriptors of a server")
    for job_id in range(10):
        server.run("open('f', 'w').write('x')", job_id=job_id)

    # A child of the server may still be removing files.
    wait_until(lambda: len(os.listdir(f"/proc/{server.pid}/fd")) == before)


def test_each_program_has_an_empty_directory(server: Server) -> None:
    """No file of a program is there for the next one."""
    code = (
        "import os\nprint(os.listdir('.'), os.getcwd() == os.environ['HOME'] == os.environ['TMPDIR'])\n"
        "open('f', 'w').close()"
    )
    outputs = [server.run(code, job_id=job_id)[1] for job_id in (1, 2)]

    assert ["[] True\n"] * 2 == outputs


@pytest.mark.many_cases(5)
@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("FSIZE", 16 * 2**20),
        ("NOFILE", 64),
        ("SIGPENDING", 64),
        ("CORE", 0),
        ("STACK", 64 * 2**20),
        ("MEMLOCK", 0),
        ("MSGQUEUE", 0),
    ],
)
def test_resource_limits_are_set_for_good(server: Server, limit: str, expected: int) -> None:
    """The program sees its limits, soft and hard, and cannot raise them."""
    code = (
        f"import resource\nkind = resource.RLIMIT_{limit}\nprint(resource.getrlimit(kind))\n"
        "try:\n    resource.setrlimit(kind, (resource.RLIM_INFINITY,) * 2)\n"
        "except (OSError, ValueError):\n    print('refused')"
    )

    assert f"({expected}, {expected})\nrefused\n" == server.run(code)[1]


def test_the_processor_limit_has_a_second_step(server: Server) -> None:
    """A program that survives SIGXCPU at its limit is killed one second later."""
    code = "import resource\nprint(resource.getrlimit(resource.RLIMIT_CPU))"

    assert "(5, 6)\n" == server.run(code, cpu_s=5)[1]


def test_the_interpreter_looks_as_if_it_had_just_started(server: Server) -> None:
    """Arguments, path, main module and streams are as with `python main.py`; nothing of the server is visible."""
    code = (
        "import gc, os, sys\n"
        "print(sys.argv, sys.orig_argv[1:], __name__, __file__, sys.path[0] == os.getcwd())\n"
        "print([name for name in sys.modules if 'turnwise' in name], gc.isenabled(), sys.stdout.encoding)"
    )

    assert "['main.py'] [] __main__ main.py True\n[] True utf-8\n" == server.run(code)[1]


def test_a_program_has_only_its_streams(server: Server) -> None:
    """No descriptor above 2 is open for reading or writing."""
    code = (
        "import fcntl, os\n"
        "for fd in range(3, 256):\n"
        "    try: flags = fcntl.fcntl(fd, fcntl.F_GETFL)\n"
        "    except OSError: continue\n"
        "    if not flags & os.O_PATH: print('open', fd)"
    )

    assert "" == server.run(code)[1]


def test_the_environment_has_nothing_of_the_host(server: Server) -> None:
    """A program sees a fixed set of variables."""
    expected = {"PATH", "LANG", "USER", "MPLBACKEND", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED"}
    expected |= {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"}
    expected |= {"HOME", "TMPDIR"}
    _, output = server.run("import os\nprint(*sorted(os.environ))")

    # bubblewrap sets PWD, the C locale coercion LC_CTYPE, and tier 2 LD_LIBRARY_PATH if the interpreter is hidden.
    assert expected <= set(output.split()) <= expected | {"PWD", "LC_CTYPE", "LD_LIBRARY_PATH"}


def test_a_program_cannot_outlive_its_server(server: Server, wait_until) -> None:
    """If the server is killed, the kernel kills its programs."""
    launch = server.launch("print('up', flush=True)\nwhile True: pass")
    assert isinstance(server.receive(), Started)
    os.kill(server.pid, signal.SIGKILL)
    server.process.process.wait()
    (stdout, stderr) = server.pipes[launch.job_id]
    output = CapturedOutput(100)

    # The pipes are at their end once no process has the other ends.
    for fd in (stdout, stderr):
        wait_until(lambda fd=fd: not server.pipes[launch.job_id].read(fd, output))


def test_a_preloaded_module_needs_no_import(server: Server) -> None:
    """A module of the preload list is in `sys.modules` of every program, and another one is not."""
    code = "import sys\nprint('colorsys' in sys.modules, 'wave' in sys.modules)"

    assert "True False\n" == server.run(code)[1]


def test_the_directory_of_a_stopped_server_is_removed(server: Server) -> None:
    """Tier 2 has one directory per server, which does not outlive it; tier 1 has none."""
    directory = server.process.directory
    if directory is not None:
        assert Path(directory).is_dir()
    server.process.stop()

    assert directory is None or not Path(directory).exists()
