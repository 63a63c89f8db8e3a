"""Reasoning with programs on real input: the agent of ToRL, the real sandbox, the tiny model and the public command."""

import asyncio
import itertools
import json
from importlib.metadata import entry_points
from pathlib import Path

import numpy as np
import pytest
import torch

from turnwise import Resources, Status
from turnwise.cli import main
from turnwise.record.invariants import check_trajectory
from turnwise_result_files import read_results
from turnwise_testing.engines.scripted import ScriptedEngine
from turnwise_testing.probes.agent import AgentProbe, make_task, probe_chat
from turnwise_torl_python import make_torl_math, make_torl_python
from turnwise_torl_python.config import TorlMathConfig, TorlPythonConfig

pytestmark = pytest.mark.usefixtures("starts_a_process")

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "examples" / "torl.yaml"
PROBLEMS = ROOT / "examples" / "torl_problems.jsonl"
STOP = "```output"
BAD_PROGRAMS = (
    "while True: pass",
    "import os; os.abort()",
    "x = bytearray(8 << 30)",
    "print('x' * (64 << 20))",
    "import sys; sys.exit(3)",
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
)


@pytest.fixture(scope="module")
def python_tool():
    """The real sandbox as a tool, or a skip that says why this machine has none."""
    if not entry_points(group="turnwise", name="python_sandbox"):
        pytest.skip("turnwise-python-sandbox is not installed")
    import turnwise_python_sandbox as sandbox

    tool = sandbox.PythonTool(sandbox.PythonToolConfig(sandbox=sandbox.SandboxConfig(timeout_s=3)), Resources())
    try:
        tool.sandbox.start()
    except sandbox.SandboxUnavailableError as error:
        pytest.skip(f"no sandbox isolates on this machine: {error}")
    return tool


class Script:
    """A model that writes given turns, and continues a turn in which the engine stopped it."""

    def __init__(self, texts):
        encode, end = probe_chat().tokenizer.encode, probe_chat().stop_token_ids[0]
        self._turns = [[*encode(text), end] for text in texts]
        self._current, self._start = [], 0

    def __call__(self, request):
        """Return the rest of a turn whose first part was appended to the last context, or the next turn."""
        context = request.token_ids.tolist()
        new = context[self._start :] if self._start else []
        stopped = 0 < len(new) < len(self._current) and new == self._current[: len(new)]
        self._current = self._current[len(new) :] if stopped else self._turns.pop(0)
        self._start = len(context)
        return self._current


def play(python_tool, tasks_and_turns, **options):
    """Run all episodes of a scripted model at once, and return them in order."""
    resources = Resources(chat=probe_chat(), tools={"python": python_tool})
    agent = make_torl_python(TorlPythonConfig(**options), resources)
    reward = make_torl_math(TorlMathConfig(error_penalty=-0.5), resources)
    probe = AgentProbe(make_agent=lambda: agent, resources=resources, turns=("",), timeout_s=240)
    scripts = {task.uid: Script(turns) for task, turns in tasks_and_turns}

    async def run():
        engine = ScriptedEngine(lambda request: scripts[request.group_id](request))
        await engine.start()
        limits = probe.limits(response_length=4096, reward_s=240)
        async with asyncio.TaskGroup() as group:
            running = [
                group.create_task(probe.run(task, agent=agent, engine=engine, reward=reward, limits=limits))
                for task, _ in tasks_and_turns
            ]
        return [each.result() for each in running]

    return asyncio.run(run())


@pytest.mark.slow
def test_problems_of_torls_kind(python_tool):
    """Solutions of one to three turns, with failing, silent and hanging programs, get the expected scores."""
    rows = [json.loads(line) for line in PROBLEMS.read_text(encoding="utf-8").splitlines()]
    plan = []
    for row in rows:
        info, truth = row["extra_info"], row["reward_model"]["ground_truth"]
        plan.append((make_task(info["index"], messages=tuple(row["prompt"]), ground_truth=truth), info["turns"]))
    runs = play(python_tool, plan)

    for row, run in zip(rows, runs, strict=True):
        turns, info = row["extra_info"]["turns"], row["extra_info"]
        assert run.result.status is Status.COMPLETED
        written = [message["content"] for message in run.result.messages if message["role"] == "assistant"]
        assert written == turns
        assert run.episode.memory["calls"] == len(turns) - 1
        expected = (1.0 if info["right"] else -1.0) - 0.5 * (len(turns) > 1 and not run.episode.memory["successes"])
        assert run.result.reward == expected
    outputs = [message["content"] for run in runs for message in run.result.messages if message["role"] == "tool"]
    assert "ModuleNotFoundError: No module named 'maths'" in outputs
    assert "(no output)" in outputs
    assert "``` 50" in outputs
    assert any("took longer than 3 seconds" in output for output in outputs)


@pytest.mark.slow
def test_misbehaving_programs_cost_their_own_episodes_only(python_tool):
    """Of 256 concurrent episodes one in ten hangs, crashes or exceeds a limit; all return, and the others are right."""
    plan = []
    for number in range(256):
        code = BAD_PROGRAMS[number // 10 % len(BAD_PROGRAMS)] if number % 10 == 0 else f"print({number} * 7 + 1)"
        call = f"Run {number}.\n```python\n{code}\n```\n{STOP}"
        plan.append((make_task(number, ground_truth=str(number * 7 + 1)), [call, f"\\boxed{{{number * 7 + 1}}}"]))
    runs = play(python_tool, plan)

    assert {run.result.status for run in runs} == {Status.COMPLETED}
    for number, run in enumerate(runs):
        output = run.result.messages[2]["content"]
        if number % 10:
            assert (output, run.result.reward) == (str(number * 7 + 1), 1.0)
        else:
            assert run.result.reward == 0.5
            assert run.episode.memory["successes"] == 0


@pytest.fixture(scope="module")
def run_dir(python_tool, tmp_path_factory):
    """The results of the example, with four episodes for each of 12 tasks."""
    out = tmp_path_factory.mktemp("torl") / "out"
    assert main(["rollout", str(CONFIG), "data.limit=12", "--out", str(out)]) == 0
    return read_results(out / "trajectories.parquet")


@pytest.mark.slow
def test_programs_in_workspaces(run_dir, tmp_path):
    """Their outputs are those of the sandbox, but for suggestions of the interpreter, and so are the episodes."""
    if not entry_points(group="turnwise", name="workspaces"):
        pytest.skip("turnwise-workspaces is not installed")
    tools = "tools=[{name: workspace, tools: [python]}]"
    assert main(["rollout", str(CONFIG), "data.limit=12", tools, "--out", str(tmp_path / "out")]) == 0

    both = [{each.uid: each for each in results} for results in (run_dir, read_results(tmp_path / "out"))]
    assert both[0].keys() == both[1].keys()
    same = 0
    for uid, one in both[0].items():
        other = both[1][uid]
        first, found = (next((m["content"] for m in each.messages if m["role"] == "tool"), "") for each in (one, other))
        assert first == found.partition(". Did you mean")[0]
        if found == first:
            same += 1
            assert one.messages == other.messages
            assert (one.status, one.reward) == (other.status, other.reward)
            np.testing.assert_array_equal(one.trajectories[0].input_ids, other.trajectories[0].input_ids)
    assert same >= 24
    assert sum(result.metrics.extra.get("tool/workspace_programs", 0.0) for result in both[1].values()) >= 36


@pytest.mark.slow
def test_the_tiny_model_writes_programs(run_dir):
    """Nearly every episode runs code, some run it twice or more, and about half of them are right."""
    assert len(run_dir) == 48
    assert {result.status for result in run_dir} <= {Status.COMPLETED, Status.TRUNCATED}
    assert sum(result.metrics.num_tool_calls > 0 for result in run_dir) >= 36
    assert max(result.metrics.num_tool_calls for result in run_dir) >= 2
    assert 0.25 < np.mean([result.reward > 0 for result in run_dir]) < 0.85


def check_masks(result, tokenizer):
    """Check that exactly the outputs of a response are masked, each behind a block that the model opened."""
    (record,) = result.trajectories
    check_trajectory(record)
    pairs = zip(record.response_mask.tolist(), record.response_ids.tolist(), strict=True)
    runs = [
        (mask, [token_id for _, token_id in run]) for mask, run in itertools.groupby(pairs, key=lambda pair: pair[0])
    ]
    outputs = [message["content"] for message in result.messages if message["role"] == "tool"]
    assert [tokenizer.decode(ids) for mask, ids in runs if mask == 0] == [f"\n{output}\n```\n" for output in outputs]
    # Runs of a response alternate, and the first one is the model's.
    assert [mask for mask, _ in runs] == [1 - number % 2 for number in range(len(runs))]
    for _, ids in runs[0 : 2 * len(outputs) : 2]:
        assert STOP in tokenizer.decode(ids)
        assert STOP not in tokenizer.decode(ids[:-1])


def test_the_masks_of_the_tiny_model(run_dir):
    """Exactly the outputs between fences are masked."""
    from transformers import AutoTokenizer

    from turnwise_torl_python import model_dir

    tokenizer = AutoTokenizer.from_pretrained(model_dir())
    for result in run_dir:
        check_masks(result, tokenizer)


def test_the_masks_of_unusual_outputs(python_tool):
    """Outputs with several lines, other alphabets or fences are masked; so is the answer to an incomplete block."""
    turns = [
        f"```python\nprint('a\\nb')\n```\n{STOP}",
        f"```python\nprint('é漢 ```')\n```\n{STOP}",
        f"```python\nprint(1)\n{STOP}",
        f"{STOP}",
        f"\\boxed{{1}} {STOP}\n2\n```\n",
    ]
    (run,) = play(python_tool, [(make_task(0, ground_truth="1"), turns)], max_tool_calls=4)

    assert run.result.status is Status.COMPLETED
    assert sum(message["role"] == "tool" for message in run.result.messages) == 4
    assert run.episode.memory["calls"] == 2
    check_masks(run.result, probe_chat().tokenizer)


def test_logprobs_equal_a_forward_pass_on_the_record(run_dir):
    """A forward pass gives every log-probability to 1e-4, also in turns that took several requests."""
    from transformers import AutoModelForCausalLM

    from turnwise_torl_python import model_dir

    model = AutoModelForCausalLM.from_pretrained(model_dir(), dtype=torch.float32).eval()
    for result in run_dir:
        (record,) = result.trajectories
        ids = torch.tensor(record.input_ids[None].astype(np.int64))
        with torch.no_grad():
            logits = model(input_ids=ids).logits
        logprobs = torch.log_softmax(logits[0, :-1].float(), -1).gather(1, ids[0, 1:, None])[:, 0].numpy()
        response = logprobs[record.num_prompt_tokens - 1 :]
        sampled = record.response_mask == 1
        assert np.abs(response - record.logprobs)[sampled].max() < 1e-4
