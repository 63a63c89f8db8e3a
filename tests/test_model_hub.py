"""Models by their id on the hub, from the command line, with a hub on loopback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hub_runs import DUPLICATES, NAME, environment, snapshot, turnwise, write_run

from turnwise_result_files import read_results
from turnwise_testing.inputs.model_hub import ModelHub
from turnwise_testing.inputs.tiny_chat import make_tiny_model

SMALL = ["chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
CASES = """
import contextlib, io, json, os, sys
from turnwise.cli import main

answers = {}
for name, (arguments, variables) in json.load(sys.stdin).items():
    os.environ.update({"HF_TOKEN": "", **variables})
    lines = io.StringIO()
    with contextlib.redirect_stderr(lines), contextlib.redirect_stdout(lines):
        try:
            code = main(arguments)
        except SystemExit as error:
            code = error.code
    answers[name] = [code, lines.getvalue()]
print(json.dumps(answers))
"""
"""Runs commands in one process, because a process takes seconds to import a tokenizer."""


def run_cases(folder: Path, hub: ModelHub, cases: dict[str, tuple[list[str], dict[str, str]]], **variables: str):
    """Return the exit code and the lines of each case."""
    done = subprocess.run(
        [sys.executable, "-c", CASES],
        input=json.dumps(cases),
        cwd=folder,
        env=environment(folder, hub, **variables),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def rollout(*overrides: str, out: str = "out", **variables: str) -> tuple[list[str], dict[str, str]]:
    return ["rollout", "run.yaml", *overrides, "--out", out], variables


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a tiny model."""
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    return {each.name: each.read_bytes() for each in folder.iterdir()}


@pytest.fixture
def hub():
    """A hub without models."""
    with ModelHub() as running:
        yield running


REFUSALS = {
    "typo": (
        rollout("model.path=./typo"),
        "model.path: there is no directory '{folder}/typo', and './typo' is no id of a model on the hub",
    ),
    "too many parts": (rollout("model.path=a/b/c"), "model.path: there is no directory '{folder}/a/b/c', and 'a/b/c'"),
    "no such model": (
        rollout("model.path=acme/none"),
        "model.path: there is no directory '{folder}/acme/none', and {url} shows no model 'acme/none': check the",
    ),
    "no such revision": (rollout("model.revision=v9"), "model.revision: acme/tiny-chat has no revision 'v9'; {url}"),
    "private": (rollout("model.path=acme/private"), "{url} shows no model 'acme/private': check the spelling, or set"),
    "private to others": (
        rollout("model.path=acme/private", HF_TOKEN="hf_other"),
        "{url} shows no model 'acme/private': check the spelling, or set",
    ),
    "gated": (
        rollout("model.path=acme/gated"),
        "model.path: acme/gated is gated, and this machine may not read it: accept its conditions at {url}/acme/gated",
    ),
    "gated for others": (rollout("model.path=acme/gated", HF_TOKEN="hf_other"), "model.path: acme/gated is gated"),
    "a file": (rollout("model.path=data.jsonl"), "model.path: '{folder}/data.jsonl' is a file; expected a folder"),
    "no weights": (
        rollout("model.path=acme/quantized", "engine=transformers"),
        "acme/quantized has no weights that can be loaded: neither safetensors nor pytorch_model.bin; download its"
        " tiny.Q4_0.gguf and name that file instead",
    ),
    "too large": (rollout("model.path=acme/huge"), "model.path: acme/huge needs 1e+06 TB, and {folder}/cache/hub has"),
    "the judge's": (
        rollout("judge.engine=scripted", "judge.model.path=acme/none"),
        "judge.model.path: there is no directory '{folder}/acme/none', and {url} shows no model 'acme/none'",
    ),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, tiny: dict[str, bytes]):
    """The folder, the hub's address and the answers to all cases of `REFUSALS`, and to two that may read the model."""
    folder = write_run(tmp_path_factory.mktemp("refusals"), plugins=["scripted_kit", "transformers_engine"])
    with ModelHub() as hub:
        hub.push(NAME, tiny)
        hub.push("acme/private", tiny, readers=("hf_mine",))
        hub.push("acme/gated", tiny, readers=("hf_mine",))
        hub.models["acme/gated"].gated = True
        hub.push("acme/quantized", {name: tiny[name] for name in SMALL} | DUPLICATES | {"pytorch_model.bin2": b""})
        del next(iter(hub.models["acme/quantized"].commits.values()))["pytorch_model.bin"]
        del next(iter(hub.models["acme/quantized"].commits.values()))["model.fp16.safetensors"]
        hub.push("acme/huge", {**tiny, "huge.json": b"{}"})
        hub.sizes["huge.json"] = 10**18
        allowed = {
            f"{kind} with a token": rollout(f"model.path=acme/{kind}", out=f"out-{kind}", HF_TOKEN="hf_mine")
            for kind in ("private", "gated")
        }
        cases = {name: case for name, (case, _text) in REFUSALS.items()} | allowed
        yield folder, hub.url, run_cases(folder, hub, cases)


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSALS)
def test_a_model_that_cannot_be_had_is_one_line(answers, name):
    """One line names the key and the hint, and the exit code is 2."""
    folder, url, found = answers
    code, lines = found[name]
    errors = [line for line in lines.splitlines() if line and not line.startswith("turnwise: downloading")]
    assert code == 2
    assert len(errors) == 1, lines
    assert errors[0].startswith("turnwise: error: ")
    assert REFUSALS[name][1].format(folder=folder, url=url) in errors[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["private", "gated"])
def test_a_token_opens_a_model(answers, kind):
    """`HF_TOKEN` is sent with each request."""
    folder, _url, found = answers
    assert found[f"{kind} with a token"][0] == 0, found
    assert len(read_results(folder / f"out-{kind}")) == 4


@pytest.mark.slow
def test_an_engine_without_weights_downloads_none(tmp_path, tiny, hub):
    """A scripted engine needs the tokenizer alone. The config keeps id and commit; later commands ask for nothing."""
    commit = hub.push(NAME, tiny | DUPLICATES, "main", "v1")
    folder = write_run(tmp_path)
    first = turnwise(folder, hub, "rollout", "run.yaml", "model.revision=v1", "--out", "out")
    assert first.returncode == 0, first.stderr
    assert sorted(each.name for each in snapshot(folder, commit).iterdir()) == SMALL
    model = yaml.safe_load((folder / "out" / "config.resolved.yaml").read_text())["model"]
    assert (model["path"], model["revision"], model["commit"]) == (NAME, "v1", commit)

    hub.requests.clear()
    hub.push(NAME, {"config.json": b"{}"}, "main", "v1")
    again = {
        "show": (["show", "out", "0"], {}),
        "resume": (["rollout", "--resume", "out"], {}),
        "resume with the config": (["rollout", "run.yaml", "model.revision=v1", "--resume", "out"], {}),
        "another revision": (["rollout", "run.yaml", "--resume", "out"], {}),
    }
    found = run_cases(folder, hub, again)
    assert [code for code, _ in found.values()] == [0, 0, 0, 2], found
    assert "'revision: v1' there, 'revision: null' given" in found["another revision"][1]
    assert hub.requests == []
    hub.stop()
    gone = run_cases(folder, hub, {"offline": (["rollout", "run.yaml", "--out", "o2"], {})}, HF_HUB_OFFLINE="1")
    assert gone["offline"][0] == 2, gone  # the cache knows the commit of v1, and not that of main
    assert "HF_HUB_OFFLINE is set" in gone["offline"][1] or "lacks" in gone["offline"][1]


@pytest.mark.slow
def test_a_folder_of_the_same_spelling_comes_first(tmp_path, tiny, hub):
    """A local folder is the model, and the hub is not asked."""
    folder = write_run(tmp_path)
    local = folder / NAME
    local.mkdir(parents=True)
    for name in SMALL:
        (local / name).write_bytes(tiny[name])
    assert turnwise(folder, hub, "rollout", "run.yaml", "--out", "out").returncode == 0
    assert hub.requests == []


@pytest.mark.slow
def test_plan_and_doctor_say_where_the_model_is(tmp_path, tiny, hub):
    """Both know the cache and ask nobody."""
    hub.push(NAME, tiny)
    folder = write_run(tmp_path)
    looks = {
        "plan": (["plan", "run.yaml", "--json", "--placement-only"], {}),
        "doctor": (["doctor", "machine", "--config", "run.yaml", "--json"], {}),
    }
    before = run_cases(folder, hub, looks)
    assert hub.requests == []
    assert f"{NAME} at main, which the run downloads to {folder}/cache/hub" in before["plan"][1]
    assert "which the run downloads to" in before["doctor"][1]
    assert run_cases(folder, hub, {"run": rollout()})["run"][0] == 0
    hub.requests.clear()
    after = run_cases(folder, hub, looks)
    assert f"{NAME} at main, in the cache {folder}/cache/hub" in after["plan"][1]
    assert hub.requests == []


@pytest.mark.slow
def test_a_download_that_breaks_off_is_continued(tmp_path, tiny, hub):
    """The hub dies in the middle of the weights; the run says so in one line, and the next takes what is missing."""
    weights = tiny["model.safetensors"]
    hub.push(NAME, tiny)
    hub.cut_after, hub.on_cut = len(weights) // 2, hub.stop
    folder = write_run(tmp_path, real=True)
    command = ("rollout", "run.yaml", "--out", "out")
    broken = turnwise(folder, hub, *command)
    assert broken.returncode == 2
    (error,) = [line for line in broken.stderr.splitlines() if line.startswith("turnwise: error")]
    assert f"the download of {NAME} from {hub.url} broke off" in error
    assert "the same command continues it" in error

    hub.cut_after = None
    hub.start()
    hub.requests.clear()
    whole = turnwise(folder, hub, *command)
    assert whole.returncode == 0, whole.stderr
    assert len([line for line in whole.stderr.splitlines() if "downloading the model" in line]) == 1
    assert not {*hub.downloads()} & {*SMALL}
    assert len(read_results(folder / "out")) == 4
