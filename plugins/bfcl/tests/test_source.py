"""Rows of the source, the wheel that they come from, and runs from the command line."""

import os
import zipfile
from pathlib import Path

import pytest
from bfcl_inputs import DATA, text_of

from turnwise.cli import main
from turnwise.errors import DataError
from turnwise.tools.schema import compile_schema
from turnwise_bfcl import data_files
from turnwise_bfcl.source import CATEGORIES, WITHOUT_ANSWERS, BfclSource
from turnwise_result_files import read_results

COUNTS = (400, 200, 200, 200, 258, 1053, 16, 24, 240, 884, 16, 200, 200, 200, 200)
"""Tasks of each of `CATEGORIES`."""


def uids(text):
    return [row["uid"] for row in BfclSource().rows(text)]


def test_rows_bring_their_tools():
    """With JSON types at every depth, in a form that tools of a run could have."""
    _, mix, plan = BfclSource().rows(text_of("simple_python"))
    for row in (mix, plan):
        compile_schema(row["tools"][0])
    found = mix["tools"][0]["function"]["parameters"]
    types = {name: schema["type"] for name, schema in found["properties"].items()}
    assert types == {"parts": "array", "names": "array", "options": "object", "label": "string"}
    speed = found["properties"]["options"]["properties"]["speed"]
    assert speed == {"type": "number", "format": "float", "description": "Speed. This is a float type value."}
    guest = plan["tools"][0]["function"]["parameters"]["properties"]["guests"]["items"]
    assert (guest["type"], guest["properties"]["age"]["type"]) == ("object", "integer")
    assert (mix["data_source"], mix["bfcl"]["category"]) == ("simple_python", "simple_python")


def test_a_size_is_a_draw_by_the_seed():
    """From the categories in turns; a small one gives all that it has, and a larger size keeps the smaller one's."""
    one, other = (uids(text_of("simple_python,multiple", size=4, seed=seed)) for seed in (1, 2))
    assert sorted(one) == sorted(other) == ["multiple_0", "simple_python_0", "simple_python_1", "simple_python_2"]
    assert uids(text_of("simple_python,multiple", size=3, seed=1)) == one[:3]
    assert "multiple_0" in one[:2]
    assert len({tuple(uids(text_of("simple_python", size=3, seed=seed))) for seed in range(20)}) > 1


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (text_of("simple_python", size=4), "option 'size' must be at most 3, which simple_python have: 4"),
        ("simple_python?folder=/nowhere", "/nowhere/BFCL_v4_simple_python.json: No such file or directory"),
        (text_of("live_simple"), "BFCL_v4_live_simple.json: No such file or directory"),
        ("simple_java", "unknown category 'simple_java'"),
        (text_of("multi_turn_base"), "BFCL_v4_multi_turn_base.json: No such file or directory"),
    ],
)
def test_mistakes_are_one_line(text, error):
    """And they say what is allowed."""
    with pytest.raises(DataError) as caught:
        list(BfclSource().rows(text))
    assert error in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("{", "not JSON in each line"),
        ('{"id": "a", "question": [], "function": []}', "entry 'a' is not in the leaderboard's form"),
        ('{"id": "a", "question": [[{"role": "user", "content": "?"}]], "function": [{}]}', "entry 'a'"),
        ('{"id": "a", "question": [[]]}', "KeyError('function')"),
        ("3", "expected an object with the key 'id' in each line"),
    ],
)
def test_a_damaged_folder_is_one_line(tmp_path, line, error):
    """It names the file, or the category and the entry."""
    (tmp_path / "BFCL_v4_irrelevance.json").write_text(f"{line}\n")
    with pytest.raises(DataError) as caught:
        list(BfclSource().rows(f"irrelevance?folder={tmp_path}"))
    assert error in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder in place of the package index, and an empty cache."""
    (tmp_path / "index").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, value in (("NO_INDEX", "1"), ("FIND_LINKS", tmp_path / "index"), ("CONFIG_FILE", os.devnull)):
        monkeypatch.setenv(f"PIP_{name}", str(value))
    return tmp_path / "index"


def write_wheel(folder: Path) -> Path:
    """Write a wheel that pip accepts, with the data of these tests."""
    wheel = folder / data_files.WHEEL
    about = "bfcl_eval-2026.3.23.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in DATA.rglob("*.json"):
            archive.write(file, f"bfcl_eval/data/{file.relative_to(DATA)}")
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: bfcl-eval\nVersion: 2026.3.23\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    return wheel


@pytest.mark.slow
def test_the_wheel_is_fetched_once(index, monkeypatch):
    """And again when it is damaged; nothing else is left in the cache."""
    wheel = write_wheel(index)
    monkeypatch.setattr(data_files, "WHEEL_SHA256", data_files._digest(wheel))
    assert uids("parallel") == ["parallel_0"]
    kept = data_files.wheel_path()
    assert list(kept.parent.iterdir()) == [kept]

    content = wheel.read_bytes()
    wheel.unlink()
    assert uids("parallel") == ["parallel_0"]
    kept.write_bytes(content[:100])
    with pytest.raises(DataError, match="cannot be downloaded"):
        uids("parallel")
    wheel.write_bytes(content)
    assert uids("parallel") == ["parallel_0"]


@pytest.mark.slow
def test_a_failed_download_is_one_line(index, capsys):
    """Without the network, with another file, and where the cache cannot be written; `folder` is the way out."""
    command = ["rollout", "examples/bfcl.yaml", "data.path=bfcl:parallel", "--out", str(index / "out")]
    expected = ["No matching distribution found", "is damaged or another file", "Not a directory"]
    for number, error in enumerate(expected):
        if number == 1:
            write_wheel(index)
        if number == 2:
            (index.parent / "cache/turnwise").rmdir()
            (index.parent / "cache/turnwise").write_text("a file")
            error = "File exists"
        assert main(command) == 2
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("turnwise: error")]
        assert len(lines) == 1
        assert lines[0].startswith("turnwise: error: bfcl:parallel: ")
        assert error in lines[0]
        assert lines[0].endswith("or name a folder with its files, as in bfcl:CATEGORY?folder=PATH")


@pytest.mark.slow
def test_all_categories_of_the_real_wheel():
    """Each has as many tasks as the leaderboard says, and every schema is one of a tool."""
    try:
        data_files.fetch_wheel()
    except DataError as error:
        pytest.skip(f"needs the wheel of bfcl-eval from the package index: {error}")
    for category, count in zip(CATEGORIES, COUNTS, strict=True):
        rows = list(BfclSource().rows(category))
        assert (category, len(rows)) == (category, count)
        assert all((row["ground_truth"] is None) == (category in WITHOUT_ANSWERS) for row in rows)
        for row in rows:
            assert all(compile_schema(schema) for schema in row["tools"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "changes"),
    [
        ("rollout", ()),
        ("eval", ()),
        pytest.param("rollout", ("runtime=ray", "runtime.reward_workers=1"), marks=pytest.mark.ray),
    ],
    ids=["rollout", "eval", "ray"],
)
def test_a_run_by_name(tmp_path, command, changes, capsys):
    """From the command line, with the tiny model, which shows the functions and scores each episode."""
    text = f"bfcl:{text_of('simple_python,parallel,irrelevance', size=5, seed=1)}"
    changes = [
        *changes,
        f"data.path={text}",
        f"data.validation_path={text}",
        "agent=tool_agent",
        "tools=[]",
        "reward=bfcl",
    ]
    more = ["rollout.prompt_length=4096", "rollout.n=1", "rollout.validation_n=1", "--out", str(tmp_path / "out")]
    assert main([command, "examples/train_calculator.yaml", *changes, *more]) == 0, capsys.readouterr().err
    results = read_results(tmp_path / "out")
    assert {result.task.data_source for result in results} == {"simple_python", "parallel", "irrelevance"}
    assert [result.reward in (0.0, 1.0) for result in results] == [True] * 5
    if command == "eval":
        assert "irrelevance" in capsys.readouterr().out
