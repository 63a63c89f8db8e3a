"""`turnwise doctor`: the findings of plugins, other interpreters, exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from turnwise.cli import main
from turnwise.plugin.host import Host, LoadedPlugin
from turnwise.protocols import Finding
from turnwise_doctor import report as doctor_report
from turnwise_doctor.diagnosis import diagnose
from turnwise_doctor.report import ask

JUDGE = "runtime: {name: ray}\njudge: {engine: transformers, pool: {replica_python: NAME}}"


class Fixed:
    """Returns the same findings at each call."""

    def __init__(self, *findings):
        self.findings = findings

    def diagnose(self):
        yield from self.findings


class Failing:
    """Raises after its first finding."""

    def diagnose(self):
        yield Finding("driver", "ok", "found")
        raise RuntimeError("two\nlines")


def host_with(plugins=(), skipped=(), **diagnostics):
    """Return a host in which each diagnostic belongs to the plugin NAME_plugin."""
    host = Host(plugins=plugins, skipped=skipped)
    for name, diagnostic in diagnostics.items():
        with host.registry("diagnostics").owned_by(f"{name}_plugin"):
            host.registry("diagnostics").add(name, lambda config, resources, made=diagnostic: made)
    return host


def states(found):
    return {each.name: [(finding.item, finding.state) for finding in each.findings] for each in found}


OK = Finding("disk", "ok", "10 GiB are free")
LIMITED = Finding("clock", "limited", "it is slow", "set it")


def test_every_plugin_is_asked():
    """The diagnoses come by name, this plugin's first, each with all its findings in order."""
    host = host_with(zebra=Fixed(OK, LIMITED), apple=Fixed(OK))
    with host.registry("diagnostics").owned_by("doctor"):
        host.registry("diagnostics").add("machine", lambda config, resources: Fixed(LIMITED))

    found = diagnose(host)

    assert ["machine", "apple", "zebra"] == [each.name for each in found]
    assert (OK, LIMITED) == found[2].findings
    assert "zebra_plugin" == found[2].plugin


@pytest.mark.parametrize("names", [["apple"], ["apple_plugin"]])
def test_one_name(names):
    """The name of a diagnostic and the name of its plugin select it."""
    found = diagnose(host_with(zebra=Fixed(OK), apple=Fixed(OK)), names)

    assert ["apple"] == [each.name for each in found]


def test_an_unknown_name_is_missing():
    """The finding has a did-you-mean; a plugin that TURNWISE_PLUGINS leaves out is named as such."""
    found = diagnose(host_with(skipped=("pear",), apple=Fixed(OK)), ["aple", "pear"])

    assert {"aple": [("aple", "missing")], "pear": [("pear", "missing")]} == states(found)
    assert "did you mean 'apple'" in found[0].findings[0].explanation
    assert "TURNWISE_PLUGINS" in found[1].findings[0].explanation


@pytest.mark.parametrize(
    ("diagnostic", "text"),
    [
        (Failing(), "plugin 'bad_plugin' raised RuntimeError: two lines"),
        (Fixed("fine"), "TypeError: expected a turnwise.Finding, got 'fine'"),
        (Fixed(), "ValueError: no finding"),
        (None, "AttributeError: "),
    ],
)
def test_a_diagnosis_that_fails_is_one_line(diagnostic, text):
    """Its finding is broken, earlier findings stay, and other plugins are asked all the same."""
    found = diagnose(host_with(bad=diagnostic, good=Fixed(OK)))

    (bad, good) = found
    assert "broken" == bad.findings[-1].state
    assert text in bad.findings[-1].explanation
    assert "\n" not in bad.findings[-1].explanation
    assert isinstance(diagnostic, Failing) == (("driver", "ok") in states(found)["bad"])
    assert (OK,) == good.findings


def test_a_plugin_that_cannot_be_imported_is_broken():
    """The finding has the error and the command that installs the plugin again."""
    plugin = LoadedPlugin(
        name="acme", module="acme", distribution="acme-kit", version="1.0", state="broken", error="ImportError: no acme"
    )

    (found,) = diagnose(host_with(plugins=(plugin,), apple=Fixed(OK)), ["acme"])

    assert ("acme", "broken") == (found.name, found.findings[0].state)
    assert "ImportError: no acme" in found.findings[0].explanation
    assert "pip install --force-reinstall acme-kit" == found.findings[0].hint


# The command


@pytest.fixture
def plugins(monkeypatch):
    """A host with a diagnostic that works, one with a limit, and one that lacks something."""
    missing = Finding("fast\x1b[31mlib [x]", "missing", "not installed", "pip install 'fastlib[cpu]'")
    host = host_with(good=Fixed(OK), slow=Fixed(OK, LIMITED), bad=Fixed(OK, missing))
    monkeypatch.setattr(doctor_report, "load", lambda recipe: host)


@pytest.mark.parametrize(
    ("names", "code"),
    [([], 0), (["good"], 0), (["slow", "good"], 0), (["bad"], 1), (["good", "bad"], 1), (["unknown"], 1)],
)
def test_exit_code(plugins, names, code, capsys):
    """The code is 1 if something that was asked for by name is missing; without names it is 0."""
    assert code == main(["doctor", *names])


def test_help_has_examples(capsys):
    """The help text ends with commands that can be copied."""
    with pytest.raises(SystemExit, match="0"):
        main(["doctor", "--help"])
    assert "Examples:" in capsys.readouterr().out


def test_table(plugins, capsys):
    """The table has states, explanations and hints; markup and control characters in them are text."""
    main(["doctor"])

    shown = capsys.readouterr().out
    for text in ("good", "10 GiB are free", "limited", "fix: set it", "fix: pip install 'fastlib[cpu]'"):
        assert text in shown
    assert "\x1b[31m" not in shown
    assert "[x]" in shown


def test_json(plugins, capsys):
    """JSON has the same findings."""
    assert 0 == main(["doctor", "slow", "--json"])

    (report,) = json.loads(capsys.readouterr().out)["interpreters"]
    (found,) = report["diagnostics"]
    assert (sys.executable, "") == (report["python"], report["error"])
    assert ("slow", "slow_plugin") == (found["name"], found["plugin"])
    assert {"item": "clock", "state": "limited", "explanation": "it is slow", "hint": "set it"} == found["findings"][1]


def test_output_of_a_package_is_not_part_of_the_report(monkeypatch, capsys):
    """A package that prints while it is checked does not break the JSON."""

    class Printing:
        def diagnose(self):
            sys.stdout.write("welcome!\n")
            yield OK

    monkeypatch.setattr(doctor_report, "load", lambda recipe: host_with(loud=Printing()))
    main(["doctor", "--json"])

    captured = capsys.readouterr()
    assert json.loads(captured.out)["interpreters"]
    assert "welcome!" in captured.err


@pytest.mark.parametrize("relative", [False, True])
def test_a_missing_interpreter_is_named(tmp_path, monkeypatch, relative):
    """The hint creates its virtual environment."""
    (tmp_path / "venv/bin").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "venv/bin")
    report = ask("./python" if relative else str(tmp_path / "venv/bin/python"), [])

    assert "there is no such interpreter" == report["error"]
    assert f"python3 -m venv {tmp_path / 'venv'}" == report["hint"]


@pytest.mark.parametrize(
    ("said", "error", "hint"),
    [
        ("No module named 'turnwise'", "turnwise is not installed there", "-m pip install turnwise"),
        (
            "turnwise: error: argument COMMAND: invalid choice: 'doctor' (choose from 'plan')",
            "turnwise-doctor is not installed there",
            "-m pip install turnwise-doctor",
        ),
        ("ValueError: broken", "ValueError: broken", ""),
    ],
)
def test_an_interpreter_that_fails_is_explained(make_program, said, error, hint):
    """Without turnwise or this plugin the hint installs it; for any other failure the last line is shown."""
    report = ask(make_program("bin/python", f'echo "{said}" >&2; exit 1'), [])

    assert error == report["error"]
    assert hint in report["hint"]
    assert bool(hint) == bool(report["hint"])


def test_a_part_that_works_in_the_replicas_interpreter_is_not_missing(plugins, make_program, tmp_path, capsys):
    """An engine can have a separate virtual environment, so it need not work here."""
    finding = {"item": "fastlib", "state": "ok", "explanation": "1.0", "hint": ""}
    there = {"name": "bad", "plugin": "bad_plugin", "findings": [finding]}
    report = {"interpreters": [{"python": "x", "error": "", "hint": "", "diagnostics": [there]}]}
    (tmp_path / "report.json").write_text(json.dumps(report))
    python = make_program("bin/python", f"cat {tmp_path / 'report.json'}")

    assert 0 == main(["doctor", "bad", "--python", python])
    assert python in capsys.readouterr().out.replace("\n", "")


@pytest.mark.slow
def test_another_interpreter_is_asked():
    """The report of a real interpreter comes back under its path."""
    report = ask(sys.executable, ["turnwise"])

    assert (sys.executable, "") == (report["python"], report["error"])
    assert "turnwise" == report["diagnostics"][0]["name"]


@pytest.mark.slow
def test_the_command_in_a_separate_process():
    """All plugins of this environment answer, and none is broken."""
    command = [sys.executable, "-m", "turnwise.cli", "doctor", "--json"]
    # Without the programs of the machine: a docker whose server does not run is broken, and rightly reported.
    environment = os.environ | {"PATH": str(Path(sys.executable).parent)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)

    (report,) = json.loads(done.stdout)["interpreters"]
    found = {each["name"]: each["findings"] for each in report["diagnostics"]}
    assert {"machine", "ray", "turnwise"} <= found.keys()
    assert [finding for findings in found.values() for finding in findings if finding["state"] == "broken"] == []


@pytest.mark.parametrize("python", ["/python3", "no-such-python", "", " ", "x/python", "/", "."])
def test_a_name_that_is_no_interpreter_has_no_hint_of_a_folder(python, tmp_path, monkeypatch):
    """Only the missing `bin/python` of a virtual environment can be created."""
    monkeypatch.chdir(tmp_path)
    report = ask(python, [])

    assert "there is no such interpreter" in report["error"]
    assert "venv" not in report["hint"]


@pytest.mark.parametrize(
    "content",
    [
        b"no program\n",
        b"\x7fELF",
        b"#!/no/such/interpreter\n",
        b"",
        b"#!/bin/sh\nprintf '\\377\\376'\n",
        b"#!/bin/sh\nprintf '\\377' >&2\n",
        b"#!/bin/sh\necho '{\"interpreters\": [5]}'\n",
        b"#!/bin/sh\necho '{\"interpreters\": [{}]}'\n",
    ],
)
def test_a_file_that_does_not_answer_is_one_line(make_program, content):
    """Executable files that are no interpreters, and answers that are no reports, are failures with a reason."""
    python = make_program("bin/python", "")
    Path(python).write_bytes(content)

    report = ask(python, [])

    assert python == report["python"]
    assert report["error"]
    assert [] == report["diagnostics"]


@pytest.mark.parametrize("name", ["venv/bin/python", "own-python"])
@pytest.mark.parametrize("section", ["runtime: {name: ray, ray: {replica_python: NAME}}", JUDGE])
def test_the_interpreters_of_a_config_are_those_of_the_plan(
    plugins, make_program, tmp_path, monkeypatch, capsys, name, section
):
    """A path is beside the config, and a bare name is on the PATH, from any working directory."""
    report = {"interpreters": [{"python": "x", "error": "", "hint": "", "diagnostics": []}]}
    (tmp_path / "report.json").write_text(json.dumps(report))
    make_program(f"site/{name}", f"cat {tmp_path / 'report.json'}")
    monkeypatch.setenv("PATH", f"{tmp_path / 'site'}{os.pathsep}{os.environ['PATH']}")
    config = tmp_path / "site" / "run.yaml"
    parts = "data: {path: t.jsonl}\nagent: single_turn\nengine: transformers\n"
    config.write_text(parts + section.replace("NAME", name) + "\n")

    main(["doctor", "--config", str(config), "--json"])

    interpreters = json.loads(capsys.readouterr().out)["interpreters"]
    assert [""] * 2 == [each["error"] for each in interpreters]
    assert interpreters[1]["python"].endswith(name)
