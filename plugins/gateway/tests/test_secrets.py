"""
Whole runs with every kind of secret: none of them is in a file that a run leaves, or in what a command prints.

The output of an agent's program is its own matter: a program that prints its key has it in the fault of its episode.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pyarrow.parquet as pq
import pytest
import yaml
from attrs import define, field
from gateway_processes import Served, serve, write_run
from gateway_rollouts import write_rollout

pytestmark = [pytest.mark.usefixtures("starts_a_process"), pytest.mark.slow]

PROGRAM = Path(__file__).parent / "programs" / "carry_secrets.py"
ENVIRONMENT = {
    "HF_TOKEN": "hf_Token+of/the Hub=1",
    "WANDB_API_KEY": "wandb-key-0123456789abcdef",
    "AWS_SECRET_ACCESS_KEY": "aws/Secret+Access=Key&1",
    "OPENAI_API_KEY": "sk-of-the-worker-0123456789",
    "ANTHROPIC_API_KEY": "sk-ant-of-the-worker-0123456789",
    "JUDGE_KEY": "sk-judge+0123/4567=89",
    "REWARD_JUDGE_KEY": "sk-reward-judge+0123/4567=89",
    "no_such_proxy": "http://user:Pass+word/0123@127.0.0.1:9",
}
"""Secrets of the trainer; the last two keys are sent to servers."""
HEADERS = {
    "api-key": "header-api-key-0123456789",
    "x-goog-api-key": "header-goog-key-0123456789",
    "x-auth-token": "header-auth-token-0123456789",
    "x-amz-security-token": "header-amz-token-0123456789",
    "Proxy-Authorization": "Basic header+proxy/0123456789=",
    "Cookie": "session=header-cookie-0123456789",
}
"""Further secrets in the requests of agents."""
COMMANDS = (
    "show run",
    "show run 1",
    "convert run --to atif --out run/episodes.atif.jsonl",
    "convert run --to openai --out run/tuning.jsonl",
    "view run --export run/page.html",
    "gateway replay run",
    "plan run.yaml",
    "config show run.yaml",
    "doctor --config run.yaml",
    "doctor --config run.yaml --json",
)
"""Commands that read the run."""
WHILE_IT_SERVES = {"out/control.json"}
"""Files in which a secret may be: the secret of the control port, while it is open."""


class SecretServer(BaseHTTPRequestHandler):
    """A model of another server, which wants a key; and a judge of rewards, as far as its start needs one."""

    seen: ClassVar[set[str]] = set()

    def do_GET(self) -> None:
        self._reply(200, {"data": [{"id": "judge", "max_model_len": 256}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.startswith("/refusing"):
            self._reply(401, {"error": {"message": "Incorrect API key provided", "code": "invalid_api_key"}})
            return
        message = {"role": "assistant", "content": "It is right."}
        self._reply(200, {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    def _reply(self, status: int, body: object) -> None:
        self.seen.add(self.headers.get("Authorization", ""))
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def other_server() -> Iterator[str]:
    """The address of a server with keys."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), SecretServer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def list_models(url: str) -> dict[str, object]:
    """Return the agent's option `models`: a server that answers, one that is not there, and one that refuses keys."""
    places = {"judge": f"{url}/v1", "nowhere": "http://127.0.0.1:9/v1", "refusing": f"{url}/refusing"}
    return {name: {"base_url": place, "api_key_env": "JUDGE_KEY"} for name, place in places.items()}


def forms_of(secret: str) -> set[bytes]:
    """Return the secret and its encodings: in URLs, in JSON, as hexadecimal digits, and in base64 at each offset."""
    raw = secret.encode()
    quoted = {urllib.parse.quote(secret, safe=""), urllib.parse.quote(secret), urllib.parse.quote_plus(secret)}
    forms = {raw, raw.hex().encode(), json.dumps(secret)[1:-1].encode(), *(each.encode() for each in quoted)}
    for offset in range(3):
        # The first and the last letters depend on what stands beside the secret.
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            encoded = encode(b"\0" * offset + raw).rstrip(b"=")
            forms.add(encoded[(0, 2, 3)[offset] : len(encoded) - 1])
    return forms


@define
class Finder:
    """
    Looks for secrets.

    Attributes:
        secrets: by their names.
        found: names of secrets, with the places.
    """

    secrets: dict[str, str]
    found: list[str] = field(factory=list)

    def look(self, place: str, data: bytes) -> None:
        for name, secret in self.secrets.items():
            if any(form in data for form in forms_of(secret)):
                self.found.append(f"{name} in {place}")

    def look_in(self, folder: Path, *, but: frozenset[Path] = frozenset()) -> None:
        """Look in all files of a folder, and in the names of the files."""
        for path in sorted(folder.rglob("*")):
            self.look("the name of a file", str(path.relative_to(folder)).encode())
            if path.is_file() and path not in but:
                self.look(str(path.relative_to(folder)), read_plain(path))


def read_plain(path: Path) -> bytes:
    """Return the content of a file, and that of the compressed columns of a table."""
    data = path.read_bytes()
    assert not data.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PK\x03\x04")), f"{path} is compressed"
    return repr(pq.read_table(path).to_pylist()).encode() + data if data.startswith(b"PAR1") else data


def environment_of(folder: Path, site: str) -> dict[str, str]:
    """Return the environment of a command, whose temporary files lie in the folder."""
    temporary = folder / "temporary"
    temporary.mkdir(exist_ok=True)
    paths = os.pathsep.join([str(folder / site), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": paths, "TMPDIR": str(temporary)}


def run_command(folder: Path, site: str, *arguments: object) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "turnwise.cli", *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=environment_of(folder, site), capture_output=True, check=False)


def check_commands(folder: Path, site: str, finder: Finder, commands: Sequence[str]) -> None:
    """Run commands, check their exit codes, and look for secrets in what they print."""
    for line in commands:
        done = run_command(folder, site, *line.split())
        # The doctor's exit code is that of the machine.
        assert done.returncode == 0 or line.startswith("doctor"), (line, done.stdout, done.stderr)
        assert done.stdout + done.stderr, line
        finder.look(f"the output of {line!r}", done.stdout + done.stderr)


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_a_rollout_keeps_no_secret(log_format: str, tmp_path: Path, other_server: str) -> None:
    """Agents that score, crash, die and are refused; with requests, a trace, all log lines, exports and a page."""
    keys = tmp_path / "keys"
    agent: dict[str, Any] = {"command": ["python", str(PROGRAM)], "models": list_models(other_server)}
    # The values of this option are in the config of the run, so a secret belongs into the variables of `inherit`.
    agent["environment"] = {"KEYS_FILE": str(keys)}
    agent["inherit"] = ["MORE_HEADERS"]
    agent["keep_requests"] = "run/requests"
    folder = tmp_path / "work"
    folder.mkdir()
    write_rollout(folder, 4, agent, max_in_flight=4)
    config = yaml.safe_load((folder / "run.yaml").read_text())
    config["telemetry"] = {"log_level": "debug", "log_format": log_format}
    config["plugins"] += ["commands", "conversions", "doctor", "observability", "openai_engine", "viewer"]
    judge = {"name": "openai", "urls": [other_server], "api_key_env": "REWARD_JUDGE_KEY", "max_context": 256}
    config["judge"] = {"engine": judge}
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    environment = {**environment_of(folder, "site"), "MORE_HEADERS": json.dumps(HEADERS)}
    command = [sys.executable, "-m", "turnwise.cli", "rollout", "run.yaml", "--out", "run", "--trace", "run/trace.json"]

    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False)

    assert done.returncode == 0, done.stderr.decode()
    sessions = dict(enumerate(keys.read_text().split()))
    assert 4 == len(set(sessions.values()))
    secrets = {**ENVIRONMENT, **HEADERS, **{f"key {number}": key for number, key in sessions.items()}}
    finder = Finder(secrets)
    finder.look("the output of the rollout", done.stdout + done.stderr)
    assert {f"Bearer {ENVIRONMENT[name]}" for name in ("JUDGE_KEY", "REWARD_JUDGE_KEY")} <= SecretServer.seen
    if log_format == "json":
        check_commands(folder, "site", finder, COMMANDS)
    finder.look_in(folder)
    assert [] == finder.found
    requests = list((folder / "run/requests").iterdir())
    assert [0o600] * 4 == [stat.S_IMODE(path.stat().st_mode) for path in requests]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_gateway_keeps_no_secret(
    how: signal.Signals, tmp_path: Path, other_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it serves, its secret is in a file of its owner alone; keys are nowhere, also after a kill."""
    (tmp_path / "temporary").mkdir()
    for name, value in (ENVIRONMENT | {"TMPDIR": str(tmp_path / "temporary")}).items():
        monkeypatch.setenv(name, value)
    config, finder = write_run(tmp_path), Finder(ENVIRONMENT | HEADERS)
    models = f"agent.models={json.dumps(list_models(other_server))}"
    options = ("agent.max_calls=50", models, "telemetry.log_level=debug", "--keep-requests", "--out", tmp_path / "out")
    with serve(tmp_path, config, *options) as served:
        check_open_gateway(tmp_path, served, finder)
        code, output, errors = served.stop(how)
    assert (0 if how == signal.SIGINT else -how) == code, errors
    finder.look("output", "\n".join([*served.lines, output, errors]).encode())
    if how == signal.SIGKILL:
        assert 0o600 == stat.S_IMODE((tmp_path / "out/control.json").stat().st_mode)
        with serve(tmp_path, "--resume", tmp_path / "out") as again:
            finder.secrets["next control"] = again.access["secret"]
            code, output, errors = again.stop()
        assert 0 == code, errors
        finder.look("output", "\n".join([*again.lines, output, errors]).encode())
    commands = ["show out", "show out 0", "convert out --to atif --out out/a.jsonl", "gateway replay out"]
    check_commands(tmp_path, "plugins", finder, commands)
    finder.look_in(tmp_path)
    assert not (tmp_path / "out/control.json").exists()
    assert [] == finder.found


def check_open_gateway(folder: Path, served: Served, finder: Finder) -> None:
    """Use sessions, end one of two, and look in the files and replies of a gateway that serves."""
    opened = [served.open(uid="t1"), served.open(uid="t2")]
    for number, session in enumerate(opened):
        finder.secrets |= {f"key {number}": session["api_key"], f"control key {number}": session["control_key"]}
        make_calls(session)
    first = f"/sessions/{opened[0]['id']}"
    replies = [served.control("GET", f"{first}?format=atif"), served.control("GET", "/sessions")]
    finder.look("replies", json.dumps([*replies, served.control("DELETE", first)]).encode())
    allowed = frozenset(folder / name for name in WHILE_IT_SERVES)
    assert [0o600] == [stat.S_IMODE(path.stat().st_mode) for path in allowed]
    for path in allowed:
        finder.look(path.name, path.read_bytes())
    finder.secrets["control"] = served.access["secret"]
    finder.look_in(folder, but=allowed)
    assert [] == finder.found


def make_calls(session: dict[str, Any]) -> None:
    """Make the calls of the program."""
    environment = {**os.environ, "OPENAI_API_KEY": session["api_key"], "OPENAI_BASE_URL": session["openai_base_url"]}
    code = f"import sys; sys.path.insert(0, {str(PROGRAM.parent)!r}); import carry_secrets as c; c.call_in_all_ways()"
    environment |= {"MORE_HEADERS": json.dumps(HEADERS)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
