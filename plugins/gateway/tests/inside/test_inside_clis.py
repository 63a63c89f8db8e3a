"""Unmodified coding agents inside workspaces: each repairs the repository of `examples/coding_cli`, ten at once."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml
from inside_runs import container_options, list_marked, why_no_boxes

from turnwise_result_files import read_results
from turnwise_testing.inputs.tokenizers import byte_tokenizer
from turnwise_testing.probes.agent import probe_chat
from turnwise_testing.whole_runs.installation import install_plugin

ROOT = Path(__file__).parents[4]
TESTS = Path(__file__).parents[1]
MINI = (
    '#!/bin/sh\nPYTHONPATH=/opt/cli/lib/python3.11/site-packages exec /usr/bin/python3 -m minisweagent.run.mini "$@"\n'
)
"""mini-SWE-agent with the Python that a box has, since a virtual environment is a link to the one that made it."""
CLIENTS = {"mini": "mini_swe_agent", "claude": "claude_code", "qwen": "qwen_code"}
"""Names of the clients of programs with other names."""
OWN_FOLDERS = {
    "opencode": "node_modules/opencode-linux-x64/bin",
    "claude": "node_modules/@anthropic-ai/claude-code-linux-x64",
}
"""Folders of programs whose packages need an installation script to make the usual one."""

pytestmark = [pytest.mark.usefixtures("starts_a_process"), pytest.mark.slow]


@pytest.fixture
def shown():
    """A folder that other users may enter, with the example and a program of mini-SWE-agent."""
    folder = Path(tempfile.mkdtemp(prefix="turnwise-shown-"))
    folder.chmod(0o755)
    (folder / "bin").mkdir()
    (folder / "bin/mini").write_text(MINI)
    (folder / "bin/mini").chmod(0o755)
    shutil.copytree(ROOT / "examples/coding_cli", folder / "example")
    yield folder
    shutil.rmtree(folder)


def write_run(folder, cli, client, shown, workspace):
    """Write a run with ten episodes of an agent of the example."""
    byte_tokenizer().save_pretrained(folder / "model")
    install_plugin(folder / "plugins", "coding_plugin", "from coding_model import register_engines\n")
    config = yaml.safe_load((ROOT / "examples/coding_cli/rollout.yaml").read_text())
    mounts = {"/opt/cli": str(client), "/opt/example": str(shown / "example"), "/opt/bin": str(shown / "bin")}
    path = f"/opt/bin:/opt/cli/{client_folder(cli)}:/usr/local/bin:/usr/bin:/bin"
    config["model"]["path"] = str(folder / "model")
    config["data"]["path"] = str(ROOT / "examples/coding_cli/tasks.jsonl")
    config["engine"] = {"name": "coding_model", "cli": cli}
    config["agent"] |= {
        "command": ["python3", "/opt/example/agent.py", cli],
        "environment": {"CODING_CONTEXT": "500000", "PATH": path},
        "workspace": {
            **workspace,
            "mounts": {**mounts, **workspace.get("mounts", {})},
            "limits": {"memory_mb": 16384, "processes": 1024, "disk_mb": 1024},
            "boot_s": 60.0,
            "state": str(folder / "state"),
        },
    }
    config["rollout"] |= {"n": 10, "prompt_length": 200000, "response_length": 20000, "max_in_flight": 10}
    (folder / "run.yaml").write_text(yaml.safe_dump(config))


def client_folder(cli):
    """Return the folder of a program in the folder of its client."""
    return OWN_FOLDERS.get(cli, "node_modules/.bin")


def roll_out(folder):
    """Run the config; return the process."""
    paths = [str(folder / "plugins"), str(TESTS), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-m", "turnwise.cli", "rollout", str(folder / "run.yaml"), "--out", str(folder / "out")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )


def check_episodes(folder, done):
    """Each episode has repaired the repository, in one main record with exactly the sampled tokens of its turns."""
    assert done.returncode == 0, done.stderr[-5000:]
    episodes = list(read_results(folder / "out"))
    assert len(episodes) == 10
    chat = probe_chat()
    for episode in episodes:
        assert str(episode.status) == "completed", episode.fault
        kinds = [each.kind for each in episode.lineage]
        assert kinds.count("main") == 1
        place = kinds.index("main")
        main = episode.trajectories[place]
        assert episode.scores[place].value == 1.0
        turns = main.turns()
        assert int(main.response_mask.sum()) == sum(stop - start for start, stop in turns)
        assert [int(main.input_ids[stop - 1]) for _, stop in turns] == [chat.stop_token_ids[0]] * 3
        texts = [chat.text(main.input_ids[start:stop]) for start, stop in turns]
        assert ["Step 0." in texts[0], "Step 1." in texts[1]] == [True, True]


@pytest.mark.skipif(bool(why_no_boxes()), reason=why_no_boxes())
@pytest.mark.parametrize("cli", ["mini", "codex", "opencode", "pi", "claude", "qwen"])
def test_ten_agents_work_in_boxes(tmp_path, installed, shown, cli):
    """Nothing of them is left after the run."""
    write_run(tmp_path, cli, installed(CLIENTS.get(cli, cli)), shown, {})

    done = roll_out(tmp_path)

    check_episodes(tmp_path, done)
    assert list_marked("/opt/example/agent.py") == []


@pytest.mark.parametrize("cli", ["mini", "codex", "opencode", "claude", "qwen"])
def test_ten_agents_work_in_containers(tmp_path, installed, shown, cli):
    """The image has busybox, and this machine's programs are shown in it."""
    client = installed(CLIENTS.get(cli, cli))
    write_run(tmp_path, cli, client, shown, container_options())

    done = roll_out(tmp_path)

    check_episodes(tmp_path, done)
    assert list_marked("/opt/example/agent.py") == []
