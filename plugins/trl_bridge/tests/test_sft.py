"""`turnwise sft`: TRL's real SFTTrainer on rows of token ids and labels."""

import json
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from turnwise import ModelSpec
from turnwise.cli import main
from turnwise.errors import ConfigError
from turnwise_testing.inputs.tokenizers import byte_tokenizer
from turnwise_trl_bridge import training

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture
def model(tiny, tmp_path):
    """Return the folder of the tiny model and a tokenizer."""
    tiny.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def rows(tmp_path):
    """Return a file of two rows, and the rows; the longer one ends behind TRL's own limit, with its only label."""
    random, made = np.random.default_rng(0), []
    for size, first in ((20, 12), (1100, 1090)):
        ids = random.integers(3, 250, size).tolist()
        made.append({"input_ids": ids, "labels": [-100] * first + ids[first:], "loss_mask": [0] * size})
    pq.write_table(pa.Table.from_pylist(made), tmp_path / "sft.parquet")
    return tmp_path / "sft.parquet", made


@pytest.mark.slow
def test_the_loss_is_that_of_the_labelled_tokens(tiny, model, rows, tmp_path):
    """The first step's loss is the mean over the labelled tokens of whole rows, and training lowers it."""
    file, made = rows
    losses = []
    for row in made:
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"][1:])
        with torch.no_grad():
            losses.append(torch.nn.functional.cross_entropy(tiny(ids).logits[0, :-1], labels, reduction="none"))
    expected = float(torch.cat(losses).sum()) / 18

    options = ["--epochs", "4", "--batch-size", "2", "--learning-rate", "0.01"]
    assert main(["sft", str(file), "--model", str(model), "--out", str(tmp_path / "out"), *options]) == 0

    log = [entry["loss"] for entry in json.loads((tmp_path / "out/log.json").read_text()) if "loss" in entry]
    assert log[0] == pytest.approx(expected, abs=2e-3)
    assert len(log) == 4
    assert log[-1] < log[0]
    assert (tmp_path / "out/model.safetensors").stat().st_mode == (tmp_path / "out/config.json").stat().st_mode
    assert (tmp_path / "out/tokenizer.json").exists()


@pytest.mark.parametrize(
    ("content", "text"),
    [(None, "cannot be read as Parquet"), ({"messages": ["a"]}, "expected rows"), ({}, "expected rows")],
)
def test_a_file_without_rows_is_one_line(model, tmp_path, capsys, content, text):
    """The error names the file and the command that writes such files."""
    file = tmp_path / "sft.parquet"
    if content is None:
        file.write_text("{}", encoding="utf-8")
    else:
        pq.write_table(pa.table(content), file)

    assert main(["sft", str(file), "--model", str(model), "--out", str(tmp_path / "out")]) == 2
    assert text in capsys.readouterr().err


def test_wrong_folders_are_one_line(rows, model, capsys):
    """Neither a missing model nor an output folder that is full or cannot be made starts a training."""
    assert main(["sft", str(rows[0]), "--model", "nowhere", "--out", "x"]) == 2
    assert main(["sft", str(rows[0]), "--model", str(model), "--out", str(model)]) == 2
    below_a_file = str(rows[0] / "out")
    assert main(["sft", str(rows[0]), "--model", str(model), "--out", below_a_file]) == 2
    error = capsys.readouterr().err
    assert "--model: there is no directory" in error
    assert "is not an empty folder" in error
    assert f"--out {below_a_file}: Not a directory" in error


@pytest.mark.slow
def test_a_model_that_lacks_a_weight_is_one_line(rows, model, tmp_path, capsys):
    """transformers would fill the gap at random, and the training would save it."""
    drop_weight(model, "model.layers.1.mlp.down_proj.weight")
    assert main(["sft", str(rows[0]), "--model", str(model), "--out", str(tmp_path / "out")]) == 2
    expected = f"--model: '{model}' lacks 1 weights of its model, such as 'model.layers.1.mlp.down_proj.weight'"
    assert expected in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*.safetensors"))


@pytest.mark.parametrize("train", [training.train_sync, training.train_async])
def test_trl_trains_no_model_that_lacks_a_weight(model, train):
    """The run is refused before any engine starts."""
    drop_weight(model, "model.layers.0.self_attn.k_proj.weight")
    config = SimpleNamespace(model_spec=lambda weights: ModelSpec(path=model))
    with pytest.raises(
        ConfigError, match=r"^model\.path: '.*' lacks 1 weights of its model, such as '.*k_proj\.weight'$"
    ):
        train(config, [], SimpleNamespace())


def drop_weight(model, name):
    weights = load_file(model / "model.safetensors")
    del weights[name]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


def test_a_job_may_always_resume(rows, model, tmp_path, monkeypatch, capsys):
    """It trains from the start after an interrupt, does nothing to a complete model, and writes to no other folder."""
    out, seen = tmp_path / "out", []
    command = ["sft", str(rows[0]), "--model", str(model), "--out", str(out), "--resume"]

    def train(arguments, _model, _rows):
        seen.append(arguments.out)
        if len(seen) == 1:
            raise KeyboardInterrupt
        return [{"loss": 1.0}]

    monkeypatch.setattr("turnwise_trl_bridge.sft.train_sft", train)

    assert main(command) == 130
    assert "has no complete model; the same command with --resume trains again" in capsys.readouterr().err
    assert main(command[:-1]) == 2
    assert "is not an empty folder" in capsys.readouterr().err
    assert main(command) == main(command) == 0
    assert "the model is complete" in capsys.readouterr().err
    assert seen == [out, out]
    assert main([*command, "--seed", "1"]) == 2
    assert "has another training: seed is 0, not 1" in capsys.readouterr().err
    table = pq.read_table(rows[0])
    pq.write_table(table.slice(1), rows[0])
    assert main(command) == 2  # the file has its name, and other rows
    assert "has another training: rows_sha256 is '" in capsys.readouterr().err
    pq.write_table(table, rows[0])
    (out / "sft.json").unlink()
    assert main(command) == 2
    assert "is not empty, and no training of turnwise sft" in capsys.readouterr().err
