"""Tests of tokenizer, batches, training, checkpoint folder and command."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from turnwise_tiny_models import (
    IGNORE_INDEX,
    TURN_END,
    FitConfig,
    Training,
    batched,
    byte_level_tokenizer,
    fit,
    pad_demonstrations,
    save,
    tiny_qwen3,
    train_command,
)

TOKENIZER = byte_level_tokenizer(["user\n3+4\n", "assistant\nseven\n"] * 50, 300, tags=["<tag>"])
DEMONSTRATIONS = st.lists(
    st.lists(st.tuples(st.integers(0, 299), st.booleans()), min_size=1, max_size=9).map(
        lambda row: ([token_id for token_id, _ in row], [writes for _, writes in row])
    ),
    min_size=1,
    max_size=5,
)


def endless():
    """Yield the same demonstration endlessly; the model writes its last two tokens."""
    ids = TOKENIZER.encode(f"user\n3+4\nseven{TURN_END}", add_special_tokens=False)
    while True:
        yield ids, [False] * (len(ids) - 2) + [True] * 2


def build_training(config: FitConfig) -> Training:
    model = tiny_qwen3(TOKENIZER, hidden_size=16, intermediate_size=16, num_layers=1, head_dim=8)
    return Training(TOKENIZER, model, batched(endless(), config.batch_size, pad_demonstrations))


@given(st.text())
def test_any_text_survives(text):
    """Encoding and decoding any text is lossless."""
    assert text == TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False), skip_special_tokens=False)


def test_a_tag_is_one_token_that_decoding_keeps():
    """Turn markers are special tokens; tags are not."""
    ids = TOKENIZER.encode(f"<tag>{TURN_END}", add_special_tokens=False)
    assert len(ids) == 2
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "<tag>"


@given(DEMONSTRATIONS)
def test_only_what_the_model_writes_is_learned(demonstrations):
    """Ids are left-aligned; targets are the ids that the model writes and `IGNORE_INDEX` elsewhere."""
    inputs, targets = pad_demonstrations(demonstrations)
    assert (
        inputs["input_ids"].shape == targets.shape == (len(demonstrations), max(len(ids) for ids, _ in demonstrations))
    )
    for row, (ids, mask) in enumerate(demonstrations):
        assert inputs["input_ids"][row, : len(ids)].tolist() == ids
        learned = [token_id if writes else IGNORE_INDEX for token_id, writes in zip(ids, mask, strict=True)]
        assert targets[row].tolist() == learned + [IGNORE_INDEX] * (targets.shape[1] - len(ids))


@given(st.integers(0, 20), st.integers(1, 6))
def test_batches_are_full(num, size):
    """Batches keep the order and have one size; an incomplete last batch is dropped."""
    batches = list(batched(iter(range(num)), size, tuple))
    assert [item for batch in batches for item in batch] == list(range(num - num % size))
    assert {len(batch) for batch in batches} <= {size}


def test_a_model_learns_what_is_written():
    """A few steps make every written token likely."""
    torch.manual_seed(0)
    config = FitConfig(steps=60, batch_size=4, learning_rate=1e-2, warmup_steps=5)
    made = build_training(config)
    inputs, targets = next(made.batches)

    def probability() -> float:
        with torch.no_grad():
            logs = made.model(**inputs).logits.log_softmax(-1)
        wanted = targets[:, 1:]
        return float(
            logs[:, :-1].gather(-1, inputs["input_ids"][:, 1:, None])[..., 0][wanted != IGNORE_INDEX].exp().min()
        )

    assert probability() < 0.1
    fit(made, config)
    assert probability() > 0.5


def test_the_folder_loads_as_any_other(tmp_path):
    """The auto classes load the same weights and vocabulary; every user may read the file."""
    made = build_training(FitConfig())
    save(made.model, TOKENIZER, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, value in made.model.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], value, rtol=0, atol=0)
    assert AutoTokenizer.from_pretrained(tmp_path).get_vocab() == TOKENIZER.get_vocab()
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o444 == 0o444


@pytest.mark.parametrize("flag", ["--steps", "--threads"])
def test_bad_numbers_are_one_line(flag, tmp_path, capsys):
    """A number below 1 exits with code 2 and one line that says what was expected."""
    with pytest.raises(SystemExit) as ended:
        train_command("train", "Train.", FitConfig(), build_training, ["--out", str(tmp_path), flag, "0"])
    assert ended.value.code == 2
    assert f"argument {flag}: expected at least 1, got 0" in capsys.readouterr().err


def test_the_seed_decides_all(tmp_path):
    """The same seed gives the same model and a different seed a different one."""
    written = []
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        out = tmp_path / name
        train_command("train", "Train.", FitConfig(steps=2), build_training, ["--out", str(out), "--seed", seed])
        written.append((out / "model.safetensors").read_bytes())
    assert written[0] == written[1] != written[2]


def test_the_readmes_example(tmp_path, monkeypatch, capsys):
    """The README's example runs for two steps."""
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    (tmp_path / "sums.py").write_text(code, encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["sums", "--out", str(tmp_path / "model"), "--steps", "2"])
    runpy.run_path(str(tmp_path / "sums.py"), run_name="__main__")
    assert "step     2/2" in capsys.readouterr().out
    assert (tmp_path / "model" / "config.json").exists()
