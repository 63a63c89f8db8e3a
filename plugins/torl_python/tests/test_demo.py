"""Tests of the tiny model: its problems, its solver, its training and its folder."""

import json
import random
from itertools import islice

import pytest

from turnwise_torl_python import model_dir
from turnwise_torl_python.answers import extract_last_boxed
from turnwise_torl_python.blocks import extract_last_python_block
from turnwise_torl_python.config import TORL_PROMPT
from turnwise_torl_python.demo.problems import generate_problems, generate_rows
from turnwise_torl_python.demo.problems import main as problems_main
from turnwise_torl_python.demo.solver import CLEAN, SHIPPED_SLIPS, NoisySolver

FILES = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


def test_the_folder_is_complete_and_small():
    """It has six files, none of them a pickle, and at most 3 MB."""
    assert {path.name for path in model_dir().iterdir()} == FILES
    assert sum(path.stat().st_size for path in model_dir().iterdir()) <= 3_000_000


def test_problems_repeat_and_splits_are_disjoint():
    """A seed determines the problems, steps chain, and no expression is in both splits."""
    train, test = (list(islice(generate_problems(split, 0), 300)) for split in ("train", "test"))
    assert train == list(islice(generate_problems("train", 0), 300))
    assert not {problem.expression for problem in train} & {problem.expression for problem in test}
    for problem in train:
        first, *more = problem.steps
        assert [step.left for step in more] == [first.result][: len(more)]
        assert 0 < problem.answer <= 9999
    assert {len(problem.steps) for problem in train} == {1, 2}


def test_the_solver_without_slips_is_right():
    """It runs one program per step and boxes the answer."""
    solver = NoisySolver(CLEAN, random.Random(0))
    for problem in islice(generate_problems("train", 1), 100):
        *calls, answer = solver.solve(problem)
        assert [int(turn.output) for turn in calls] == [step.result for step in problem.steps]
        assert [extract_last_python_block(turn.text) for turn in calls] == [
            f"print({step.text})\n" for step in problem.steps
        ]
        assert extract_last_boxed(answer.text) == str(problem.answer)


def test_the_solver_with_slips_is_right_about_half_of_the_time():
    """Its programs fail, are skipped or are wrong at the configured rates."""
    solver = NoisySolver(SHIPPED_SLIPS, random.Random(0))
    problems = list(islice(generate_problems("train", 1), 1000))
    turns = [solver.solve(problem) for problem in problems]
    right = sum(extract_last_boxed(t[-1].text) == str(p.answer) for t, p in zip(turns, problems, strict=True))
    assert 400 < right < 700
    assert any("NameError" in (turn.output or "") for solution in turns for turn in solution)


def test_problems_are_written_as_rows(tmp_path, capsys):
    """The command writes the rows that the example reads."""
    problems_main(["--split", "test", "--num", "5", "--out", str(tmp_path / "rows.jsonl")])
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert rows == generate_rows("test", 5, 0)
    assert "wrote 5 test problems" in capsys.readouterr().out


def test_a_demonstration_is_encoded_piece_by_piece():
    """The solver's text is learned, the prompt and outputs are not, and the text follows the agent's protocol."""
    from transformers import AutoTokenizer

    from turnwise_torl_python.demo.encoding import encode

    tokenizer = AutoTokenizer.from_pretrained(model_dir())
    problem = next(generate_problems("test", 0))
    turns = NoisySolver(CLEAN, random.Random(0)).solve(problem)
    ids, mask = encode(tokenizer, problem, turns)
    learned = tokenizer.decode([token_id for token_id, is_action in zip(ids, mask, strict=True) if is_action])
    assert learned == "".join(turn.text for turn in turns) + "<|im_end|>"
    assert tokenizer.decode(ids).startswith(TORL_PROMPT.replace("[PROMPT]", problem.question) + "```python\n")


@pytest.mark.slow
def test_training_writes_a_folder(tmp_path, capsys):
    """Two steps of training write a folder with the same files as the shipped one."""
    from turnwise_torl_python.demo.train import main as train_main

    train_main(["--out", str(tmp_path / "model"), "--steps", "2"])
    assert {path.name for path in (tmp_path / "model").iterdir()} == FILES
    assert "step     2/2" in capsys.readouterr().out


def test_training_makes_the_shipped_tokenizer():
    """Training learns the vocabulary and merges of the shipped tokenizer."""
    from transformers import AutoTokenizer

    from turnwise_torl_python.demo.train import TrainConfig, build_training

    shipped = AutoTokenizer.from_pretrained(model_dir())
    made = build_training(TrainConfig()).tokenizer
    assert made.backend_tokenizer.to_str() == shipped.backend_tokenizer.to_str()
    assert made.chat_template == shipped.chat_template
