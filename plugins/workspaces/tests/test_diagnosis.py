"""The diagnosis of workspaces, on this machine and on machines that lack something."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from boxes import list_boxes, why_no_boxes

from turnwise.errors import InfrastructureError
from turnwise_workspaces import diagnosis

BOXES, PODMAN, DOCKER = "workspaces in boxes", "workspaces with podman", "workspaces with docker"


def find() -> dict[str, tuple[str, str]]:
    """Return the states and explanations of the findings."""
    return {each.item: (each.state, each.explanation) for each in diagnosis.diagnose()}


def write_program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    (folder / name).chmod(0o755)


@pytest.mark.skipif(bool(why_no_boxes()), reason=why_no_boxes())
def test_doctor_starts_a_box():
    """Through the command line; nothing is left."""
    command = [sys.executable, "-m", "turnwise.cli", "doctor", "workspaces", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)

    text = json.dumps(json.loads(done.stdout))
    assert "starts boxes" in text, done.stderr
    assert list_boxes() == []


def test_a_machine_without_programs(tmp_path, monkeypatch):
    """Each is named as limited: one backend is enough."""
    monkeypatch.setenv("PATH", str(tmp_path))

    found = find()

    assert {BOXES: "limited", PODMAN: "limited", DOCKER: "limited"} == {
        name: state for name, (state, _) in found.items()
    }


def test_programs_that_do_not_work(tmp_path, monkeypatch):
    """Each is broken, with its reason in one line."""
    write_program(tmp_path, "bwrap", "exit 1")
    write_program(tmp_path, "podman", "echo one >&2; echo no rights here >&2; exit 125")
    write_program(tmp_path, "docker", "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path))

    async def start(*_: object) -> None:
        raise InfrastructureError("no namespaces\nof users")

    monkeypatch.setattr(diagnosis.BubblewrapBackend, "start", start)
    found = find()

    assert found[BOXES] == ("broken", "the backend `bubblewrap`: no box starts: no namespaces")
    assert found[PODMAN][0] == "broken"
    assert found[PODMAN][1].endswith("`podman info` fails: no rights here")
    assert found[DOCKER][0] == "ok"
