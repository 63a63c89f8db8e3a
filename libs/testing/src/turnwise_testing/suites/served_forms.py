"""Tests of an engine with grammars through `turnwise rollout`: a client of OpenAI asks for forms of its replies."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import yaml

from turnwise.record.columns import Origin
from turnwise_result_files import read_results
from turnwise_testing.inputs.tiny_chat import make_tiny_model

CLIENT = """
import json, os, re, sys
import jsonschema
from openai import OpenAI
from turnwise_testing.inputs.schemas import random_schema

client, messages, ended = OpenAI(max_retries=0), json.loads(os.environ["TURNWISE_TASK"])["messages"], 0
create, model = client.chat.completions.create, os.environ["TURNWISE_MODEL"]
for seed in range(int(sys.argv[1])):
    schema = random_schema(seed)
    asked = [*messages, {"role": "user", "content": f"Number {seed}."}]
    if seed % 2:
        form = {"type": "json_schema", "json_schema": {"name": "reply", "schema": schema}}
        (choice,) = create(model=model, messages=asked, response_format=form, max_tokens=500).choices
        text = choice.message.content
    else:
        tool = {"type": "function", "function": {"name": "save", "parameters": schema}}
        named = {"type": "function", "function": {"name": "save"}}
        (choice,) = create(model=model, messages=asked, tools=[tool], tool_choice=named, max_tokens=500).choices
        text = None
        if choice.finish_reason != "length":
            (call,) = choice.message.tool_calls
            assert call.function.name == "save", call
            text = call.function.arguments
            # JSON has no largest number; one beyond any float is no call to the parser.
            text = None if re.search(r"[eE][+]?[0-9]{3}", text) else text
    if choice.finish_reason != "length":
        ended += 1
        if text is not None:
            jsonschema.validate(json.loads(text), schema)
create(model=model, messages=messages, max_tokens=5)
print(f"TURNWISE_SCORE={ended}")
"""


class ServedFormsSuite:
    """
    Tests by the command line, in the environment of the engine. A subclass overrides `engine`, the section of a config.

    Attributes:
        plugin: name of the engine's plugin.
        num_schemas: random schemas; every other belongs to a tool.
    """

    plugin: ClassVar[str]
    num_schemas: ClassVar[int] = 110

    @classmethod
    def engine(cls) -> Mapping[str, Any]:
        """Return the section `engine` of a config, whose context is at least 4,096 tokens."""
        raise NotImplementedError("override engine")

    def write_run(self, folder: Path, **engine: object) -> None:
        """Write a run whose agent is the client."""
        make_tiny_model(folder / "model", head_dim=64, max_context=4096)
        (folder / "client.py").write_text(CLIENT, encoding="utf-8")
        (folder / "tasks.jsonl").write_text(
            json.dumps({"messages": [{"role": "user", "content": "Hi"}]}) + "\n", "utf-8"
        )
        agent = {
            "name": "external",
            "structured_output": "constrain",
            "command": [sys.executable, "client.py", str(self.num_schemas)],
            "idle_s": 600,
        }
        config = {
            "model": {"path": "model"},
            "data": {"path": "tasks.jsonl"},
            "engine": {**self.engine(), **engine},
            "plugins": ["chat_templates", "gateway", "hermes_parser", "reported_reward", "routers", self.plugin],
            "parser": "hermes",
            "chat": {"name": "jinja", "tools": "system_prompt"},
            "reward": "reported",
            "agent": agent,
            "rollout": {"prompt_length": 3400, "response_length": 600, "max_in_flight": 1, "max_records": 256},
            "telemetry": {"log_level": "warning"},
        }
        (folder / "run.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")

    def run(self, folder: Path) -> subprocess.CompletedProcess[str]:
        """Run `turnwise rollout`."""
        command = [sys.executable, "-m", "turnwise", "rollout", "run.yaml", "--out", "out"]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)

    def test_replies_have_the_form_that_a_client_asks_for(self, tmp_path: Path) -> None:
        """Texts and calls of a named tool fit their random schemas; their tokens are recorded, and not trained."""
        self.write_run(tmp_path)

        done = self.run(tmp_path)

        assert done.returncode == 0, done.stdout + done.stderr
        (episode,) = read_results(tmp_path / "out")
        assert episode.fault is None
        assert episode.reward is not None, episode.status
        assert episode.reward >= self.num_schemas / 3
        *constrained, free = episode.trajectories
        assert len(constrained) == self.num_schemas
        assert set(free.origins.tolist()) == {Origin.ACTION}
        for record in constrained:
            assert set(record.origins.tolist()) == {Origin.CONSTRAINED}
            assert not record.response_mask.any()
            assert (record.logprobs < 0).any()

    def test_an_engine_whose_grammars_are_off_is_refused(self, tmp_path: Path) -> None:
        """In one line that names the option, before the engine starts."""
        self.write_run(tmp_path, grammars=False)

        done = self.run(tmp_path)

        assert done.returncode != 0
        (line,) = [each for each in (done.stdout + done.stderr).splitlines() if "structured_output" in each]
        assert "constrain needs an engine with grammars" in line
        assert "engine.grammars: true" in line

    def test_grammars_need_a_tokenizer(self, tmp_path: Path) -> None:
        """A model folder without one is refused at the start."""
        self.write_run(tmp_path)
        (tmp_path / "model/tokenizer.json").unlink()

        done = self.run(tmp_path)

        assert done.returncode != 0
        assert "tokenizer" in done.stderr + done.stdout
