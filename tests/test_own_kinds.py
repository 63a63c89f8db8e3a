"""Each kind of part from a file of the user, `./file.py:Name`, in one process and on Ray."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from turnwise.cli import main
from turnwise.config.run import RunConfig, kinds_of
from turnwise.plugin.host import KINDS
from turnwise.types import Status
from turnwise_result_files import read_results
from turnwise_testing.whole_runs.scripted_run import SITE, environment_of, write_scripted_run

OWN = '''
from pathlib import Path

import aiohttp

from turnwise import Observer, Reply, State, TrajectoryScore
from turnwise_chat_templates import ChatTemplate as _ChatTemplate
from turnwise_middleware import Middleware as _Middleware
from turnwise_routers import RoundRobin as _RoundRobin
from turnwise_testing import byte_tokenizer as _byte_tokenizer
from turnwise_testing.engines.scripted import RandomPolicy, ScriptedEngine
from turnwise_testing.probes.agent import ProbeParser as _ProbeParser

USED = Path(__file__).with_name("used")


def note(kind):
    USED.mkdir(exist_ok=True)
    (USED / kind).touch()


class Engine(ScriptedEngine):
    def __init__(self, mean_tokens=9):
        policy = RandomPolicy(seed=3, vocab_size=120, end_token_id=258, mean_tokens=mean_tokens)
        super().__init__(policy=policy, record=False)
        note("engines")


class OwnChat(_ChatTemplate):
    def __init__(self, resources):
        assert resources.model.path.name == "model"
        super().__init__(_byte_tokenizer())
        note("chats")


class Agent:
    def __init__(self, resources):
        self.chat = resources.chat

    async def step(self, episode):
        note("agents")
        episode.begin(self.chat.prompt(episode.messages))
        result = await episode.generate()
        episode.messages.append({"role": "assistant", "content": self.chat.text(result.token_ids)})
        return State.TERMINATED


class Parser(_ProbeParser):
    def __init__(self, resources):
        super().__init__(resources.chat)
        note("tool_parsers")


class Reasoning:
    def __init__(self):
        note("reasoning_parsers")

    def split(self, text):
        return "", text


def reward(episode):
    note("rewards")
    return 1.0


def group_reward(episodes):
    note("group_rewards")
    return [1.0] * len(episodes)


class User:
    async def create(self, task):
        return self

    async def respond(self, session, messages):
        return Reply(should_terminate=True)

    async def release(self, session):
        pass

    def __init__(self):
        note("interactions")


def tool(number: int) -> int:
    """Double a number."""
    return 2 * number


class Tool:
    schema = {"type": "function", "function": {"name": "own", "description": "x", "parameters": {"type": "object"}}}

    def __init__(self):
        note("tools")

    async def create(self, task):
        return None

    async def execute(self, session, arguments):
        raise AssertionError

    async def release(self, session):
        return None


def postprocessor(batch):
    note("postprocessors")
    return {}


class Watcher(Observer):
    def on_episode_finished(self, event):
        note("observers")


class Router(_RoundRobin):
    def __init__(self):
        note("routers")
        super().__init__()


class Middle(_Middleware):
    async def before_step(self, episode):
        note("middleware")


class Room:
    def reset(self, task, seed):
        from turnwise_environments.protocol import Observation

        note("environment")
        return Observation(text="Go.")

    def step(self, action):
        from turnwise_environments.protocol import Observation

        return Observation(text="Done.", done=True)

    def close(self):
        pass


async def outside(task, client):
    note("external")
    headers = {"Authorization": f"Bearer {client.api_key}"}
    body = {"model": client.model, "messages": list(task.messages)}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(f"{client.openai_base_url}/chat/completions", json=body) as response,
    ):
        assert response.status == 200
    return 0.5
'''
PARTS = {
    "engines": ["engine={name: './own.py:Engine', mean_tokens: 4}"],
    "agents": ["agent=./own.py:Agent"],
    "chats": ["chat=./own.py:OwnChat"],
    "tool_parsers": ["parser=./own.py:Parser", "tools=[./own.py:tool]"],
    "reasoning_parsers": ["reasoning_parser=./own.py:Reasoning"],
    "rewards": ["reward=./own.py:reward"],
    "group_rewards": ["group_reward=./own.py:group_reward", "runtime.reward_workers=1"],
    "interactions": ["interaction=./own.py:User"],
    "tools": ["tools=[./own.py:Tool]", "parser=hermes"],
    "postprocessors": ["postprocessors=[./own.py:postprocessor]"],
    "observers": ["observers=[./own.py:Watcher]"],
    "routers": ["router=./own.py:Router"],
    "middleware": ["middleware=[./own.py:Middle]"],
    "environment": ["agent={name: environment, environment: './own.py:Room'}"],
    "external": ["agent={name: external, function: './own.py:outside'}"],
}
"""Overrides that take a part of each kind from the file; the last three are
in the section of a plugin and in options of agents."""
IN_REPLICAS = {"weight_transports"}
"""Kinds that a run needs only when its weights change; `test_own_weight_transport` covers them."""
NOT_IN_CONFIGS = {"adapters", "columns", "commands", "diagnostics"}


def local(kind: str) -> list[str]:
    """Return the overrides of a kind for a run in one process."""
    return [each for each in PARTS[kind] if "reward_workers" not in each]


def run_folder(folder: Path) -> Path:
    """Write a run of two tasks and the file `own.py`; return the folder."""
    write_scripted_run(folder, num_tasks=2, modules=["./own.py"], plugins=None)
    (folder / "own.py").write_text(OWN, encoding="utf-8")
    return folder


def check(folder: Path, kind: str) -> None:
    """Check that the part was used, and that all episodes have ended."""
    assert (folder / "used" / kind).exists(), sorted(path.name for path in (folder / "used").glob("*"))
    results = list(read_results(folder / "out/trajectories.parquet"))
    assert {each.status for each in results} <= {Status.COMPLETED, Status.TRUNCATED}, [each.fault for each in results]


def test_every_kind_is_here() -> None:
    """A new kind of part needs a case."""
    assert {*PARTS} - {"environment", "external", "middleware"} == {*KINDS} - IN_REPLICAS - NOT_IN_CONFIGS
    assert {*kinds_of(RunConfig).values()} <= {*PARTS} | IN_REPLICAS


@pytest.mark.many_cases(2)
@pytest.mark.parametrize("kind", PARTS)
def test_a_file_has_the_part(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The part runs, and the plan knows it."""
    folder = run_folder(tmp_path)
    monkeypatch.syspath_prepend(folder / SITE)
    overrides = local(kind)
    if kind != "routers":
        arguments = ["rollout", str(folder / "run.yaml"), *overrides, "--out", str(folder / "out")]
        assert main(arguments) == 0, capsys.readouterr().err
        check(folder, kind)
    assert main(["plan", str(folder / "run.yaml"), *overrides]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("kind", ["engines", "environment"])
def test_a_resumed_run_finds_the_file(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorded config of the run, in another folder, names the same file."""
    folder = run_folder(tmp_path)
    monkeypatch.syspath_prepend(folder / SITE)
    assert main(["rollout", str(folder / "run.yaml"), *PARTS[kind], "--out", str(folder / "out")]) == 0
    for name in ("trajectories.parquet", "metrics.json", f"../used/{kind}"):
        (folder / "out" / name).unlink()
    assert main(["rollout", "--resume", str(folder / "out")]) == 0
    check(folder, kind)


@pytest.mark.many_cases(5)
@pytest.mark.parametrize("kind", PARTS)
def test_a_file_that_is_not_listed_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line names the key, the file and `modules`, and nothing of the file has run."""
    folder = run_folder(tmp_path)
    monkeypatch.syspath_prepend(folder / SITE)
    arguments = ["rollout", str(folder / "run.yaml"), *local(kind), "modules=[]", "--out", str(folder / "out")]
    assert main(arguments) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines
    for line in lines:
        assert "is not allowed; list it in modules, which holds nothing" in line
    assert not (folder / "used").exists()


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize(
    "kinds",
    [
        ("engines", "agents", "rewards", "observers", "routers", "middleware"),
        ("environment", "tools", "postprocessors", "group_rewards"),
        ("external", "tool_parsers", "reasoning_parsers", "interactions"),
    ],
    ids=lambda kinds: "-".join(kinds),
)
def test_a_file_has_the_parts_on_ray(kinds: tuple[str, ...], tmp_path: Path) -> None:
    """Workers and replicas read the file."""
    folder = run_folder(tmp_path)
    overrides = [each for kind in kinds for each in PARTS[kind]]
    process = subprocess.run(
        [
            *(sys.executable, "-m", "turnwise.cli", "rollout", str(folder / "run.yaml"), *overrides),
            *("runtime.name=ray", "runtime.num_workers=1", "rollout.prompt_length=1024", "--out", str(folder / "out")),
        ],
        env=environment_of(folder),
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    for kind in kinds:
        check(folder, kind)


def test_json_schema_knows_places(capsys: pytest.CaptureFixture[str]) -> None:
    """The schema for editors takes a place wherever a config names a part."""
    assert main(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    text = json.dumps(schema["$defs"]["Choice.engines"])
    assert r"[^:]+\\.py" in text
