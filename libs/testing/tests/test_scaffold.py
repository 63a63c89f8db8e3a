"""`turnwise new`: every kind of part passes ruff, mypy, its own tests and `turnwise check` as it is written."""

import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

from turnwise.cli import main
from turnwise.plugin.host import KINDS as REGISTRIES
from turnwise_testing.scaffold.kinds import KINDS
from turnwise_testing.scaffold.project import Part, extend

FILES = [
    ".github/workflows/test.yml",
    ".gitignore",
    "README.md",
    "pyproject.toml",
    "src/turnwise_debate/__init__.py",
    "src/turnwise_debate/debate.py",
    "src/turnwise_debate/py.typed",
    "tests/test_debate.py",
]


def files_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """Projects are made in a folder of the test."""
    monkeypatch.chdir(tmp_path)


def error_of(capsys, *arguments: str) -> str:
    """Return the one line of a failing command."""
    assert main(["new", *arguments]) == 2
    return capsys.readouterr().err.removeprefix("turnwise: error: ").rstrip("\n")


def test_every_registry_has_a_kind():
    """A new hook needs a template."""
    assert {kind.registry for kind in KINDS.values()} == {
        *REGISTRIES,
        "environments",
        "scorers",
        "task_sources",
        "workspaces",
        "wrappers",
    }
    assert sorted(KINDS) == list(KINDS)


def test_a_project_is_written_without_a_question(capsys):
    """The output lists the files and the next commands."""
    assert main(["new", "agent", "debate"]) == 0
    assert files_of(Path("debate")) == FILES
    output = capsys.readouterr().out
    assert [line.removeprefix("wrote debate/") for line in output.splitlines() if "wrote" in line] == FILES
    assert output.endswith("Next:\n  pip install -e debate\n  pytest debate\n  turnwise check debate\n")
    project = tomllib.loads(Path("debate/pyproject.toml").read_text())["project"]
    assert (project["name"], project["entry-points"]["turnwise"]) == (
        "turnwise-debate",
        {"debate": "turnwise_debate.debate"},
    )
    assert project["dependencies"] == ["attrs>=25.3", "turnwise>=0.1,<0.2"]


def test_further_parts_go_into_one_project(capsys):
    """The entry points of the project list them; its own lines stay as they were."""
    main(["new", "agent", "debate", "--distribution", "acme-debate", "--folder", "plugins/one"])
    before = Path("plugins/one/pyproject.toml").read_text()
    assert main(["new", "reward", "brevity", "--into", "plugins/one"]) == 0
    after = Path("plugins/one/pyproject.toml").read_text()
    assert after.replace('brevity = "acme_debate.brevity"\n', "") == before
    assert tomllib.loads(after)["project"]["entry-points"]["turnwise"] == {
        "brevity": "acme_debate.brevity",
        "debate": "acme_debate.debate",
    }
    assert {"src/acme_debate/brevity.py", "tests/test_brevity.py"} < set(files_of(Path("plugins/one")))
    expected = "plugins/one/src/acme_debate/brevity.py exists; choose another name for the reward"
    assert error_of(capsys, "reward", "brevity", "--into", "plugins/one") == expected


@pytest.mark.many_cases
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["agnt", "x"], f"unknown kind 'agnt'; did you mean 'agent'?; kinds: {', '.join(KINDS)}"),
        (["thing", "x"], f"unknown kind 'thing'; kinds: {', '.join(KINDS)}"),
        (
            ["agent", "My-Agent"],
            "'My-Agent' is no name for a plugin: expected lower-case words, joined by underscores; "
            "did you mean 'my_agent'?",
        ),
        (["agent", "class"], "'class' is no name for a plugin: expected lower-case words, joined by underscores"),
        (["agent", "../x y"], "'../x y' is no name for a plugin"),
        (["router", "least_tokens"], "the router 'least_tokens' is taken, by the plugin 'routers'; choose another"),
        (["agent", "builtins"], "a plugin 'builtins' is installed already; choose another name, or uninstall it"),
        (["agent", "testing_"], "'testing_' is no name for a plugin"),
        (["agent", "x" * 300], f"{'x' * 300}: File name too long"),
        (["agent", "x", "--folder", "x" * 300], f"{'x' * 300}: File name too long"),
        (["agent", "x", "--folder", "/proc/x"], "/proc/x: No such file or directory"),
        (["agent", "x", "--distribution", "Acme X"], "'Acme X' is no name for a distribution"),
        (["agent", "x", "--distribution", "pytest"], "pytest "),
        (
            ["agent", "x", "--folder", "taken"],
            "taken exists; to add a part to it: turnwise new",
        ),
        (["agent", "x", "--folder", "file/x"], "file/x: "),
        (["agent", "x", "--into", "missing"], "missing/pyproject.toml: No such file or directory; --into expects"),
        (["agent", "x", "--into", "taken"], "taken/pyproject.toml: expected a project with the section"),
        (["agent", "x", "--into", "other"], "other/pyproject.toml: expected the package other/src/other; --into adds"),
    ],
)
def test_a_bad_command_line_writes_nothing(capsys, tmp_path, arguments, expected):
    """The error is one line, and names the hint."""
    Path("file").write_text("")
    for name, text in (("taken", "[project]\nname = 'x'\n"), ("other", "")):
        Path(name).mkdir()
        Path(name, "pyproject.toml").write_text(text)
    points = "[project.entry-points.turnwise]\nother = 'other'\n"
    Path("other/pyproject.toml").write_text(f"[project]\nname = 'other'\n{points}")
    before = files_of(tmp_path)
    text = error_of(capsys, *arguments)
    assert text.startswith(expected)
    assert "\n" not in text
    assert files_of(tmp_path) == before


def test_an_environment_gets_the_entry_point_of_environments(capsys):
    """Its own project, and a project with a plugin, in either order; a name may be taken there too."""
    group, point = "turnwise.environments", "turnwise_maze.maze:Maze"
    assert main(["new", "environment", "maze"]) == 0
    assert main(["new", "agent", "walker", "--into", "maze"]) == 0
    assert main(["new", "environment", "cave", "--into", "maze"]) == 0
    assert main(["new", "agent", "debate"]) == 0
    assert main(["new", "environment", "arena", "--into", "debate"]) == 0
    first, second = (tomllib.loads(Path(name, "pyproject.toml").read_text())["project"] for name in ("maze", "debate"))

    assert first["entry-points"][group] == {"maze": point, "cave": "turnwise_maze.cave:Cave"}
    assert first["entry-points"]["turnwise"] == {"walker": "turnwise_maze.walker"}
    assert second["entry-points"][group] == {"arena": "turnwise_debate.arena:Arena"}
    assert any(each.startswith("turnwise-environments") for each in second["dependencies"])
    capsys.readouterr()
    expected = "the environment 'guess_number' is taken, by the plugin 'turnwise-environments'; choose another name"
    assert error_of(capsys, "environment", "guess_number") == expected


def test_environments_are_checked(capsys):
    """By the name of their entry point, and an unknown one gets a suggestion."""
    assert main(["check", "guess_number"]) == 0
    output = capsys.readouterr().out
    assert "passed  guess_number: turn_without_an_action_is_no_failure" in output
    assert "skipped guess_number: episode_ends  (the actions of an episode are not known" in output
    assert main(["check", "gess_number"]) == 2
    assert "did you mean 'guess_number'?" in capsys.readouterr().err


def test_a_missing_package_is_named(capsys, monkeypatch):
    """The error has the command that installs it."""
    monkeypatch.setattr("turnwise_testing.scaffold.project.find_spec", lambda name: None)
    text = error_of(capsys, "postprocessor", "lengths")
    assert text == "a postprocessor needs torch; to install it: pip install 'turnwise[torch]'"


def test_a_project_file_that_cannot_be_extended_is_left_alone(capsys):
    """Entry points may be written as an inline table, to which a line cannot be added."""
    main(["new", "agent", "debate"])
    path = Path("debate/pyproject.toml")
    text = path.read_text().replace('[project.entry-points.turnwise]\ndebate = "turnwise_debate.debate"\n', "")
    inline = '[project.entry-points]\nturnwise = {debate = "turnwise_debate.debate"}\n'
    path.write_text(text + inline)
    line = 'brevity = "turnwise_debate.brevity"'
    expected = f"debate/pyproject.toml: write {line} below [project.entry-points.turnwise] yourself"
    assert error_of(capsys, "reward", "brevity", "--into", "debate") == expected
    assert path.read_text() == text + inline
    assert files_of(Path("debate")) == FILES


class Environment:
    """A virtual environment over the packages of the one that runs the tests; pip needs no network in it."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.python = folder / "bin" / "python"
        [site] = folder.glob("lib/python*/site-packages")
        places = [path for path in sys.path if Path(path).is_dir() and not path.startswith(sys.base_prefix)]
        site.joinpath("outer.pth").write_text("\n".join([*places, sysconfig.get_path("purelib")]))
        self.cache = folder / "mypy_cache"

    def run(self, *arguments: str | Path, cwd: Path) -> str:
        """Run a module, and fail with its output."""
        command = [self.python, "-m", *map(str, arguments)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MYPY_CACHE_DIR": str(self.cache), "PYTHONPATH": ""}
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{arguments}:\n{done.stdout}{done.stderr}"
        return done.stdout

    def install(self, folder: Path) -> None:
        options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
        self.run("pip", "install", "-q", *options, "-e", folder, cwd=folder.parent)

    def uninstall(self, distribution: str, cwd: Path) -> None:
        self.run("pip", "uninstall", "-q", "-y", distribution, cwd=cwd)

    def lint(self, folder: Path) -> None:
        self.run("ruff", "check", "--no-cache", ".", cwd=folder)
        self.run("ruff", "format", "--no-cache", "--check", ".", cwd=folder)

    def test(self, folder: Path, *tests: str) -> None:
        self.run("pytest", "-q", "-p", "no:cacheprovider", *tests, cwd=folder)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """An environment that the slow tests share."""
    return Environment(tmp_path_factory.mktemp("environment"))


@pytest.mark.slow
@pytest.mark.one_part
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.ray] if kind == "engine" else []) for kind in KINDS]
)
def test_a_new_plugin_is_green(kind, environment, tmp_path):
    """A project of each kind passes ruff, its tests and `turnwise check` in a separate environment."""
    assert main(["new", kind, f"new_{kind}"]) == 0
    folder = tmp_path / f"new_{kind}"
    environment.install(folder)
    try:
        environment.lint(folder)
        environment.test(folder)
        assert f"passed  new_{kind}: " in environment.run("turnwise.cli", "check", f"new_{kind}", cwd=folder)
    finally:
        environment.uninstall(f"turnwise-new-{kind.replace('_', '-')}", tmp_path)


@pytest.mark.slow
def test_one_project_with_every_kind_is_green(environment, tmp_path):
    """All kinds fit into one distribution, in which mypy sees the code of all of them at once."""
    folder = tmp_path / "new_all"
    for kind in KINDS:
        name = f"all_{kind}"
        part = Part(kind=kind, name=name, distribution="turnwise-new-all")
        if folder.exists():
            extend(part, KINDS[kind], folder)
        else:
            assert main(["new", kind, name, "--folder", str(folder), "--distribution", part.distribution]) == 0
    environment.install(folder)
    try:
        environment.lint(folder)
        environment.run("mypy", cwd=folder)
        environment.test(folder, "-k", "not ray_actor")
        assert "passed  all_agent: " in environment.run("turnwise.cli", "check", "all_agent", cwd=folder)
    finally:
        environment.uninstall("turnwise-new-all", tmp_path)
