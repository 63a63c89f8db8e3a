"""The page about clients has the pinned version of each client that its command runs."""

import importlib.util
from pathlib import Path

from long_coding import AGENTS
from test_client_records import DIALECTS

SCRIPT = Path(__file__).parent / "clients/table.py"


def load_table():
    spec = importlib.util.spec_from_file_location("client_table", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_every_client_in_its_pinned_version():
    """After a new pin, `make client-table` has to run the client again; no line says that a client fails."""
    table = load_table()
    lines, long_runs = table.read_tables(table.PAGE.read_text(encoding="utf-8"))

    assert {table.AGENTS.get(each, each) for each in AGENTS} == long_runs.keys()
    for name, line in long_runs.items():
        assert f"| {table.describe_versions(name)} | works | works |" in line
    page = table.PAGE.read_text(encoding="utf-8")
    assert all(table.describe_versions(name) in page for name in table.SHORT_AGENTS)
    assert DIALECTS.keys() == lines.keys()
    for name, line in lines.items():
        assert f"| {table.describe_versions(name)} |" in line
        cells = line.split("|")[3:6]
        assert [each in DIALECTS[name] for each in table.DIALECTS] == [bool(cell.strip()) for cell in cells], name
        assert "fails" not in line


def test_a_failed_run_is_seen():
    """A failure is a word in the cell, and a skipped client keeps its line while its version is the pinned one."""
    table = load_table()
    cases = "".join(
        f'<testcase name="test_x[haystack-chat-{way}]">{inner}</testcase>'
        for way, inner in (("plain", ""), ("stream", "<failure/>"))
    )
    skipped = '<testcase name="test_x[ag2-chat-plain]"><skipped/></testcase>'
    outcomes = table.read_outcomes(table.ET.fromstring(f"<suite>{cases}{skipped}</suite>").iter("testcase"))

    known = {"ag2": f"| `ag2` | {table.describe_versions('ag2')} | plain |", "strands": "| `strands` | old 1 | plain |"}
    lines = list(table.write_lines(outcomes, known, table.DIALECTS))

    assert ["| `ag2`", "| `hays"] == [line[:7] for line in lines]
    assert "| plain; stream fails |  |" in lines[1]


def test_a_failed_long_run_is_seen():
    """A failure of one of both runs is in its own cell."""
    table = load_table()
    cases = (
        '<testcase name="test_thirty_turns[claude]"/>'
        '<testcase name="test_an_interrupted_run_goes_on[claude]"><failure/></testcase>'
        '<testcase name="test_thirty_turns[codex]"><skipped/></testcase>'
    )
    outcomes = table.read_long_runs(table.ET.fromstring(f"<suite>{cases}</suite>").iter("testcase"))

    (line,) = table.write_lines(outcomes, {}, table.LONG_WAYS.values())

    assert line.startswith(f"| `claude_code` | {table.describe_versions('claude_code')} | works | it fails |")
