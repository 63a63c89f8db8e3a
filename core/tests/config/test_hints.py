"""Unknown keys: the error names the key that the user may have meant, in whichever section it is."""

from __future__ import annotations

import json

import pytest

from turnwise.cli import main
from turnwise.config.file import load_config, structure_config
from turnwise.config.hints import _places_below
from turnwise.config.run import RunConfig
from turnwise.errors import ConfigError

CASES = {
    "rollout.temperature=0.5": "rollout.temperature: unknown key; did you mean 'rollout.sampling.temperature'?",
    "rollout.num_workers=2": "rollout.num_workers: unknown key; a key of verl; use runtime.num_workers",
    "rollout.max_tokens=20": "rollout.max_tokens: unknown key; did you mean 'rollout.sampling.max_tokens'?",
    "rollout.temprature=1": "rollout.temprature: unknown key; did you mean 'rollout.sampling.temperature'?",
    "rollout.promt_length=1": "rollout.promt_length: unknown key; did you mean 'prompt_length'?",
    "modle.path=x": "modle: unknown key; did you mean 'model'?",
    "response_length=5": "response_length: unknown key; did you mean 'rollout.response_length'?",
    "rollout.sampling.n=5": "rollout.sampling.n: unknown key; did you mean 'rollout.n'?",
    "model.trust_remote=1": "model.trust_remote: unknown key; did you mean 'trust_remote_code'?",
    "engine={name:transformers,device:cuda}": (
        "engine.name: missing; the section has only name:transformers, device:cuda; write a space behind each colon"
    ),
    "rollout={n:8}": "rollout.n:8: unknown key; write a space behind each colon",
}


BASE = {"data": {"path": "data.jsonl"}, "agent": "single_turn", "engine": "transformers"}


@pytest.mark.parametrize("override", CASES)
def test_hints(override, tmp_path):
    """One line has the whole key."""
    config = tmp_path / "run.yaml"
    config.write_text(json.dumps(BASE), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(config, [override])
    assert CASES[override] in str(caught.value)


def test_the_command_line_shows_the_hint(tmp_path, capsys):
    """The error of a command has the line."""
    config = tmp_path / "run.yaml"
    config.write_text(json.dumps(BASE), encoding="utf-8")
    assert main(["config", "show", str(config), "rollout.num_workers=2", "engine.temperature=1"]) == 2
    shown = capsys.readouterr().err
    assert CASES["rollout.num_workers=2"] in shown
    assert "engine.temperature: unknown key; a key of TRL; use rollout.sampling.temperature" in shown


@pytest.mark.parametrize("place", [place for place in _places_below(RunConfig, "") if "." in place])
def test_every_key_is_found_from_another_section(place):
    """A key of the schema that is written in a section which has no such key leads to a key of this name."""
    name, places = place.rpartition(".")[2], _places_below(RunConfig, "")
    section = next(each for each in ("telemetry", "memory", "weights") if f"{each}.{name}" not in places)
    with pytest.raises(ConfigError) as caught:
        structure_config({**BASE, section: {name: 1}}, None)
    line = next(line for line in str(caught.value).splitlines() if f"{section}.{name}: unknown key" in line)
    found = line.partition("did you mean '")[2].rstrip("'?")
    assert found.rpartition(".")[2] == name
    assert found in places
