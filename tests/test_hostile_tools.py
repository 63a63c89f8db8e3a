"""Tools that raise, exit, hang, answer or print too much, or leave children: what a rollout makes of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import psutil
import pytest
import yaml

from turnwise import Status
from turnwise_result_files import read_results
from turnwise_testing.whole_runs.installation import install_plugin

TOOLS = '''
import os
import subprocess
import sys
import time


def raises() -> str:
    """Raise."""
    raise RuntimeError("the disk is full\\nand more")


def exits() -> str:
    """Exit."""
    raise SystemExit(3)


def interrupts() -> str:
    """Raise what Ctrl-C raises."""
    raise KeyboardInterrupt


def recurses() -> str:
    """Never return."""
    def again() -> str:
        return again()

    return again()


def groups() -> str:
    """Raise several."""
    raise ExceptionGroup("both", [ValueError("a"), TypeError("b")])


def hangs() -> str:
    """Hang."""
    time.sleep(10_000)
    return "late"


def answers() -> str:
    """Answer with 100 MB."""
    return "x" * 100_000_000


def prints() -> str:
    """Print 100 MB."""
    for _ in range(100):
        sys.stdout.write("x" * 1_000_000)
    return "printed"


def odd() -> str:
    """Answer with characters that no text has."""
    return "\\x00\\ud800 <|im_end|>"


def leaves() -> str:
    """Leave a child behind that holds the output."""
    return str(subprocess.Popen(["sleep", "10000"]).pid)


def fine() -> str:
    """Work."""
    return "fine"
'''
CALLER = """
import turnwise


class Caller:
    async def step(self, episode):
        episode.begin([3, 4])
        await episode.generate()
        name = episode.task.messages[0]["content"]
        result = await episode.call_tool(turnwise.ToolCall(name=name, arguments={}))
        text = f"{result.error} {len(result.text)} {result.text[:200]}"
        episode.messages.append({"role": "tool", "content": text.encode(errors="replace").decode()})
        return turnwise.State.TERMINATED


@turnwise.hookimpl
def register_agents(registry):
    registry.add("caller", lambda config, resources: Caller())


@turnwise.hookimpl
def register_engines(registry):
    from turnwise_testing.engines.scripted import RandomPolicy, ScriptedEngine

    policy = RandomPolicy(seed=3, vocab_size=80, end_token_id=1, mean_tokens=4)
    registry.add("random", lambda config, resources: ScriptedEngine(policy=policy))
"""
EXPECTED = {
    "raises": "True .*the disk is full",
    "exits": "True .*SystemExit",
    "interrupts": "True .*KeyboardInterrupt",
    "recurses": "True .*(RecursionError|recursion)",
    "groups": "True .*(both|ExceptionGroup)",
    "hangs": "True .*did not answer within 30 seconds",
    "answers": "False 100000000 x",
    "prints": "False 7 printed",
    "odd": "",
    "leaves": r"False \d+ \d+",
    "fine": "False 4 fine",
}


@pytest.fixture(scope="module", params=["thread", "process"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """The place of the tools, and the results of a rollout that calls each of them, by the tool."""
    folder = tmp_path_factory.mktemp("tools")
    install_plugin(folder / "site", "acme_caller", CALLER)
    # In a module that can be imported, as a process needs it.
    place = "" if request.param == "thread" else "(run_in='process')"
    decorated = TOOLS.replace("\ndef ", f"\n@turnwise_plain_functions.tool{place}\ndef ")
    (folder / "site" / "odd_tools.py").write_text("import turnwise_plain_functions\n" + decorated)
    (folder / "rows.jsonl").write_text("".join(f'{{"prompt": "{name}", "uid": "{name}"}}\n' for name in EXPECTED))
    config = {
        "model": {"path": "package:turnwise_calculator_demo"},
        "data": {"path": "rows.jsonl"},
        "engine": "random",
        "agent": "caller",
        "modules": ["odd_tools"],
        "tools": [f"odd_tools:{name}" for name in EXPECTED],
        "rollout": {"response_length": 256, "deadlines": {"tool_call_s": 30.0}},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    paths = [str(folder / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "turnwise.cli", "rollout", str(folder / "run.yaml"), "--out", str(folder / "out")],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            stdout=out,
            stderr=err,
        )
        code = process.wait(timeout=500)
    assert code == 0, (folder / "stderr").read_text(errors="replace")[-2000:]
    results = {each.task.uid: each for each in read_results(folder / "out" / "trajectories.parquet")}
    return request.param, results


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_a_tool_costs_no_episode(run, name: str) -> None:
    """The model reads what went wrong, in a text; the episode goes on, and so does the run."""
    _place, results = run
    result = results[name]
    assert result.status is Status.COMPLETED, result.fault
    assert re.match(EXPECTED[name], result.messages[-1]["content"], re.DOTALL), result.messages[-1]["content"]


@pytest.mark.slow
def test_children_end_with_the_run(run) -> None:
    """A process that a tool has left behind and that the model was told of does not outlive a run in processes."""
    place, results = run
    pid = int(results["leaves"].messages[-1]["content"].split()[-1])
    try:
        deadline = time.monotonic() + 60
        while place == "process" and psutil.pid_exists(pid) and time.monotonic() < deadline:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                break
            time.sleep(0.05)
        alive = psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        assert place == "thread" or not alive
    finally:
        if psutil.pid_exists(pid):
            psutil.Process(pid).kill()
