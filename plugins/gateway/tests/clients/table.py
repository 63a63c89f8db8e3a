"""
Runs the clients of `versions.toml` that are installed, and writes the page about them.

    python plugins/gateway/tests/clients/table.py

It takes some minutes. A client that is not installed keeps the line that it has, if that is of the pinned version.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping
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


def main() -> None:
    """Run the tests, and write the page."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "slow", "-n", "2", f"--junitxml={report}"]
        subprocess.run([*command, str(TESTS / "test_client_records.py")], cwd=ROOT, check=False)
        outcomes = read_outcomes(ET.parse(report).iter("testcase"))
    known = read_page(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else {}
    PAGE.write_text(HEAD + "".join(write_lines(outcomes, known)), encoding="utf-8")


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


def read_page(text: str) -> dict[str, str]:
    """Return the lines of a page by the names of their clients."""
    return {found[1]: line for line in text.splitlines() if (found := re.match(r"\| `(\w+)` \|", line))}


def write_lines(outcomes: Mapping[str, Mapping[str, Mapping[str, str]]], known: Mapping[str, str]) -> Iterable[str]:
    """Yield the lines of the table."""
    pinned = VERSIONS["pip"] | VERSIONS["npm"]
    for name in sorted(outcomes.keys() | known.keys() & pinned.keys()):
        versions = describe_versions(name)
        if name in outcomes:
            cells = [describe_outcome(outcomes[name].get(dialect, {})) for dialect in DIALECTS]
            yield f"| `{name}` | {versions} | {' | '.join(cells)} | {VERSIONS['notes'].get(name, '')} |\n"
        elif f"| {versions} |" in known[name]:
            yield known[name] + "\n"


def describe_versions(name: str) -> str:
    """Return the packages of a client with their versions."""
    return ", ".join((VERSIONS["pip"] | VERSIONS["npm"])[name]).replace("==", " ")


def describe_outcome(ways: Mapping[str, str]) -> str:
    """Return a cell; empty for a dialect that the test does not ask for."""
    by_outcome: dict[str, list[str]] = defaultdict(list)
    for way, outcome in sorted(ways.items()):
        by_outcome[outcome].append(way)
    return "; ".join(
        f"{', '.join(names)}" + (" fails" if word == "fails" else "") for word, names in by_outcome.items()
    )


if __name__ == "__main__":
    main()
