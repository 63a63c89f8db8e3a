"""The documentation is correct: its code runs, its links resolve, its generated pages are up to date."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from argparse import ArgumentParser
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml
from attrs import fields_dict
from packaging.requirements import Requirement
from page_runner import Block, blocks, commands

import turnwise
from turnwise.cli import make_parser
from turnwise.config.file import load_config
from turnwise.config.resolve import resolve
from turnwise.config.run import RunConfig
from turnwise.plugin.host import load

ROOT = Path(__file__).parents[1]

DOCS = sorted(ROOT.glob("docs/**/*.md"))
PAGES = [
    *DOCS,
    *sorted(ROOT.glob("*.md")),
    *sorted(ROOT.glob("core/*.md")),
    *sorted(ROOT.glob("libs/*/*.md")),
    *sorted(ROOT.glob("plugins/*/*.md")),
    *sorted(ROOT.glob("changelog.d/README.md")),
]
WRITTEN = [page for page in DOCS if page.parent.name != "reference"]
"""Pages that people write. The pages of the reference come from code."""

PLUGIN_TUTORIAL = ROOT / "docs/tutorial/first-agent-plugin.md"
"""Has separate tests, in `test_tutorial.py`."""

SCRIPT_MODULES = {"turnwise", "turnwise.errors"}
"""The modules of turnwise that the pages import; the test kit and the packages of examples are distributions."""

PLUGIN_MODULES = {"turnwise.protocols", "turnwise.showing", "turnwise.types", "turnwise.weights"}
"""The modules that the files of a plugin import besides, as those of `turnwise new` do."""


def name_of(page: Path) -> str:
    """Return a page as texts show it."""
    return page.relative_to(ROOT).as_posix()


def runnable() -> Iterator[object]:
    """Yield the pages with code or commands; pages that load the demo model or run pytest are slow."""
    for page in [ROOT / "README.md", *(page for page in WRITTEN if page != PLUGIN_TUTORIAL)]:
        found = list(blocks(page))
        if any(block.language == "python" or list(commands(block)) for block in found):
            text = "".join(block.text for block in found)
            is_slow = any(mark in text for mark in ("$ turnwise", "$ pytest", "RolloutManager.from_config("))
            yield pytest.param(page, id=name_of(page), marks=[pytest.mark.slow] if is_slow else [])


def files() -> list[tuple[Path, Block]]:
    """Return the blocks that readers save as files, with their pages."""
    return [(page, block) for page in WRITTEN for block in blocks(page) if block.file]


@pytest.mark.parametrize("page", list(runnable()))
def test_code_of_the_page_runs(page: Path, tmp_path: Path) -> None:
    """A reader who follows the page from top to bottom meets no error."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    runner = Path(__file__).with_name("page_runner.py")

    done = subprocess.run(
        [sys.executable, runner, page], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300
    )

    assert done.returncode == 0, done.stdout + done.stderr


def imported_modules(source: str) -> Iterator[str]:
    """Yield the modules that a piece of Python imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


@pytest.mark.parametrize("page", [ROOT / "README.md", *DOCS], ids=name_of)
def test_pages_import_top_level_names(page: Path) -> None:
    """Pages teach one way to import: `from turnwise import ...`."""
    for block in blocks(page):
        modules = set(imported_modules(block.text)) if block.language == "python" else set()
        own = {name for name in modules if name.partition(".")[0] == "turnwise"} - SCRIPT_MODULES
        is_plugin = "/src/" in f"/{block.file}" or "/tests/" in f"/{block.file}"
        assert {".".join(name.split(".")[:2]) for name in own} <= (PLUGIN_MODULES if is_plugin else set())


def test_generated_pages_are_up_to_date() -> None:
    """`docs/generate.py --check` reports no page: options, commands, packages and metrics match the code."""
    done = subprocess.run(
        [sys.executable, ROOT / "docs/generate.py", "--check"], capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def headings(page: Path) -> set[str]:
    """Return the anchors of a page: anchors that a repository host makes of headings, and names in the reference."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles} | reference_names(page)


def reference_names(page: Path) -> set[str]:
    """Return the dotted names that a reference page documents, with the public names of its modules."""
    found: set[str] = set()
    for dotted in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
        found.add(dotted)
        if is_module(dotted):
            found |= {f"{dotted}.{name}" for name in vars(importlib.import_module(dotted)) if name[0] != "_"}
        else:
            module, _, name = dotted.rpartition(".")
            assert hasattr(importlib.import_module(module), name), f"{name_of(page)} documents {dotted}"
    return found


def is_module(dotted: str) -> bool:
    """Return whether a dotted name is a module."""
    parent, _, name = dotted.rpartition(".")
    return not hasattr(importlib.import_module(parent), name) or dotted in sys.modules


def test_every_public_name_is_in_the_reference() -> None:
    """The reference documents each name that `turnwise` exports."""
    found = {name.rpartition(".")[2] for page in DOCS if page not in WRITTEN for name in reference_names(page)}

    assert sorted(set(turnwise.__all__) - found) == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_resolve(page: Path) -> None:
    """Every link to another page or to a heading has a target."""
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name_of(page)} links to {link}"
        assert not anchor or anchor in headings(target), f"{name_of(page)} links to {link}"


def test_every_page_can_be_found() -> None:
    """The README links to every page of the documentation."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    linked = {(ROOT / link.partition("#")[0]).resolve() for link in re.findall(r"\]\(([^)\s]+)\)", text)}

    assert [name_of(page) for page in DOCS if page not in linked] == []


def typed_commands(page: Path) -> Iterator[list[str]]:
    """Yield the commands that a page shows after a `$` or in an indented line."""
    for block in blocks(page):
        yield from commands(block)
    text = re.sub(r"\\\n\s*", "", page.read_text(encoding="utf-8"))
    for line in re.findall(r"^    ((?:\S*/)?(?:turnwise|pip|pytest|make)\b.*)$", text, re.MULTILINE):
        yield [word.strip('"') for word in re.split(r"\s+#\s", line)[0].split()]


@cache
def command_line() -> ArgumentParser:
    """Return the parser of all commands."""
    return make_parser(load())


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_exist(page: Path) -> None:
    """Every command parses: the command line accepts it, the Makefile has the target, or pip finds the folders."""
    parser = command_line()
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    made = {arguments[2] for _, *arguments in typed_commands(page) if arguments[:2] == ["new", "command"]}
    for program, *arguments in typed_commands(page):
        if arguments and arguments[0] in made:
            continue
        match Path(program).name:
            case "turnwise":
                parser.parse_args(arguments)
            case "make":
                assert arguments[0] in targets
            case "pip":
                local = [each.partition("[")[0] for each in arguments if each.startswith("./")]
                named = [arguments[i + 1] for i, each in enumerate(arguments) if each in ("-c", "-r")]
                assert [each for each in (*local, *named) if not (ROOT / each).exists()] == []


@pytest.mark.parametrize("page", [*PAGES, *sorted((ROOT / "benchmarks").glob("*.py"))], ids=name_of)
def test_benchmarks_get_overrides_before_lists(page: Path) -> None:
    """An override behind the numbers of an option, such as `--seeds 1 2 a.b=c`, is taken for a number and refused."""
    text = re.sub(r"\\\n\s*", "", page.read_text(encoding="utf-8"))
    shown = re.findall(r"^ *(?:\$ )?python benchmarks/.*$", text, re.MULTILINE)
    assert [line for line in shown if re.search(r"--[\w-]+(?: \d[\d.]*)+ +[\w.]+=", line)] == []


def test_files_are_introduced() -> None:
    """The text before a file names it, because Markdown does not show the name of a block."""
    for page, block in files():
        before = page.read_text(encoding="utf-8").splitlines()[: block.line - 2]
        assert f"`{block.file}`" in "\n".join(before), f"{name_of(page)}:{block.line} {block.file}"


def test_yaml_is_of_a_config(tmp_path: Path) -> None:
    """Sections in pages have keys of a config, and whole files load as configs."""
    known = {*fields_dict(RunConfig), "middleware", "limits"}  # the last two are sections of plugins
    for page in [*WRITTEN, *sorted(ROOT.glob("plugins/*/README.md"))]:
        for block in blocks(page):
            if block.language == "yaml":
                assert yaml.safe_load(block.text).keys() <= known, name_of(page)
    for _, block in files():
        if block.language == "yaml" and "self_check" not in block.text:
            path = tmp_path / block.file
            path.write_text(block.text, encoding="utf-8")
            config = load_config(path)
            found = resolve(config, load()).agent.name  # the place of own code is absolute then
            assert found.endswith(config.agent.name.removeprefix("./"))


def test_layers_are_those_of_the_contract() -> None:
    """The page about layers lists what `lint-imports` checks."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    text = (ROOT / "docs/explanation/layers.md").read_text(encoding="utf-8")
    shown = text.partition("<!-- layers:begin -->\n```text\n")[2].partition("\n```\n<!-- layers:end -->")[0]

    assert shown.splitlines() == settings["contracts"][0]["layers"]


def test_tutorial_shows_a_real_run() -> None:
    """The demo's block has the command of `make demo`, its tables, and one conversation with the origin of tokens."""
    text = (ROOT / "docs/tutorial/first-rollout.md").read_text(encoding="utf-8")
    block = text.partition("<!-- demo:begin -->\n```console\n")[2].partition("```\n<!-- demo:end -->")[0]
    recipe = re.search(r"^demo:.*\n\t(.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert recipe is not None
    command = recipe[1].replace("$(BIN)/", "").replace("$(DEMO_OUT)", "runs/demo")

    first, second = re.findall(r"^\$ (.*)$", block, re.MULTILINE)
    assert first == command
    assert re.fullmatch(r"turnwise show runs/demo \d+", second)
    for expected in ("│ episodes", "completed", "wrote runs/demo", "⟦act⟧", "⟦obs⟧", "<tool_call>"):
        assert expected in block
    assert str(ROOT) not in block


def rows_of(table: str) -> dict[str, list[str]]:
    """Return the names in each row of a summary: all its words, without numbers and ids of episodes."""
    found: dict[str, list[str]] = {}
    for label, text in re.findall(r"^│ (\S*) +│ (.*?) *│$", table, re.MULTILINE):
        name = label or next(reversed(found))  # a long row has further lines
        words = re.findall(r"(?<![\w.])[a-z][a-z@_/]*", text) if name != "slowest" else []
        found.setdefault(name, []).extend(words)
    return found


@pytest.mark.slow
def test_tutorial_shows_the_rows_of_a_run(tmp_path: Path) -> None:
    """The summary in the tutorial has the rows and names of today's; `python docs/generate.py demo` renews it."""
    page = (ROOT / "docs/tutorial/first-rollout.md").read_text(encoding="utf-8").partition("<!-- demo:begin -->")[2]
    command = [sys.executable, "-m", "turnwise", "rollout", "examples/calculator.yaml", "data.limit=1"]
    environment = {**os.environ, "COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"}
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out")],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )

    found = rows_of(done.stdout.partition("\nwrote ")[0])

    assert len(found) > 15
    assert found == rows_of(page.partition("\nwrote ")[0])


def test_readme_names_the_first_commands() -> None:
    """A reader of the README finds the demo and the tests."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")

    assert "make demo" in text
    assert "make test" in text


def test_site_requirements_are_pinned() -> None:
    """`make site` installs exact versions."""
    pins = {Requirement(line).name for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()}
    lines = (ROOT / "requirements-docs.txt").read_text(encoding="utf-8").splitlines()

    assert [line for line in lines if not line.startswith("#") and line not in pins] == []


def test_site_has_every_page() -> None:
    """The navigation of the site lists each page of `docs/`."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")

    assert [name_of(page) for page in DOCS if page.relative_to(ROOT / "docs").as_posix() not in text] == []


def test_site_reads_what_its_reference_names() -> None:
    """`make site` reads the sources of every package in the Python reference; nothing is installed beside it."""
    plugins = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["plugins"]
    (reader,) = (each["mkdocstrings"] for each in plugins if "mkdocstrings" in each)
    folders = reader["handlers"]["python"]["paths"]
    page = (ROOT / "docs/reference/python.md").read_text(encoding="utf-8")
    packages = set(re.findall(r"^::: (\w+)", page, re.MULTILINE))

    assert {"turnwise"} < packages
    assert [name for name in packages if not any((ROOT / folder / name).is_dir() for folder in folders)] == []


def test_pages_name_no_machine() -> None:
    """No page has a path of a developer's machine."""
    found = [name_of(page) for page in PAGES if re.search(r"/(home|root|work|tmp|Users)/", page.read_text("utf-8"))]

    assert found == []


def test_quoted_messages_exist() -> None:
    """The page about problems quotes messages as the code writes them."""
    page = (ROOT / "docs/how-to/solve-problems.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^\| `([^`]+ [^`]+)`", page, re.MULTILINE)
    files = [file for folder in ("core/src", "libs", "plugins") for file in (ROOT / folder).glob("**/src/**/*.py")]
    files += (ROOT / "core/src").glob("**/*.py")
    code = "\n".join(file.read_text(encoding="utf-8") for file in files)
    for message in quoted:
        # A message starts with its fixed part, or has it after a name in quotes.
        fixed = [part.strip() for part in re.split(r"'[^']*'|\.\.\.|;", message)]
        assert all(part in code for part in fixed), message
    assert len(quoted) > 5
