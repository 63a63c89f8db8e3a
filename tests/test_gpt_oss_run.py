"""A run of gpt-oss through the command line: the chat `harmony`, the tool agent and the parser of the format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from turnwise.cli import main
from turnwise_result_files import read_results
from turnwise_testing.inputs.tokenizers import byte_tokenizer
from turnwise_testing.whole_runs.installation import install_plugin

TOKENS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
CALL = (
    "<|channel|>analysis<|message|>I add first.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
    '<|constrain|>json<|message|>{"a": 1, "b": 2}<|call|>'
)
NEXT_CALL = '<|channel|>commentary to=functions.multiply <|constrain|>json<|message|>{"a": 3, "b": 4}<|call|>'
ANSWER = "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>It is 12.<|return|>"
PARTS = """
from attrs import frozen

from turnwise import hookimpl
from turnwise_testing.engines.scripted import ScriptedEngine


@frozen
class Options:
    \"\"\"Options: the turns, in order.\"\"\"

    turns: tuple[str, ...]


class Engine(ScriptedEngine):
    def __init__(self, options, resources):
        super().__init__(self.write, record=False)
        self.options, self.path = options, resources.model.path

    async def start(self):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.path)
        self.turns = [tokenizer.encode(turn, add_special_tokens=False) for turn in self.options.turns]
        self.result = tokenizer.encode(" to=assistant", add_special_tokens=False)
        await super().start()

    def write(self, request):
        ids = request.token_ids.tolist()
        size = len(self.result)
        return self.turns[sum(ids[at : at + size] == self.result for at in range(len(ids)))]


@hookimpl
def register_engines(registry):
    registry.add("gpt_oss_turns", Engine, config=Options)
"""
TOOLS = '''
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b
'''
SYSTEM = """\
<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.
Knowledge cutoff: 2024-06
Current date: 2026-05-31

Reasoning: low

# Valid channels: analysis, commentary, final. Channel must be included for every message.
Calls to these tools must go to the commentary channel: 'functions'.<|end|>"""
DEVELOPER = """\
<|start|>developer<|message|># Instructions

Be brief.

# Tools

## functions

namespace functions {

// Add two numbers.
type add = (_: {
a: number,
b: number,
}) => any;

// Multiply two numbers.
type multiply = (_: {
a: number,
b: number,
}) => any;

} // namespace functions<|end|>"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model without a chat template, a task, two tools and a scripted engine."""
    install_plugin(tmp_path / "site", "gpt_oss_turns", PARTS)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.chdir(tmp_path)
    byte_tokenizer(None, TOKENS, eos_token="<|return|>").save_pretrained(tmp_path / "model")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "(1 + 2) * 4?"}]
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"messages": messages, "ground_truth": "12"}), encoding="utf-8")
    (tmp_path / "own.py").write_text(TOOLS, encoding="utf-8")
    config: dict[str, Any] = {
        "model": {"path": "model"},
        "chat": {"name": "harmony", "reasoning_effort": "low", "date": "2026-05-31"},
        "data": {"path": "tasks.jsonl"},
        "engine": {"name": "gpt_oss_turns", "turns": [CALL, NEXT_CALL, ANSWER]},
        "agent": "tool_agent",
        "parser": "gpt_oss",
        "modules": ["./own.py"],
        "tools": ["./own.py:add", "./own.py:multiply"],
        "rollout": {"n": 1, "prompt_length": 1024, "response_length": 2048},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return tmp_path


def test_a_run_of_gpt_oss(folder: Path) -> None:
    """The record is the prompt of the format, the sampled turns as they were, and the results of the tools."""
    assert main(["rollout", "run.yaml", "--out", "out"]) == 0

    (result,) = read_results(folder / "out/trajectories.parquet")
    (trajectory,) = result.trajectories
    tokenizer = byte_tokenizer(None, TOKENS, eos_token="<|return|>")
    start = "<|start|>assistant"
    assert tokenizer.decode(trajectory.input_ids).split(start, 1) == [
        f"{SYSTEM}{DEVELOPER}<|start|>user<|message|>(1 + 2) * 4?<|end|>",
        f'{CALL}<|start|>functions.add to=assistant<|channel|>commentary<|message|>"3"<|end|>{start}'
        f'{NEXT_CALL}<|start|>functions.multiply to=assistant<|channel|>commentary<|message|>"12"<|end|>{start}'
        f"{ANSWER}",
    ]
    assert result.messages[-1]["content"] == "It is 12."
    assert [each["role"] for each in result.messages] == [
        *("system", "user", "assistant", "tool", "assistant", "tool", "assistant")
    ]


@pytest.mark.parametrize("given", ["2026-05-31", "null"])
def test_the_resolved_config_holds_the_date(folder: Path, given: str) -> None:
    """A resumed run shows the date that the run has begun with."""
    assert main(["rollout", "run.yaml", f"chat.date={given}", "--out", "out"]) == 0

    resolved = yaml.safe_load((folder / "out/config.resolved.yaml").read_text(encoding="utf-8"))
    shown = str(resolved["chat"]["date"])
    (result,) = read_results(folder / "out/trajectories.parquet")
    assert f"Current date: {shown}\n" in byte_tokenizer(None, TOKENS).decode(result.trajectories[0].input_ids)
    assert given in ("null", shown)
    assert main(["rollout", "--resume", "out"]) == 0
