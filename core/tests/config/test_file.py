"""Config files: YAML 1.2 and TOML, refusals, overrides, and writing YAML."""

import textwrap
from pathlib import Path

import pytest

from turnwise.config.file import (
    MAX_BYTES,
    MAX_DEPTH,
    apply_overrides,
    dump_yaml,
    load_config,
    read_mapping,
    with_absolute_paths,
)
from turnwise.config.parts import ToolChoice
from turnwise.config.run import (
    Choice,
    DataConfig,
    RunConfig,
)
from turnwise.errors import ConfigError

MINIMAL = "data: {path: t.jsonl}\nagent: a\nengine: e\n"


def written(folder: Path, content: str | bytes, file: str = "run.yaml") -> Path:
    path = folder / file
    path.write_bytes(content if isinstance(content, bytes) else textwrap.dedent(content).encode())
    return path


def complaint(call, *arguments: object) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    return str(caught.value)


def test_a_config_is_read_with_its_folder_and_defaults(tmp_path):
    """The smallest file makes a whole config."""
    config = load_config(written(tmp_path, MINIMAL))
    expected = RunConfig(data=DataConfig(path="t.jsonl"), agent=Choice("a"), engine=Choice("e"), base_dir=tmp_path)
    assert expected == config
    assert tmp_path / "t.jsonl" == config.locate(config.data.path)


def test_a_dict_is_a_config(tmp_path, monkeypatch):
    """Its paths start from the working directory, overrides apply to it, and the dict itself stays as it is."""
    monkeypatch.chdir(tmp_path)
    content = {"data": {"path": "t.jsonl"}, "agent": "a", "engine": "e"}
    assert load_config(written(tmp_path, MINIMAL)) == load_config(content)
    assert 7 == load_config(content, ["rollout.n=7"]).rollout.n
    assert content == {"data": {"path": "t.jsonl"}, "agent": "a", "engine": "e"}
    assert "the config with overrides: rollout.m" in complaint(load_config, content, ["rollout.m=7"])


def test_the_folder_does_not_depend_on_how_the_file_was_named(tmp_path, monkeypatch):
    """A relative file name means the same folder as an absolute one."""
    path = written(tmp_path, MINIMAL)
    monkeypatch.chdir(tmp_path)
    assert load_config(path) == load_config("run.yaml")


def test_an_anchored_config_means_the_same_in_any_folder(tmp_path):
    """Relative paths become absolute; package paths and unset paths stay."""
    path = written(tmp_path, MINIMAL + "model: {path: 'package:p', chat_template: c}\ntools_file: /abs/t\n")
    config = with_absolute_paths(load_config(path))
    assert (config.data.path, config.data.validation_path) == (str(tmp_path / "t.jsonl"), None)
    assert (config.model.path, config.model.chat_template) == ("package:p", str(tmp_path / "c"))
    assert config.tools_file == "/abs/t"


def test_toml_and_yaml_mean_the_same(tmp_path):
    """Users may choose."""
    yaml = written(
        tmp_path,
        """\
        data: {path: t}
        agent: {name: a, max_turns: 3}
        engine: e
        rollout:
          n: 4
          sampling: {temperature: 1e-1, stop: [x]}
        """,
    )
    toml = written(
        tmp_path,
        """\
        engine = "e"
        [data]
        path = "t"
        [agent]
        name = "a"
        max_turns = 3
        [rollout]
        n = 4
        sampling = {temperature = 1e-1, stop = ["x"]}
        """,
        "run.toml",
    )
    assert load_config(toml) == load_config(yaml)


@pytest.mark.parametrize(
    ("scalar", "value"),
    [
        ("1e-3", 0.001),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("-1.", -1.0),
        ("1.5E+2", 150.0),
        ("12", 12),
        ("+3", 3),
        ("012", 12),
        ("0o17", 15),
        ("0x1F", 31),
        ("1_000", "1_000"),
        ("3:30", "3:30"),
        ("2026-01-01", "2026-01-01"),
        ("yes", "yes"),
        ("No", "No"),
        ("on", "on"),
        ("OFF", "OFF"),
        ("y", "y"),
        ("true", True),
        ("False", False),
        ("tRUE", "tRUE"),
        ("~", None),
        ("null", None),
        ("", None),
        ("''", ""),
        ("'12'", "12"),
        ('"true"', "true"),
        ("=", "="),
        ("1e", "1e"),
        (".", "."),
        ("0b1", "0b1"),
    ],
)
def test_scalars_mean_what_yaml_1_2_says(tmp_path, scalar, value):
    """YAML 1.1 made numbers of times, booleans of Norway, and text of 1e3."""
    found = read_mapping(written(tmp_path, f"key: {scalar}\n"))["key"]
    assert (type(value), value) == (type(found), found)


def test_keys_are_text_as_they_stand(tmp_path):
    """`on` and `<<` are keys like any other."""
    assert read_mapping(written(tmp_path, "on: 1\n<<: {a: 1}\n")) == {"on": 1, "<<": {"a": 1}}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a: &x 1\nb: *x\n", "line 1, column 4: aliases and anchors are refused"),
        ("a: *x\n", "line 1, column 4: aliases and anchors are refused"),
        (
            "a: !!python/name:os.system x\n",
            "line 1, column 4: tags are refused: tag:yaml.org,2002:python/name:os.system",
        ),
        ("a: !include x\n", "line 1, column 4: tags are refused: !include"),
        ("a: 1\nb: 2\na: 3\n", "line 3, column 1: duplicate key 'a'"),
        ("a:\n  - {b: 1, 'b': 2}\n", "line 2, column 12: duplicate key 'b'"),
        ("1: 2\n", "line 1, column 1: keys must be text; put this one in quotes"),
        ("? [a]\n: 1\n", "line 1, column 3: keys must be text; put this one in quotes"),
        ("a: 1\n---\nb: 2\n", "expected a single document in the stream: but found another document"),
        ("a: [\n", "line 2, column 1: while parsing a flow node"),
        ("a: b: c\n", "line 1, column 5: mapping values are not allowed here"),
        ("a: \x01\n", "unacceptable character #x0001"),
        ('a: {b: ["\\ud800"]}\n', "a.b.0: the text is not valid Unicode"),
        ("a: 9223372036854775808\n", "a: the number does not fit 64 bits"),
        (f"a: {'9' * 5000}\n", "a: the number does not fit 64 bits"),
        ("a: {b: -.inf}\n", "a.b: expected text, a finite number, true, false or null, got -inf"),
        ("a: .NaN\n", "a: expected text, a finite number, true, false or null, got nan"),
        ("a: 1e999\n", "a: expected text, a finite number"),
        ("", "the file is empty"),
        ("# only a comment\n", "the file is empty"),
        ("[1, 2]\n", "expected keys with values, got [1, 2]"),
        ("just text\n", "expected keys with values, got 'just text'"),
        (b"a: \xff\n", "expected UTF-8 text; byte 3 is not"),
        (b"a: " + b"x" * MAX_BYTES, f"the file is larger than {MAX_BYTES} bytes"),
        ("a: " + "[" * MAX_DEPTH + "]" * MAX_DEPTH, f"line 1, column 35: values are nested more than {MAX_DEPTH}"),
        ("[" * 100_000, f"values are nested more than {MAX_DEPTH} levels deep"),
        ("- " * 100_000, f"values are nested more than {MAX_DEPTH} levels deep"),
    ],
)
def test_yaml_that_a_config_does_not_need_is_refused(tmp_path, content, expected):
    """The error is one line with the file, and the place where there is one."""
    path = written(tmp_path, content)
    line = complaint(read_mapping, path)
    assert line.startswith(f"{path}: ")
    assert expected in line
    assert len(line.splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a = \n", "Invalid value (at line 1, column 5)"),
        ("a = 1\na = 2\n", "Cannot overwrite a value"),
        ("a = 2026-01-01\n", "a: expected text, a finite number, true, false or null, got 2026-01-01"),
        ("[a]\nb = inf\n", "a.b: expected text, a finite number"),
        (f"a = {'9' * 5000}\n", "Exceeds the limit"),
        ("a = " + "[" * 100_000, f"values are nested more than {MAX_DEPTH} levels deep"),
        (".".join("a" * 100) + " = 1\n", f"values are nested more than {MAX_DEPTH} levels deep"),
        ("a = 9223372036854775808\n", "a: the number does not fit 64 bits"),
    ],
)
def test_toml_that_a_config_cannot_hold_is_refused(tmp_path, content, expected):
    """Dates and numbers without end have no place in a config."""
    path = written(tmp_path, content, "run.toml")
    line = complaint(read_mapping, path)
    assert line.startswith(f"{path}: ")
    assert expected in line
    assert len(line.splitlines()) == 1


def test_an_empty_toml_file_lacks_its_keys(tmp_path):
    """It is a mapping without keys, so the keys that are missing are named."""
    path = written(tmp_path, "", "run.toml")
    lines = complaint(load_config, path).splitlines()
    assert [f"{path}: {key}: missing" for key in ("data", "agent", "engine")] == [
        line.partition(";")[0] for line in lines
    ]


def test_files_that_cannot_be_read_say_why(tmp_path):
    """The path comes first, then the reason."""
    missing = tmp_path / "none.yaml"
    assert f"{missing}: No such file or directory" == complaint(load_config, missing)
    (tmp_path / "folder.yaml").mkdir()
    assert complaint(load_config, tmp_path / "folder.yaml").endswith("folder.yaml: Is a directory")
    other = written(tmp_path, "{}", "run.json")
    assert f"{other}: expected a file that ends in .yaml, .yml or .toml" == complaint(load_config, other)


def test_a_deleted_working_directory_is_named(tmp_path, monkeypatch):
    """A config needs it, even if all of its paths are absolute."""
    path = written(tmp_path, MINIMAL)
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert complaint(load_config, path) == f"{path}: the working directory no longer exists; change to another one"


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path):
    """Some editors write one."""
    assert read_mapping(written(tmp_path, b"\xef\xbb\xbfa: 1\n")) == {"a": 1}
    assert read_mapping(written(tmp_path, b"\xef\xbb\xbfa = 1\r\n", "x.toml")) == {"a": 1}


def test_every_mismatch_is_a_line_with_the_file(tmp_path):
    """All are reported at once, and the source says whether overrides took part."""
    path = written(tmp_path, MINIMAL + "rollout: {n: 0}\nagnt: x\n")
    expected = ["rollout.n: must be >= 1: 0", "agnt: unknown key; did you mean 'agent'?"]
    assert [f"{path}: {line}" for line in expected] == complaint(load_config, path).splitlines()
    lines = complaint(load_config, path, ["rollout.sed=1"]).splitlines()
    assert f"{path} with overrides: rollout.sed: unknown key; did you mean 'seed'?" in lines


def test_overrides_change_what_the_file_says(tmp_path):
    """They are applied in order, to present and to missing values."""
    path = written(tmp_path, MINIMAL + "tools: [x]\n")
    overrides = ["rollout.n=8", "rollout.n=2", "agent.max_turns=3", "tools.1=y", "tools.0.k=[1, 1e3]", "reward=r"]
    config = load_config(path, [*overrides, "rollout.sampling.stop=['3', x]", "observers.0=o"])
    assert config.rollout.n == 2
    assert Choice("a", {"max_turns": 3}) == config.agent
    assert (ToolChoice("x", {"k": [1, 1000.0]}), ToolChoice("y")) == config.tools
    assert Choice("r") == config.reward
    assert config.rollout.sampling.stop == ("3", "x")
    assert (Choice("o"),) == config.observers


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("1", 1),
        ("1e-3", 0.001),
        ("", None),
        ("null", None),
        ("true", True),
        ("yes", "yes"),
        ("'1'", "1"),
        ('"a b"', "a b"),
        ("''", ""),
        ("[1, {a: b}]", [1, {"a": "b"}]),
        ("{}", {}),
        ("You are: kind # really", "You are: kind # really"),
        ("- x", "- x"),
        ("*x", "*x"),
        ("a=b", "a=b"),
        ("  7 ", 7),
    ],
)
def test_the_value_of_an_override_is_one_scalar_or_yaml_in_brackets_or_quotes(value, expected):
    """Text needs no quotes, whatever YAML would make of a colon or a hash in it."""
    found = apply_overrides({}, [f"k.v={value}"])["k"]["v"]
    assert (type(expected), expected) == (type(found), found)


def test_overrides_leave_what_they_were_given_alone():
    """The same base may be used with other overrides."""
    base = {"a": {"b": [1]}, "c": None}
    assert apply_overrides(base, ["a.b.0=2", "c.d.0=5"]) == {"a": {"b": [2]}, "c": {"d": [5]}}
    assert base == {"a": {"b": [1]}, "c": None}


def test_a_bare_name_keeps_the_options_of_a_section_that_has_it():
    """The override in the help's example keeps the file's other values."""
    base = {"engine": {"name": "vllm", "max_context": 9}, "tools": [{"name": "x", "k": 1}], "agent": "a"}
    assert base == apply_overrides(base, ["engine=vllm", "tools.0=x", "agent=a"])
    assert apply_overrides(base, ["engine=verl", "tools.0=y"]) == {"engine": "verl", "tools": ["y"], "agent": "a"}
    assert apply_overrides(base, ["engine={name: vllm}"])["engine"] == {"name": "vllm"}
    assert apply_overrides(base, ["engine="])["engine"] is None


@pytest.mark.parametrize("section", [{"name": "ray", "num_workers": 4}, {"name": "local", "num_workers": 4}])
def test_the_name_of_the_runtime_is_set_without_its_other_keys(section):
    """They belong to one class, whatever the name."""
    assert apply_overrides({"runtime": section}, ["runtime=ray"]) == {"runtime": {"name": "ray", "num_workers": 4}}
    assert apply_overrides({"runtime": {"num_workers": 4}}, ["runtime=ray"])["runtime"]["num_workers"] == 4
    assert apply_overrides({"runtime": section}, ["runtime={name: local}"]) == {"runtime": {"name": "local"}}
    assert apply_overrides({"runtime": "local"}, ["runtime=ray"]) == {"runtime": "ray"}


def test_a_number_is_a_key_where_there_is_a_section():
    """Only lists have places."""
    assert apply_overrides({"a": {"0": 1}}, ["a.0=2"]) == {"a": {"0": 2}}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rollout.n", "expected path=value, such as rollout.n=8"),
        ("=1", "expected path=value"),
        ("a..b=1", "expected path=value"),
        ("list.2=1", "list.2: expected a place in the list, 0 to 1, got '2'"),
        ("list.-1=1", "list.-1: expected a place in the list, 0 to 1, got '-1'"),
        ("list.x.y=1", "list.x: expected a place in the list, 0 to 1, got 'x'"),
        (f"list.{'9' * 5000}=1", "expected a place in the list"),
        ("number.x=1", "number is 3, which has no parts"),
        ("text.0=1", "text is 't', which has no parts"),
        ("a=[1", "line 1, column 3: while parsing a flow sequence"),
        ("a=[*x]", "line 1, column 2: aliases and anchors are refused"),
        ("a='x' y", "line 1, column 5"),
        ("a=.inf", "a: expected text, a finite number"),
        (".".join("a" * 50) + "=1", f"values are nested more than {MAX_DEPTH} levels deep"),
    ],
)
def test_overrides_that_cannot_be_applied_say_why(override, expected):
    """The error quotes the override as it was given."""
    line = complaint(apply_overrides, {"list": [0], "number": 3, "text": "t"}, [override])
    assert line.startswith(f"override {override!r}: ")
    assert expected in line


def test_nothing_is_taken_from_the_environment(tmp_path, monkeypatch):
    """A config that reads secrets would write them into every log of it."""
    monkeypatch.setenv("SECRET", "hidden")
    path = written(tmp_path, MINIMAL + "reward: {name: r, key: '${SECRET}', other: $SECRET}\n")
    assert load_config(path).reward.options == {"key": "${SECRET}", "other": "$SECRET"}
    assert "hidden" not in dump_yaml(load_config(path))
