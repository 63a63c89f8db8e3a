"""
Runs the clients of `versions.toml` that are installed, and writes the page about them.

    python plugins/gateway/tests/clients/table.py [NAME ...]

Without names it runs all of them, which takes some minutes. A client that is not run, or not installed, keeps the line
that it has, if that is of the pinned version.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Final
from xml.etree import ElementTree as ET

ROOT: Final = Path(__file__).parents[4]
PAGE: Final = ROOT / "docs/reference/clients.md"
TESTS: Final = ROOT / "plugins/gateway/tests"
VERSIONS: Final = tomllib.loads(Path(__file__).with_name("versions.toml").read_text(encoding="utf-8"))
DIALECTS: Final = {"chat": "Chat Completions", "responses": "Responses", "messages": "Messages"}
HEAD: Final = """\
<!-- `make client-table` writes this page from the runs of the clients. -->

# Which clients work

Each line is about an unmodified library or agent in its pinned version, which holds a conversation with a real session
of the [gateway](../../plugins/gateway/README.md). It gets a turn with reasoning, a text and a call of its tool in odd
JSON, runs the tool, and sends all of it back in its own way. A client works if its answer is the model's last turn, and
the whole conversation is one record with exactly the sampled tokens. "plain" and "stream" are responses without and
with server-sent events.

| client | versions | Chat Completions | Responses | Messages | it needs, or does |
| --- | --- | --- | --- | --- | --- |
"""
LONG_RUNS: Final = """
## Coding agents in long runs

Each agent works for thirty turns of a scripted model. It runs commands, two at once in one turn, starts a sub-agent,
and asks for a summary when the context is nearly full. "cut streams": two streams break on the way. "interrupted":
Ctrl-C ends the agent in the middle of a turn, and its own command continues the conversation. An agent works if each
turn that it got is in one record, once, with the right kind, and the messages of the episode end with its last turn.

| agent | versions | cut streams | interrupted | it needs, or does |
| --- | --- | --- | --- | --- |
"""
SHORT_RUNS: Final = """
## Coding agents in short runs

These repair the repository of the [example](../../examples/coding_cli/README.md), and but for mini-SWE-agent, which
asks for no stream, also after a stream that breaks: {}. aider has no tools, and shows the edited file anew in place of
the old one, so each of its turns is a record.
"""
SHORT_AGENTS: Final = ("aider", "continue_cli", "mini_swe_agent", "pi")
LONG_WAYS: Final = {"test_thirty_turns": "cut streams", "test_an_interrupted_run_goes_on": "interrupted"}
AGENTS: Final = {"claude": "claude_code", "qwen": "qwen_code"}
"""Names in `versions.toml` of agents whose programs have other names."""


def main() -> None:
    """Run the tests, and write the page."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "slow", "-n", "2", f"--junitxml={report}"]
        command += ["-k", " or ".join(f"{name}-" for name in sys.argv[1:])] if sys.argv[1:] else []
        files = [str(TESTS / name) for name in ("test_client_records.py", "test_long_coding_runs.py")]
        subprocess.run([*command, *files], cwd=ROOT, check=False)
        cases = list(ET.parse(report).iter("testcase"))
    clients, agents = read_tables(PAGE.read_text(encoding="utf-8"))
    lines = write_lines(read_outcomes(cases), clients, DIALECTS)
    long_runs = write_lines(read_long_runs(cases), agents, LONG_WAYS.values())
    short_runs = SHORT_RUNS.format(", ".join(map(describe_versions, SHORT_AGENTS)))
    PAGE.write_text("".join((HEAD, *lines, LONG_RUNS, *long_runs, short_runs)), encoding="utf-8")


def read_outcomes(cases: Iterable[ET.Element]) -> dict[str, dict[str, dict[str, str]]]:
    """Return the outcome of each client, dialect and way; clients that were skipped are missing."""
    found: dict[str, dict[str, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for case in cases:
        named = re.search(r"\[(\w+)-(\w+)-(plain|stream)\]", case.get("name", ""))
        if named is None or case.find("skipped") is not None:
            continue
        failed = case.find("failure") is not None or case.find("error") is not None
        found[named[1]][named[2]][named[3]] = "fails" if failed else "works"
    return found


def read_long_runs(cases: Iterable[ET.Element]) -> dict[str, dict[str, dict[str, str]]]:
    """Return the outcome of each coding agent and way; agents that were skipped are missing."""
    found: dict[str, dict[str, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for case in cases:
        named = re.fullmatch(r"(\w+)\[(\w+)\]", case.get("name", ""))
        if named is None or named[1] not in LONG_WAYS or case.find("skipped") is not None:
            continue
        failed = case.find("failure") is not None or case.find("error") is not None
        found[AGENTS.get(named[2], named[2])][LONG_WAYS[named[1]]] = {"it": "fails"} if failed else {"works": "works"}
    return found


def read_tables(page: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the lines of both tables of the page by the names of their clients."""
    first, _, second = page.partition(LONG_RUNS.splitlines()[1])
    return _read_lines(first), _read_lines(second)


def _read_lines(text: str) -> dict[str, str]:
    return {found[1]: line for line in text.splitlines() if (found := re.match(r"\| `(\w+)` \|", line))}


def write_lines(
    outcomes: Mapping[str, Mapping[str, Mapping[str, str]]], known: Mapping[str, str], columns: Collection[str]
) -> Iterable[str]:
    """Yield the lines of a table with the given columns between the versions and the notes."""
    pinned = VERSIONS["pip"] | VERSIONS["npm"]
    for name in sorted(outcomes.keys() | known.keys() & pinned.keys()):
        versions = describe_versions(name)
        if name in outcomes:
            cells = [describe_outcome(outcomes[name].get(column, {})) for column in columns]
            yield f"| `{name}` | {versions} | {' | '.join(cells)} | {VERSIONS['notes'].get(name, '')} |\n"
        elif f"| {versions} |" in known[name]:
            yield known[name] + "\n"


def describe_versions(name: str) -> str:
    """Return the packages of a client with their versions."""
    return ", ".join((VERSIONS["pip"] | VERSIONS["npm"])[name]).replace("==", " ")


def describe_outcome(ways: Mapping[str, str]) -> str:
    """Return a cell; empty for a column that the test does not ask for."""
    by_outcome: dict[str, list[str]] = defaultdict(list)
    for way, outcome in sorted(ways.items()):
        by_outcome[outcome].append(way)
    return "; ".join(
        f"{', '.join(names)}" + (" fails" if word == "fails" else "") for word, names in by_outcome.items()
    )


if __name__ == "__main__":
    main()
