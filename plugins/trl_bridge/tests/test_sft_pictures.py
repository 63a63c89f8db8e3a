"""`turnwise sft` on rows with pictures: TRL's real SFTTrainer computes what a plain forward pass does."""

import json
import re
from typing import get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from turnwise.cli import main
from turnwise.types import PlacedPicture
from turnwise_engine_support.picture_families import placeholders_at
from turnwise_engine_support.pictures import PictureReader
from turnwise_result_files.media import MediaFolder
from turnwise_testing.inputs.tokenizers import byte_tokenizer
from turnwise_testing.inputs.vision import draw_picture
from turnwise_testing.references.vision_reference import VisionReference
from turnwise_tiny_models import VisionKind, save_random_vision

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

SIZES = ((8, 8), (24, 24), (16, 40), (40, 8))
NUM_LEARNED = 9


@pytest.fixture(scope="module", params=get_args(VisionKind))
def reference(request, tmp_path_factory):
    """The forward pass of a tiny vision-language model."""
    return VisionReference(save_random_vision(request.param, tmp_path_factory.mktemp(request.param)))


def make_row(reference, seed, num_pictures):
    """Return a row whose last ids are learned, and its pictures; a placeholder's id is among the learned ones."""
    rng = np.random.default_rng(seed)
    ids, pictures = rng.integers(20, 200, 3).tolist(), []
    for _ in range(num_pictures):
        picture = draw_picture(int(rng.integers(4)), *SIZES[int(rng.integers(4))])
        size = reference.count_tokens(picture)
        pictures.append(PlacedPicture(start=len(ids), num_tokens=size, picture=picture))
        ids += [reference.placeholder] * size + rng.integers(20, 200, 2).tolist()
    learned = [*rng.integers(20, 200, NUM_LEARNED - 1).tolist(), reference.placeholder]
    return {"input_ids": ids + learned, "labels": [-100] * len(ids) + learned}, pictures


def write_rows(folder, rows):
    """Write rows with their pictures, as `turnwise convert --to sft` does."""
    media = MediaFolder(folder)
    made = [
        row | {"pictures": [dict(zip(("start", "num_tokens", "file"), each, strict=True)) for each in places]}
        for row, places in ((row, media.put_places(pictures)) for row, pictures in rows)
    ]
    pq.write_table(pa.Table.from_pylist(made), folder / "sft.parquet")
    return folder / "sft.parquet", made


def expected_scores(reference, row, pictures):
    """Return the (n,) log-probabilities of the learned ids, of a single forward pass of transformers."""
    first = len(row["input_ids"]) - NUM_LEARNED
    return reference.scores(row["input_ids"], first, temperature=1.0, variant=0, pictures=pictures)[0]


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(counts=st.lists(st.integers(0, 3), min_size=1, max_size=4))
def test_batches_have_the_log_probabilities_of_separate_rows(reference, tmp_path_factory, counts):
    """Padded together, with and without pictures, each learned id has the score of its row alone."""
    from transformers import AutoModelForImageTextToText
    from trl.trainer.utils import add_fused_lm_head

    from turnwise_trl_bridge.sft_pictures import PictureCollator

    folder = tmp_path_factory.mktemp("rows")
    rows = [make_row(reference, number, count) for number, count in enumerate(counts)]
    _file, made = write_rows(folder, rows)
    model = AutoModelForImageTextToText.from_pretrained(reference.path, dtype=torch.float32).eval()
    add_fused_lm_head(model)
    collator = PictureCollator(model=model, reader=PictureReader(reference.path), folder=folder, pad_token_id=0)
    batch = collator([row | {"number": number} for number, row in enumerate(made)])
    mask = batch.pop("is_picture", torch.zeros(1, 1, dtype=torch.bool))
    with torch.no_grad(), placeholders_at(model, mask):
        found = model(**batch, fused_lm_head=True)
    for index, (row, pictures) in enumerate(rows):
        own = found.log_probs[index][found.label_mask[index].bool()].numpy()
        np.testing.assert_allclose(own, expected_scores(reference, row, pictures), atol=1e-4, rtol=0)


def test_the_command_trains_on_pictures(reference, tmp_path):
    """The first loss is that of plain forward passes, it falls, and the written folder is a whole model."""
    rows = [make_row(reference, number, number % 3) for number in range(4)]
    file, _made = write_rows(tmp_path, rows)
    scores = np.concatenate([expected_scores(reference, *row) for row in rows])

    options = ["--epochs", "6", "--batch-size", "4", "--learning-rate", "0.003"]
    out = tmp_path / "out"
    assert main(["sft", str(file), "--model", str(reference.path), "--out", str(out), *options]) == 0

    log = [entry["loss"] for entry in json.loads((out / "log.json").read_text()) if "loss" in entry]
    assert log[0] == pytest.approx(-scores.mean(), abs=2e-3)
    assert len(log) == 6
    assert log[-1] < log[0] - 0.5
    trained = VisionReference(out)
    assert np.mean([expected_scores(trained, *row).mean() for row in rows]) > scores.mean() + 0.5
    assert trained.count_tokens(rows[1][1][0].picture) == rows[1][1][0].num_tokens


def test_rows_of_texts_train_such_a_model(reference, tmp_path):
    """A file without the column of pictures is enough."""
    row, _pictures = make_row(reference, 0, 0)
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "sft.parquet")
    command = ["sft", str(tmp_path / "sft.parquet"), "--model", str(reference.path), "--out", str(tmp_path / "out")]
    assert main(command) == 0
    (loss,) = [each["loss"] for each in json.loads((tmp_path / "out/log.json").read_text()) if "loss" in each]
    assert loss == pytest.approx(-expected_scores(reference, row, []).mean(), abs=2e-3)


REFUSED = {
    "changed": "the picture has changed since it was written",
    "missing": "row 0: .*the picture cannot be read: No such file",
    "no reference": "'cat.png' is no reference to a picture",
    "learned": "row 0: the picture of tokens 3 to .* has labels, which must be -100",
    "behind the end": "row 0: the picture of tokens .* overlaps, or is behind the end",
    "other ids": "row 0: the picture .* is on ids that are not the model's placeholder",
    "too few": "row 0: the picture .* placeholders, but the model's processor computes",
    "texts": "pictures: expected a list of {start, num_tokens, file} in each row",
}


@pytest.mark.many_cases
@pytest.mark.parametrize("mistake", REFUSED)
def test_rows_with_pictures_are_refused(reference, tmp_path, capsys, mistake):
    """With one line that names the row, and no model is left."""
    (row, pictures) = make_row(reference, 2, 2)
    file, (made, *_) = write_rows(tmp_path, [(row, pictures)])
    place = made["pictures"][0]
    match mistake:
        case "changed":
            (tmp_path / place["file"]).write_bytes(b"\x89PNG\r\n\x1a\n other")
        case "missing":
            (tmp_path / place["file"]).unlink()
        case "no reference":
            place["file"] = "cat.png"
        case "learned":
            made["labels"][place["start"]] = reference.placeholder
        case "behind the end":
            made["pictures"][1]["start"] = len(made["input_ids"]) - 1
        case "other ids":
            place["start"] -= 1
        case "too few":
            place["num_tokens"] -= 1
        case "texts":
            made["pictures"] = ["cat.png"]
    pq.write_table(pa.Table.from_pylist([made]), file)
    out = tmp_path / "out"
    assert main(["sft", str(file), "--model", str(reference.path), "--out", str(out)]) == 2
    assert re.search(REFUSED[mistake], capsys.readouterr().err)
    assert not any(out.iterdir())


def test_a_model_of_texts_is_refused(reference, tiny, tmp_path, capsys):
    """The line names the file and the model."""
    tiny.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    file, _made = write_rows(tmp_path, [make_row(reference, 1, 1)])
    assert main(["sft", str(file), "--model", str(tmp_path / "model"), "--out", str(tmp_path / "out")]) == 2
    assert "sft.parquet: the rows have pictures, which the model of" in capsys.readouterr().err
