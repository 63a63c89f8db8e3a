"""Coding agents from npm that are refused, run out of context, or wait for a slow model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.slow


@pytest.fixture
def run(path_of):
    """Runs an agent of the example at a gateway; returns its exit code and its output."""

    def start(cli, gateway):
        variables = {
            "PATH": f"{path_of(cli)}:{os.environ['PATH']}",
            "OPENAI_BASE_URL": f"{gateway.url}/v1",
            "OPENAI_API_KEY": gateway.key,
            "ANTHROPIC_BASE_URL": gateway.url,
            "TURNWISE_MODEL": "tiny",
            "CODING_CONTEXT": "500000",
            "TURNWISE_TASK": json.dumps({"messages": [{"role": "user", "content": "Repair median.py."}]}),
        }
        command = [sys.executable, str(ROOT / "examples/coding_cli/agent.py"), cli]
        done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    return start


def calls_of_the_agent(gateway):
    """Return the calls with tools; the others are for a title and the like."""
    return [call for call in gateway.backend.calls if call.tools]


@pytest.mark.parametrize("kind", ["session_closed", "budget_exhausted"])
@pytest.mark.parametrize("cli", ["claude", "codex", "opencode", "pi"])
def test_a_refusal_ends_the_agent(gateway, refused, run, cli, kind):
    """The agent makes one call, tells the reason, and ends with an error."""
    gateway.backend.script = lambda _call: refused(kind, "It is over.")

    code, output = run(cli, gateway)

    assert code != 0
    assert "It is over." in output
    assert 1 == len(calls_of_the_agent(gateway))


@pytest.mark.parametrize(
    ("cli", "told"),
    [
        ("claude", "Prompt is too long · the request is ~600000 tokens (limit 500000)"),
        ("codex", "Codex ran out of room in the model's context window"),
    ],
)
def test_a_full_context_is_understood(gateway, refused, run, cli, told):
    """The agent says in its own words that the context is full, and does not try again."""
    gateway.backend.script = lambda _call: refused(
        "context_length_exceeded", "It is too long.", num_tokens=600_000, max_tokens=500_000
    )

    code, output = run(cli, gateway)

    assert code != 0
    assert told in output
    assert 1 == len(calls_of_the_agent(gateway))


@pytest.mark.parametrize(("heartbeat_s", "delay_s", "survives"), [(0.2, 12.0, True), (6.0, 600.0, False)])
def test_codex_waits_while_there_are_heartbeats(serve, make_reply, path_of, tmp_path, heartbeat_s, delay_s, survives):
    """With an idle limit of 4 s it takes a reply after 12 s; a silence of 6 s behind the first heartbeat ends it."""
    gateway = serve(heartbeat_s=heartbeat_s)
    gateway.backend.delay_s = delay_s
    gateway.backend.script = lambda _call: make_reply(content="It is done.")
    limits = "stream_idle_timeout_ms = 4000, stream_max_retries = 0, request_max_retries = 0"
    provider = f'name = "run", base_url = "{gateway.url}/v1", env_key = "OPENAI_API_KEY", wire_api = "responses"'
    options = ['model="tiny"', 'model_provider="run"', f"model_providers.run={{{provider}, {limits}}}"]
    command = [path_of("codex") / "codex", "exec", "--skip-git-repo-check"]
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "OPENAI_API_KEY": gateway.key}

    done = subprocess.run(
        [*command, *(part for option in options for part in ("-c", option)), "Say when it is done."],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )

    assert survives == (done.returncode == 0), done.stderr
    assert survives == ("It is done." in done.stdout)
    assert 1 == len(gateway.backend.calls)
    assert ("confirmed" if survives else "cancelled") == gateway.backend.outcome()
