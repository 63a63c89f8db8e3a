"""`turnwise sft` with rows and options that cannot be trained on: one line, before any training."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from turnwise.cli import main
from turnwise_testing.inputs.tokenizers import byte_tokenizer

GOOD = {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}
REFUSED = {
    "nothing to learn": ([GOOD | {"labels": [-100] * 3}], "no row has a token to learn"),
    "one token": ([{"input_ids": [1], "labels": [1]}], "no row has a token to learn"),
    "only first tokens": ([GOOD | {"labels": [1, -100, -100]}] * 2, "no row has a token to learn"),
    "fewer labels": ([GOOD, GOOD | {"labels": [-100]}], "row 1 has 3 input_ids and 1 labels"),
    "shifted labels": (
        [GOOD | {"labels": [2, 3, -100]}],
        "row 0: the label of token 0 is 2, and must be -100 or its id 1",
    ),
    "another id": ([GOOD, GOOD | {"labels": [-100, 2, 4]}], "row 1: the label of token 2 is 4"),
    "another mark": ([GOOD | {"labels": [-1, 2, 3]}], "row 0: the label of token 0 is -1"),
    "an empty row": ([GOOD, {"input_ids": [], "labels": []}], "row 1 has no tokens"),
    "a null row": ([GOOD, {"input_ids": None, "labels": None}], "input_ids: row 1 has a null"),
    "a null id": ([GOOD | {"input_ids": [1, None, 3]}], "input_ids: row 0 has a null"),
    "a null label": ([GOOD, GOOD, GOOD | {"labels": [-100, 2, None]}], "labels: row 2 has a null"),
    "texts": ([GOOD | {"input_ids": ["1", "2", "3"]}], "input_ids: expected a list of integers in each row"),
    "fractions": ([GOOD | {"labels": [1.5, 2.5, 3.5]}], "labels: expected a list of integers in each row"),
    "numbers": ([{"input_ids": 1, "labels": 1}], "input_ids: expected a list of integers in each row, got int64"),
    "rows of a rollout": ([{"prompt_ids": [1], "response_ids": [2]}], "expected rows with input_ids and labels"),
    "an id beyond the model": (
        [GOOD, {"input_ids": [1, 2, 3, 999_999], "labels": [-100, 2, 3, -100]}],
        "row 1: token 3 has the id 999999, and the model has the ids 0 to",
    ),
    "a negative id": ([{"input_ids": [1, 2, -3], "labels": [-100, 2, -100]}], "row 0: token 2 has the id -3"),
}


@pytest.fixture
def train(tiny, tmp_path, capsys):
    """A function that trains on a table or the bytes of a file, and returns the exit code and standard error."""
    tiny.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    capsys.readouterr()  # bars of saving

    def run(content, *options):
        file = tmp_path / "rows.parquet"
        if isinstance(content, bytes):
            file.write_bytes(content)
        else:
            pq.write_table(content, file)
        out = tmp_path / "out"
        code = main(["sft", str(file), "--model", str(tmp_path / "model"), "--out", str(out), *options])
        assert code == 0 or not out.exists() or not any(out.iterdir())
        return code, capsys.readouterr().err

    return run


@pytest.mark.many_cases
@pytest.mark.parametrize(("rows", "text"), REFUSED.values(), ids=REFUSED)
def test_rows_are_refused(train, rows, text):
    """With the number of the row."""
    code, errors = train(pa.Table.from_pylist(rows))

    assert code == 2
    assert text in errors
    assert errors.count("\n") == 1


def test_a_cut_file_is_refused(train, tmp_path):
    """And a text."""
    pq.write_table(pa.Table.from_pylist([GOOD] * 1000), tmp_path / "whole.parquet")
    whole = (tmp_path / "whole.parquet").read_bytes()
    for content in (b"", b"text", whole[: len(whole) // 2]):
        code, errors = train(content)
        assert code == 2
        assert "cannot be read as Parquet" in errors


@pytest.mark.parametrize(
    "options",
    [(name, value) for name in ("--learning-rate", "--epochs", "--batch-size") for value in ("0", "-1", "nan", "x")]
    + [("--learning-rate", "inf"), ("--seed", "-1"), ("--seed", str(2**32)), ("--seed", "x")],
    ids=" ".join,
)
def test_options_are_refused(train, capsys, options):
    """By the parser of the command line."""
    with pytest.raises(SystemExit, match="2"):
        train(pa.Table.from_pylist([GOOD]), *options)
    assert f"argument {options[0]}: " in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("kind", [pa.list_(pa.int32()), pa.large_list(pa.int64()), pa.list_(pa.int16(), 3)], ids=str)
def test_lists_of_any_integers_are_read(train, kind):
    """Of other writers, too; a log gets no progress bar."""
    code, errors = train(pa.Table.from_pylist([GOOD], schema=pa.schema([("input_ids", kind), ("labels", kind)])))

    assert code == 0
    assert "Loading weights" not in errors
