"""The JSON Schema of configs: it accepts and refuses the same files as the reader."""

import copy
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal, NewType

import jsonschema_rs
import pytest
import structlog
from attrs import Factory, field, fields, frozen, make_class, validators
from hypothesis import example, given
from hypothesis import strategies as st

import turnwise.config.parts
import turnwise.config.run
import turnwise.config.runtime
from turnwise.config.file import read_mapping, structure_config, to_dict
from turnwise.config.parts import file_fields
from turnwise.config.run import RunConfig
from turnwise.errors import ConfigError
from turnwise.plugin.kinds import Section
from turnwise.plugin.registry import NoConfig, Registry
from turnwise_commands.config_schema import attribute_docs, json_schema

MINIMAL = {"data": {"path": "t"}, "agent": "a", "engine": {"name": "e", "dtype": "float32"}}
PLAIN = jsonschema_rs.validator_for(json_schema())

Positive = NewType("Positive", int)


class Dtype(Enum):
    F32 = "float32"
    BF16 = "bfloat16"


@frozen
class Node:
    """
    A tree.

    Attributes:
        children: further
            trees.
    """

    children: tuple["Node", ...] = ()


@frozen
class EngineOptions:
    """
    Options of a fake engine.

    Attributes:
        dtype: of the weights.
    """

    path: Path
    dtype: Dtype = Dtype.F32
    share: float = field(default=0.9, validator=[validators.gt(0), validators.le(1)])
    limit: int | None = field(default=None, validator=validators.optional(validators.lt(10)))
    mode: Literal["fast", "slow"] = "fast"
    betas: tuple[float, float] = (0.9, 0.99)
    tree: Node = Node()
    sizes: Mapping[str, int] = field(factory=dict)
    names: Sequence[str] = ()
    count: Positive = Positive(1)
    note: Annotated[str, "free"] = ""
    bare: dict = field(factory=dict)
    row: tuple = ()
    anything: Any = None
    either: int | list[str] = 1
    derived: int = field(default=Factory(lambda self: len(self.names), takes_self=True))
    unknown: complex | None = None


def host_of(**entries: dict[str, type]) -> SimpleNamespace:
    """Anything with registries is a host for the schema."""
    kinds = {item.metadata["turnwise_kind"] for item in fields(RunConfig) if "turnwise_kind" in item.metadata}
    registries = {kind: Registry(kind) for kind in kinds}
    for kind, registered in entries.items():
        for name, config in registered.items():
            registries[kind].add(name, config, config=config)
    sections = {"p": Section(kind="tools"), "q": Section(options=Node)}
    return SimpleNamespace(registry=registries.__getitem__, sections=sections)


HOST = host_of(agents={"a": NoConfig, "b": Node}, engines={"e": EngineOptions}, tools={"t": Node})


def paths_of(value: object, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = [path] if path else []
    for key, item in value.items() if isinstance(value, dict) else ():
        found += paths_of(item, (*path, key))
    return found


# Rules between fields and in validators of our own, which JSON Schema does not know.
BEYOND_SCHEMA = {("model", "trust_remote_code"), ("model",), ("runtime", "reward_workers"), ("runtime", "num_replicas")}
BEYOND_SCHEMA |= {("runtime", "ray", "replica_resources"), ("runtime", "ray", "worker_resources")}
PATHS = sorted(set(paths_of(to_dict(structure_config(MINIMAL, Path("/"))))) - BEYOND_SCHEMA)
PATHS += [(*path[:-1], "unknown") for path in PATHS if len(path) > 1] + [("unknown",), ("base_dir",)]
TOOLS = [["t"], [{"name": "t", "class": 1}], ["m:f"], ["./f.py:f"], [{"name": "m:C", "k": 1}], [{"k": 3}], [{}], [[]]]
VALUES = [None, True, False, 0, 1, 2, -1, 5, 0.5, -0.5, "", "x", "3", "local", "auto", "error", "info", [], {}]
VALUES += [["x"], [""], [1], {"name": "x"}, {"name": "x", "k": [1]}, {"name": ""}, {"name": 1}, {"k": 1}, {"k": "x"}]
VALUES += [["x", {"name": "y"}], {"agent": {"name": "z"}}, *TOOLS]


@st.composite
def documents(draw):
    """A small config with up to four values, right or wrong, put somewhere in it."""
    document = copy.deepcopy(MINIMAL) | {"modules": ["m"]}
    for path in draw(st.lists(st.sampled_from(PATHS), max_size=4)):
        section = document
        for key in path[:-1]:
            if not isinstance(section.get(key), dict):
                section[key] = {"path": "t"} if key == "data" else {}
            section = section[key]
        section[path[-1]] = copy.deepcopy(draw(st.sampled_from(VALUES)))
    return document


def is_readable(document: dict[str, Any]) -> bool:
    try:
        structure_config(document, Path("/"))
    except ConfigError:
        return False
    return True


@given(documents())
@example(MINIMAL | {"data": {"path": None}})
@example(MINIMAL | {"data": {}})
@example(MINIMAL | {"data": {"path": "t", "columns": {"prompt": "x"}}})
@example(MINIMAL | {"data": {"path": "t", "columns": {"name": "x"}}})
def test_schema_and_reader_agree(document):
    """A document is valid exactly when it can be read, two rules apart, which the schema lacks."""
    rollout, data = (document.get(name) if isinstance(document.get(name), dict) else {} for name in ("rollout", "data"))
    samplings = [rollout.get(name) for name in ("sampling", "validation_sampling")]
    has_bad_top_k = any(isinstance(each, dict) and each.get("top_k") in (0, -0.5) for each in samplings)
    names_no_file = data.get("path") is None and not data.get("sources")
    if has_bad_top_k or names_no_file:
        assert not is_readable(document)
    else:
        assert is_readable(document) == PLAIN.is_valid(document)


def test_the_written_out_defaults_are_valid():
    """A config that was read and written in full fits its schema."""
    assert PLAIN.is_valid(to_dict(structure_config(MINIMAL, Path("/"))))


@pytest.mark.parametrize("host", [None, HOST, host_of()])
def test_it_is_a_schema_of_the_dialect_that_it_names(host):
    """Editors refuse a schema that is none."""
    schema = json_schema(host)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    jsonschema_rs.meta.validate(schema)


def test_every_key_has_its_type_default_and_description():
    """Editors show the types, defaults and docstrings of the classes."""
    schema = json_schema()
    rollout = schema["$defs"]["RolloutConfig"]
    assert rollout["properties"]["n"] == {
        "type": "integer",
        "minimum": 1,
        "default": 1,
        "description": "episodes per task: the size of a group.",
    }
    assert schema["required"] == ["data", "agent", "engine"]
    assert "base_dir" not in schema["properties"]
    for section in (schema, *schema["$defs"].values()):
        for name, item in section.get("properties", {}).items():
            assert item is False or "description" in item or section["required"] == [name], name


def test_the_docstring_of_every_config_class_names_exactly_its_fields():
    """A field without documentation, or documentation without a field, is a mistake of ours."""
    modules = (turnwise.config.run, turnwise.config.parts, turnwise.config.runtime)
    for name, kind in ((name, kind) for module in modules for name, kind in vars(module).items()):
        if isinstance(kind, type) and "turnwise.config.run" in kind.__module__ and hasattr(kind, "__attrs_attrs__"):
            documented = set(attribute_docs(kind)) - {"base_dir", "sections"}
            assert {item.name for item in file_fields(kind)} == documented, name


def test_documentation_of_several_lines_is_joined():
    """Docstrings are wrapped; descriptions are not. A class without the section has none."""
    assert attribute_docs(Node) == {"children": "further trees."}
    assert attribute_docs(NoConfig) == {}
    assert attribute_docs(type("Bare", (), {})) == {}


@pytest.mark.parametrize(
    ("changes", "valid"),
    [
        ({}, True),
        ({"agent": "b"}, True),
        ({"agent": {"name": "b", "children": [{"children": []}, {}]}}, True),
        ({"agent": {"name": "b", "children": [{"child": []}]}}, False),
        ({"agent": {"name": "a", "children": []}}, False),
        ({"agent": "c"}, False),
        ({"agents": {"x": "b"}}, True),
        ({"agents": {"x": "c"}}, False),
        ({"reward": None}, True),
        ({"reward": "r"}, False),
        ({"tools": ["t", "m:f", {"name": "m:C", "k": 1}]}, True),
        ({"tools": ["m:f.g"]}, False),
        ({"agent": "./agent.py:Agent"}, True),
        ({"engine": "m:E"}, True),
        ({"tools": ["u"]}, False),
        ({"engine": "e"}, False),
        ({"engine": {"name": "e"}}, False),
        ({"engine": {"path": "p"}}, False),
        ({"p": ["t", "m:f"], "q": {"children": []}}, True),
        ({"p": ["u"]}, False),
        ({"q": {"child": []}}, False),
        ({"r": {}}, False),
    ],
)
def test_with_a_host_only_registered_names_and_options_are_valid(changes, valid):
    """A bare name is valid where the part needs no options."""
    document = {"data": {"path": "t"}, "agent": "a", "engine": {"name": "e", "path": "p"}, **changes}
    assert valid == jsonschema_rs.validator_for(json_schema(HOST)).is_valid(document)


@pytest.mark.parametrize(
    ("option", "right", "wrong"),
    [
        ("dtype", ["float32", "bfloat16"], ["float16", None]),
        ("path", ["x"], ["", 3]),
        ("share", [1, 0.5], [0, 1.1, "1"]),
        ("limit", [None, 9, -1], [10, "x"]),
        ("mode", ["slow"], ["slowly"]),
        ("betas", [[0, 1]], [[0], [0, 1, 2], [0, "1"], "01"]),
        ("tree", [{}, {"children": [{}]}], [{"x": 1}, []]),
        ("sizes", [{}, {"a": 1}], [{"a": "1"}, []]),
        ("names", [[], ["a"]], [[1], "a"]),
        ("count", [3], ["3"]),
        ("note", ["x"], [1]),
        ("bare", [{"a": []}], [[]]),
        ("row", [[1, "x"]], ["x"]),
        ("anything", [None, 1, [{}]], []),
        ("either", [1, ["x"]], ["x", [1]]),
        ("derived", [1], ["1"]),
        ("unknown", [None, {}], []),
    ],
)
def test_options_of_plugins_have_the_schema_of_their_class(option, right, wrong):
    """Every type that a plugin's config may have is described, and one that is not known holds anything."""
    schema = jsonschema_rs.validator_for(json_schema(HOST))

    def is_valid(value: object) -> bool:
        engine = {"name": "e", "path": "p", option: value}
        return schema.is_valid({"data": {"path": "t"}, "agent": "a", "engine": engine})

    assert ([True] * len(right), [False] * len(wrong)) == (
        [is_valid(value) for value in right],
        [is_valid(value) for value in wrong],
    )


def test_two_classes_of_one_name_keep_their_own_definitions():
    """Classes of different plugins may have the same name."""
    inner = [
        make_class(name, {key: field(default=0, type=int)}) for name, key in (("I", "x"), ("I", "y"), ("Choice", "z"))
    ]
    agents = {
        name: make_class("O", {"o": field(factory=each, type=each)}) for name, each in zip("abc", inner, strict=True)
    }
    schema = jsonschema_rs.validator_for(json_schema(host_of(agents=agents, engines={"e": NoConfig})))
    valid = {
        name + key: schema.is_valid({"data": {"path": "t"}, "engine": "e", "agent": {"name": name, "o": {key: 1}}})
        for name in "abc"
        for key in "xyz"
    }
    assert {"ax", "by", "cz"} == {pair for pair, is_valid in valid.items() if is_valid}


def test_a_file_stands_up_to_the_schema_as_it_was_read(tmp_path):
    """The schema is about the values of a file, after YAML and before classes."""
    path = tmp_path / "run.yaml"
    path.write_text("data: {path: t}\nagent: a\nengine: e\nrollout: {sampling: {temperature: 1e-1}}\n")
    assert PLAIN.is_valid(read_mapping(path))


@frozen
class Unresolved:
    """An annotation names a class that does not exist."""

    first: Node = Node()
    second: "Missing" = None  # noqa: F821 - the class must not exist


@frozen
class Unwritable:
    """A config file has no form for this default."""

    hook: Any = field(default=print)


@pytest.mark.parametrize("broken", [Unresolved, Unwritable])
def test_a_broken_config_class_costs_only_its_own_options(broken):
    """A log line names the part and its plugin, and the schema still checks all other parts."""
    registered = {"a": NoConfig, "b": Node}
    host = host_of(agents={**registered, "z": broken}, engines={"e": EngineOptions})
    with structlog.testing.capture_logs() as logs:
        validator = jsonschema_rs.validator_for(json_schema(host))

    assert [(line["part"], line["plugin"]) for line in logs] == [("z", host.registry("agents").get("z").owner)]
    run = {"data": {"path": "t"}, "engine": {"name": "e", "path": "p"}}
    assert validator.is_valid({**run, "agent": {"name": "z", "anything": 1}})
    assert validator.is_valid({**run, "agent": {"name": "b", "children": [{}]}})
    assert not validator.is_valid({**run, "agent": {"name": "b", "children": 3}})
    assert not validator.is_valid({**run, "agent": {"name": "unknown"}})
