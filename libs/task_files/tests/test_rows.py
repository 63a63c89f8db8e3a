"""Rows of files as tasks."""

import csv
import json
import os
import tempfile
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.errors import DataError
from turnwise.types import Task
from turnwise_task_files.rows import read_tasks, task_from_row

USER = {"role": "user", "content": "2+2?"}
VERL_ROW = {
    "data_source": "openai/gsm8k",
    "agent_name": "tool_agent",
    "prompt": [{"role": "system", "content": "Think."}, USER],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"split": "train", "index": 7, "tools_kwargs": {"calc": {"create_kwargs": {"ground_truth": "4"}}}},
}

OTHER_COLUMN = "data.columns.prompt=NAME reads the prompt from another column"
few = settings(max_examples=50, deadline=None)

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def write_jsonl(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_parquet(path: Path, rows: list[dict]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def error_of(path: Path, **options: object) -> str:
    """Load and return the one-line error."""
    with pytest.raises(DataError) as caught:
        read_tasks(path, **options)
    text = str(caught.value)
    assert text.startswith(str(path))
    assert "\n" not in text
    return text.removeprefix(str(path))


class TestRows:
    """Conversion of rows."""

    def test_own_form(self, tmp_path):
        """Every field of our own form is taken, and other columns are kept."""
        row = {
            "messages": [USER],
            "uid": "row-a",
            "sample_index": 3,
            "agent_name": "single_turn",
            "ground_truth": {"answer": 4},
            "data_source": "sums",
            "level": 2,
        }
        expected = Task(
            messages=(USER,),
            uid="row-a",
            sample_index=3,
            agent_name="single_turn",
            ground_truth={"answer": 4},
            data_source="sums",
            extra={"level": 2},
        )
        assert [expected] == read_tasks(write_jsonl(tmp_path / "t.jsonl", row))

    def test_verl_form(self, tmp_path):
        """A row of verl is read unchanged; its other columns stay in `extra`."""
        (task,) = read_tasks(write_jsonl(tmp_path / "t.jsonl", VERL_ROW))
        assert tuple(VERL_ROW["prompt"]) == task.messages
        assert (
            task.agent_name,
            task.data_source,
            task.ground_truth,
            task.sample_index,
        ) == ("tool_agent", "openai/gsm8k", "4", 7)
        assert {name: VERL_ROW[name] for name in ("ability", "reward_model", "extra_info")} == task.extra

    def test_the_truth_of_a_row_of_skyrl(self, tmp_path):
        """It lies in `reward_spec`, which verl calls `reward_model`."""
        row = {
            "prompt": [{"role": "user", "content": "2 + 2?"}],
            "reward_spec": {"method": "rule", "ground_truth": "4"},
        }
        (task,) = read_tasks(write_jsonl(tmp_path / "t.jsonl", row))
        assert ("4", row["reward_spec"]) == (task.ground_truth, task.extra["reward_spec"])

    @pytest.mark.parametrize(
        "message",
        [
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
            {"role": "function", "name": "f", "content": "4"},
        ],
    )
    def test_the_older_form_of_calls_is_refused(self, tmp_path, message):
        """The line names the form that replaced it."""
        row = {"prompt": [{"role": "user", "content": "2 + 2?"}, message]}
        with pytest.raises(DataError, match="use tool_calls and the role tool"):
            read_tasks(write_jsonl(tmp_path / "t.jsonl", row))

    @pytest.mark.parametrize(
        ("columns", "truth"),
        [
            pytest.param({"solution": "4"}, "4", id="TRL"),
            pytest.param({"solution": 4, "reward_model": {"ground_truth": "5"}}, "5", id="verl before TRL"),
            pytest.param({"solution": "4", "ground_truth": "6"}, "6", id="ours before TRL"),
            pytest.param({"reward_spec": json.dumps({"ground_truth": "7"})}, "7", id="SkyRL as text"),
            pytest.param({"solution": "4", "reward_spec": {"ground_truth": "8"}}, "8", id="SkyRL before TRL"),
        ],
    )
    def test_each_place_of_a_ground_truth_is_read(self, tmp_path, columns, truth):
        """No row of a peer is silently without a truth, and the columns stay for rewards that read them."""
        [task] = read_tasks(write_jsonl(tmp_path / "a.jsonl", {"prompt": "2+2?", **columns}))
        assert truth == task.ground_truth
        assert columns.keys() - {"ground_truth"} <= task.extra.keys()

    def test_reward_model_may_be_json_text(self, tmp_path):
        """`reward_model` and `extra_info` may be structs written as text."""
        row = VERL_ROW | {name: json.dumps(VERL_ROW[name]) for name in ("reward_model", "extra_info")}
        assert read_tasks(write_jsonl(tmp_path / "a.jsonl", VERL_ROW)) == read_tasks(
            write_jsonl(tmp_path / "b.jsonl", row)
        )

    def test_text_prompt_is_one_user_message(self, tmp_path):
        """A plain prompt becomes a user message."""
        (task,) = read_tasks(write_jsonl(tmp_path / "t.jsonl", {"prompt": "2+2?"}))
        assert task.messages == (USER,)

    def test_messages_win_over_prompt(self, tmp_path):
        """Where both are given, `prompt` is an ordinary column."""
        (task,) = read_tasks(write_jsonl(tmp_path / "t.jsonl", {"prompt": "raw", "messages": [USER]}))
        assert (task.messages, task.extra) == ((USER,), {"prompt": "raw"})

    def test_own_ground_truth_wins(self, tmp_path):
        """`ground_truth` wins over the one in `reward_model`, and may be false."""
        (task,) = read_tasks(write_jsonl(tmp_path / "t.jsonl", VERL_ROW | {"ground_truth": 0}))
        assert task.ground_truth == 0

    def test_a_column_can_be_ignored(self, tmp_path):
        """With null for `agent_name`, rows name no agent; an unknown column need not be there."""
        path = tmp_path / "tasks.jsonl"
        path.write_text(json.dumps({"prompt": "Hello", "agent_name": "tool_agent", "split": "a"}))
        (task,) = read_tasks(path, columns={"agent_name": None, "uid": None})
        assert ("", {"split": "a"}) == (task.agent_name, task.extra)

    def test_null_columns_are_as_absent(self, tmp_path):
        """Parquet gives null for a column that a row lacks."""
        row = {
            "prompt": "2+2?",
            "messages": None,
            "agent_name": None,
            "reward_model": None,
            "extra_info": None,
            "uid": None,
        }
        (task,) = read_tasks(write_jsonl(tmp_path / "t.jsonl", row))
        assert (task.agent_name, task.ground_truth, task.sample_index) == ("", None, 0)

    def test_tool_calls_and_parts(self, tmp_path):
        """An assistant message may have calls and no content, and content may be typed parts."""
        messages = [
            {"role": "developer", "content": [{"type": "text", "text": "hi", "image_url": None}]},
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]},
            {"role": "tool", "content": "", "tool_call_id": None},
        ]
        (task,) = read_tasks(write_jsonl(tmp_path / "t.jsonl", {"messages": messages}))
        expected = (
            {"role": "developer", "content": [{"type": "text", "text": "hi"}]},
            messages[1],
            {"role": "tool", "content": ""},
        )
        assert expected == task.messages

    @pytest.mark.parametrize(
        ("row", "expected"),
        [
            ({"extra_info": {"index": 5}}, 5),
            ({"extra_info": {"index": 5.0}}, 5),
            ({"extra_info": {"index": "train-5"}}, 9),
            ({"extra_info": {"index": -1}}, 9),
            ({"extra_info": {"index": True}}, 9),
            ({"extra_info": {"index": 5}, "sample_index": 6}, 6),
            ({}, 9),
        ],
    )
    def test_sample_index(self, row, expected):
        """The row's own index, else verl's, else its number."""
        assert expected == task_from_row({"prompt": "a", **row}, row_number=9).sample_index

    def test_numpy_and_arrow_values_become_plain(self):
        """A row from memory may hold scalars and arrays of other libraries."""
        row = {
            "prompt": np.array([USER], dtype=object),
            "extra_info": {"index": np.int64(4)},
            "n": np.float32(0.5),
            "a": np.arange(2),
            "s": pa.scalar("x"),
            "t": (1, 2),
        }
        task = task_from_row(row)
        assert (
            task.sample_index,
            task.extra,
        ) == (4, {"extra_info": {"index": 4}, "n": 0.5, "a": [0, 1], "s": "x", "t": [1, 2]})
        assert {int, float, list, str} == {type(v) for v in (task.sample_index, *list(task.extra.values())[1:])}

    @few
    @given(JSON_VALUES)
    def test_extra_is_kept(self, value):
        """Any JSON value of another column comes back as it was."""
        assert {"other": value} == task_from_row({"prompt": "a", "other": value}).extra


class TestUid:
    """Names that stay."""

    def test_derived_uid_is_plain_and_stable(self):
        """A derived uid is a known function of the content, without the characters that others split at."""
        uid = task_from_row(VERL_ROW).uid
        assert uid == task_from_row(VERL_ROW, row_number=5, where="elsewhere").uid
        assert uid == "22698ad0be3e2021"

    @few
    @given(st.text(min_size=1), st.integers(0, 50), st.text(min_size=1), st.integers(0, 50))
    def test_derived_uid_tells_content_and_index_apart(self, prompt, index, other_prompt, other_index):
        """Two rows share a uid exactly when their messages and index are equal."""
        uids = [
            task_from_row({"prompt": p, "extra_info": {"index": i}}).uid
            for p, i in ((prompt, index), (other_prompt, other_index))
        ]
        assert ((prompt, index) == (other_prompt, other_index)) == (uids[0] == uids[1])
        assert not set("_/") & set(uids[0])

    def test_given_uid_is_kept(self, tmp_path):
        """A text stays, an integer becomes one."""
        rows = [{"prompt": "a", "uid": "x_1"}, {"prompt": "a", "uid": 12}]
        assert [t.uid for t in read_tasks(write_jsonl(tmp_path / "t.jsonl", *rows))] == ["x_1", "12"]

    def test_repeated_rows_are_tasks_of_their_own(self, tmp_path):
        """A data set that repeats rows, index and all, can be read, and its uids do not depend on the slice."""
        path = write_jsonl(tmp_path / "t.jsonl", VERL_ROW, VERL_ROW, VERL_ROW)
        uid = task_from_row(VERL_ROW).uid
        assert [uid, f"{uid}-2", f"{uid}-3"] == [t.uid for t in read_tasks(path)]
        assert [f"{uid}-2"] == [t.uid for t in read_tasks(path, offset=1, limit=1)]

    def test_duplicates_name_both_rows(self, tmp_path):
        """A given uid is unique."""
        row = {"prompt": "a", "uid": "x"}
        path = write_jsonl(tmp_path / "t.jsonl", row, {"prompt": "b"}, row)
        assert f", line 3: uid 'x' is also the uid of {path}, line 1" == error_of(path)

    @pytest.mark.parametrize("uid", ["", True, 1.5, ["a"]])
    def test_uid_of_another_kind(self, tmp_path, uid):
        """Nothing but a text or an integer names a row."""
        path = write_jsonl(tmp_path / "t.jsonl", {"prompt": "a", "uid": uid})
        assert f", line 1: uid: expected a text that is not empty, got {uid!r}" == error_of(path)


class TestFiles:
    """The three formats, and slices of them."""

    def test_formats_agree(self, tmp_path):
        """The same rows are the same tasks in every format."""
        rows = [VERL_ROW, VERL_ROW | {"extra_info": VERL_ROW["extra_info"] | {"index": 8}}]
        (tmp_path / "t.json").write_text(json.dumps(rows, indent=1))
        jsonl, parquet = write_jsonl(tmp_path / "t.jsonl", *rows), write_parquet(tmp_path / "t.parquet", rows)
        expected = read_tasks(jsonl)
        assert expected == read_tasks(parquet)
        assert expected == read_tasks(tmp_path / "t.json")

    def test_parquet_nulls_in_messages_are_dropped(self, tmp_path):
        """The keys that Parquet adds to every message do not reach the chat template."""
        messages = [USER, {"role": "tool", "content": "4", "tool_call_id": "c1"}]
        (task,) = read_tasks(write_parquet(tmp_path / "t.parquet", [{"messages": messages}]))
        assert tuple(messages) == task.messages

    def test_parquet_of_pandas(self, tmp_path):
        """Categories, and integers with gaps, are read as their values."""
        table = pa.table(
            {
                "prompt": ["a", "b"],
                "data_source": pa.array(["x", "x"]).dictionary_encode(),
                "vector": pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float64(), 2)),
                "names": pa.array([["u"], []], pa.large_list(pa.large_string())),
            }
        )
        pq.write_table(table, tmp_path / "t.parquet")
        tasks = read_tasks(tmp_path / "t.parquet")
        assert [t.data_source for t in tasks] == ["x", "x"]
        assert [t.extra for t in tasks] == [{"vector": [1.0, 2.0], "names": ["u"]}, {"vector": [3.0, 4.0], "names": []}]

    def test_bom_and_blank_lines(self, tmp_path):
        """Byte-order marks do no harm, and blank lines are no rows."""
        path = tmp_path / "t.jsonl"
        path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\n  \n{"prompt": "\xc3\xa9"}')
        tasks = read_tasks(path)
        assert [(t.messages[0]["content"], t.sample_index) for t in tasks] == [("a", 0), ("é", 1)]
        (tmp_path / "t.json").write_bytes(b'\xef\xbb\xbf[{"prompt": "a"}]')
        assert tasks[:1] == read_tasks(tmp_path / "t.json")

    def test_format_overrides_suffix(self, tmp_path):
        """A file may be named as it likes."""
        path = write_jsonl(tmp_path / "t.json", {"prompt": "a"})
        assert len(read_tasks(path, format="jsonl")) == 1

    @few
    @given(st.integers(1, 12), st.integers(0, 14), st.none() | st.integers(1, 14), st.none() | st.integers(0, 3))
    def test_slices_and_shuffles(self, num_rows, offset, limit, shuffle_seed):
        """`offset` and `limit` cut the shuffled rows, the same at every call."""
        with tempfile.TemporaryDirectory() as folder:
            path = write_jsonl(Path(folder) / "t.jsonl", *({"prompt": str(i)} for i in range(num_rows)))
            whole = read_tasks(path, shuffle_seed=shuffle_seed)
            assert list(range(num_rows)) == sorted(t.sample_index for t in whole)
            if offset >= num_rows:
                assert "is past its" in error_of(path, offset=offset, limit=limit, shuffle_seed=shuffle_seed)
                return
            expected = whole[offset:] if limit is None else whole[offset : offset + limit]
            assert expected == read_tasks(path, offset=offset, limit=limit, shuffle_seed=shuffle_seed)

    def test_shuffling_shuffles(self, tmp_path):
        """The order depends on the seed and on nothing else."""
        path = write_jsonl(tmp_path / "t.jsonl", *({"prompt": str(i)} for i in range(20)))
        orders = [[t.sample_index for t in read_tasks(path, shuffle_seed=seed)] for seed in (1, 1, 2)]
        assert orders[0] == orders[1] != orders[2]

    @pytest.mark.parametrize("shuffle_seed", [None, 1])
    def test_a_limit_beyond_any_file(self, tmp_path, shuffle_seed):
        """The largest limit of a config leaves room for no offset."""
        path = write_jsonl(tmp_path / "t.jsonl", {"prompt": "a"}, {"prompt": "b"})
        assert 1 == len(read_tasks(path, offset=1, limit=2**63 - 1, shuffle_seed=shuffle_seed))

    def test_limit_stops_reading(self, tmp_path):
        """Rows behind the last one are not looked at."""
        path = tmp_path / "t.jsonl"
        path.write_text('{"prompt": "a"}\nbroken')
        assert len(read_tasks(path, limit=1)) == 1


class TestFileErrors:
    """One line for each file that cannot be read."""

    def test_missing_file(self, tmp_path):
        """The path is named."""
        assert error_of(tmp_path / "t.jsonl") == ": no such file"

    def test_directory(self, tmp_path):
        """A directory is no file."""
        (tmp_path / "t.jsonl").mkdir()
        assert error_of(tmp_path / "t.jsonl") == ": is a directory, not a file"

    def test_pipe(self, tmp_path):
        """A pipe is refused at once, since it may never have a writer."""
        os.mkfifo(tmp_path / "t.jsonl")
        assert error_of(tmp_path / "t.jsonl") == ": is a pipe or a device, not a file"

    def test_operating_system_error(self, tmp_path, monkeypatch):
        """Whatever the system says is passed on in one line."""

        def refuse(*_args: object) -> None:
            raise PermissionError(13, "Permission denied")

        path = write_jsonl(tmp_path / "t.jsonl", {"prompt": "a"})
        monkeypatch.setattr(Path, "open", refuse)
        assert error_of(path) == ": cannot be read: [Errno 13] Permission denied"

    @pytest.mark.parametrize("text", ["", "\n \n"])
    def test_empty_jsonl(self, tmp_path, text):
        """No rows is an error, not an empty list."""
        (tmp_path / "t.jsonl").write_text(text)
        assert error_of(tmp_path / "t.jsonl") == ": holds no rows"

    def test_empty_json_and_parquet(self, tmp_path):
        """The other formats say the same."""
        (tmp_path / "t.json").write_text("[]")
        assert error_of(tmp_path / "t.json") == ": holds no rows"
        pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "t.parquet")
        assert error_of(tmp_path / "t.parquet") == ": holds no rows"

    def test_unknown_suffix_and_format(self, tmp_path):
        """The known ones are listed."""
        assert error_of(tmp_path / "t.txt") == ": suffix '.txt' is none of .csv, .jsonl, .json, .parquet"
        assert error_of(tmp_path / "t.json", format="text") == ": format 'text' is none of csv, jsonl, json, parquet"

    def test_options_out_of_range(self, tmp_path):
        """`limit` and `offset` are checked before the file."""
        assert error_of(tmp_path / "t.jsonl", limit=0) == ": 'limit' must be at least 1, not 0"
        assert error_of(tmp_path / "t.jsonl", offset=-1) == ": 'offset' must be at least 0, not -1"

    def test_not_utf8(self, tmp_path):
        """The line and the byte of the whole file are named, in JSONL and in JSON."""
        data = b'{"prompt": "a"}\n{"prompt": "\xff"}\n'
        (tmp_path / "t.jsonl").write_bytes(data)
        assert f", line 2: not UTF-8 at byte {data.index(0xFF)} of the file" == error_of(tmp_path / "t.jsonl")
        (tmp_path / "t.json").write_bytes(data)
        assert f", line 2: not UTF-8 at byte {data.index(0xFF)} of the file" == error_of(tmp_path / "t.json")

    def test_invalid_json(self, tmp_path):
        """The line and the column are named."""
        (tmp_path / "t.jsonl").write_text('{"prompt": "a"}\n\n{"prompt": }\n')
        assert error_of(tmp_path / "t.jsonl") == ", line 3: invalid JSON at column 12: Expecting value"
        (tmp_path / "t.json").write_text('[{"prompt": "a"},\n{"prompt": }]')
        assert error_of(tmp_path / "t.json") == ", line 2: invalid JSON at column 12: Expecting value"

    def test_json_that_is_cut_off(self, tmp_path):
        """The line is the one that lacks its end, and not the one after it."""
        (tmp_path / "t.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"\n')
        assert error_of(tmp_path / "t.jsonl") == ", line 2: invalid JSON at column 15: Expecting ',' delimiter"
        (tmp_path / "t.json").write_text('[{"prompt": "a"},\n{"prompt": "b"}\n\n')
        assert error_of(tmp_path / "t.json") == ", line 2: invalid JSON at column 16: Expecting ',' delimiter"

    def test_json_that_python_alone_reads(self, tmp_path):
        """Python writes NaN, which no column that is read may have; and nesting has an end."""
        (tmp_path / "t.jsonl").write_text('{"prompt": NaN, "x": 1}')
        assert error_of(tmp_path / "t.jsonl") == ", line 1: prompt: nan is no JSON value"
        (tmp_path / "t.jsonl").write_text("[" * 100_000)
        assert error_of(tmp_path / "t.jsonl") == ", line 1: invalid JSON: its JSON is nested too deeply"
        (tmp_path / "t.jsonl").write_text('{"prompt": "a", "x": ' + "[" * 700 + "]" * 700 + "}")
        assert error_of(tmp_path / "t.jsonl") == ", line 1: nested too deeply"

    def test_json_is_no_list(self, tmp_path):
        """A `.json` file holds a list."""
        (tmp_path / "t.json").write_text("{}")
        assert error_of(tmp_path / "t.json") == ": expected a list of objects, got dict"

    def test_corrupt_parquet(self, tmp_path):
        """Bytes that are no Parquet file, and a file that was cut."""
        path = tmp_path / "t.parquet"
        path.write_bytes(b"PAR1 nothing PAR1")
        assert ": not a readable Parquet file: " in error_of(path)
        write_parquet(path, [VERL_ROW])
        path.write_bytes(path.read_bytes()[:-20])
        assert ": not a readable Parquet file: " in error_of(path)

    def test_parquet_text_that_is_not_utf8(self, tmp_path):
        """Arrow does not look at the bytes of a text; the reader does."""
        raw = pa.array([b"\xff"]).cast(pa.binary())
        column = pa.Array.from_buffers(pa.string(), 1, raw.buffers())
        pq.write_table(pa.table({"prompt": column}), tmp_path / "t.parquet")
        assert ": not a readable Parquet file: 'utf-8' codec" in error_of(tmp_path / "t.parquet")

    @pytest.mark.parametrize(
        ("column", "named"),
        [
            (pa.array([b"\x80\x04."]), "binary"),
            (pa.array([[{"bytes": b"a"}]]), "binary"),
            (pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0" * 16], pa.binary(16))), "extension<arrow.uuid>"),
        ],
    )
    def test_parquet_columns_of_other_types(self, tmp_path, column, named):
        """Bytes and extension types are refused by name; nothing is unpickled."""
        pq.write_table(pa.table({"prompt": ["a"], "odd": column}), tmp_path / "t.parquet")
        expected = f": column 'odd' has type {named}; only text, numbers, booleans, times, lists and structs are read"
        assert expected == error_of(tmp_path / "t.parquet")

    def test_parquet_times_and_decimals_become_text(self, tmp_path):
        """A column of them does not refuse the file, also within a struct, and null stays null."""
        day = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
        columns = {
            "at": pa.array([day, None], pa.timestamp("us", "UTC")),
            "nested": pa.array([{"at": day.date()}, {"at": None}], pa.struct([("at", pa.date32())])),
            "price": pa.array([Decimal("1.50"), None]),
            "took": pa.array([timedelta(seconds=90), None]),
        }
        pq.write_table(pa.table({"prompt": ["a", "b"], **columns}), tmp_path / "t.parquet")
        first, second = (task.extra for task in read_tasks(tmp_path / "t.parquet"))

        expected = {
            "at": "2026-01-02T03:04:05+00:00",
            "nested": {"at": "2026-01-02"},
            "price": "1.50",
            "took": "0:01:30",
        }
        assert expected == first
        assert {"at": None, "nested": {"at": None}, "price": None, "took": None} == second

    @pytest.mark.parametrize("odd", [pa.date32(), pa.date64(), pa.timestamp("ms"), pa.duration("s")], ids=str)
    def test_parquet_times_that_python_has_not(self, tmp_path, odd):
        """Arrow counts beyond the year 9999."""
        days = odd == pa.date32()
        column = pa.array([2**30 if days else 86_400_000 * 10**9], pa.int32() if days else pa.int64()).cast(odd)
        pq.write_table(pa.table({"prompt": ["a"], "at": column}), tmp_path / "t.parquet")
        assert error_of(tmp_path / "t.parquet").startswith(": not a readable Parquet file: ")

    def test_parquet_columns_of_one_name(self, tmp_path):
        """Only the last of them would be read."""
        pq.write_table(pa.table([["a"], ["b"]], names=["prompt", "prompt"]), tmp_path / "t.parquet")
        assert error_of(tmp_path / "t.parquet") == ": two columns are called 'prompt'"

    def test_parquet_extension_that_nobody_registered(self, tmp_path):
        """A type that only its metadata names is refused as well."""
        field = pa.field("odd", pa.string(), metadata={"ARROW:extension:name": "arrow.py_extension_type"})
        pq.write_table(
            pa.table([["a"], ["b"]], schema=pa.schema([("prompt", pa.string()), field])), tmp_path / "t.parquet"
        )
        assert "has type extension<arrow.py_extension_type>;" in error_of(tmp_path / "t.parquet")


class TestRowErrors:
    """One line for each row that is no task."""

    @pytest.mark.parametrize(
        ("row", "expected"),
        [
            (["a"], "expected an object, got list"),
            ({"question": "a"}, f"has neither 'messages' nor 'prompt'; {OTHER_COLUMN}"),
            ({"messages": []}, "messages is empty"),
            ({"prompt": ""}, "prompt is empty"),
            ({"messages": "hi"}, "messages: expected a list of {role, content}, got str"),
            ({"prompt": {"role": "user"}}, "prompt: expected a list of {role, content}, got dict"),
            ({"messages": [USER, "hi"]}, "messages[1]: expected {role, content}, got str"),
            (
                {"messages": [{"role": "humn", "content": "a"}]},
                "messages[0].role: 'humn' is none of system, user, assistant, tool, developer",
            ),
            (
                {"messages": [{"content": "a"}]},
                "messages[0].role: None is none of system, user, assistant, tool, developer",
            ),
            (
                {"messages": [{"role": "user"}]},
                "messages[0].content: expected a text or a list of typed parts, got null",
            ),
            (
                {"messages": [{"role": "user", "content": [{"text": "a"}]}]},
                "messages[0].content: expected a text or a list of typed parts, got list",
            ),
            (
                {"messages": [{"role": "assistant", "content": "", "tool_calls": "x"}]},
                "messages[0].tool_calls: expected a list of objects, got str",
            ),
            (
                {"messages": [{"role": "assistant", "content": "", "tool_calls": ["x"]}]},
                "messages[0].tool_calls: expected a list of objects, got list",
            ),
            ({"prompt": "a", "sample_index": "x"}, "sample_index: expected an integer from 0 to 2**63 - 1, got 'x'"),
            ({"prompt": "a", "sample_index": -1}, "sample_index: expected an integer from 0 to 2**63 - 1, got -1"),
            ({"prompt": "a", "agent_name": 3}, "agent_name: expected a text, got int"),
            ({"prompt": "a", "data_source": ["b"]}, "data_source: expected a text, got list"),
            ({"prompt": "a", "extra_info": [1]}, "extra_info: expected an object, got list"),
            ({"prompt": "a", "reward_model": "[]"}, "reward_model: expected an object, got list"),
            (
                {"prompt": "a", "reward_model": "rule"},
                "reward_model: not a JSON object: it is not valid JSON: Expecting value at character 0",
            ),
            (
                {"prompt": "a", "x": {"y": ["\ud800"]}},
                "x.y[0]: the text holds half of a surrogate pair, which is no character",
            ),
        ],
    )
    def test_text(self, tmp_path, row, expected):
        """The error names the line, the place in the row and the expected value."""
        path = write_jsonl(tmp_path / "t.jsonl", {"prompt": "fine"}, row)
        assert f", line 2: {expected}" == error_of(path)

    def test_parquet_names_the_row(self, tmp_path):
        """Rows of Parquet and JSON lists are counted from 0."""
        path = write_parquet(tmp_path / "t.parquet", [{"prompt": "a"}, {"prompt": None}])
        assert error_of(path) == f", row 1: has neither 'messages' nor 'prompt'; {OTHER_COLUMN}"
        (tmp_path / "t.json").write_text('[{"prompt": "a"}, 3]')
        assert error_of(tmp_path / "t.json") == ", row 1: expected an object, got int"

    @pytest.mark.parametrize(("value", "named"), [(float("nan"), "nan"), ({1, 2}, "set"), (np.float64("inf"), "inf")])
    def test_values_that_json_has_not(self, value, named):
        """A row from memory may hold values that no file can."""
        with pytest.raises(DataError, match=rf"^row 3: x\[0\]: {named} is no JSON value$"):
            task_from_row({"prompt": "a", "x": [value]}, where="row 3")


class TestColumns:
    """Other names of columns."""

    def test_a_data_set_of_questions_and_answers(self, tmp_path):
        """The named columns are understood, and the others are kept."""
        path = write_jsonl(tmp_path / "t.jsonl", {"question": "2+2?", "answer": "4", "level": 1})
        (task,) = read_tasks(path, columns={"prompt": "question", "ground_truth": "answer"})
        assert ((USER,), "4", {"level": 1}) == (task.messages, task.ground_truth, task.extra)
        assert task.uid == read_tasks(write_jsonl(tmp_path / "u.jsonl", {"prompt": "2+2?"}))[0].uid

    def test_names_may_be_exchanged(self, tmp_path):
        """A column with an understood name may have another meaning."""
        path = write_jsonl(tmp_path / "t.jsonl", {"prompt": "4", "ground_truth": "2+2?"})
        (task,) = read_tasks(path, columns={"prompt": "ground_truth", "ground_truth": "prompt"})
        assert ((USER,), "4") == (task.messages, task.ground_truth)

    def test_errors(self, tmp_path):
        """The error names a missing column and the existing ones, and a file without a prompt has the option."""
        path = write_jsonl(tmp_path / "t.jsonl", {"question": "2+2?", "answer": "4"})
        text = error_of(path, columns={"prompt": "questions"})
        assert text == ", line 1: has no column 'questions'; its columns are question, answer"
        assert error_of(path) == f", line 1: has neither 'messages' nor 'prompt'; {OTHER_COLUMN}"


class TestCsv:
    """Comma-separated files."""

    @given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1), min_size=1))
    @few
    def test_cells_are_text(self, prompts):
        """Quotes, commas and line breaks within cells are read as they were written."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "t.csv")
            with path.open("w", encoding="utf-8", newline="") as file:
                csv.writer(file, quoting=csv.QUOTE_ALL).writerows([["prompt"], *([each] for each in prompts)])
            assert prompts == [task.messages[0]["content"] for task in read_tasks(path)]

    def test_numbers_and_empty_cells(self, tmp_path):
        """The index is a number, an answer keeps its zeros, an empty cell is null, and a BOM is dropped."""
        text = "\ufeffprompt,sample_index,ground_truth,note\n2+2?,7,007,\n"
        (tmp_path / "t.CSV").write_text(text, encoding="utf-8")
        (task,) = read_tasks(tmp_path / "t.CSV")
        assert (7, "007", {"note": None}) == (task.sample_index, task.ground_truth, task.extra)

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("prompt\na,b\n", ", line 2: has more cells than the first line, which names the columns"),
            ('prompt\n"a\n', ", line 2: invalid CSV: unexpected end of data"),
            ("prompt\n", ": holds no rows"),
            (
                "prompt,sample_index\na,-1\n",
                ", line 2: sample_index: expected an integer from 0 to 2**63 - 1, got '-1'",
            ),
            (
                f"prompt,sample_index\na,{'9' * 5000}\n",
                f", line 2: sample_index: expected an integer from 0 to 2**63 - 1, got '{'9' * 59}",
            ),
            ("prompt,prompt\na,b\n", ": two columns are called 'prompt'"),
        ],
    )
    def test_errors(self, tmp_path, text, expected):
        """Each is one line with the file and the line."""
        (tmp_path / "t.csv").write_text(text)
        assert expected == error_of(tmp_path / "t.csv")
