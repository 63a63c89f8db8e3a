"""Requests that schemathesis makes from `openapi.yaml`, right and wrong ones, end as the file says."""

import subprocess
import sys
from pathlib import Path

import pytest

from turnwise_gateway.calls import CallOfTool

FOLDER = Path(__file__).parents[1]
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,ignored_auth"


@pytest.mark.slow
def test_requests_from_the_schema(gateway, make_reply, tmp_path):
    """No request has a status, a content type or a body that the file does not have, and none ends with 5xx."""
    command = [sys.executable, str(FOLDER / "tests/clients/install.py"), "schemathesis"]
    installed = subprocess.run(command, capture_output=True, text=True, check=False)
    if installed.returncode:
        pytest.skip(f"cannot install schemathesis: {installed.stderr[-300:]}")
    call = CallOfTool(id="a", name="add", arguments='{"x": 1}')
    gateway.backend.script = lambda _call: make_reply(reasoning="Hm.", tool_calls=(call,), finish="tool_calls")

    program = Path(installed.stdout.strip()) / "bin/st"
    options = ["--checks", CHECKS, "--header", f"Authorization: Bearer {gateway.key}", "--seed", "1", "--no-color"]
    done = subprocess.run(
        [program, "run", str(FOLDER / "openapi.yaml"), "--url", gateway.url, *options, "--max-examples", "60"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )

    assert 0 == done.returncode, done.stdout[-6000:] + done.stderr[-2000:]
    assert {"chat", "messages", "responses"} == {each.dialect for each in gateway.backend.calls}
    assert 0 == gateway.server.num_in_flight
