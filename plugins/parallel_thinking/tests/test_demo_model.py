"""Tests of the tiny model's training, and of the shipped files."""

import json

import torch
from transformers import AutoTokenizer

from turnwise_parallel_thinking import model_dir
from turnwise_parallel_thinking.demo.train import TrainConfig, build_training, main
from turnwise_tiny_models import IGNORE_INDEX


def test_training_makes_the_shipped_tokenizer():
    """Training learns the vocabulary and merges of the shipped tokenizer."""
    shipped = AutoTokenizer.from_pretrained(model_dir())
    made = build_training(TrainConfig()).tokenizer
    assert made.backend_tokenizer.to_str() == shipped.backend_tokenizer.to_str()
    assert made.chat_template == shipped.chat_template


def test_a_batch_is_under_its_layout():
    """The mask is causal and hides some earlier tokens, and every target is an id of its row."""
    inputs, targets = next(build_training(TrainConfig(batch_size=3)).batches)
    seen = inputs["attention_mask"][:, 0] == 0
    assert not seen.triu(1).any()
    assert (~seen & torch.ones_like(seen).tril()).any(dim=(1, 2)).all()
    learned = targets != IGNORE_INDEX
    assert learned.any(1).all()
    assert torch.equal(targets[learned], inputs["input_ids"][learned])
    assert (inputs["position_ids"] <= torch.arange(targets.shape[1])).all()


def test_training_writes_a_folder_like_the_shipped_one(tmp_path, capsys):
    """The folder has the same files and the same config as the shipped one."""
    main(["--out", str(tmp_path / "model"), "--steps", "1"])
    assert "step     1/1" in capsys.readouterr().out
    names = {path.name for path in model_dir().iterdir()}
    assert {path.name for path in (tmp_path / "model").iterdir()} == names
    made, shipped = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "model", model_dir()))
    assert made == shipped
