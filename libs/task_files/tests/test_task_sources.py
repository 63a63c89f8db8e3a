"""Task sources: rows by name, wherever a config has a path of tasks."""

import json

import pytest
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st

from turnwise import NoConfig, Resources
from turnwise.config.file import structure_config, with_absolute_paths
from turnwise.errors import ConfigError, DataError, PluginError, TurnwiseError
from turnwise.plugin.host import Host
from turnwise_task_files import describe_sources, load_sources, load_tasks, parse_text, sources, split_options
from turnwise_task_files.plugin import add_hookspecs

SECTIONS = {"engine": "e", "agent": "good"}


@frozen
class SumOptions:
    size: int = 3
    wide: bool = False


@frozen
class Sums:
    """`sums:START?size=N`: questions whose answers are counted up from the start."""

    config: NoConfig
    resources: Resources

    def describe(self, text: str) -> str:
        start, options = self._read(text)
        return f"{options.size} sums from {start}"

    def rows(self, text: str):
        start, options = self._read(text)
        for number in range(options.size):
            if start + number == 13:
                raise ZeroDivisionError("unlucky")
            yield {"prompt": f"{start} + {number}?", "truth": start + number}

    def _read(self, text: str):
        start, options = parse_text(text, SumOptions)
        if not start.isdecimal():
            raise DataError(f"unknown start {start!r}; expected a number")
        return int(start), options


@pytest.fixture(autouse=True)
def host(monkeypatch):
    """A host whose only task source is `sums`."""
    host = Host()
    host.specs.collect(__import__("turnwise_task_files.plugin").plugin, "task_files")
    host.registry("task_sources").add("sums", Sums)
    monkeypatch.setattr(sources, "load_plugins", lambda _config: host)
    return host


def config_of(folder, **data):
    return structure_config(SECTIONS | {"data": data}, folder)


def test_a_path_names_a_source(tmp_path):
    """Its rows have the options that files have."""
    columns = {"ground_truth": "truth"}
    config = config_of(tmp_path, path="sums:5?size=4", columns=columns, offset=1, limit=2)
    assert [6, 7] == [task.ground_truth for task in load_tasks(config)]
    assert ["4 sums from 5"] == describe_sources(config)

    wide = {"path": "sums:50?size=20", "columns": columns}
    ordered = [task.ground_truth for task in load_tasks(config_of(tmp_path, **wide))]
    mixed = [task.ground_truth for task in load_tasks(config_of(tmp_path, **wide, shuffle=True))]
    assert ordered != mixed
    assert ordered == sorted(mixed)


def test_sources_and_files_mix(tmp_path):
    """Each keeps its name, without the options, and tasks of one text under two names differ in their uids."""
    (tmp_path / "file.jsonl").write_text('{"prompt": "1?"}\n')
    paths = [{"path": "sums:1?size=2"}, {"path": "sums:1?size=3", "name": "more"}, {"path": "file.jsonl"}]
    config = config_of(tmp_path, sources=paths, validation_path="sums:7")

    first, second, file = load_sources(config)

    assert [{"sums:1"}, {"more"}, {"file"}] == [{t.data_source for t in each} for each in (first, second, file)]
    assert 6 == len({task.uid for task in [*first, *second, *file]})
    assert ["2 sums from 1", "3 sums from 1", f"file {tmp_path / 'file.jsonl'}"] == describe_sources(config)
    data = {"path": "sums:1", "validation_path": "sums:7"}
    held_out = structure_config(SECTIONS | {"rollout": {"validation": True}, "data": data}, tmp_path)
    assert ["7 + 0?", "7 + 1?", "7 + 2?"] == [task.messages[0]["content"] for task in load_tasks(held_out)]


def test_a_file_comes_before_a_source(tmp_path):
    """Of one spelling; and only names of sources stay as they are where paths become absolute."""
    (tmp_path / "sums:5").write_text('{"prompt": "a file?"}\n')
    config = structure_config(SECTIONS | {"data": {"path": "sums:5", "format": "jsonl"}}, tmp_path)
    assert ["a file?"] == [task.messages[0]["content"] for task in load_tasks(config)]
    assert str(tmp_path / "sums:5") == with_absolute_paths(config).data.path
    assert "sums:6" == with_absolute_paths(config_of(tmp_path, path="sums:6")).data.path
    long = f"sums:{'9' * 5000}"
    assert long == with_absolute_paths(config_of(tmp_path, path=long)).data.path


@pytest.mark.parametrize(
    ("path", "error", "text"),
    [
        ("sum:5", PluginError, "sum:5: no such file, and unknown task source 'sum'; did you mean 'sums'?"),
        ("https://host/a", PluginError, "https://host/a: no such file, and unknown task source 'https'; known: sums"),
        ("sums:five", DataError, "sums:five: unknown start 'five'; expected a number"),
        ("sums:5?sise=2", DataError, "sums:5?sise=2: sise: unknown key; did you mean 'size'?"),
        ("sums:5?size=two", DataError, "sums:5?size=two: size: expected an integer, got 'two'"),
        ("sums:5?size", DataError, "sums:5?size: option 'size': expected NAME=VALUE"),
        ("sums:5?size=1&size=2", DataError, "sums:5?size=1&size=2: option 'size' is there twice"),
        ("sums:5?size=0", DataError, "sums:5?size=0: holds no rows"),
        ("sums:13", PluginError, "sums:13: the task source raised ZeroDivisionError: unlucky"),
        ("C:data.jsonl", DataError, "no such file"),
        ("./sums:5.jsonl", DataError, "no such file"),
    ],
)
def test_mistakes_are_one_line(tmp_path, path, error, text):
    """It starts with the path, and says what is allowed."""
    with pytest.raises(error) as caught:
        load_tasks(config_of(tmp_path, path=path))
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_the_kind(tmp_path, monkeypatch):
    """A config that lists its plugins must list the one that reads sources."""
    monkeypatch.setattr(sources, "load_plugins", lambda _config: Host())
    with pytest.raises(PluginError, match=r"^sums:5: no such file, and a task source needs the plugin 'task_files'"):
        load_tasks(config_of(tmp_path, path="sums:5"))


@given(st.text(max_size=30))
def test_any_text_is_read_or_refused(text):
    """The form of a text never raises anything but the errors of users."""
    try:
        rest, values = split_options(text)
    except TurnwiseError:
        return
    assert text.startswith(rest)
    json.dumps(values, default=str)


def test_the_hook_is_there():
    """And `ConfigError` of a source names the path too."""
    assert hasattr(add_hookspecs, "turnwise_impl")
    with pytest.raises(ConfigError, match="unknown key"):
        parse_text("1?no=2", SumOptions)
