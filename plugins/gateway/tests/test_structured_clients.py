"""Libraries for structured output against `turnwise gateway serve`: they check the reply and ask again themselves."""

import json
import subprocess
from pathlib import Path

import pytest
from even_model import save_even_model
from gateway_processes import serve
from tokenizers import Tokenizer

import turnwise_calculator_demo
from turnwise.record.columns import Origin
from turnwise_result_files import read_results
from turnwise_testing.whole_runs.installation import install_plugin

CLIENTS = Path(__file__).parent / "clients"
MODEL = Path(turnwise_calculator_demo.__file__).parent / "model"
PARTS = """
import json
import os

import turnwise


def make(_config, resources):
    from tokenizers import Tokenizer

    from turnwise_testing.engines.scripted import ScriptedEngine

    encode = Tokenizer.from_file(str(resources.model.path / "tokenizer.json")).encode
    turns = iter(json.loads(os.environ["TURNS"]))

    def sample(request):
        return [*encode(next(turns), add_special_tokens=False).ids, request.sampling.stop_token_ids[0]]

    return ScriptedEngine(sample)


@turnwise.hookimpl
def register_engines(registry):
    registry.add("listed_turns", make)
"""
CONFIG = """
model: {path: "package:turnwise_calculator_demo"}
data: {path: tasks.jsonl}
engine: listed_turns
parser: hermes
agent: {name: external, command: [python, unused.py]}
rollout: {prompt_length: 16384, response_length: 16384, max_in_flight: 2}
telemetry: {log_level: warning}
"""
REAL = """
model: {path: model}
chat: {name: jinja, tools: system_prompt}
data: {path: tasks.jsonl}
engine: {name: transformers, device: cpu, max_context: 8192, seed: 0}
parser: hermes
agent: {name: external, command: [python, unused.py]}
rollout: {prompt_length: 4096, response_length: 4096, max_in_flight: 2}
telemetry: {log_level: warning}
"""
ANN = {"name": "Ann", "age": 42}
BAD, GOOD = {"name": "Ann", "age": "unknown"}, ANN


def as_call(arguments, name="Person"):
    """A turn that calls a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def as_chat(arguments):
    """A turn in the form that DSPy's default prompt asks for."""
    fields = "".join(f"[[ ## {name} ## ]]\n{value}\n\n" for name, value in arguments.items())
    return f"{fields}[[ ## completed ## ]]"


JSON = [json.dumps(BAD), json.dumps(GOOD)]
# A client, its mode, the turns, the turns of each record, and the metrics that count its wishes.
RUNS = {
    "instructor-TOOLS": ([as_call(BAD), as_call(GOOD)], [2], {"wished_tool_choice_named": 2}),
    "instructor-JSON": (JSON, [2], {"wished_response_format": 2}),
    "instructor-JSON_SCHEMA": (JSON, [2], {"wished_response_format": 2}),
    "dspy-ChatAdapter": (["I do not know.", json.dumps(GOOD)], [1, 1], {"wished_response_format": 1}),
    "dspy-JSONAdapter": ([json.dumps(GOOD)], [1], {"wished_response_format": 1}),
    "agno-": ([json.dumps(GOOD)], [1], {"wished_response_format": 1}),
    "strands-": ([as_call(BAD), as_call(GOOD)], [2], {}),
}

pytestmark = pytest.mark.slow


@pytest.fixture
def run(installed, tmp_path, monkeypatch):
    """Runs a client against a gateway whose model has some turns; returns its output and the episode."""

    def start(case, turns, option, config=CONFIG):
        name, _, mode = case.partition("-")
        program = [str(installed(name) / "bin/python"), str(CLIENTS / f"{name}_client.py")]
        install_plugin(tmp_path / "plugins", "turnwise_listed_parts", PARTS)
        task = {"uid": "t1", "messages": [{"role": "user", "content": "Who is it?"}]}
        (tmp_path / "tasks.jsonl").write_text(json.dumps(task) + "\n")
        (tmp_path / "run.yaml").write_text(config)
        monkeypatch.setenv("TURNS", json.dumps(turns))
        out = tmp_path / "out"
        options = (f"agent.structured_output={option}", "--out", out)
        with serve(tmp_path, tmp_path / "run.yaml", *options) as served:
            session = served.open()
            done = subprocess.run(
                [*program, session["openai_base_url"], session["api_key"], mode],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=300,
                check=True,
            )
            served.control("DELETE", f"/sessions/{session['id']}")
            code, _output, errors = served.stop()
        assert 0 == code, errors
        return json.loads(done.stdout.splitlines()[-1]), list(read_results(out))

    return start


@pytest.mark.parametrize("case", RUNS)
def test_a_client_checks_the_reply_and_asks_again(run, case):
    """With `wish`, a client gets what the model says; its retry after an invalid reply is in the record, exactly."""
    turns, records, wishes = RUNS[case]

    output, (episode,) = run(case, turns, "wish")

    assert ANN == output
    assert records == [len(record.turns()) for record in episode.trajectories]
    encode = Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode
    sampled = [record.input_ids[start:end] for record in episode.trajectories for start, end in record.turns()]
    assert [encode(turn, add_special_tokens=False).ids for turn in turns] == [ids[:-1].tolist() for ids in sampled]
    counted = {name.removeprefix("gateway/"): value for name, value in episode.metrics.extra.items()}
    assert wishes == {name: value for name, value in counted.items() if name in wishes}
    assert sum(records) == counted["calls"]
    assert 0 == counted.get("forks_foreign_turn", 0)


@pytest.mark.parametrize("case", [name for name, (_, _, wishes) in RUNS.items() if wishes])
def test_a_refused_client_is_told_the_option(run, case):
    """With `refuse`, the error of the client names the option."""
    turns, _, _ = RUNS[case]

    output, _ = run(case, turns, "refuse")

    assert "structured_output: wish" in output["error"]


CONSTRAINED = {
    "instructor-TOOLS": "tool_choice_named",
    "instructor-JSON_SCHEMA": "response_format",
    "dspy-JSONAdapter": "response_format",
}
"""Modes that send the schema: a random model would write any object in the mode JSON of instructor."""


@pytest.mark.parametrize("case", CONSTRAINED)
def test_a_constrained_client_gets_its_form_at_once(run, case, tmp_path):
    """With `constrain`, the reply of a random model fits, without a second request; its tokens are not trained."""
    save_even_model(tmp_path / "model")

    output, (episode,) = run(case, [], "constrain", REAL)

    assert [str, int] == [type(output[name]) for name in ("name", "age")]
    assert 1 == episode.metrics.extra["gateway/calls"]
    assert 1 == episode.metrics.extra[f"gateway/constrained_{CONSTRAINED[case]}"]
    (record,) = episode.trajectories
    assert {Origin.CONSTRAINED} == set(record.origins.tolist())
