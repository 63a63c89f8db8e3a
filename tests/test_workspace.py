"""Every plugin folder has the same structure, and the installed versions fit together."""

from __future__ import annotations

import ast
import re
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from turnwise.plugin.host import load
from turnwise.types import PluginRecipe

ROOT = Path(__file__).parents[1]
PLUGINS = sorted(path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml"))
PROJECT_KEYS = {
    "dependencies",
    "description",
    "entry-points",
    "license",
    "name",
    "optional-dependencies",
    "readme",
    "requires-python",
    "version",
}


def project_file(folder: str) -> dict[str, Any]:
    """Return the `pyproject.toml` of a folder."""
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))


def requirements_of(folder: str) -> list[Requirement]:
    """Return the requirements of a distribution, with those of its extras."""
    project = project_file(folder)["project"]
    extras = project.get("optional-dependencies", {}).values()
    return [Requirement(text) for text in (*project["dependencies"], *(text for extra in extras for text in extra))]


def constraints() -> dict[str, Requirement]:
    """Return the pins of `constraints.txt` by canonical name."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]
    return {canonicalize_name(each.name): each for each in found}


def development_lines() -> list[str]:
    """Return the lines of `requirements-dev.txt` without comments."""
    lines = (ROOT / "requirements-dev.txt").read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


@pytest.fixture(params=PLUGINS)
def plugin(request: pytest.FixtureRequest) -> str:
    """The name of each plugin folder in turn."""
    return str(request.param)


def test_there_are_plugins() -> None:
    """The list of plugins is not empty."""
    assert "tool_parsers" in PLUGINS


def test_layout() -> None:
    """The repository has the promised folders, and each promised plugin is a distribution with an entry point."""
    plugins = ("vllm_engine", "sglang_engine", "hermes_parser", "parallel_thinking", "torl_python")
    folders = ("core", *(f"plugins/{name}" for name in plugins), "tests", "docs")

    assert (ROOT / "pyproject.toml").is_file()
    assert [name for name in folders if not (ROOT / name).is_dir()] == []
    for name in plugins:
        project = project_file(f"plugins/{name}")["project"]
        assert f"turnwise-{name.replace('_', '-')}" == project["name"]
        assert {name: f"turnwise_{name}"} == project["entry-points"]["turnwise"]


def test_every_folder_is_a_plugin() -> None:
    """Every folder under `plugins/` has a `pyproject.toml`; one without files is left from another commit."""
    paths = [path for path in ROOT.glob("plugins/*") if path.is_dir() and path.name != "__pycache__"]
    folders = sorted(path.name for path in paths if any(each.is_file() for each in path.iterdir()))

    assert folders == PLUGINS


def test_project_file(plugin: str) -> None:
    """Every plugin has the same keys, and its names follow from the name of its folder."""
    file, core = project_file(f"plugins/{plugin}"), project_file("core")
    project = file["project"]

    assert {"build-system", "project", "tool"} == file.keys()
    assert core["build-system"] == file["build-system"]
    assert project.keys() == PROJECT_KEYS
    assert {"setuptools": {"packages", "package-data"}} == {k: set(v) for k, v in file["tool"].items()}
    assert f"turnwise-{plugin.replace('_', '-')}" == project["name"]
    for key in ("license", "requires-python", "readme"):
        assert core["project"][key] == project[key]


def test_entry_point(plugin: str) -> None:
    """One entry point for turnwise has the name of the folder and names the package; others are known groups."""
    entry_points = project_file(f"plugins/{plugin}")["project"]["entry-points"]

    assert {plugin: f"turnwise_{plugin}"} == entry_points.pop("turnwise")
    assert entry_points.keys() <= {"sglang.srt.plugins", "turnwise.environments", "verl.plugins"}


def test_range_of_the_core_holds(plugin: str) -> None:
    """The plugin requires a range of the core that contains the core's version."""
    ranges = [each.specifier for each in requirements_of(f"plugins/{plugin}") if each.name == "turnwise"]

    assert ranges
    for specifier in ranges:
        assert {">=", "<"} == {each.operator for each in specifier}
        assert specifier.contains(project_file("core")["project"]["version"])


def test_installed_versions_are_current(plugin: str) -> None:
    """The installed versions equal the versions of the folders, so the tests run this code."""
    for folder in ("core", f"plugins/{plugin}"):
        project = project_file(folder)["project"]
        assert project["version"] == version(project["name"])


def test_files(plugin: str) -> None:
    """Every plugin has a README, type information and the conformance suite of its kind."""
    folder = ROOT / "plugins" / plugin
    title = (folder / "README.md").read_text(encoding="utf-8").splitlines()[0]

    assert f"# turnwise-{plugin.replace('_', '-')}" == title
    assert (folder / f"src/turnwise_{plugin}/py.typed").is_file()
    assert "Suite)" in (folder / "tests/test_conformance.py").read_text(encoding="utf-8")


def test_developers_install_every_plugin() -> None:
    """`requirements-dev.txt` installs every plugin."""
    found = [re.match(r"-e (core|plugins/(\w+))", line) for line in development_lines() if line.startswith("-e")]

    assert ["", *PLUGINS] == sorted(match[2] or "" for match in found if match)


def test_constraints_pin_every_requirement() -> None:
    """Each third-party requirement has one exact version, which every declared range allows."""
    pins = constraints()
    folders = ["core", *(f"plugins/{name}" for name in PLUGINS)]
    required = [each for folder in folders for each in requirements_of(folder)]
    required += [Requirement(line) for line in development_lines() if not line.startswith("-")]
    for requirement in required:
        name = canonicalize_name(requirement.name)
        if name.startswith("turnwise"):
            continue
        assert name in pins, f"constraints.txt does not pin {name}"
        (pin,) = pins[name].specifier
        assert pin.operator == "=="
        assert requirement.specifier.contains(pin.version), f"{requirement} does not allow {pin.version}"


def test_torch_is_the_agreed_one() -> None:
    """torch has the version that every environment of this repository pins."""
    assert str(constraints()["torch"]) == "torch==2.13.0"


def test_extras_of_the_core_name_the_packages_of_parts() -> None:
    """Errors about unknown agents, commands, engines, observers and parsers find the package in these extras."""
    project = project_file("core")["project"]
    found = {
        extra: {each.name: each for each in map(Requirement, lines)}
        for extra, lines in project["optional-dependencies"].items()
    }
    named = set()
    host = load(PluginRecipe(allow=(*PLUGINS, "chat_templates", "task_files", "testing")))
    for kind in (
        "adapters",
        "agents",
        "chats",
        "commands",
        "engines",
        "observers",
        "reasoning_parsers",
        "routers",
        "task_sources",
        "tool_parsers",
    ):
        for entry in host.registry(kind).entries().values():
            if entry.owner != "builtins":
                name = entry.name.replace("_", "-")  # perhaps of parts of two kinds, also in two packages
                named.add(name)
                requirement = found[name][f"turnwise-{entry.owner.replace('_', '-')}"]
                assert requirement.specifier.contains(version(requirement.name))

    for owner in host.sections:
        named.add(owner.replace("_", "-"))  # the key of its section
        assert f"turnwise-{owner.replace('_', '-')}" in found[owner.replace("_", "-")]

    assert found.keys() - named == {"gguf", "ray", "tokenizers", "torch"}


def test_the_readme_installs_what_the_demo_needs() -> None:
    """No index has our distributions, so the command that installs folders must name each that another one needs."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    line = (
        "pip install -c constraints.txt -r requirements-demo.txt --extra-index-url https://download.pytorch.org/whl/cpu"
    )
    assert f"\n    {line}\n" in readme
    assert line in (ROOT / "requirements-demo.txt").read_text(encoding="utf-8")


LISTS = {
    "requirements-demo.txt": (),
    "requirements-dev.txt": (),
    "plugins/verl_bridge/requirements-verl.txt": (),
    "plugins/sglang_engine/README.md": (),
    ".ci/engine": ("core", "plugins/vllm_engine", "plugins/sglang_engine"),  # by a variable
}
"""Files that install folders of the repository, and folders that they name in another way."""


@pytest.mark.parametrize("file", LISTS)
def test_a_list_of_folders_has_what_they_need(file: str) -> None:
    """No index has our distributions, so a file that installs folders must name each that another one needs."""
    text = (ROOT / file).read_text(encoding="utf-8")
    folders = {*re.findall(r"(?<![\w/(])(?:\./)?(core|(?:libs|plugins)/\w+)(?![\w/])", text), *LISTS[file]}
    assert len(folders) > 5
    found = {project_file(folder)["project"]["name"] for folder in folders}

    for folder in folders:
        needed = {Requirement(text).name for text in project_file(folder)["project"]["dependencies"]}
        assert {name for name in needed if name.startswith("turnwise")} <= found, folder


@pytest.mark.parametrize(
    ("file", "tests"),
    [
        ("plugins/verl_bridge/requirements-verl.txt", "plugins/verl_bridge/tests"),
        (".ci/engine", "plugins/vllm_engine/tests"),
        (".ci/engine", "plugins/sglang_engine/tests"),
    ],
)
def test_a_list_of_folders_has_what_tests_import(file: str, tests: str) -> None:
    """The tests of a plugin with an environment of its own import no package that the environment lacks."""
    text = (ROOT / file).read_text(encoding="utf-8")
    folders = {*re.findall(r"(?<![\w/(])(?:\./)?(core|(?:libs|plugins)/\w+)(?![\w/])", text), *LISTS[file]}
    found = {f"turnwise_{folder.rpartition('/')[2]}" for folder in folders}

    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / tests).rglob("*.py")]
    imported = {
        node.module.partition(".")[0]
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module
    }
    assert {name for name in imported if name.startswith("turnwise_")} <= found


RINGS = {
    "Promised": "Promised: a change that breaks its users has an entry in the changelog.",
    "Experimental": "Experimental: any release may change it.",
}


def test_every_package_is_in_one_ring() -> None:
    """The page of packages names each package once, as promised or as experimental, and its README starts with this."""
    page = (ROOT / "docs/reference/packages.md").read_text(encoding="utf-8")
    sections = {ring: page.partition(f"\n## {ring}\n")[2].partition("\n## ")[0] for ring in RINGS}
    named = [
        (file, RINGS[ring])
        for ring, section in sections.items()
        for file in re.findall(r"^\| \[[\w-]+\]\(../../(\S+)/README.md\)", section, re.MULTILINE)
    ]
    folders = ["core", *(path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("[lp]*s/*/pyproject.toml"))]
    lines = [(name, (ROOT / name / "README.md").read_text(encoding="utf-8").splitlines()[2]) for name in folders]

    assert sorted(named) == sorted(lines)
