"""Plugins are installed with pip: in a fresh environment, with the declared requirements alone."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
LEFT_OUT = shutil.ignore_patterns("*.egg-info", "build", "__pycache__", "tests")
Run = Callable[..., str]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for an environment and for copies of the packages: a build writes beside its sources."""
    return tmp_path_factory.mktemp("install")


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    """A function that runs a program of a fresh environment with the core and one plugin, outside this repository."""
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)

    def run_program(program: str, *arguments: str | Path) -> str:
        command = [folder / "venv/bin" / program, *arguments]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    for name in ("core", "plugins/single_turn"):
        shutil.copytree(ROOT / name, folder / name, ignore=LEFT_OUT)
    pip_install(run_program, folder / "core", folder / "plugins/single_turn")
    return run_program


def pip_install(run: Run, *arguments: str | Path) -> None:
    """Install into the fresh environment, with the pinned versions."""
    options = ("--quiet", "--disable-pip-version-check", "--constraint", ROOT / "constraints.txt")
    run("python", "-m", "pip", "install", *options, *arguments)


def plugins(run: Run) -> dict[str, Any]:
    """Return the plugins that `turnwise plugins --json` lists, by name."""
    return {each["name"]: each for each in json.loads(run("turnwise", "plugins", "--json"))["plugins"]}


def core_files(folder: Path) -> dict[str, str]:
    """Return a hash of each installed file of the core."""
    (site,) = folder.glob("venv/lib/python*/site-packages/turnwise")
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(site.rglob("*.py"))}


def test_only_what_was_installed_is_listed(run: Run) -> None:
    """The core's plugin and the installed one are listed, and both load."""
    found = plugins(run)

    assert list(found) == ["builtins", "single_turn"]
    assert {each["state"] for each in found.values()} == {"ok"}
    assert found["single_turn"]["registers"] == {"agents": ["single_turn"]}


def test_nothing_heavy_comes_along(run: Run) -> None:
    """The core and the parser require no tensor library, no model library and no test kit."""
    found = {each["name"].lower() for each in json.loads(run("python", "-m", "pip", "list", "--format=json"))}

    assert found & {"torch", "transformers", "tokenizers", "ray", "vllm", "sglang", "pytest", "hypothesis"} == set()


def test_every_module_is_installed(run: Run, folder: Path) -> None:
    """The build leaves out no module."""
    here = {path.relative_to(ROOT / "core/src").as_posix() for path in (ROOT / "core/src/turnwise").rglob("*.py")}
    (site,) = folder.glob("venv/lib/python*/site-packages")
    there = {path.relative_to(site).as_posix() for path in (site / "turnwise").rglob("*.py")}

    assert here == there


def test_a_new_plugin_needs_no_change_of_the_core(run: Run, folder: Path) -> None:
    """A plugin from another folder is listed after its installation, and gone after its removal."""
    before = core_files(folder)
    make_plugin(folder / "elsewhere")

    pip_install(run, "--no-deps", folder / "elsewhere")
    found = plugins(run)

    assert list(found) == ["builtins", "shout", "single_turn"]
    assert found["shout"]["registers"] == {"tools": ["shout"]}
    assert core_files(folder) == before

    run("python", "-m", "pip", "uninstall", "--quiet", "--yes", "turnwise-shout")
    assert list(plugins(run)) == ["builtins", "single_turn"]


def make_plugin(folder: Path) -> None:
    """Write a plugin with one tool."""
    package = folder / "src/turnwise_shout"
    package.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(
        textwrap.dedent("""
            [build-system]
            requires = ["setuptools>=77"]
            build-backend = "setuptools.build_meta"

            [project]
            name = "turnwise-shout"
            version = "0.1.0"
            dependencies = ["turnwise>=0.1,<0.2"]

            [project.entry-points.turnwise]
            shout = "turnwise_shout"

            [tool.setuptools.packages.find]
            where = ["src"]
        """),
        encoding="utf-8",
    )
    (package / "__init__.py").write_text(
        textwrap.dedent("""
            import turnwise

            def make_shout(config, resources):
                raise NotImplementedError

            @turnwise.hookimpl
            def register_tools(registry):
                registry.add("shout", make_shout)
        """),
        encoding="utf-8",
    )
