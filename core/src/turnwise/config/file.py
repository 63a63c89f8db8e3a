"""
Config files: YAML or TOML to a `RunConfig`, with overrides from a command line, and back to YAML.

YAML is read by the rules of its version 1.2 core schema, so ``1e-3`` is a number, and ``yes``, ``3:30`` and
``2026-01-01`` are text. The reader refuses everything that a config does not need: aliases and anchors (a small file
can grow without bound), tags, duplicate keys, more than one document, and more than `MAX_BYTES` or `MAX_DEPTH`. It
reads nothing from the environment.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Hashable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import yaml
from attrs import evolve

from turnwise.config.errors import located, shown
from turnwise.config.parts import FILE_END, PACKAGE, ModelConfig
from turnwise.config.peer_keys import explain_sections
from turnwise.config.run import RunConfig, map_choices
from turnwise.config.sections import split_sections
from turnwise.config.structuring import structure, unstructure
from turnwise.errors import ConfigError
from turnwise.types import JsonDict, JsonObject, copy_json

MAX_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 32
_TOO_DEEP: Final = f"values are nested more than {MAX_DEPTH} levels deep"
_MAX_INTEGER: Final = 2**63 - 1
_LONE_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_RARE_LINE_BREAK: Final = re.compile("[\x85\u2028\u2029]")
_TAG: Final = "tag:yaml.org,2002:"
_INTEGER: Final = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT: Final = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_CORE_SCHEMA: Final = {
    "null": re.compile(r"~|null|Null|NULL|"),
    "bool": re.compile(r"true|True|TRUE|false|False|FALSE"),
    "int": _INTEGER,
    "float": _FLOAT,
}
_Section = JsonDict | list[object]


def load_config(source: str | Path | JsonObject, overrides: Iterable[str] = ()) -> RunConfig:
    """
    Read a run's config.

    Args:
        source: a file that ends in .yaml, .yml or .toml, or its content as a dict. Paths in the config are relative to
            the folder of the file; a dict is relative to the working directory.
        overrides: such as ``rollout.n=8`` or ``tools.0=search``, applied in order (see `apply_overrides`).

    Raises:
        ConfigError: the file cannot be read or does not fit; one line for each thing that is wrong.
    """
    data, name, base_dir = read_config(source, overrides)
    with located(name):
        return structure_config(data, base_dir)


def read_config(source: str | Path | JsonObject, overrides: Iterable[str] = ()) -> tuple[JsonDict, str, Path]:
    """Return the plain values of a config with overrides applied, its name for error texts, and its folder."""
    overrides = tuple(overrides)
    if isinstance(source, Mapping):
        data, name, base_dir = dict(source), "the config", Path.cwd()
    else:
        data, name, base_dir = read_mapping(source), str(source), Path(source).absolute().parent
    return apply_overrides(data, overrides), f"{name} with overrides" if overrides else name, base_dir


def structure_config(data: object, base_dir: Path) -> RunConfig:
    """Make a run's config from plain values; `ConfigError` with one line for each mismatch."""
    own, sections = split_sections(data) if isinstance(data, Mapping) else (data, {})
    try:
        return evolve(structure(own, RunConfig), base_dir=base_dir, sections=sections)
    except ConfigError as error:
        raise ConfigError("\n".join(explain_sections(str(error).splitlines(), data))) from error


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Return the config with its relative paths made absolute, so that it means the same in any folder."""

    def anchor(path: str) -> str:
        return path if path.startswith(PACKAGE) else str(config.locate(path).absolute())

    def anchor_if_set(path: str | None) -> str | None:
        return None if path is None else anchor(path)

    def anchor_tasks(path: str) -> str:
        return path if config.is_task_source(path) else anchor(path)

    def anchor_model(model: ModelConfig) -> ModelConfig:
        path = model.path
        if path is not None and not config.is_on_hub(model):
            path = anchor(path)
        return evolve(model, path=path, chat_template=anchor_if_set(model.chat_template))

    config = with_absolute_code(config)
    data, judge = config.data, config.judge
    return evolve(
        config,
        model=anchor_model(config.model),
        judge=None if judge is None else evolve(judge, model=anchor_model(judge.model)),
        data=evolve(
            data,
            path=None if data.path is None else anchor_tasks(data.path),
            sources=tuple(evolve(source, path=anchor_tasks(source.path)) for source in data.sources),
            validation_path=None if data.validation_path is None else anchor_tasks(data.validation_path),
        ),
        tools_file=anchor_if_set(config.tools_file),
    )


def with_absolute_code(config: RunConfig) -> RunConfig:
    """Return the config with absolute paths of the files with code that it names."""
    anchor = partial(absolute_place, config)
    anchored: RunConfig = map_choices(config, lambda choice, *_: evolve(choice, name=anchor(choice.name)))
    return evolve(anchored, modules=tuple(map(anchor, config.modules)))


def absolute_place(config: RunConfig, place: str) -> str:
    """Return a file with code, or a place in one, with its absolute path; every other name as it is."""
    home, colon, name = place.rpartition(":") if ":" in place else (place, "", "")
    return f"{config.locate(home)}{colon}{name}" if home.endswith(FILE_END) else place


def to_dict(config: RunConfig) -> JsonDict:
    """Return plain values for `structure_config`: every key but `base_dir`, with the defaults."""
    return {**unstructure(config), **config.sections}


def dump_yaml(config: RunConfig) -> str:
    """Return the config as YAML that `load_config` reads back; relative paths stay relative to its `base_dir`."""
    text: str = yaml.dump(to_dict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text


def read_mapping(path: str | Path) -> JsonDict:
    """Read a YAML or TOML file of keys with values; `ConfigError` is one line with the path and the line of it."""
    try:
        return _parsed(Path(path))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: {_TOO_DEEP}") from error
    # tomllib lets the ValueError of a number with thousands of digits pass.
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error


def apply_overrides(data: JsonObject, overrides: Iterable[str]) -> JsonDict:
    """
    Return plain config values with overrides applied.

    An override is ``path=value``. Dots join the parts of the path. A number is an index of a list; the list's length
    appends to it. A value that starts with a quote, ``[`` or ``{`` is YAML. Every other value is one scalar, so text
    needs no quotes, and an empty value is null. Missing sections are created. A bare name for a section with `name`,
    as in ``agent: my_agent``, becomes that section.

    A bare name for a section that already has this name, as in ``agent=my_agent``, changes nothing. Another name
    replaces the section, because its options belong to the old name. Only `runtime` keeps its keys, which are the same
    for every name.

    Raises:
        ConfigError: one is not of this form, or its path leads through something that is no section or list.
    """
    root: JsonDict = copy_json(data)
    for override in overrides:
        path, equals, text = override.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            raise ConfigError(f"override {override!r}: expected path=value, such as rollout.n=8")
        try:
            _set(root, keys, _override_value(text.strip()))
            _check(root, "", 1)
        except ConfigError as error:
            raise ConfigError(f"override {override!r}: {error}") from error
    return root


def _parsed(file: Path) -> JsonDict:
    suffix = file.suffix.lower()
    if suffix not in (".yaml", ".yml", ".toml"):
        raise ConfigError("expected a file that ends in .yaml, .yml or .toml")
    text = _read_text(file)
    data = tomllib.loads(text) if suffix == ".toml" else _load_yaml(text)
    if not isinstance(data, dict):
        raise ConfigError("the file is empty" if data is None else f"expected keys with values, got {shown(data)}")
    _check(data, "", 1)
    return data


def _read_text(file: Path) -> str:
    with file.open("rb") as stream:
        data = stream.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ConfigError(f"the file is larger than {MAX_BYTES} bytes")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"expected UTF-8 text; byte {error.start} is not") from error


def _check(value: object, path: str, depth: int) -> None:
    """Raise `ConfigError` for a value that no config can hold; the caller adds the source."""
    if depth > MAX_DEPTH:
        raise ConfigError(_TOO_DEEP)
    if isinstance(value, dict):
        for key, item in value.items():
            _check(item, f"{path}.{key}" if path else key, depth + 1)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check(item, f"{path}.{index}", depth + 1)
    elif type(value) is str and _LONE_SURROGATE.search(value):
        raise ConfigError(f"{path}: the text is not valid Unicode")
    elif type(value) is int and abs(value) > _MAX_INTEGER:
        raise ConfigError(f"{path}: the number does not fit 64 bits")
    elif not (value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value))):
        raise ConfigError(f"{path}: expected text, a finite number, true, false or null, got {value}")


def _override_value(text: str) -> object:
    return _load_yaml(text) if text[:1] in ("'", '"', "[", "{") else _scalar(text)


def _set(container: _Section, keys: list[str], value: object) -> None:
    for place, key in enumerate(keys[:-1]):
        child = _get(container, key, keys[: place + 1])
        section: _Section
        if isinstance(child, dict | list):
            section = child
        elif child is None:
            section = [] if _is_index(keys[place + 1]) else {}
        elif isinstance(child, str) and not _is_index(keys[place + 1]):
            section = {"name": child}
        else:
            raise ConfigError(f"{'.'.join(keys[: place + 1])} is {shown(child)}, which has no parts")
        _put(container, key, section)
        container = section
    old = _get(container, keys[-1], keys)  # refuses a place that the list does not have
    # All runtimes have the same keys, so another name keeps them.
    if isinstance(old, dict) and isinstance(value, str) and (old.get("name") == value or keys == ["runtime"]):
        value = {**old, "name": value}
    _put(container, keys[-1], value)


def _is_index(key: str) -> bool:
    return key.isdecimal() and len(key) < 10


def _get(container: _Section, key: str, path: list[str]) -> object:
    if isinstance(container, dict):
        return container.get(key)
    if not _is_index(key) or int(key) > len(container):
        raise ConfigError(f"{'.'.join(path)}: expected a place in the list, 0 to {len(container)}, got {key!r}")
    return container[int(key)] if int(key) < len(container) else None


def _put(container: _Section, key: str, value: object) -> None:
    if isinstance(container, dict):
        container[key] = value
    else:
        container[int(key) : int(key) + 1] = [value]


def _load_yaml(text: str) -> object:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        text = ": ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{where}{text}") from error
    except yaml.YAMLError as error:
        raise ConfigError(" ".join(str(error).split())) from error


def _tag_of(text: str) -> str:
    return next((tag for tag, pattern in _CORE_SCHEMA.items() if pattern.fullmatch(text)), "str")


def _scalar(text: str) -> str | float | bool | None:
    """Return the value of an unquoted scalar in the core schema of YAML 1.2."""
    tag = _tag_of(text)
    if tag == "int":
        # Python refuses to read thousands of digits, and no field holds that many.
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10)) if len(text) < 100 else _MAX_INTEGER + 1
    if tag == "float":
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    if tag == "bool":
        return text.lower() == "true"
    return None if tag == "null" else text


class _CoreSchema(yaml.resolver.BaseResolver):
    """The tag resolver of YAML 1.2 for reader and writer; PyYAML has only the one of 1.1."""

    def resolve(self, kind: type[yaml.Node], value: str, implicit: tuple[bool, bool]) -> str:
        if kind is yaml.ScalarNode:
            return _TAG + (_tag_of(value) if implicit[0] else "str")
        return _TAG + ("seq" if kind is yaml.SequenceNode else "map")


class _Loader(_CoreSchema, yaml.SafeLoader):
    """Reads one document of plain values."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose one node, or refuse it before reading its content."""
        event = self.peek_event()  # type: ignore[no-untyped-call]  # PyYAML leaves it unannotated
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise _refusal("aliases and anchors are refused", event.start_mark)
        if event.tag is not None:
            raise _refusal(f"tags are refused: {event.tag}", event.start_mark)
        if self._depth >= MAX_DEPTH:
            raise _refusal(_TOO_DEEP, event.start_mark)
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        """Construct a mapping, or refuse keys that are not text or occur twice."""
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag != f"{_TAG}str":
                raise _refusal("keys must be text; put this one in quotes", key.start_mark)
            if key.value in seen:
                raise _refusal(f"duplicate key {key.value!r}", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(_CoreSchema, yaml.SafeDumper):
    """Writes YAML that `_Loader` reads back as the same values."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    # PyYAML writes these line breaks unescaped in single quotes, where its reader takes them for spaces.
    style = '"' if _RARE_LINE_BREAK.search(value) else None
    return dumper.represent_scalar(f"{_TAG}str", value, style)


def _refusal(problem: str, mark: yaml.Mark) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


_Dumper.add_representer(str, _represent_text)
for _name in ("null", "bool", "int", "float"):
    _Loader.add_constructor(_TAG + _name, lambda _loader, node: _scalar(node.value))
