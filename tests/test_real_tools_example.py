"""
The commands of docs/how-to/train-a-real-model.md, in order, on a tiny model whose template shows no tools.

The page has the figures of the real model, whose weights no test downloads.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import turnwise_calculator_demo
from turnwise.cli import main

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/how-to/train-a-real-model.md"
GGUF = "~/.cache/turnwise/SmolLM2-135M-Instruct.Q4_1.gguf"
NO_TOOLS = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
REAL = ("train_real.yaml", "real_tools.yaml", "real_tool_sums.yaml")
SMALL = {
    "rollout": ["data.limit=8"],
    "train": ["train.num_steps=1", "rollout.n=2", "train.algorithm.ppo_mini_batch_size=4"],
}
"""Overrides of each command; the text of the real tools has four times the tokens of the tiny vocabulary."""
LONG = ["rollout.prompt_length=1024", "engine.num_threads=1"]


def page_commands() -> list[list[str]]:
    """Return the commands of turnwise in the page, whose lines may end with a backslash."""
    text = PAGE.read_text(encoding="utf-8").replace("\\\n", " ")
    return [shlex.split(line)[1:] for line in re.findall(r"^    (turnwise .*)$", text, re.MULTILINE)]


def test_the_page_names_each_stage() -> None:
    """Demonstrations, fine-tuning, reinforcement learning and export, with an evaluation after each training."""
    first, *names = [command[0] for command in page_commands()]
    assert first == "train"
    demonstrations = ["rollout", "convert", "convert", "sft"]
    assert names == ["eval", *demonstrations, "eval", "train", "eval", *demonstrations, "train", "export", "rollout"]


@pytest.mark.slow
def test_the_commands_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each ends without an error, and the last model is one of transformers with the template of the first."""
    model = tmp_path / "model"
    shutil.copytree(Path(str(turnwise_calculator_demo.__file__)).parent / "model", model)
    (model / "chat_template.jinja").write_text(NO_TOOLS, encoding="utf-8")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    for name in REAL:
        config = tmp_path / "examples" / name
        config.write_text(config.read_text(encoding="utf-8").replace(GGUF, str(model)), encoding="utf-8")
    held_out = tmp_path / "examples/heldout_calculator.jsonl"
    held_out.write_text("".join(held_out.read_text(encoding="utf-8").splitlines(keepends=True)[:4]), encoding="utf-8")
    monkeypatch.chdir(tmp_path)

    for name, *arguments in page_commands():
        words = [str(model) if word == GGUF else word.replace("$PWD", str(tmp_path)) for word in arguments]
        is_real = any(word.endswith((*REAL, "external_openai/rollout.yaml")) for word in words)
        more = [*SMALL.get(name, []), *(LONG if is_real and name != "convert" else [])]
        # The last two words are the option of the output; an override behind another one wins.
        assert main([name, *words[:-2], *more, *words[-2:]]) == 0, (name, words)

    rows = pq.read_table(tmp_path / "runs/sft.parquet").to_pylist()
    assert all(any(row["loss_mask"]) for row in rows)
    steps = [json.loads(line) for line in (tmp_path / "runs/train/metrics.jsonl").read_text().splitlines()]
    assert any("reward/mean" in step for step in steps)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path / "models/calculator"))
    assert tokenizer.chat_template == NO_TOOLS
    AutoModelForCausalLM.from_pretrained(str(tmp_path / "models/calculator"))
