"""Which tier is taken, and what happens where none works."""

from __future__ import annotations

import pytest

from turnwise_python_sandbox import Sandbox, SandboxUnavailableError, Status, Tier
from turnwise_python_sandbox.box import landlock
from turnwise_python_sandbox.config import SandboxConfig
from turnwise_python_sandbox.interpreter import barrier
from turnwise_python_sandbox.job import Job, Limits
from turnwise_python_sandbox.selftest import Trial, choose, make_recipe, try_tier


def test_a_tier_works_where_landlock_is() -> None:
    """A sandbox that broke must not look like a machine that has no isolation, which skips its tests."""
    if not landlock.abi():
        pytest.skip("this kernel has no Landlock")
    assert choose(SandboxConfig()).recipe.tier in (Tier.NAMESPACES, Tier.LANDLOCK)


def test_without_bubblewrap_the_next_tier_is_taken(monkeypatch) -> None:
    """The reason is kept for the doctor."""
    monkeypatch.setattr("turnwise_python_sandbox.launching.shutil.which", lambda _name: None)
    if not landlock.abi():
        pytest.skip("this kernel has no Landlock")
    found = choose(SandboxConfig(timeout_s=7.5))

    assert Tier.LANDLOCK is found.recipe.tier
    assert "bubblewrap is not installed" in found.trials[0].reason


def test_refused_when_nothing_works(monkeypatch) -> None:
    """No silent fall to something weaker: the text has every reason and both ways out."""
    monkeypatch.setattr(
        "turnwise_python_sandbox.selftest.try_tier", lambda recipe: Trial(tier=recipe.tier, reason="it leaks")
    )
    with pytest.raises(SandboxUnavailableError, match=r"tier 1.*it leaks.*tier 2.*it leaks.*unsafe_subprocess"):
        Sandbox(timeout_s=7.25).start()


def test_unsafe_is_the_last_resort(monkeypatch) -> None:
    """Allowed by name, it is used only when nothing better works, and every result says so."""
    monkeypatch.setattr(
        "turnwise_python_sandbox.selftest.try_tier", lambda recipe: Trial(tier=recipe.tier, reason="it leaks")
    )
    with Sandbox(timeout_s=7.125, unsafe_subprocess=True) as sandbox:
        result = sandbox.run("print(1)")

    assert (Status.OK, "1\n", Tier.UNSAFE_SUBPROCESS, False) == (
        result.status,
        result.stdout,
        result.tier,
        result.isolated,
    )


def test_unsafe_needs_its_name() -> None:
    """A number in a config is not enough."""
    with pytest.raises(SandboxUnavailableError, match="needs unsafe_subprocess"):
        Sandbox(tier=5).start()


def test_macos_is_not_here() -> None:
    """A tier of another system is refused by name."""
    with pytest.raises(SandboxUnavailableError, match="tier 3"):
        Sandbox(tier=3).start()


def test_a_leak_is_found(monkeypatch) -> None:
    """The self-test fails a tier that lets something through."""
    monkeypatch.setattr("turnwise_python_sandbox.selftest._PROBE", "print('[[\"read a file of the host\"], []]')")
    trial = try_tier(make_recipe(SandboxConfig(), Tier.LANDLOCK))

    if "no Landlock" in trial.reason:
        pytest.skip(trial.reason)
    assert "a program could read a file of the host" == trial.reason


def test_a_probe_that_cannot_run_fails_the_tier(monkeypatch) -> None:
    """A tier in which honest code breaks is not used."""
    monkeypatch.setattr("turnwise_python_sandbox.selftest._PROBE", "raise SystemExit('broken')")

    assert try_tier(make_recipe(SandboxConfig(), Tier.LANDLOCK)).reason


def test_a_wrong_interpreter_is_told() -> None:
    """The text names it."""
    with pytest.raises(SandboxUnavailableError, match="/no/such/python"):
        Sandbox(python="/no/such/python").start()


def test_barriers_are_found(tmp_path) -> None:
    """The topmost directory in the way, for a user who is not the owner."""
    inner = tmp_path / "a/b/c"
    inner.mkdir(parents=True)
    for each in (tmp_path, tmp_path / "a", tmp_path / "a/b"):
        each.chmod(0o755)
    (tmp_path / "a").chmod(0o700)

    found = barrier(str(inner), 64999)

    assert found is not None
    assert str(tmp_path / "a").startswith(found)


UNSAFE = {"tier": 5, "unsafe_subprocess": True, "timeout_s": 5.0}


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
def test_verdicts_without_isolation(our_processes, code: str, status: Status) -> None:
    """One process per run gives the same verdicts."""
    before = our_processes()
    with Sandbox(**UNSAFE) as sandbox:
        result = sandbox.run(code, timeout_s=1.5 if status is Status.TIMEOUT else 5.0)

    assert status is result.status, result
    assert our_processes() <= before


def test_without_isolation_the_group_is_killed(our_processes) -> None:
    """A child that stays in the group does not outlive the run."""
    before = our_processes()
    with Sandbox(**UNSAFE) as sandbox:
        result = sandbox.run("import os, time\nif os.fork() == 0:\n    time.sleep(100)\nprint('parent')")

    assert "parent\n" == result.stdout
    assert our_processes() <= before


def test_limits_become_a_launch() -> None:
    """MiB become bytes; a session has no wall-clock limit of its own."""
    limits = Limits(timeout_s=2.0, memory_mb=3, max_output_bytes=1, cpu_s=4, disk_mb=5, max_files=6)

    assert (1, 2.0, 4, 3 * 2**20, 5 * 2**20, 6, False) == tuple(limits.launch(1, session=False))
    assert limits.launch(1, session=True).wall_s > 10**5
    job = Job(number=1, code=b"", stdin=b"", limits=limits, tier=Tier.LANDLOCK)
    assert job.answer.done() is False
