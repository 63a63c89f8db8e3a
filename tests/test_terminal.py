"""No text of others reaches a terminal raw: not in an error, a table, a log line, or the output of a program."""

from __future__ import annotations

import ast
import io
import json
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest
import structlog
from hypothesis import example, given
from hypothesis import strategies as st
from test_architecture import SOURCES, containing, name_of, parsed

from turnwise.cli import main
from turnwise.console import Console
from turnwise.events.logging import configure_logging
from turnwise.plugin.host import load
from turnwise.record.result import EpisodeResult
from turnwise.terminal import literal
from turnwise.types import Fault, PluginRecipe, Status, Task
from turnwise_result_files import TrajectoryWriter
from turnwise_testing.whole_runs.installation import install_plugin
from turnwise_testing.whole_runs.scripted_run import PLUGIN, SITE, write_scripted_run

HOSTILE: Final = "\x1b]0;x\x07\x1b[2J\x9b31m\r\x08\u202egnp\u2066\u200bend"
"""Sets the title of a window, clears the screen, overwrites the line, and turns the direction of writing."""
RAW: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u2028-\u202e\u2060-\u206f]")
COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")

PLUGIN_CODE: Final = f"""
import turnwise

class Raises:
    def score(self, episode):
        raise ValueError({HOSTILE!r})

@turnwise.hookimpl
def register_rewards(registry):
    registry.add("raises", lambda config, resources: Raises())
"""
MCP_SERVER: Final = f"import sys\nprint({HOSTILE!r}, file=sys.stderr)\nsys.exit(3)\n"
ENGINE: Final = f"import socket\nprint({HOSTILE!r} + '\\t' + socket.gethostname() + '/gone/1/1')\n"
"""Lists a container whose owner is gone."""
PRINTS: Final = f"print({HOSTILE!r})\nraise ValueError({HOSTILE!r})\n"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with hostile texts in every file that a command reads."""
    folder = tmp_path_factory.mktemp("hostile")
    plugins = [PLUGIN, "acme_hostile", "plain_functions", "mcp_tools", "tool_agent", "hermes_parser"]
    write_scripted_run(folder, plugins=plugins, modules=["own.py"])
    install_plugin(folder / SITE, "acme_hostile", PLUGIN_CODE)
    install_plugin(folder / SITE, "acme_broken", f"raise ValueError({HOSTILE!r})\n")
    # A key of YAML in double quotes may have escapes.
    (folder / "key.yaml").write_text(f"{json.dumps(HOSTILE)}: 1\nmodel: {{}}\n")
    (folder / "own.py").write_text(f"raise ValueError({HOSTILE!r})\n")
    (folder / "server.py").write_text(MCP_SERVER)
    (folder / "program.py").write_text(PRINTS)
    (folder / "engine.py").write_text(ENGINE)
    for name in ("rows.jsonl", "bad.jsonl"):
        (folder / name).write_text(json.dumps({HOSTILE: HOSTILE}) + "\n")
    task = Task(messages=[{"role": "user", "content": HOSTILE}], uid=HOSTILE, data_source=HOSTILE)
    fault = Fault(owner="agent", kind=HOSTILE, message=HOSTILE)
    with TrajectoryWriter(folder / "run/trajectories.parquet") as writer:
        writer.write(EpisodeResult(task=task, agent_name=HOSTILE, status=Status.FAILED, fault=fault))
    return folder


@pytest.fixture
def place(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those files in the working directory, and the hostile plugins installed."""
    monkeypatch.syspath_prepend(str(files / SITE))
    for name in ("acme_hostile", "acme_broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.chdir(files)


OUT: Final = f"{HOSTILE}out"
SCRIPTED: Final = ["rollout", "run.yaml", "--overwrite", "--out", "out"]
CASES: Final[dict[str, list[list[str]]]] = {
    "bench": [["bench", "routing", "--routers", HOSTILE], ["bench", "routing", "--trace", HOSTILE]],
    "check": [["check", HOSTILE], ["check", "--simulate", HOSTILE], ["check", "raises", "--config", "key.yaml"]],
    "config": [["config", "show", "key.yaml"], ["config", "show", HOSTILE], ["config", "show", "run.yaml", HOSTILE]],
    "convert": [
        ["convert", HOSTILE, "--to", "atif", "--out", "x"],
        ["convert", "bad.jsonl", "--to", "atif", "--out", "x"],
        ["convert", "run", "--to", "openai", "--out", OUT],
    ],
    "doctor": [["doctor", HOSTILE], ["doctor", "--config", "key.yaml"], ["doctor", "--python", HOSTILE, "machine"]],
    "eval": [["eval", "key.yaml"], ["eval", "--resume", HOSTILE], ["eval", "run.yaml", "--k", HOSTILE]],
    "export": [["export", HOSTILE, "--to", OUT]],
    "gateway": [["gateway", "replay", HOSTILE], ["gateway", HOSTILE]],
    "mask": [["mask", HOSTILE, "0", "--out", "x.png"], ["mask", "bad.jsonl", "0", "--out", "x.png"]],
    "new": [["new", HOSTILE, "name"], ["new", "agent", HOSTILE], ["new", "agent", "mine", "--folder", OUT]],
    "plan": [["plan", "key.yaml"], ["plan", HOSTILE]],
    "pool": [["pool", "status", HOSTILE], ["pool", "export", "bad.jsonl"], ["pool", HOSTILE]],
    "plugins": [["plugins"], ["plugins", "--json"], ["plugins", HOSTILE], ["plugins", "--help"]],
    "rollout": [
        ["rollout", "key.yaml", "--out", "out"],
        ["rollout", "--resume", HOSTILE],
        [*SCRIPTED[:-1], OUT],
        [*SCRIPTED, "reward=raises"],
        [*SCRIPTED, "reward=raises", "telemetry.log_format=console"],
        [*SCRIPTED, "reward=./own.py:score"],
        [
            *SCRIPTED,
            "agent=tool_agent",
            "parser=hermes",
            "tools=[{name: mcp, servers: {a: {command: python, args: [server.py]}}}]",
        ],
        [*SCRIPTED, "data.path=rows.jsonl"],
        [*SCRIPTED, f"data.path=reasoning_gym:{HOSTILE}"],
        [*SCRIPTED, f"data.path=bfcl:{HOSTILE}"],
        [*SCRIPTED, f"data.path=harbor:{HOSTILE}"],
        [*SCRIPTED, f"data.path=terminal_bench:{HOSTILE}"],
        [*SCRIPTED, f"data.path=swe:{HOSTILE}"],
        [*SCRIPTED, f"model.path={HOSTILE}"],
    ],
    "sandbox": [["sandbox", "run", "program.py"], ["sandbox", "run", HOSTILE]],
    "sft": [["sft", HOSTILE, "--model", HOSTILE, "--out", "x"]],
    "show": [["show", "run"], ["show", "run", "0"], ["show", HOSTILE], ["show", "bad.jsonl"]],
    "tags": [["tags", HOSTILE, "--to", OUT], ["tags", "run", "--to", "tagged", "--tag", HOSTILE]],
    "train": [["train", "key.yaml", "--out", "out"], ["train", "--resume", HOSTILE]],
    "trl": [["trl", "key.yaml", "--out", "x"], ["trl", HOSTILE, "--out", "x"]],
    "view": [["view", HOSTILE], ["view", "bad.jsonl", "--export", "x.html"], ["view", "run", "--export", OUT]],
    "workspaces": [
        ["workspaces", HOSTILE],
        ["workspaces", "find", "--backend", HOSTILE],
        ["workspaces", "find", "--options", HOSTILE],
        *(
            ["workspaces", "find", "--backend", "containers", "--options", json.dumps({"command": ["python", program]})]
            for program in ("engine.py", "server.py", HOSTILE)
        ),
    ],
}
"""Command lines of each command, in the folder of `place`."""


def run(words: list[str]) -> None:
    with suppress(SystemExit):  # of the parser
        main(words)


def test_every_command_has_cases() -> None:
    """A new command brings the hostile texts that it may print."""
    assert set(CASES) == set(load(PluginRecipe()).registry("commands").entries())


@pytest.mark.many_cases
@pytest.mark.parametrize("words", [pytest.param(words, id=name) for name, cases in CASES.items() for words in cases])
def test_nothing_is_printed_raw(place: None, capfd: pytest.CaptureFixture[str], words: list[str]) -> None:
    """Errors, tables and programs' outputs have control characters as escapes, and the file gets nothing else."""
    run(words)
    printed = "".join(capfd.readouterr())

    assert printed
    assert RAW.findall(COLOUR.sub("", printed)) == []


def test_a_log_line_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Values, names and tracebacks of a line for people are escaped; only our own colours are sequences."""

    class Odd:
        def __repr__(self) -> str:
            return HOSTILE

    configure_logging(log_format="console")
    structlog.get_logger().error(HOSTILE, reason=HOSTILE, odd=Odd(), exc_info=ValueError(HOSTILE), **{HOSTILE: 1})
    printed = capsys.readouterr().err

    assert "ValueError" in printed
    assert RAW.findall(COLOUR.sub("", printed)) == []
    assert r"\x1b]0;x\x07" in printed


@given(st.text(st.one_of(st.sampled_from(HOSTILE), st.characters())))
def test_a_console_escapes_what_any_part_prints(text: str) -> None:
    """A console of commands prints no raw character of a text, and its markup is text."""
    out = io.StringIO()
    Console(file=out, force_terminal=True, width=200, legacy_windows=False).print(f"[bold]{text}[/nonsense]")

    assert RAW.findall(COLOUR.sub("", out.getvalue())) == []
    assert literal(literal(text)) == literal(text)


PROGRAMS: Final = (
    "core/src/turnwise/cli/__init__.py",
    "core/src/turnwise/console.py",
    "core/src/turnwise/events/logging.py",
    "core/src/turnwise/models/gguf_converter.py",
    "core/src/turnwise/runtime/ray/actor_lines.py",
    "core/src/turnwise/terminal.py",
    "libs/testing/src/turnwise_testing/engines/actor_run.py",
    "plugins/python_sandbox/src/turnwise_python_sandbox/box/",
    "plugins/torl_python/src/turnwise_torl_python/verifier_process.py",
)
"""Modules that may write to a stream themselves: the way to the terminal, and programs that another program reads."""


@pytest.mark.parametrize("found", ["write to a stream", "rich.console.Console"])
def test_all_print_through_one_module(found: str) -> None:
    """No module writes to a standard stream or makes a console, but `turnwise.terminal` and `turnwise.console`."""
    check: Callable[[ast.AST], bool] = {"write to a stream": is_write, "rich.console.Console": is_console}[found]
    words = {"write to a stream": r"sys\.std\w+\.write\w*", "rich.console.Console": "rich.console"}[found]
    sources = (path for path in SOURCES if not name_of(path).startswith((*PROGRAMS, "benchmarks/", "docs/")))
    paths = containing(sources, words)

    assert [name_of(path) for path in paths if any(map(check, ast.walk(parsed(path))))] == []


def is_write(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr in ("write", "writelines")
        and ast.unparse(node.value) in ("sys.stdout", "sys.stderr")
    )


def is_console(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.ImportFrom)
        and node.module == "rich.console"
        and any(alias.name == "Console" for alias in node.names)
    )


@example("\x7f")
@given(st.text())
def test_json_stays_json(text: str) -> None:
    """Commands print JSON with texts of others, which programs read."""
    shown = literal(json.dumps(text))
    assert text == json.loads(shown)
    assert shown.isprintable()
