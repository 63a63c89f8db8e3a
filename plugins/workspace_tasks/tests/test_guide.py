"""The config of the guide runs, with a model that solves one of its tasks, on both runtimes."""

from __future__ import annotations

import re
import shutil

import pytest
import yaml
from agent_runs import call, roll_out, write_run
from boxes import why_no_boxes
from task_folders import EXAMPLES

from turnwise_result_files import read_results

GUIDE = EXAMPLES.parents[1] / "docs/how-to/train-a-coding-agent.md"
SOLVE = "f=$(grep -rl '^reason:' logs); (echo \"$f\"; sed -n 's/^reason: //p' \"$f\") > answer.txt"
TURNS = (call("shell", command="ls"), call("shell", command=SOLVE), "Done.")


@pytest.mark.slow
@pytest.mark.skipif(bool(why_no_boxes()), reason=why_no_boxes())
@pytest.mark.parametrize("runtime", ["local", pytest.param("ray", marks=pytest.mark.ray)])
def test_the_guide_runs(runtime, tmp_path):
    """The model solves `find-a-file` in each episode of it, and no other task."""
    config = yaml.safe_load(re.search(r"```yaml\n(model:.*?)```", GUIDE.read_text(), re.DOTALL)[1])
    (tool,) = config.pop("tools")
    rollout = {**config.pop("rollout"), "n": 2}
    shutil.copytree(EXAMPLES, tmp_path / "examples/shell_tasks")
    for name in ("model", "engine"):  # the ones of the scripted model
        del config[name]
    write_run(tmp_path, TURNS, tool, **config, rollout=rollout, runtime=runtime)

    done = roll_out(tmp_path)

    assert done.returncode == 0, done.stderr
    episodes = list(read_results(tmp_path / "out"))
    assert len(episodes) == 24
    assert [str(each.fault) for each in episodes if each.fault] == []
    assert {each.task.uid: each.reward for each in episodes} == {
        each.name: float(each.name == "find-a-file") for each in EXAMPLES.iterdir()
    }
