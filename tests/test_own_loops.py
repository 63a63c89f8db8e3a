"""An agent of several turns that is one function of a file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from turnwise import EpisodeResult, Resources, RolloutManager, Status, load_config
from turnwise.cli import main
from turnwise.record.columns import Origin
from turnwise.record.invariants import check_trajectory
from turnwise_plain_functions.adapter import FunctionAdapter
from turnwise_result_files import read_results
from turnwise_task_files import load_tasks
from turnwise_testing.whole_runs.scripted_run import PLUGIN, SITE, environment_of, write_scripted_run

OWN = '''
async def my_loop(episode, resources, num_turns=3):
    """Ask the model again after each answer."""
    chat = resources.chat
    episode.begin(chat.prompt(episode.messages))
    for number in range(num_turns):
        turn = await episode.generate(max_tokens=4)
        episode.messages.append({"role": "assistant", "content": chat.text(turn.token_ids)})
        if number + 1 < num_turns:
            message = {"role": "user", "content": "Sure?"}
            episode.observe(chat.delta([message], turn.token_ids[-1], with_tools=False))
            episode.messages.append(message)
'''
OPTIONS = ["modules=[./own.py]", "agent={name: './own.py:my_loop', num_turns: 3}"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run and the file `own.py`."""
    write_scripted_run(tmp_path, num_tasks=2, plugins=[PLUGIN, "plain_functions"])
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path / SITE)
    return tmp_path


def records_of(results: list[EpisodeResult]) -> dict[tuple[str, int], list[int]]:
    """Return the tokens of each episode, all of which have three turns."""
    for each in results:
        check_trajectory(each.trajectories[0])
        assert each.status in {Status.COMPLETED, Status.TRUNCATED}, each.fault  # a last turn of four tokens is cut
        assert ["user", "assistant"] * 3 == [message["role"] for message in each.messages]
    return {(each.task.uid, each.rollout_n): each.trajectories[0].input_ids.tolist() for each in results}


@pytest.mark.slow
def test_a_function_has_several_turns(folder: Path) -> None:
    """The command line runs it, its questions are no tokens of the model, and the options are its arguments."""
    assert 0 == main(["rollout", str(folder / "run.yaml"), *OPTIONS, "--out", str(folder / "out")])
    results = read_results(folder / "out")

    assert 4 == len(records_of(results))
    origins = [int(each) for each in results[0].trajectories[0].origins]
    assert {int(Origin.ACTION), int(Origin.OBSERVATION)} <= set(origins)
    assert 3 == results[0].metrics.num_turns


@pytest.mark.ray
@pytest.mark.slow
def test_it_runs_on_ray(folder: Path) -> None:
    """The records of workers are those of one process."""
    found = {}
    for runtime in ("local", "ray"):
        command = [sys.executable, "-m", "turnwise", "rollout", "run.yaml", *OPTIONS, f"runtime={runtime}"]
        done = subprocess.run(
            [*command, "--out", runtime],
            cwd=folder,
            env=environment_of(folder),
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        assert 0 == done.returncode, done.stderr
        found[runtime] = records_of(read_results(folder / runtime))
    assert found["local"] == found["ray"]


@pytest.mark.parametrize("options", [{}, {"num_turns": 1}])
@pytest.mark.parametrize("resumable", [True, False])
def test_a_function_says_whether_it_can_be_repeated(options: dict[str, int], resumable: bool) -> None:
    """An attribute `resumable` of the function is that of the agent, also with options."""

    async def my_loop(episode: object, num_turns: int = 3) -> None: ...

    if not resumable:
        my_loop.resumable = False  # type: ignore[attr-defined]  # as a user writes it
    agent = FunctionAdapter(Resources()).adapt("agents", my_loop, options)

    assert resumable == agent.resumable  # type: ignore[union-attr]


def test_an_interrupted_function_is_repeated_with_its_turns(folder: Path) -> None:
    """The tokens that were sampled before the interrupt stay, and the episodes have all of their turns."""
    write_scripted_run(folder, num_tasks=5, plugins=[PLUGIN, "plain_functions"])
    opened = folder / "opened"
    config = load_config(folder / "run.yaml", [*OPTIONS, f"engine={{name: scripted, hold: {opened}}}"])
    with RolloutManager.from_config(config) as manager:
        first = records_of(manager.rollout(load_tasks(config), min_fraction=0.6))
        sampled = {each.uid: each.turns[0].result.token_ids.tolist() for each in manager.unfinished}
        opened.touch()
        rest = manager.rollout([], resume=True)

    assert all(sampled.values())
    assert 6 == len(first)
    assert 4 == len(records_of(rest))
    for each in rest:
        record = each.trajectories[0]
        kept = sampled[each.uid]
        assert record.input_ids[record.num_prompt_tokens :][: len(kept)].tolist() == kept
