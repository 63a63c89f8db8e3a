"""Commands refuse a file that two readers could understand differently, in one line that names the place."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from turnwise.cli import main
from turnwise.plugin.host import load
from turnwise_calculator_demo import model_dir

ROOT: Final = Path(__file__).parents[1]
CONFIG: Final = ROOT / "examples/calculator.yaml"
Write = str | list[dict[str, object]] | pa.Table | Callable[[], pa.Table]


@pytest.fixture(autouse=True, scope="module")
def one_host() -> Iterator[None]:
    """Load the plugins once: every command would look for them again, which takes longer than to run."""
    with pytest.MonkeyPatch.context() as patch:
        host = load()
        for module in ("turnwise.cli", "turnwise.config.resolve"):
            patch.setattr(f"{module}.load", lambda *_arguments, **_options: host)
        yield


def write(path: Path, content: Write) -> Path:
    if isinstance(content, str):
        path.write_text(content)
    else:
        pq.write_table(pa.Table.from_pylist(content) if isinstance(content, list) else content, path)
    return path


def nested_struct() -> pa.Table:
    """Return a column whose objects have two fields of one name."""
    fields = [pa.field("a", pa.int64()), pa.field("a", pa.int64())]
    column = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], fields=fields)
    return pa.table({"prompt": ["x"], "extra_info": column})


TWICE: Final = '{"style": "rule", "style": "model"}'
ESCAPED: Final = json.dumps(TWICE)
TASK_FILES: Final[dict[str, tuple[str, Write, str]]] = {
    "jsonl": ("jsonl", '{"prompt": "a"}\n{"prompt": "b", "prompt": "c"}\n', 'line 2: invalid JSON: the key "prompt"'),
    "jsonl, nested": ("jsonl", '\n{"prompt": [{"role": "user", "content": "a", "role": "tool"}]}', "line 2: invalid"),
    "jsonl, escaped name": ("jsonl", '{"prompt": "a", "\\u0070rompt": "b"}', 'line 1: invalid JSON: the key "prompt"'),
    "json": ("json", '[{"prompt": "a"},\n\n{"prompt": "b",\n"prompt": "c"}]', 'line 3: invalid JSON: the key "prompt"'),
    "json, nested": (
        "json",
        '[{"prompt": "a",\n"extra_info": {\n"x": [{"index": 1,\n"index": 2}]}}]',
        'line 3: invalid JSON: the key "index"',
    ),
    "jsonl, json within": ("jsonl", f'{{"prompt": "a", "reward_model": {ESCAPED}}}', "reward_model: not a JSON object"),
    "csv, json within": (
        "csv",
        'prompt,extra_info\na,"{""index"": 1, ""index"": 2}"\n',
        'line 2: extra_info: not a JSON object: the key "index"',
    ),
    "parquet, json within": ("parquet", [{"prompt": "a", "reward_model": TWICE}], 'the key "style" is given twice'),
    "csv columns": ("csv", "prompt,prompt\na,b\n", "two columns are called 'prompt'"),
    "parquet columns": ("parquet", pa.table([["a"], ["b"]], names=["prompt", "prompt"]), "two columns are called"),
    "parquet fields": ("parquet", nested_struct, "duplicate field names"),
    "jsonl, index": ("jsonl", '{"prompt": "a", "sample_index": 1}\n' * 2, "line 2: sample_index 1 is also the"),
    "json, index": (
        "json",
        '[{"prompt": "a", "sample_index": 1}, {"prompt": "b", "sample_index": 1}]',
        "row 1: sample_",
    ),
    "csv, index": ("csv", "prompt,sample_index\na,1\nb,2\nc,1\n", "line 4: sample_index 1 is also the sample_index of"),
    "parquet, index": ("parquet", [{"prompt": "a", "sample_index": 4}] * 2, "row 1: sample_index 4 is also the"),
    "jsonl, index null": (
        "jsonl",
        '{"prompt": "a", "sample_index": 1}\n{"prompt": "b", "sample_index": null}',
        "line 2: has no sample_index, but ",
    ),
    "json, index absent": (
        "json",
        '[{"prompt": "a"}, {"prompt": "b", "sample_index": 0}]',
        "row 0: has no sample_index",
    ),
    "csv, index null": ("csv", "prompt,sample_index\na,1\nb,\n", "line 3: has no sample_index, but "),
    "parquet, index null": (
        "parquet",
        [{"prompt": "a", "sample_index": 1}, {"prompt": "b", "sample_index": None}],
        "row 1: has no sample_index, but ",
    ),
    "csv, few cells": ("csv", 'prompt,uid\na,x\n"b\nc"\n', "line 4: has fewer cells than the first line"),
    "csv, many cells": ("csv", "prompt,uid\na,x\nb,y,z\n", "line 3: has more cells than the first line"),
}


@pytest.mark.parametrize("name", TASK_FILES)
def test_a_task_file(tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str) -> None:
    """The line names the file, the row and the key or the index, and nothing is written."""
    suffix, content, expected = TASK_FILES[name]
    path = write(tmp_path / f"tasks.{suffix}", content() if callable(content) else content)

    code = main(["rollout", str(CONFIG), f"data.path={path}", "--out", str(tmp_path / "out")])

    error = capfd.readouterr().err
    assert (2, 1) == (code, error.count("\n")), error
    assert error.startswith(f"turnwise: error: {path}")
    assert expected in error
    assert not (tmp_path / "out").exists()


CONFIGS: Final = {
    "yaml": ("rollout:\n  n: 1\n  n: 2\n", "line 3, column 3: duplicate key 'n'"),
    "toml": ("[rollout]\nn = 1\nn = 2\n", "at line 3"),
}


@pytest.mark.parametrize("suffix", CONFIGS)
@pytest.mark.parametrize("command", ["rollout", "train", "eval"])
def test_a_config(tmp_path: Path, capfd: pytest.CaptureFixture[str], suffix: str, command: str) -> None:
    """A key that a config gives twice is refused with its line."""
    text, expected = CONFIGS[suffix]
    path = write(tmp_path / f"run.{suffix}", text)

    code = main([command, str(path), "--out", str(tmp_path / "out")])

    error = capfd.readouterr().err
    assert (2, 1) == (code, error.count("\n")), error
    assert error.startswith(f"turnwise: error: {path}")
    assert expected in error


def test_servers_of_another_program(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A server that a file of MCP servers names twice is refused: only the last one would start."""
    server = '{"command": "true"}'
    path = write(tmp_path / "servers.json", f'{{"mcpServers": {{"a": {server}, "a": {server}}}}}')

    code = main(["rollout", str(CONFIG), f"tools=[{{name: mcp, file: {path}}}]", "--out", str(tmp_path / "out")])

    error = capfd.readouterr().err
    assert (2, 1) == (code, error.count("\n")), error
    assert f'{path}: the key "a" is given twice' in error


@pytest.mark.parametrize("wrong", ["source", "tools"])
def test_demonstrations(tmp_path: Path, capfd: pytest.CaptureFixture[str], wrong: str) -> None:
    """So are conversations for SFT and the schemas of their tools."""
    line = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]'
    source = write(tmp_path / "tune.jsonl", f"{line}}}\n{line}{', ' + line[1:] if wrong == 'source' else ''}}}\n")
    function = '"name": "f", "description": "f", "parameters": {}' + (', "name": "g"' if wrong == "tools" else "")
    schema = f'[{{"type": "function", "function": {{{function}}}}}]'
    tools = write(tmp_path / "tools.json", schema)
    words = ["--to", "sft", "--model", str(model_dir()), "--tools", str(tools)]

    code = main(["convert", str(source), *words, "--out", str(tmp_path / "out.parquet")])

    error = capfd.readouterr().err
    assert (2, 1) == (code, error.count("\n")), error
    place = f"{source}, line 2: invalid JSON" if wrong == "source" else f"{tools}: cannot be read"
    assert f'{place}: the key "{"messages" if wrong == "source" else "name"}" is given twice' in error
