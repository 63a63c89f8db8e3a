"""`turnwise tags` adds tags to the vocabulary of a model, which stays the same model otherwise."""

import json
from unicodedata import normalize

import pytest
import torch
import transformers
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from turnwise.cli import main
from turnwise_parallel_thinking.config import Tags
from turnwise_parallel_thinking.tag_ids import encode_tags
from turnwise_testing.inputs.tokenizers import byte_tokenizer
from turnwise_testing.references.reference_model import save_random_model

NUM_TOKENS = len(byte_tokenizer(tags=()))
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
ADDED = ["<Parallel>", "</Parallel>", "<Path>", "</Path>", "<Summary>", "</Summary>"]


def make_model(folder, *, tied=True, spare=0, tags=()):
    config = transformers.Qwen2Config(vocab_size=NUM_TOKENS + len(tags) + spare, tie_word_embeddings=tied, **SIZES)
    save_random_model(config, folder)
    byte_tokenizer(tags=tags).save_pretrained(folder)
    return folder


def load(folder):
    return transformers.AutoTokenizer.from_pretrained(folder), transformers.AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """The tokenizer before and after."""
    folder = make_model(tmp_path_factory.mktemp("model"))
    assert main(["tags", str(folder), "--to", str(folder / "tagged")]) == 0
    return load(folder)[0], load(folder / "tagged")[0]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("spare", [0, 3, 40])
def test_the_model_is_the_same_on_its_own_tokens(tmp_path, capsys, tied, spare):
    """Old rows stay to the bit; new ones are the mean of the pieces of their tag, in the input and in the output."""
    folder = make_model(tmp_path / "model", tied=tied, spare=spare)

    assert main(["tags", str(folder), "--to", str(tmp_path / "new/tagged")]) == 0

    shown = capsys.readouterr().out
    tokenizer, model = load(folder)
    new_tokenizer, new_model = load(tmp_path / "new/tagged")
    ids = encode_tags(Tags(), new_tokenizer)
    assert (ids.block, ids.end_path) == (NUM_TOKENS, NUM_TOKENS + 3)
    assert f"<Parallel> is {ids.block}" in shown
    assert new_model.config.vocab_size == max(NUM_TOKENS + spare, NUM_TOKENS + len(ADDED))
    assert tied == (new_model.get_output_embeddings().weight is new_model.get_input_embeddings().weight)
    for old, new in (
        (model.get_input_embeddings().weight, new_model.get_input_embeddings().weight),
        (model.get_output_embeddings().weight, new_model.get_output_embeddings().weight),
    ):
        assert torch.equal(old[:NUM_TOKENS], new[:NUM_TOKENS])
        for number, text in enumerate(ADDED):
            pieces = tokenizer.encode(text, add_special_tokens=False)
            torch.testing.assert_close(new[NUM_TOKENS + number], old[pieces].mean(0))
    assert [each.name for each in (tmp_path / "new").iterdir()] == ["tagged"]
    assert len({each.stat().st_mode for each in (tmp_path / "new/tagged").iterdir()}) == 1


@given(st.text())
@example("\uf900")
def test_other_texts_keep_their_ids(tokenizers, text):
    """A text without tags has the ids that it had, and decodes to itself in the form NFC, which the tokenizer makes."""
    before, after = tokenizers
    if not any(tag in text for tag in ADDED):
        assert before.encode(text) == after.encode(text)
    assert after.decode(after.encode(text)) == normalize("NFC", text)


@given(st.lists(st.one_of(st.sampled_from(ADDED), st.text(max_size=5)), max_size=8))
def test_a_tag_is_one_token_wherever_it_stands(tokenizers, parts):
    """Text beside a tag, white space included, changes nothing."""
    _, after = tokenizers
    ids = after.encode("".join(parts))
    assert sum(part in ADDED for part in parts) <= sum(each >= NUM_TOKENS for each in ids)
    assert after.decode(ids) == "".join(parts)


def test_only_missing_tags_are_added(tmp_path, capsys):
    """Tags that are one token stay as they are, and a tag may have a text of the user's own."""
    folder = make_model(tmp_path / "model", tags=("<Path>", "</Path>"))

    assert main(["tags", str(folder), "--to", str(tmp_path / "tagged"), "--tag", "block=<fork>"]) == 0

    added = ["<fork>", "</Parallel>", "<Summary>", "</Summary>"]
    assert all(
        f"{text} is {NUM_TOKENS + 2 + number}" in capsys.readouterr().out for number, text in enumerate(added[:1])
    )
    tokenizer, _model = load(tmp_path / "tagged")
    assert [len(tokenizer.encode(text)) for text in added] == [1] * 4
    assert len(tokenizer.encode("<Parallel>")) > 1


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--tag", "door=<a>"], "give NAME=TEXT with a name out of block"),
        (["--tag", "separator=x"], "give NAME=TEXT"),
        (["--tag", "block="], "give NAME=TEXT"),
        (["--tag", "block=<Path>"], "the tags must differ"),
        (["--to", "model"], "exists; name another folder"),
    ],
)
def test_bad_input_is_refused_in_one_line(tmp_path, monkeypatch, capsys, words, reason):
    """Nothing is written."""
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "model")

    assert main(["tags", "model", "--to", "tagged", *words]) == 2

    error = capsys.readouterr().err
    assert reason in error
    assert len(error.splitlines()) == 1
    assert [each.name for each in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(("files", "reason"), [({}, "config"), ({"config.json": "{}"}, "MODEL"), (None, "there is no")])
def test_a_folder_without_a_model_is_refused(tmp_path, capsys, files, reason):
    """One line names it, and nothing is left behind."""
    for name, text in (files or {}).items():
        (tmp_path / name).write_text(text)
    folder = tmp_path if files is not None else tmp_path / "none"

    assert main(["tags", str(folder), "--to", str(tmp_path / "new/tagged")]) == 2

    assert reason in capsys.readouterr().err
    assert not any((tmp_path / "new").glob("*"))


def test_a_model_that_lacks_a_weight_is_refused(tmp_path, capsys):
    """transformers would fill each gap at random, and the new folder would have it."""
    folder = make_model(tmp_path / "model", tied=False)
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        others = {other: each for other, each in weights.items() if other != name}
        save_file(others, folder / "model.safetensors", metadata={"format": "pt"})
        assert main(["tags", str(folder), "--to", str(tmp_path / "tagged")]) == 2
        assert f"{folder}: it lacks 1 weights of its model, such as '{name}'" in capsys.readouterr().err
    assert not (tmp_path / "tagged").exists()


def test_a_model_with_all_tags_is_used_as_it_is(tmp_path, capsys):
    """The command says so."""
    folder = make_model(tmp_path / "model", tags=ADDED)

    assert main(["tags", str(folder), "--to", str(tmp_path / "tagged")]) == 2

    assert "each tag is one token of this model already" in capsys.readouterr().err


@pytest.mark.slow
def test_the_model_thinks_in_parallel_and_is_trained(tmp_path, monkeypatch):
    """A rollout, a step of training and its export keep the tags, and the export has their trained embeddings."""
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "model")
    assert main(["tags", "model", "--to", "tagged"]) == 0
    (tmp_path / "tasks.jsonl").write_text(
        "".join(json.dumps({"messages": [{"role": "user", "content": str(n)}]}) + "\n" for n in range(2))
    )
    (tmp_path / "own.py").write_text("def score(episode):\n    return float(episode.rollout_n)\n")
    (tmp_path / "run.yaml").write_text(
        """\
model: {path: tagged}
data: {path: tasks.jsonl}
engine: {name: transformers, max_context: 512, num_threads: 1}
agent: {name: parallel_thinking, num_paths: 2, max_blocks: 1, max_path_tokens: 8}
modules: [./own.py]
reward: ./own.py:score
rollout: {n: 2, seed: 0, prompt_length: 256, response_length: 64}
train: {num_steps: 1, tasks_per_step: 2, optimizer: {lr: 0.01}, checkpoint: {every: 1}}
"""
    )

    assert main(["train", "run.yaml", "--out", "out"]) == 0
    assert main(["export", "out", "--to", "exported"]) == 0

    before, after = (load(tmp_path / name) for name in ("tagged", "exported"))
    assert encode_tags(Tags(), before[0]).block == encode_tags(Tags(), after[0]).block
    assert before[1].config.vocab_size == after[1].config.vocab_size
    tags = slice(NUM_TOKENS, NUM_TOKENS + len(ADDED))
    assert not torch.equal(before[1].get_input_embeddings().weight[tags], after[1].get_input_embeddings().weight[tags])
