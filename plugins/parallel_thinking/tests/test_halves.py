"""Tests of the training example's tasks, demonstrations and start model."""

import json
import random
import re
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from turnwise_parallel_thinking.config import Tags
from turnwise_parallel_thinking.demo.halves import HalvedSum, generate_problems, main, write_demonstration
from turnwise_parallel_thinking.demo.train_halves import TrainConfig, build_training
from turnwise_parallel_thinking.demo.train_halves import main as train_main
from turnwise_parallel_thinking.tagged_text import parse_tagged_text

EXAMPLES = Path(__file__).parents[3] / "examples"
MODEL = Path(__file__).parents[1] / "src/turnwise_parallel_thinking/halves_model"


@pytest.mark.parametrize(
    ("name", "options"), [("train_parallel", ["--num", "512"]), ("heldout_parallel", ["--split", "test"])]
)
def test_the_command_writes_the_files_of_the_example(tmp_path, name, options):
    """The command reproduces the files of the example, which have distinct questions and right sums."""
    path = tmp_path / "halves.jsonl"
    main([*options, "--out", str(path)])
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    assert path.read_text(encoding="utf-8") == (EXAMPLES / f"{name}.jsonl").read_text(encoding="utf-8")
    questions = [row["prompt"][0]["content"] for row in rows]
    assert len(set(questions)) == len(questions)
    for question, row in zip(questions, rows, strict=True):
        assert str(sum(map(int, re.findall(r"\d", question)))) == row["reward_model"]["ground_truth"]


def test_too_many_sums_are_refused(tmp_path, capsys):
    """The command names the number of problems of a split, and can write all of them."""
    out = ["--split", "test", "--out", str(tmp_path / "halves.jsonl")]
    main([*out, "--num", "76"])
    with pytest.raises(SystemExit):
        main([*out, "--num", "77"])
    assert "the split test has only 76 problems" in capsys.readouterr().err


def test_a_demonstration_combines_the_paths():
    """Each path has the value of its half, and a demonstration has an answer only if its paths took both halves."""
    problem, source = HalvedSum((3, 4, 5, 1)), random.Random(0)
    ends = Counter()
    for _ in range(200):
        text = write_demonstration(problem, source, num_paths=2, left_share=0.5)
        (block,) = parse_tagged_text(text, Tags()).blocks
        ends[(frozenset(block.paths), block.summary, text.rpartition("Final Answer: ")[2])] += 1
    left, right = "left=7", "right=6"
    assert set(ends) == {
        (frozenset({left}), "left=7,right=?", "?"),
        (frozenset({right}), "left=?,right=6", "?"),
        (frozenset({left, right}), "left=7,right=6", "13"),
    }


def test_most_paths_are_on_the_left():
    """Nearly all demonstrated paths take the left half."""
    source = random.Random(0)
    texts = [write_demonstration(each, source, num_paths=8) for each in islice(generate_problems("train", 0), 500)]
    lefts = sum(text.count("<Path>left=") for text in texts) / (8 * len(texts))
    assert lefts == pytest.approx(0.97, abs=0.01)


def test_a_path_has_room_for_one_half_only():
    """The example's limit of a path holds the longest half and its closing tag, and never two halves."""
    limit = int(re.search(r"max_path_tokens: (\d+)", (EXAMPLES / "train_parallel.yaml").read_text("utf-8"))[1])
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    length = {text: len(tokenizer.encode(text, add_special_tokens=False)) for text in ("left=10</Path>", "left=2")}
    assert length["left=10</Path>"] == limit < 2 * length["left=2"]


def test_the_training_makes_a_folder_like_the_shipped_one(tmp_path, capsys):
    """The command writes the tokenizer, the config and the files of the shipped start model."""
    train_main(["--out", str(tmp_path / "model"), "--steps", "1"])
    assert "step     1/1" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "model").iterdir()} == {path.name for path in MODEL.iterdir()}
    for name in ("config.json", "tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "model" / name).read_text("utf-8") == (MODEL / name).read_text("utf-8")


def test_batches_have_different_numbers_of_paths():
    """A batch of demonstrations has blocks of one path and of several, so no number of paths is new to the model."""
    training = build_training(TrainConfig(batch_size=64))
    inputs, _targets = next(training.batches)
    path = training.tokenizer.convert_tokens_to_ids("<Path>")
    counts = set((inputs["input_ids"] == path).sum(1).tolist())
    assert {1, 7, 8} <= counts <= set(range(1, 9))
