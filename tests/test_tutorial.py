"""The plugin of the tutorial, installed by pip as a reader installs it, passes its tests and runs an episode."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from page_runner import blocks, commands

ROOT = Path(__file__).parents[1]

PAGE = ROOT / "docs/tutorial/first-agent-plugin.md"
PROGRAMS = {
    "turnwise": ("-c", "import sys; from turnwise.cli import main; sys.exit(main())"),
    "pytest": ("-m", "pytest", "-p", "no:cacheprovider"),
    "python": ("-c",),
}
Type = Callable[..., str]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project that the page's first command writes, with the files of the page, and the plugin installed."""
    outside = tmp_path_factory.mktemp("tutorial")
    first = next(command for block in blocks(PAGE) for command in commands(block))
    subprocess.run([sys.executable, *PROGRAMS[first[0]], *first[1:]], cwd=outside, check=True)
    folder = outside / "self_check"
    for block in blocks(PAGE):
        if block.file:
            path = folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
    # Built with the setuptools that is here, so that the test needs no network.
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    options = ["--no-deps", "--no-build-isolation", "--target", "site", "."]
    subprocess.run([*pip, *options], cwd=folder, check=True)
    return folder


@pytest.fixture(scope="module")
def type_in(project: Path) -> Type:
    """Types a command of the page into a shell, in the folder of the project."""

    def run(program: str, *arguments: str) -> str:
        command = [sys.executable, *PROGRAMS[program], *arguments]
        environment = {**os.environ, "PYTHONPATH": str(project / "site")}
        done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_page_has_one_file_of_a_plugin() -> None:
    """`turnwise new` writes the rest of the plugin; the other files run it."""
    names = [block.file for block in blocks(PAGE) if block.file]

    assert names == ["src/turnwise_self_check/self_check.py", "questions.jsonl", "run.yaml"]


def test_plugin_is_listed(type_in: Type) -> None:
    """`pip install` is all that it takes to be found."""
    listed = json.loads(type_in("turnwise", "plugins", "--json"))["plugins"]

    (plugin,) = [each for each in listed if each["name"] == "self_check"]
    assert plugin["state"] == "ok"
    assert plugin["registers"] == {"agents": ["self_check"]}


@pytest.mark.slow
def test_plugin_passes_its_conformance_test(type_in: Type) -> None:
    """The suite of the page runs, and nothing in it is left out."""
    output = type_in("pytest", "tests", "-rA")

    assert "PASSED" in output
    assert "SKIPPED" not in output


@pytest.mark.slow
def test_plugin_runs_episodes(project: Path, type_in: Type) -> None:
    """The commands of the page run the agent on the demo model, and its last lines of Python agree with the results."""
    used = ("rollout", "show")
    typed = [command for block in blocks(PAGE) for command in commands(block) if command[1:2] and command[1] in used]
    (code,) = [block.text for block in blocks(PAGE) if block.language == "python" and not block.file]

    _, shown = [type_in(*command) for command in typed]
    printed = type_in("python", code)

    metrics = json.loads((project / "runs/first/metrics.json").read_text(encoding="utf-8"))
    assert metrics["episodes"] == 4
    assert metrics["status"]["failed"] == 0
    assert "Check your answer." in shown
    assert "⟦act⟧" in shown
    assert len(printed.splitlines()) == 4
