"""The tiny model: how it is trained, and that what is shipped came from that."""

import json

import torch
from transformers import AutoTokenizer

from turnwise_parallel_thinking import model_dir
from turnwise_parallel_thinking.demo.train import TrainConfig, main, recipe
from turnwise_tiny_models import IGNORED


def test_training_begins_with_the_shipped_tokenizer():
    """Vocabulary and merges are those that training makes."""
    shipped = AutoTokenizer.from_pretrained(model_dir())
    made = recipe(TrainConfig()).tokenizer
    assert made.backend_tokenizer.to_str() == shipped.backend_tokenizer.to_str()
    assert made.chat_template == shipped.chat_template


def test_a_batch_is_under_its_layout():
    """Nothing sees what comes later; some token does not see all before it; what is learned is an id of the row."""
    inputs, targets = next(recipe(TrainConfig(batch_size=3)).batches)
    seen = inputs["attention_mask"][:, 0] == 0
    assert not seen.triu(1).any()
    assert (~seen & torch.ones_like(seen).tril()).any(dim=(1, 2)).all()
    learned = targets != IGNORED
    assert learned.any(1).all()
    assert torch.equal(targets[learned], inputs["input_ids"][learned])
    assert (inputs["position_ids"] <= torch.arange(targets.shape[1])).all()


def test_training_writes_a_folder_like_the_shipped_one(tmp_path, capsys):
    """The same files and the same config."""
    main(["--out", str(tmp_path / "model"), "--steps", "1"])
    assert "step     1/1" in capsys.readouterr().out
    names = {path.name for path in model_dir().iterdir()}
    assert {path.name for path in (tmp_path / "model").iterdir()} == names
    made, shipped = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "model", model_dir()))
    assert made == shipped
