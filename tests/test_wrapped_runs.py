"""Whole runs whose parts an installed plugin wraps, in one process and on Ray."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from turnwise.cli import main
from turnwise.types import Status
from turnwise_result_files import read_results
from turnwise_testing.whole_runs.installation import install_plugin
from turnwise_testing.whole_runs.scripted_run import PLUGIN, SITE, environment_of, write_scripted_run

PLUGIN_CODE = """
import os
from pathlib import Path

import turnwise
from attrs import evolve, frozen


@frozen(kw_only=True)
class Options:
    notes: Path
    fails: str = ""
    most: float = 1000.0


@turnwise.hookimpl
def config_section():
    return turnwise.Section(options=Options)


def note(run, part):
    options = run.options(Options)
    with options.notes.open("a") as file:
        file.write(f"{part} {run.role} {os.getpid()}\\n")
    if options.fails == part:
        raise RuntimeError(f"no {part} today")
    return options


class Counted(turnwise.Wrapper):
    async def generate(self, request):
        result = await self.inner.generate(request)
        assert len(result.token_ids)
        return result


class Capped(turnwise.Wrapper):
    def __init__(self, inner, most):
        super().__init__(inner)
        self.most = most

    def score(self, episode):
        score = self.inner.score(episode)
        return evolve(score, value=min(self.most, score.value))


@turnwise.hookimpl
def wrap_engine(engine, run):
    note(run, "engine")
    return Counted.around(engine)


@turnwise.hookimpl
def wrap_agent(agent, run):
    note(run, "agent")


@turnwise.hookimpl
def wrap_reward(reward, run):
    return Capped.around(reward, note(run, "reward").most)
"""
RollOut = Callable[..., tuple[int, str]]
RUNTIMES = ["local", pytest.param("ray", marks=[pytest.mark.slow, pytest.mark.ray])]


@pytest.fixture
def roll_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RollOut:
    """
    A function that rolls out two tasks with the plugin `acme_limits`, and returns the exit code and the errors.

    On Ray it starts a process, because Ray's processes must find the plugin.
    """

    def roll_out(runtime: str, **options: object) -> tuple[int, str]:
        words = write(tmp_path, runtime, options)
        if runtime == "ray":
            return in_process(tmp_path, words)
        monkeypatch.syspath_prepend(str(tmp_path / SITE))
        monkeypatch.delitem(sys.modules, "acme_limits", raising=False)
        return main(words), capsys.readouterr().err

    return roll_out


def in_process(folder: Path, words: list[str]) -> tuple[int, str]:
    """Run the command in a process of its own; return its exit code and its errors."""
    command, environment = [sys.executable, "-m", "turnwise.cli", *words], environment_of(folder)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    return done.returncode, done.stderr


def write(folder: Path, runtime: str, options: dict[str, object]) -> list[str]:
    """Write the run and its plugin, and return the words of the command."""
    section = {"notes": "notes", **options}
    file = write_scripted_run(folder, num_tasks=2, plugins=[PLUGIN, "acme_limits"], acme_limits=section)
    install_plugin(folder / SITE, "acme_limits", PLUGIN_CODE)
    return ["rollout", str(file), f"runtime={runtime}", "runtime.num_workers=2", "--out", str(folder / "out")]


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_an_installed_plugin_wraps_a_run(runtime: str, roll_out: RollOut, tmp_path: Path) -> None:
    """Each process wraps each part that it builds once, and the wrapped reward gives the scores."""
    code, errors = roll_out(runtime, most=2.0)

    assert code == 0, errors
    results = list(read_results(tmp_path / "out"))
    assert {each.status for each in results} <= {Status.COMPLETED, Status.TRUNCATED}
    assert {each.reward for each in results} == {2.0}
    notes = (tmp_path / "notes").read_text(encoding="utf-8").splitlines()
    assert len(notes) == len({*notes})
    found = {" ".join(line.split()[:2]) for line in notes}
    if runtime == "local":
        assert found == {"agent driver", "engine driver", "reward driver"}
    else:
        in_driver = {"agent driver", "reward driver"}  # built there to find errors before Ray starts
        assert found == {"engine replica", "agent worker", "reward worker"} | in_driver


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("part", ["agent", "engine", "reward"])
def test_a_wrapper_that_raises_ends_the_command(runtime: str, part: str, roll_out: RollOut, tmp_path: Path) -> None:
    """The exit code is 2 before any episode, and the error names the plugin and the hook."""
    code, errors = roll_out(runtime, fails=part)

    assert code == 2, errors
    line = next(line for line in errors.splitlines() if line.startswith("turnwise: error: "))
    assert f"'wrap_{part}' of plugin 'acme_limits' raised RuntimeError: no {part} today" in line
    assert "Traceback" not in errors
    assert not (tmp_path / "out/trajectories.parquet").exists()
