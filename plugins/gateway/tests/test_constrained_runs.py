"""Constrained runs from the command line: a tiny model with random weights, and unmodified clients."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from even_model import save_even_model
from gateway_rollouts import ENGINE

from turnwise import Status
from turnwise.record.columns import Origin
from turnwise_result_files import read_results
from turnwise_testing.whole_runs.installation import install_plugin
from turnwise_tiny_models.tokenizer import CHATML

PLUGINS = ["acme_one_reply", "chat_templates", "gateway", "hermes_parser", "reported_reward"]
PROGRAMS = Path(__file__).parent / "programs"
RUN = {
    "model": {"path": "model"},
    "data": {"path": "tasks.jsonl"},
    "engine": {"name": "transformers", "max_context": 4096, "device": "cpu", "seed": 1},
    "parser": "hermes",
    "chat": {"name": "jinja", "tools": "system_prompt"},
    "reward": "reported",
    "rollout": {"prompt_length": 1024, "response_length": 3000, "max_in_flight": 2, "max_records": 256},
    "telemetry": {"log_level": "warning"},
}


@pytest.fixture
def write_run(tmp_path):
    """A function that writes a run with a random model, and returns its folder."""

    def write(template=CHATML, program=(str(PROGRAMS / "call_constrained.py"),), **changes):
        save_even_model(tmp_path / "model", template)
        task = {"uid": "t1", "messages": [{"role": "user", "content": "Which item is it?"}]}
        (tmp_path / "tasks.jsonl").write_text(json.dumps(task) + "\n")
        agent = {"name": "external", "structured_output": "constrain", "keep_requests": "requests"}
        agent["command"] = ["python", *program]
        (tmp_path / "run.yaml").write_text(yaml.safe_dump({**RUN, "agent": agent, **changes}))
        return tmp_path

    return write


def rollout(folder):
    """Run `turnwise rollout` and return its process."""
    return turnwise(folder, "rollout", "run.yaml", "--out", "out")


def turnwise(folder, *arguments):
    """Run a command and return its process."""
    command = [sys.executable, "-m", "turnwise.cli", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=600)


@pytest.mark.slow
@pytest.mark.parametrize("thinks", [False, True])
def test_clients_get_the_form_that_they_ask_for(write_run, thinks):
    """
    Each reply of a random model parses, in all dialects; its tokens are sampled and not trained.

    Also with a template that starts each turn in a think block, which is free and ends before the form.
    """
    template = CHATML.replace("assistant\\n'", "assistant\\n<think>'") if thinks else CHATML
    reasoning = {"reasoning_parser": "think_tags"} if thinks else {}
    folder = write_run(template, **reasoning)

    done = rollout(folder)

    assert done.returncode == 0, done.stdout + done.stderr
    (episode,) = read_results(folder / "out")
    assert episode.status is Status.COMPLETED, episode.fault
    assert episode.reward == 7
    sampled = [record for record in episode.trajectories if len(record.turns())]
    free = [record for record in sampled if record.response_mask.any()]
    assert (len(sampled), len(free)) == (8, 1)
    for record in sampled:
        origin = Origin.ACTION if record is free[0] else Origin.CONSTRAINED
        assert set(record.origins.tolist()) == {origin}
        assert (record.weight_versions >= 0).all()
        assert (record.logprobs < 0).any()
    counts = episode.metrics.extra
    assert counts["gateway/constrained_response_format"] == 1
    assert counts["gateway/constrained_tool_choice_named"] == 2
    assert not [name for name in counts if "wished" in name]
    replayed = turnwise(folder, "gateway", "replay", "requests", "--config", "run.yaml", "--json")
    assert [None] == [each["difference"] for each in json.loads(replayed.stdout)["sessions"]], replayed.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [4, 200])
def test_replies_to_random_schemas_fit_them(write_run, number):
    """Over HTTP: each reply that no limit has cut is valid."""
    folder = write_run(program=(str(PROGRAMS / "call_schemas.py"), str(number)))

    done = rollout(folder)

    assert done.returncode == 0, done.stdout + done.stderr
    (episode,) = read_results(folder / "out")
    assert episode.fault is None
    assert episode.reward >= number / 2
    assert len(episode.trajectories) == number
    assert not any(record.response_mask.any() for record in episode.trajectories)


@pytest.mark.slow
def test_schemas_whose_grammars_fail_are_refused(write_run):
    """A loop of references, and one that grows too large while a turn is sampled; the session and its replay go on."""
    folder = write_run(program=(str(PROGRAMS / "call_failing_schemas.py"),))

    done = rollout(folder)

    assert done.returncode == 0, done.stdout + done.stderr
    (episode,) = read_results(folder / "out")
    assert episode.fault is None
    assert episode.reward == episode.metrics.extra["gateway/refused_grammar"] >= 2
    assert episode.metrics.extra["gateway/refused_unsupported"] == 1
    replayed = turnwise(folder, "gateway", "replay", "requests", "--config", "run.yaml", "--json")
    assert [None] == [each["difference"] for each in json.loads(replayed.stdout)["sessions"]], replayed.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [("plan", "run.yaml"), ("rollout", "run.yaml", "--out", "out"), ("gateway", "serve", "run.yaml", "--out", "out")],
)
def test_an_engine_without_grammars_is_refused_at_the_start(write_run, monkeypatch, command):
    """In one line, before an engine starts or a client calls; the option is named."""
    folder = write_run(engine="one_reply", plugins=PLUGINS)
    install_plugin(folder / "site", "acme_one_reply", ENGINE)
    monkeypatch.setenv("PYTHONPATH", str(folder / "site"))

    done = turnwise(folder, *command)

    assert done.returncode not in (0, None)
    (line,) = [each for each in (done.stdout + done.stderr).splitlines() if "structured_output" in each]
    assert "agent.structured_output: constrain needs an engine with grammars" in line
    assert "Traceback" not in done.stderr
    assert not (folder / "out" / "trajectories.parquet").exists()


@pytest.mark.ray
@pytest.mark.slow
def test_grammars_reach_an_engine_in_another_process(write_run):
    """With Ray, the request's grammar travels to the replica, and the origins travel back."""
    program = (str(PROGRAMS / "call_schemas.py"), "6")
    folder = write_run(program=program, runtime={"name": "ray", "num_workers": 1, "num_replicas": 1})

    done = rollout(folder)

    assert done.returncode == 0, done.stdout + done.stderr
    (episode,) = read_results(folder / "out")
    assert episode.reward >= 3
    for record in episode.trajectories:
        assert set(record.origins.tolist()) == {Origin.CONSTRAINED}
