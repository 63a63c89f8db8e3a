"""Selection of a tier, and refusal if none works."""

from __future__ import annotations

import pytest

from turnwise_python_sandbox import Sandbox, SandboxUnavailableError, Status, Tier
from turnwise_python_sandbox.box import landlock
from turnwise_python_sandbox.config import SandboxConfig
from turnwise_python_sandbox.interpreter import find_blocking_directory
from turnwise_python_sandbox.limits import Limits
from turnwise_python_sandbox.selftest import SelfTestResult, build_server_spec, run_selftest, select_tier

pytestmark = pytest.mark.usefixtures("starts_a_process")


def test_a_tier_works_if_the_kernel_has_landlock() -> None:
    """A broken sandbox fails here; other tests would skip it as a machine without isolation."""
    if not landlock.detect_abi():
        pytest.skip("this kernel has no Landlock")
    assert select_tier(SandboxConfig()).spec.tier in (Tier.NAMESPACES, Tier.LANDLOCK)


def test_without_bubblewrap_the_next_tier_is_selected(monkeypatch) -> None:
    """A tier whose program is missing is skipped, and the reason is recorded."""
    monkeypatch.setattr("turnwise_python_sandbox.server_command.shutil.which", lambda _name: None)
    if not landlock.detect_abi():
        pytest.skip("this kernel has no Landlock")
    found = select_tier(SandboxConfig(timeout_s=7.5))

    assert Tier.LANDLOCK is found.spec.tier
    assert "bubblewrap is not installed" in found.results[0].failure


def test_refused_when_nothing_works(monkeypatch) -> None:
    """Without a working tier nothing runs; the error has every reason and both hints."""
    monkeypatch.setattr(
        "turnwise_python_sandbox.selftest.run_selftest", lambda spec: SelfTestResult(tier=spec.tier, failure="it leaks")
    )
    with pytest.raises(SandboxUnavailableError, match=r"tier 1.*it leaks.*tier 2.*it leaks.*unsafe_subprocess"):
        Sandbox(timeout_s=7.25).start()


def test_unsafe_is_the_last_resort(monkeypatch) -> None:
    """`unsafe_subprocess` is used only if no tier works, and every result says so."""
    monkeypatch.setattr(
        "turnwise_python_sandbox.selftest.run_selftest", lambda spec: SelfTestResult(tier=spec.tier, failure="it leaks")
    )
    with Sandbox(timeout_s=7.125, unsafe_subprocess=True) as sandbox:
        result = sandbox.run("print(1)")

    assert (Status.OK, "1\n", Tier.UNSAFE_SUBPROCESS, False) == (
        result.status,
        result.stdout,
        result.tier,
        result.isolated,
    )


def test_tier_5_needs_the_option_unsafe_subprocess() -> None:
    """The number of the tier alone does not switch isolation off."""
    with pytest.raises(SandboxUnavailableError, match="needs unsafe_subprocess"):
        Sandbox(tier=5).start()


def test_a_tier_of_another_system_is_refused() -> None:
    """The error names the tier."""
    with pytest.raises(SandboxUnavailableError, match="tier 3"):
        Sandbox(tier=3).start()


def test_a_leak_is_found(monkeypatch) -> None:
    """The self-test fails a tier in which the probe reaches something, and names it."""
    monkeypatch.setattr("turnwise_python_sandbox.selftest._PROBE", "print('[[\"read a file of the host\"], []]')")
    trial = run_selftest(build_server_spec(SandboxConfig(), Tier.LANDLOCK))

    if "no Landlock" in trial.failure:
        pytest.skip(trial.failure)
    assert "a program could read a file of the host" == trial.failure


def test_a_probe_that_cannot_run_fails_the_tier(monkeypatch) -> None:
    """A tier in which the probe itself fails does not pass."""
    monkeypatch.setattr("turnwise_python_sandbox.selftest._PROBE", "raise SystemExit('broken')")

    assert run_selftest(build_server_spec(SandboxConfig(), Tier.LANDLOCK)).failure


def test_a_wrong_interpreter_is_refused() -> None:
    """The error names the interpreter."""
    with pytest.raises(SandboxUnavailableError, match="/no/such/python"):
        Sandbox(python="/no/such/python").start()


def test_the_blocking_directory_is_found(tmp_path) -> None:
    """It is the topmost parent that a user other than the owner may not enter."""
    inner = tmp_path / "a/b/c"
    inner.mkdir(parents=True)
    for each in (tmp_path, tmp_path / "a", tmp_path / "a/b"):
        each.chmod(0o755)
    (tmp_path / "a").chmod(0o700)

    found = find_blocking_directory(str(inner), 64999)

    # A folder of pytest's above it may be closed too.
    closed = [each for each in (*reversed(inner.parents), inner) if not each.stat().st_mode & 0o001]
    assert str(closed[0]) == found
    assert tmp_path / "a" in closed


UNSAFE = {"tier": 5, "unsafe_subprocess": True, "timeout_s": 60.0}


@pytest.mark.many_cases(3)
@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("print(1)", Status.OK),
        ("1 / 0", Status.ERROR),
        ("while True: pass", Status.TIMEOUT),
        ("while True: print('x' * 1000)", Status.OUTPUT_LIMIT),
        ("import os; os.abort()", Status.CRASHED),
        ("x = bytearray(10**12)", Status.MEMORY),
    ],
)
def test_statuses_without_isolation(our_processes, code: str, status: Status) -> None:
    """Tier 5 reports the same statuses as the isolating tiers, and leaves no process."""
    before = our_processes()
    with Sandbox(**UNSAFE) as sandbox:
        result = sandbox.run(code, timeout_s=1.5 if status is Status.TIMEOUT else 60.0)

    assert status is result.status, result
    assert our_processes() <= before


def test_without_isolation_the_group_is_killed(our_processes) -> None:
    """A child process in the program's group does not outlive the run."""
    before = our_processes()
    with Sandbox(**UNSAFE) as sandbox:
        result = sandbox.run("import os, time\nif os.fork() == 0:\n    time.sleep(100)\nprint('parent')")

    assert "parent\n" == result.stdout
    assert our_processes() <= before


def test_limits_become_a_launch() -> None:
    """MiB become bytes, and the server does not limit the wall-clock time of a session."""
    limits = Limits(timeout_s=2.0, memory_mb=3, max_output_bytes=1, cpu_s=4, disk_mb=5, max_files=6)

    assert (1, 2.0, 4, 3 * 2**20, 5 * 2**20, 6, False) == tuple(limits.build_launch(1, session=False))
    assert limits.build_launch(1, session=True).wall_s > 10**5
