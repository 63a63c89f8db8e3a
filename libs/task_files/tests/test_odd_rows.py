"""Rows of other programs' data sets: values without a number, conversations with answers, ShareGPT, Parquet's nulls."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from turnwise.errors import DataError
from turnwise_task_files.rows import read_tasks, task_from_row

USER, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
SYSTEM = {"role": "system", "content": "Be brief."}
FORMATS = ("jsonl", "json", "parquet")


def write(folder, rows, kind="jsonl"):
    """Write rows as one of the formats, as Python's and Arrow's own writers do."""
    path = folder / f"tasks.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif kind == "json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path, **options):
    """Return the tasks and the warnings."""
    with capture_logs() as logs:
        tasks = read_tasks(path, **options)
    return tasks, [entry for entry in logs if entry["log_level"] == "warning"]


# Numbers that JSON does not have

PLACES = {
    "a column": lambda value: {"pass_rate": value},
    "a struct": lambda value: {"extra_info": {"pass_rate": value, "split": "a"}},
    "a list": lambda value: {"scores": [0.5, value]},
    "a struct in a list": lambda value: {"runs": [{"score": value}, {"score": 0.5}]},
    "reward_model": lambda value: {"reward_model": {"ground_truth": "4", "weight": value}},
    "arguments of a tool": lambda value: {"extra_info": {"tools_kwargs": {"calc": {"scale": value}}}},
}


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
def test_a_column_that_nobody_reads_may_have_no_number(tmp_path, kind, place, number):
    """It is null, the other values stay, and one warning for the file counts the rows and names the first."""
    rows = [{"prompt": "a", **place(0.5)}, {"prompt": "b", **place(float(number))}, {"prompt": "c", **place(0.25)}]
    path = write(tmp_path, [*rows, {"prompt": "d", **place(float(number))}], kind)

    tasks, warnings = read(path)

    expected = task_from_row(rows[1] | place(None), row_number=1)
    assert tasks[1].extra == expected.extra
    assert tasks[0].extra == task_from_row(rows[0]).extra
    (warning,) = warnings
    assert warning["rows"] == 2
    assert warning["first"] == f"{path}, {'line 2' if kind == 'jsonl' else 'row 1'}"
    assert warning["columns"] == next(name for name in place(0.0))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    "row",
    [
        {"ground_truth": float("nan")},
        {"reward_model": {"ground_truth": float("nan")}},
        {"sample_index": float("inf")},
        {"uid": float("nan")},
        {"agent_name": float("nan")},
        {"prompt": [{"role": "user", "content": "a", "weight": float("nan")}]},
    ],
    ids=["ground_truth", "ground_truth of verl", "sample_index", "uid", "agent_name", "prompt"],
)
def test_a_column_that_is_read_needs_its_values(tmp_path, kind, row):
    """A truth or a name that is no number is refused, by row and column."""
    path = write(tmp_path, [{"prompt": "a", **row}], kind)
    with pytest.raises(DataError, match=r"(line 1|row 0): .*(nan|inf) is no JSON value"):
        read_tasks(path)


def test_a_renamed_column_is_read(tmp_path):
    """The names of `data.columns` decide which columns are read."""
    path = write(tmp_path, [{"prompt": "a", "answer": float("nan"), "ground_truth": 1}], "parquet")
    with pytest.raises(DataError, match="ground_truth: nan is no JSON value"):
        read_tasks(path, columns={"ground_truth": "answer"})


def test_a_broken_json_file_stays_one(tmp_path):
    """Only the three names of numbers are read; what is no JSON for another reason is refused as before."""
    path = tmp_path / "t.jsonl"
    path.write_text('{"prompt": "a", "x": NaN, "x": 1}')
    with pytest.raises(DataError, match='the key "x" is given twice'):
        read_tasks(path)
    path.write_text('{"prompt": "a", "x": Nan}')
    with pytest.raises(DataError, match="invalid JSON at column 22"):
        read_tasks(path)


# Conversations that are no prompts

ODD = {
    "an answer at the end": ([USER, ANSWER], "end with an assistant message"),
    "tool calls at the end": (
        [USER, {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],
        "end with an assistant message",
    ),
    "a system message alone": ([SYSTEM], "have no message but a system message"),
    "a developer message alone": ([{"role": "developer", "content": "x"}], "have no message but a system message"),
    "an empty user message": ([SYSTEM, {"role": "user", "content": ""}], "have a message without content"),
    "a user message of spaces": ([{"role": "user", "content": " \n"}], "have a message without content"),
    "a user message of no parts": ([{"role": "user", "content": []}], "have a message without content"),
    "an empty part": ([{"role": "user", "content": [{"type": "text", "text": ""}]}], "have a message without content"),
}


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("messages", "text"), ODD.values(), ids=ODD)
def test_an_odd_prompt_is_told_once(tmp_path, kind, messages, text):
    """The task is read as it is; one warning counts the rows and names the first of them."""
    in_parts = any(isinstance(message["content"], list) for message in messages)  # a column of Parquet has one type
    plain = [{**USER, "content": [{"type": "text", "text": "2+2?"}]}] if in_parts else [USER]
    messages = [message for message in messages if not in_parts or message is not SYSTEM]
    rows = [{"prompt": plain}, {"prompt": messages}, {"prompt": plain}, {"prompt": messages}]

    tasks, warnings = read(write(tmp_path, rows, kind))

    assert len(tasks) == 4
    (warning,) = warnings
    assert text in warning["event"]
    assert (warning["rows"], warning["of"]) == (2, 4)
    assert warning["first"].endswith("line 2" if kind == "jsonl" else "row 1")


def test_each_kind_is_told_separately(tmp_path):
    """Kinds do not hide each other, a plain data set is silent, and rows beyond the limit do not count."""
    rows = [{"prompt": [USER]}, *({"prompt": messages} for messages, _text in ODD.values())]
    assert len(read(write(tmp_path, rows))[1]) == 3
    assert read(write(tmp_path, rows), limit=1)[1] == []
    _, warnings = read(write(tmp_path, rows), offset=1, limit=2)
    assert [(each["rows"], each["of"]) for each in warnings] == [(2, 2)]


# ShareGPT

SHARE_GPT = [
    {"from": "system", "value": "Be brief."},
    {"from": "human", "value": "2+2?"},
    {"from": "gpt", "value": "4"},
    {"from": "user", "value": "And 3+3?"},
]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("column", ["conversations", "messages", "prompt", "dialogue"])
def test_share_gpt(tmp_path, kind, column):
    """Messages of `from` and `value` are those of `role` and `content`; `conversations` is read as `messages` is."""
    path = write(tmp_path, [{column: SHARE_GPT, "id": "a"}], kind)
    columns = {"messages": "dialogue"} if column == "dialogue" else {}

    ((task,), warnings) = read(path, columns=columns)

    assert task.messages == (SYSTEM, USER, ANSWER, {"role": "user", "content": "And 3+3?"})
    assert (dict(task.extra), warnings) == ({"id": "a"}, [])


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"from": "function_call", "value": "{}"}, "function_call"),
        ({"from": "alien", "value": "x"}, "'alien' is none of"),
        ({"from": "human"}, "expected a text"),
        ({"from": "human", "value": None}, "expected a text"),
        ({"from": "human", "role": "user", "value": "x"}, "both"),
    ],
    ids=["calls", "unknown", "no value", "null", "both forms"],
)
def test_share_gpt_that_is_refused(tmp_path, message, text):
    """The line names the row and the message."""
    with pytest.raises(DataError, match=rf"line 1: conversations\[1\].*{text}"):
        read_tasks(write(tmp_path, [{"conversations": [SHARE_GPT[1], message]}]))


# Truths


def test_a_solution_of_trl(tmp_path):
    """TRL's data sets have the truth in `solution`; a column that has the truth by another name wins."""
    rows = [{"prompt": "a", "solution": "4"}, {"prompt": "b", "solution": "work", "ground_truth": "5"}]
    tasks, _ = read(write(tmp_path, rows))
    assert [task.ground_truth for task in tasks] == ["4", "5"]
    assert tasks[0].extra["solution"] == "4"
    ((task,), _) = read(write(tmp_path, [{"prompt": "a", "solution": "work, so 4", "answer": "4"}]))
    assert task.ground_truth is None  # two columns could be meant


# Parquet's nulls

DEEP = st.fixed_dictionaries(
    {}, optional={"x": st.integers(0, 9), "y": st.fixed_dictionaries({"z": st.text(max_size=2)})}
)
KWARGS = st.dictionaries(
    st.sampled_from(["calc", "search", "run"]),
    st.fixed_dictionaries(
        {},
        optional={
            "create_kwargs": st.dictionaries(st.sampled_from("abc"), st.text(max_size=3), min_size=1),
            "limit": st.integers(0, 9),
            "names": st.lists(st.text(max_size=2), max_size=2),
            "deep": DEEP,
        },
    ),
)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(KWARGS, KWARGS.filter(bool) | st.none()), min_size=1, max_size=4),
    index=st.booleans(),
)
def test_formats_give_equal_tasks(tmp_path_factory, rows, index):
    """A column of Parquet gives each row the keys of all rows; the ones that a row did not have are removed."""
    folder = tmp_path_factory.mktemp("rows")
    made = []
    for number, (tools, interaction) in enumerate(rows):
        info = {"split": "a", "tools_kwargs": tools, "interaction_kwargs": interaction}
        info = {name: value for name, value in info.items() if value not in (None, {})}
        made.append({"prompt": [USER], "extra_info": info | ({"index": number} if index else {})})
    try:
        parquet = read_tasks(write(folder, made, "parquet"))
    except pa.ArrowNotImplementedError:  # Parquet has no structs without a field
        return

    assert parquet == read_tasks(write(folder, made, "jsonl")) == read_tasks(write(folder, made, "json"))


def test_nulls_of_other_columns_stay(tmp_path):
    """A null may mean something there."""
    rows = [{"prompt": "a", "extra_info": {"split": None, "tools_kwargs": {"a": {"x": 1}}}, "level": None}]
    for kind in FORMATS:
        ((task,), _) = read(write(tmp_path, rows, kind))
        assert task.extra == {"extra_info": {"split": None, "tools_kwargs": {"a": {"x": 1}}}, "level": None}


def test_kwargs_of_numpy():
    """Rows from memory are treated alike."""
    arguments = {"a": None, "b": {"x": None, "y": np.int64(1)}}
    task = task_from_row({"prompt": "a", "extra_info": {"tools_kwargs": arguments}})
    assert task.extra["extra_info"]["tools_kwargs"] == {"b": {"y": 1}}
