"""Plain values to config classes: accepted values, refusals, and error texts."""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any, Literal

import pytest
from attrs import field, frozen, validators

from turnwise.config.file import structure_config, to_dict
from turnwise.config.parts import ToolChoice
from turnwise.config.run import Choice, DataConfig, RunConfig
from turnwise.config.structuring import _converter, structure, unstructure
from turnwise.errors import ConfigError, PluginError
from turnwise.types import JsonObject

MINIMAL = {"data": {"path": "t"}, "agent": "a", "engine": "e"}


class Level(StrEnum):
    LOW = "low"
    HIGH = "high"


class Bits(Enum):
    EIGHT = 8
    AUTO = "auto"


@frozen
class Inner:
    x: int = 1


@frozen
class Options:
    """Every kind of field that plugins use."""

    level: Level = Level.LOW
    bits: Bits = Bits.EIGHT
    mode: Literal["a", "b", 3] = "a"
    path: Path = Path("x")
    either: int | str | None = None
    betas: tuple[float, float] = (0.9, 0.95)
    inner: list[Inner] = field(factory=list)
    counts: Mapping[str, int] = field(factory=dict)
    names: frozenset[str] = frozenset()
    numbers: Sequence[float] = ()
    anything: Any = None
    optional: Inner | None = None
    one_or_more: int | list[int] = 1
    bare: list = field(factory=list)


def mismatches(data: object, kind: object = Options, path: str = "engine") -> list[str]:
    """Return the lines of the error that `structure` raises."""
    with pytest.raises(ConfigError) as caught:
        structure(data, kind, path=path)
    return str(caught.value).splitlines()


def config_mismatches(**changes: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        structure_config({**MINIMAL, **changes}, Path("/base"))
    return str(caught.value).splitlines()


def test_every_kind_of_field_is_read_and_written():
    """Structuring gives the annotated types, and unstructuring gives the plain values back."""
    plain = {
        "level": "high",
        "bits": "auto",
        "mode": 3,
        "path": "/p",
        "either": "x",
        "betas": [0.5, 0.25],
        "inner": [{"x": 2}],
        "counts": {"k": 1},
        "names": ["n"],
        "numbers": [1.0],
        "anything": {"deep": [1, None]},
        "optional": {"x": 3},
        "one_or_more": [1, 2],
        "bare": [1, "x"],
    }
    expected = Options(
        level=Level.HIGH,
        bits=Bits.AUTO,
        mode=3,
        path=Path("/p"),
        either="x",
        betas=(0.5, 0.25),
        inner=[Inner(2)],
        counts={"k": 1},
        names=frozenset({"n"}),
        numbers=(1.0,),
        anything={"deep": [1, None]},
        optional=Inner(3),
        one_or_more=[1, 2],
        bare=[1, "x"],
    )
    assert expected == structure(plain, Options)
    assert plain == unstructure(expected)
    assert Options() == structure({}, Options)
    assert Options(either=None) == structure({"either": None}, Options)


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        ({"level": "hgh"}, ["engine.level: expected one of low, high, got 'hgh'; did you mean 'high'?"]),
        ({"bits": "8"}, ["engine.bits: expected one of 8, auto, got '8'; did you mean '8'?"]),
        ({"mode": True}, ["engine.mode: expected one of a, b, 3, got true"]),
        ({"path": 3}, ["engine.path: expected a path, got 3"]),
        ({"path": ""}, ["engine.path: expected a path, got ''"]),
        ({"either": 1.5}, ["engine.either: expected an integer or text or null, got 1.5"]),
        ({"betas": [1]}, ["engine.betas: expected a list of 2 items, got [1]"]),
        ({"betas": [1, "2"]}, ["engine.betas.1: expected a number, got '2'"]),
        ({"inner": [{"x": 1}, {"x": "1"}]}, ["engine.inner.1.x: expected an integer, got '1'"]),
        ({"inner": {"x": 1}}, ["engine.inner: expected a list, got {'x': 1}"]),
        ({"counts": {"a": 1, "b": True}}, ["engine.counts.b: expected an integer, got true"]),
        ({"counts": [1]}, ["engine.counts: expected a section of keys, got [1]"]),
        ({"names": "abc"}, ["engine.names: expected a list, got 'abc'"]),
        ({"numbers": [10**400]}, ["engine.numbers.0: int too large to convert to float"]),
        ({"optional": {"y": 1}}, ["engine.optional.y: unknown key; known: x"]),
        ({"optional": 1}, ["engine.optional: expected a section of keys, got 1"]),
        ({"one_or_more": "1"}, ["engine.one_or_more: expected an integer or a list, got '1'"]),
        (None, ["engine: expected a section of keys, got null; remove the key to use the defaults"]),
    ],
)
def test_mismatches_name_path_value_and_what_was_expected(data, lines):
    """One line says all that a user needs to put a value right."""
    assert lines == mismatches(data)


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        ("3", int, "expected an integer, got '3'"),
        (True, int, "expected an integer, got true"),
        (1.0, int, "expected an integer, got 1.0"),
        (None, int, "expected an integer, got null"),
        ("1e-3", float, "expected a number, got '1e-3'"),
        (False, float, "expected a number, got false"),
        (float("nan"), float, "expected a finite number, got nan"),
        (0, bool, "expected true or false, got 0"),
        ("yes", bool, "expected true or false, got 'yes'"),
        (12, str, "expected text, got 12; put it in quotes"),
        (True, str, "expected text, got true; put it in quotes"),
        (None, str, "expected text, got null"),
        ([], str, "expected text, got []"),
    ],
)
def test_nothing_is_guessed(value, kind, text):
    """A value of the wrong type is an error, even where Python could convert it."""
    assert [f"key: {text}"] == mismatches(value, kind, "key")


def test_a_field_of_objects_takes_any_plain_value():
    """`object` and `JsonObject` in a config class hold what the file has, as `Any` does."""
    value = {"a": [1, {"b": None}]}

    assert structure(value, JsonObject) == value
    assert structure([1, "x", None], list[object]) == [1, "x", None]


def test_a_whole_number_may_stand_for_a_float():
    """It is the only conversion, and the result is a float."""
    result = structure(1, float)
    assert (float, 1.0) == (type(result), result)


def test_the_exact_type_of_a_union_wins():
    """1 stays an integer where a float would fit as well, in either order of the annotation."""
    assert [int, int, float] == [type(structure(value, float | int)) for value in (1, 2, 1.0)]
    assert [int, float] == [type(structure(value, int | float)) for value in (1, 1.5)]


def test_long_values_are_cut():
    """An error stays readable when the value is huge."""
    [line] = mismatches("x" * 1000, int, "key")
    assert len(line) < 120


def test_all_mismatches_are_reported_at_once():
    """Fixing a config does not take one run for each mistake, also where validators find two in one section."""
    lines = config_mismatches(
        agnt="x",
        rollout={"n": 0, "seed": -1, "prompt_length": "3", "sampling": {"temperture": 1, "top_k": 0}},
        telemetry={"log_level": "warn"},
    )
    assert lines == [
        "rollout.n: must be >= 1: 0",
        "rollout.seed: must be >= 0: -1",
        "rollout.sampling.top_k: must be -1 (all) or at least 1: 0",
        "rollout.sampling.temperture: unknown key; did you mean 'temperature'?",
        "rollout.prompt_length: expected an integer, got '3'",
        "telemetry.log_level: expected one of debug, info, warning, error, got 'warn'; did you mean 'warning'?",
        "agnt: unknown key; did you mean 'agent'?",
    ]


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({"data": {}}, ["data.path: missing; name a file here or several in data.sources"]),
        ({"data": {"path": ""}}, ["data.path: must not be empty"]),
        ({"rollout": None}, ["rollout: expected a section of keys, got null; remove the key to use the defaults"]),
        ({"engine": None}, ["engine: expected a name, or a section with 'name' and options, got null"]),
        ({"engine": {"nme": "x"}}, ["engine.name: missing; the section has only nme"]),
        ({"engine": {}}, ["engine.name: missing; the section has only no keys"]),
        ({"engine": {"name": 3}}, ["engine.name: expected text, got 3"]),
        ({"engine": ""}, ["engine.name: must not be empty"]),
        ({"reward": ""}, ["reward.name: must not be empty"]),
        ({"agents": {"x": 3}}, ["agents.x: expected a name, or a section with 'name' and options, got 3"]),
        ({"plugins": "vllm"}, ["plugins: expected a list, got 'vllm'"]),
        ({"runtime": "rey"}, ["runtime.name: expected one of local, ray, got 'rey'"]),
        ({"base_dir": "/"}, ["base_dir: unknown key"]),
        ({"tools": ["x", {"k": 1}]}, ["tools.1.name: missing; the section has only k"]),
        ({"tools": [{"name": "x", "schema": 1}]}, ["tools.0.schema: expected a section of keys, got 1"]),
        (
            {"reward": "m:f.g"},
            ["reward.name: must be a registered name, 'package.module:Name' or"],
        ),
        ({"modules": ["a b"]}, ["modules: must be names of modules or files that end in .py: 'a b'"]),
        ({"tools": [3]}, ["tools.0: expected a name, or a section with 'name' and options, got 3"]),
        (
            {"model": {"trust_remote_code": True}},
            ["model.revision: must be a whole commit hash when trust_remote_code is true: None"],
        ),
        (
            {"model": {"template_options": {"a": object}}},
            ["model: expected text, a number, true, false, null, a list or a mapping with text keys, got <class"],
        ),
    ],
)
def test_sections_of_a_config_say_what_they_take(changes, lines):
    """Errors of plugin choices, tools and rules between fields name their paths."""
    found = config_mismatches(**changes)
    assert lines == [actual[: len(line)] for line, actual in zip(lines, found, strict=True)]


def test_a_choice_is_a_name_or_a_section():
    """The options are every key but the name, and are not looked at without the plugin."""
    config = structure_config({**MINIMAL, "reward": {"name": "r", "k": [1]}, "observers": ["o"]}, Path("/base"))
    assert Choice("r", {"k": [1]}) == config.reward
    assert (Choice("o"),) == config.observers
    assert Choice("a") == config.agent
    assert Path("/base") == config.base_dir


def test_a_tool_may_have_a_schema_of_the_users_own():
    """It is no option of the tool."""
    tools = ["r", {"name": "s", "k": 1}, {"name": "m:f", "run_in": "process", "schema": {"type": "function"}}]
    config = structure_config({**MINIMAL, "tools": tools, "modules": ["m"]}, Path("/"))
    function = ToolChoice("m:f", {"run_in": "process"}, {"type": "function"})
    assert (ToolChoice("r"), ToolChoice("s", {"k": 1}), function) == config.tools
    assert [{"name": "r"}, *tools[1:]] == to_dict(config)["tools"]


def test_writing_needs_no_reading_first():
    """Fields outside files are not written, also in a process that has read no file."""
    _converter.cache_clear()
    config = RunConfig(data=DataConfig(path="t"), agent=Choice("a"), engine=Choice("e"))
    assert "base_dir" not in to_dict(config)


def test_a_runtime_may_be_its_bare_name():
    """`runtime: local` means the section with that name and defaults."""
    plain = to_dict(structure_config({**MINIMAL, "runtime": "local"}, Path("/")))
    assert plain["runtime"] == to_dict(structure_config(MINIMAL, Path("/")))["runtime"]
    assert (plain["runtime"]["name"], plain["runtime"]["num_workers"]) == ("local", 1)


def test_paths_among_options_start_from_the_config():
    """The folder is given once; without one, paths stay as they are."""
    assert Path("/base/x") == structure({"path": "x"}, Options, base_dir=Path("/base")).path
    assert Path("/abs") == structure({"path": "/abs"}, Options, base_dir=Path("/base")).path
    assert Path("x") == structure({"path": "x"}, Options).path


def test_a_validator_that_needs_the_whole_object_runs_once_it_is_there():
    """Fields are validated one by one first, where a validator sees no other field."""

    @frozen
    class Range:
        low: int = field(validator=validators.ge(0))
        high: int = field()

        @high.validator
        def _check(self, _attribute, value):
            if value < self.low:
                raise ValueError(f"'high' must be at least {self.low}: {value}")

    assert Range(1, 2) == structure({"low": 1, "high": 2}, Range)
    assert mismatches({"low": 3, "high": 2}, Range) == ["engine.high: must be at least 3: 2"]


def test_a_validators_text_becomes_one_line():
    """Errors are one line each, also when a plugin's validator is talkative or says nothing."""

    @frozen
    class Talkative:
        x: int = field()
        y: int = 0

        @x.validator
        def _check(self, _attribute, value):
            raise ValueError("first\nsecond") if value else ValueError

    assert mismatches({"x": 1}, Talkative) == ["engine.x: first second"]
    assert mismatches({"x": 0}, Talkative) == ["engine.x: ValueError"]


def test_a_class_without_fields_takes_no_options():
    """The hint does not offer keys that are not there."""

    @frozen
    class Nothing:
        pass

    assert mismatches({"x": 1}, Nothing) == ["engine.x: unknown key; there are no options"]


def test_a_type_that_no_config_can_hold_is_the_plugins_fault():
    """The user can do nothing about it, so it is no `ConfigError`."""

    @frozen
    class Impossible:
        callback: Callable[[int], int] = print

    with pytest.raises(PluginError, match=r"^engine: .*Impossible.* cannot be read from a config"):
        structure({}, Impossible, path="engine")


def test_an_annotation_for_type_checkers_only_is_the_plugins_fault():
    """Its name is not there when a config is read."""

    @frozen
    class Impossible:
        thing: "NotImported" = None  # noqa: F821 - that it is not there is what the test is about

    with pytest.raises(PluginError, match=r"annotations of .*Impossible cannot be resolved: name 'NotImported'"):
        structure({}, Impossible)


def test_a_converter_of_the_class_runs_before_its_validator():
    """The annotation gives the type in files, the converter the type in the object."""

    @frozen
    class Sizes:
        sizes: list[int] = field(converter=tuple, validator=validators.instance_of(tuple))

    assert Sizes((1, 2)) == structure({"sizes": [1, 2]}, Sizes)


def test_a_default_that_no_config_can_hold_is_the_plugins_fault():
    """Filling in defaults would otherwise write a config that cannot be read."""

    @frozen
    class Impossible:
        thing: Any = field(factory=object)

    with pytest.raises(PluginError, match="Impossible cannot be written as a config"):
        unstructure(Impossible())


def test_values_without_a_path_have_errors_without_one():
    """The top of a document has no name."""
    assert mismatches("x", int, "") == ["expected an integer, got 'x'"]
    assert mismatches(["x"], list[int], "") == ["0: expected an integer, got 'x'"]


@frozen
class Outer:
    """Sections whose defaults differ from the defaults of their classes."""

    inner: Options = Options(level=Level.HIGH, bits=Bits.AUTO)
    maybe: Options | None = field(factory=lambda: Options(names=frozenset({"x"})))
    choice: Choice = field(factory=lambda: Choice("a", {"lr": 1}))
    same: Inner = Inner()


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"inner": {"mode": "b"}}, Outer(inner=Options(level=Level.HIGH, bits=Bits.AUTO, mode="b"))),
        ({"inner": {"bits": 8}}, Outer(inner=Options(level=Level.HIGH))),
        ({"inner": {}}, Outer()),
        ({"maybe": {"path": "y"}}, Outer(maybe=Options(names=frozenset({"x"}), path=Path("y")))),
        ({"maybe": None}, Outer(maybe=None)),
        # The options of a choice belong to its name.
        ({"choice": "b"}, Outer(choice=Choice("b"))),
        ({"same": {"x": 2}}, Outer(same=Inner(2))),
    ],
)
def test_one_key_of_a_section_leaves_what_the_others_are_here(data, expected):
    """A section's other keys keep the defaults of this place, which differ from the class."""
    assert structure(data, Outer) == expected


@pytest.mark.parametrize("section", ["validation_sampling", "sampling"])
def test_setting_how_much_is_sampled_does_not_change_how(section):
    """Validation and a judge stay greedy when a file says only how many tokens they may sample."""
    judge = {"engine": "e", "sampling": {"max_tokens": 24}}
    config = structure({**MINIMAL, "judge": judge, "rollout": {section: {"max_tokens": 24}}}, RunConfig)
    assert (config.judge.sampling.temperature, config.judge.sampling.max_tokens) == (0.0, 24)
    sampling = getattr(config.rollout, section)
    assert (sampling.temperature, sampling.max_tokens) == (0.0 if section == "validation_sampling" else 1.0, 24)
