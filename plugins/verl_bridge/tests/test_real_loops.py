"""Agent loops of users of verl run as they are by `turnwise rollout`; without verl these tests are skipped."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("verl", reason="verl is not installed here: see plugins/verl_bridge/README.md")
pytest.importorskip("turnwise_commands", reason="the command line is not installed here")

from turnwise.cli import main
from turnwise_result_files import read_results
from turnwise_testing.whole_runs.scripted_run import PLUGIN, SITE, environment_of, write_scripted_run

pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("ignore")]

LOOPS = Path(__file__).with_name("verl_loops.py")
ROW = {
    "data_source": "gsm8k",
    "prompt": [{"role": "user", "content": "What is 6 * 7?"}],
    "reward_model": {"style": "rule", "ground_truth": "42"},
    "extra_info": {"split": "train", "index": 0},
}
YAML = """
- name: other_agent
  _target_: verl_loops.OldLoop
- name: echo_agent
  _target_: verl_loops.EchoLoop
  turns: 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a run over two rows of verl, and the user's file of loops."""
    write_scripted_run(
        tmp_path,
        plugins=[PLUGIN, "verl_bridge", "reported_reward"],
        reward="reported",
        rollout={"n": 2, "prompt_length": 128, "response_length": 128},
    )
    (tmp_path / "data.jsonl").write_text((json.dumps(ROW) + "\n") * 2, encoding="utf-8")
    (tmp_path / "loops.yaml").write_text(YAML, encoding="utf-8")
    shutil.copy(LOOPS, tmp_path / "my_loops.py")
    monkeypatch.syspath_prepend(tmp_path / SITE)
    monkeypatch.setenv("PYTHONPATH", f"{environment_of(tmp_path)['PYTHONPATH']}:{LOOPS.parent}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rollout(agent, *changes):
    """Run the command; return its exit status."""
    return main(["rollout", "run.yaml", f"agent={agent}", *changes, "--out", "out"])


AGENTS = {
    "0.7": "{name: verl, file: my_loops.py, loop: EchoLoop}",
    "options": "{name: verl, file: my_loops.py, loop: EchoLoop, options: {turns: 3}}",
    "0.5": "{name: verl, file: my_loops.py, loop: OldLoop}",
    "0.9": "{name: verl, file: my_loops.py, loop: TokenLoop}",
    "module": "{name: verl, loop: verl_loops.EchoLoop, modules: [verl_loops]}",
    "yaml": "{name: verl, file: loops.yaml, loop: echo_agent, modules: [verl_loops]}",
    "own": "{name: verl, loop: verl.experimental.agent_loop.single_turn_agent_loop.SingleTurnAgentLoop}",
}


@pytest.mark.parametrize(
    ("agent", "turns", "reward"),
    [
        ("0.7", 2, 2.0),
        ("options", 3, 2.0),
        ("0.5", 1, None),
        ("0.9", 1, None),
        ("module", 2, 2.0),
        ("yaml", 3, 2.0),
        ("own", 1, None),
    ],
)
def test_a_loop_of_verl_runs_as_it_is(folder, agent, turns, reward):
    """The records have the sampled tokens of every turn, and the loop's score is the reward."""
    assert rollout(AGENTS[agent]) == 0

    check_results(folder, turns, reward)


@pytest.mark.slow
@pytest.mark.ray
def test_a_loop_of_verl_runs_on_ray(folder):
    """Workers import verl and the user's file."""
    assert rollout(AGENTS["0.7"], "runtime=ray") == 0

    check_results(folder, 2, 2.0)


def check_results(folder, turns, reward):
    """Check turns, masks, messages and rewards of four episodes."""
    results = list(read_results(folder / "out"))
    assert len(results) == 4
    assert {result.reward for result in results} == {reward}
    for result in results:
        (record,) = result.trajectories
        assert len(record.turns()) == turns
        assert result.metrics.num_tokens["action"] == int(record.response_mask.sum()) > 0
        assert bool((record.logprobs[record.response_mask == 1] < 0).all())
        assert [each["role"] for each in result.messages] == ["user", *["assistant", "user"] * (turns - 1), "assistant"]
    assert len({tuple(result.trajectories[0].response_ids.tolist()) for result in results}) > 1


def test_a_loop_samples_the_same_tokens_again(folder):
    """The seeds of a loop's turns depend on the task alone."""
    agent = AGENTS["0.7"]
    assert rollout(agent) == 0
    first = [result.trajectories[0].input_ids.tolist() for result in read_results(folder / "out")]
    assert main(["rollout", "run.yaml", f"agent={agent}", "--out", "again"]) == 0
    again = [result.trajectories[0].input_ids.tolist() for result in read_results(folder / "again")]

    assert sorted(first) == sorted(again)


def test_an_observation_with_mask_1_fails_the_episode_with_its_place(folder):
    """The text names the place in the loop's own list."""
    assert rollout("{name: verl, file: my_loops.py, loop: WrongLoop}") != 0

    for result in read_results(folder / "out"):
        (record,) = result.trajectories
        place = int(np.flatnonzero(record.response_mask == 0)[0])
        assert f"response_mask[{place}] is 1, but the engine did not sample" in result.fault.message
        assert result.fault.owner == "agent"


def test_a_failing_loop_keeps_its_turns(folder):
    """The exception is the episode's fault, and the sampled turn stays in the record."""
    assert rollout("{name: verl, file: my_loops.py, loop: RaisingLoop}") != 0

    for result in read_results(folder / "out"):
        assert result.fault.message == "the tool is broken"
        assert result.trajectories[0].response_mask.sum() > 0


def test_the_config_of_verl_has_the_run_s_values_and_the_user_s(folder):
    """`self.config` is verl's default config with the values of the options."""
    agent = (
        "{name: verl, file: my_loops.py, loop: EchoLoop,"
        " config: {actor_rollout_ref.rollout.multi_turn.max_tool_response_length: 1}}"
    )
    assert rollout(agent) == 0

    for result in read_results(folder / "out"):
        assert len(result.messages[-2]["content"].split("<tool_response>")[1].split("</tool_response>")[0].strip()) <= 1


@pytest.mark.parametrize(
    ("agent", "problem"),
    [
        ("{name: verl}", "expected 'package.module.Name', or a Python file in 'file', got ''"),
        ("{name: verl, loop: os.system}", "module 'os' is not allowed; list it in 'modules', which has verl"),
        ("{name: verl, file: my_loops.py, loop: Echo}", "there is no 'Echo'"),
        ("{name: verl, file: my_loops.py, loop: NoLoop}", "it is no AgentLoopBase: expected a class with"),
        ("{name: verl, file: none.py, loop: EchoLoop}", "No such file"),
        ("{name: verl, file: loops.yaml}", "there is no loop ''; it has other_agent, echo_agent"),
        ("{name: verl, file: loops.yaml, loop: echo_agent}", "module 'verl_loops' is not allowed"),
        (
            "{name: verl, file: my_loops.py, loop: EchoLoop, config: {actor_rollout_ref.rollout.prompt_length: 5}}",
            "actor_rollout_ref.rollout.prompt_length is 5, but rollout.prompt_length is 128",
        ),
        ("{name: verl, file: my_loops.py, loop: EchoLoop, kwargs: {}}", "agent.kwargs: unknown"),
    ],
)
def test_a_wrong_choice_is_one_line(folder, capsys, agent, problem):
    """The error names the key or the file, and the hint."""
    assert rollout(agent) != 0

    error = capsys.readouterr().err
    assert problem in error
    assert len([line for line in error.splitlines() if line.startswith("turnwise: error")]) == 1
