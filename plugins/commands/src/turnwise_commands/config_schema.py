"""
The JSON Schema of a run's config, for editors and for checks outside Python.

It is read off the attrs classes: types, defaults, bounds, and descriptions from the docstrings. With a host it knows
the names that plugins registered and their options. It says less than `turnwise.config.file` does where JSON Schema
cannot: 1.0 passes for an integer, and rules between two fields or in a validator of a plugin's own are not in it.
"""

from __future__ import annotations

import inspect
import math
import re
import types
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, NewType, Union, get_args, get_origin

import attrs
import structlog
from attrs import define, field

from turnwise.config.parts import KIND, PLACE_PATTERN, SCHEMA, Choice, CodePlace, ToolChoice, TypeForm, file_fields
from turnwise.config.run import RunConfig
from turnwise.config.runtime import RuntimeConfig
from turnwise.config.structuring import default_of, unstructure
from turnwise.errors import describe
from turnwise.plugin.host import Host
from turnwise.plugin.registry import Entry

DIALECT = "https://json-schema.org/draft/2020-12/schema"

Schema = dict[str, Any]
"""A JSON schema, whose parts are read and changed while it grows."""

_SCALARS: Mapping[object, Schema] = {
    type(None): {"type": "null"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    Path: {"type": "string", "minLength": 1},
    CodePlace: {"type": "string"},
}
_TOOL_SCHEMA = "replaces the tool's own schema, which the model sees"
_PLACE: Schema = {"type": "string", "pattern": PLACE_PATTERN}
_OWN_SECTION: Schema = {"type": "object", "properties": {"name": _PLACE}, "required": ["name"]}
_BOUNDS = {">=": "minimum", ">": "exclusiveMinimum", "<=": "maximum", "<": "exclusiveMaximum"}


def json_schema(host: Host | None = None) -> Schema:
    """Return the schema of `RunConfig`; with a host, only registered names and their options are valid."""
    builder = _Builder(host)
    root = builder.section(RunConfig)
    root["properties"] |= builder.plugin_sections()
    return {"$schema": DIALECT, "title": "turnwise run config", **root, "$defs": builder.definitions}


def attribute_docs(kind: type) -> dict[str, str]:
    """Return the description of each attribute from the `Attributes:` sections of a class and its bases."""
    docs: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        section = re.search(r"^Attributes:\n((?:    .*\n?|\n)*)", inspect.cleandoc(each.__doc__ or ""), re.MULTILINE)
        found = re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", section[1], re.MULTILINE) if section else []
        docs |= {name: " ".join(text.split()) for name, text in found}
    return docs


@define
class _Builder:
    """Makes one schema; each class gets one definition, so that classes may hold themselves."""

    host: Host | None
    definitions: dict[str, Schema] = field(factory=dict, init=False)
    _names: dict[type, str] = field(factory=lambda: {Choice: "Choice"}, init=False)

    def section(self, kind: type) -> Schema:
        """Return the schema of an attrs class."""
        docs = attribute_docs(kind)
        fields = file_fields(kind)
        properties = {item.name: self._property(item, docs.get(item.name, "")) for item in fields}
        required = [item.name for item in fields if item.default is attrs.NOTHING]
        return _described(
            {
                "type": "object",
                "properties": properties,
                **({"required": required} if required else {}),
                "additionalProperties": False,
            },
            _summary(kind),
        )

    def plugin_sections(self) -> Schema:
        """Return the schemas of the plugins' own sections, by the plugin."""
        sections = self.host.sections if self.host is not None else {}
        return {
            name: self._of(tuple[Choice, ...], section.kind) if section.kind else self._class(section.options)
            for name, section in sections.items()
        }

    def _property(self, item: attrs.Attribute[object], doc: str) -> Schema:
        schema = {**self._of(item.type, item.metadata.get(KIND, "")), **_rules(item.validator)}
        schema.update(item.metadata.get(SCHEMA, {}))
        default = default_of(item)
        if default is not attrs.NOTHING:
            schema["default"] = unstructure(default)
        return _described(schema, doc)

    def _of(self, kind: TypeForm, registry: str = "") -> Schema:
        """Return the schema of a type; one that is not known here may hold anything."""
        origin: object = get_origin(kind)
        if origin is Annotated or isinstance(kind, NewType):
            return self._of(kind.__supertype__ if isinstance(kind, NewType) else get_args(kind)[0], registry)
        if origin in (Union, types.UnionType):
            return _any_of([self._of(member, registry) for member in get_args(kind)])
        if origin is Literal or (isinstance(kind, type) and issubclass(kind, Enum)):
            return {"enum": [each.value if isinstance(each, Enum) else each for each in get_args(kind) or kind]}
        if kind in _SCALARS:
            return dict(_SCALARS[kind])
        if kind in (Choice, ToolChoice):
            known = registry if self.host is not None else ""
            return self._named(f"Choice.{known}" if known else "Choice", lambda: self._choice(known))
        if attrs.has(kind):
            return self._class(kind)
        return self._collection(origin or kind, get_args(kind), registry)

    def _class(self, kind: type) -> Schema:
        namesakes = sum(other.__name__ == kind.__name__ for other in self._names)
        name = self._names.setdefault(kind, f"{kind.__name__}.{namesakes + 1}" if namesakes else kind.__name__)
        reference = self._named(name, lambda: self.section(kind))
        if kind is RuntimeConfig:
            return _any_of([self._of(attrs.fields(RuntimeConfig).name.type), reference])
        return reference

    def _named(self, name: str, make: Callable[[], Schema]) -> Schema:
        if name not in self.definitions:
            self.definitions[name] = {}  # a class that holds itself finds its name taken
            self.definitions[name] = make()
        return {"$ref": f"#/$defs/{name}"}

    def _choice(self, registry: str) -> Schema:
        if not registry:
            name = {"type": "string", "minLength": 1}
            section = {"type": "object", "properties": {"name": name}, "required": ["name"]}
            return _described(_any_of([name, section]), _summary(Choice))
        assert self.host is not None  # a registry is named only then
        entries: Mapping[str, Entry[object]] = self.host.registry(registry).entries()
        sections = [self._options(entry) for entry in entries.values()]
        if registry == "tools":
            schema = {"schema": {"type": "object", "description": _TOOL_SCHEMA}}
            sections = [{**each, "properties": {**each["properties"], **schema}} for each in sections]
        bare = [name for name, section in zip(entries, sections, strict=True) if section["required"] == ["name"]]
        return {"oneOf": [*([{"enum": bare}] if bare else []), *sections, _PLACE, _OWN_SECTION]}

    def _options(self, entry: Entry[object]) -> Schema:
        known = set(self.definitions)
        try:
            section = self.section(entry.config)
        except Exception as error:  # noqa: BLE001 - a broken class must not cost the schema of the other parts
            for half_made in self.definitions.keys() - known:
                del self.definitions[half_made]
            structlog.get_logger().warning(
                "the schema checks no options of this part", part=entry.name, plugin=entry.owner, error=describe(error)
            )
            return {"type": "object", "properties": {"name": {"const": entry.name}}, "required": ["name"]}
        section["properties"] = {"name": {"const": entry.name}, **section["properties"]}
        section["required"] = ["name", *section.get("required", ())]
        return section

    def _collection(self, origin: object, members: tuple[object, ...], registry: str) -> Schema:
        if not isinstance(origin, type):
            return {}
        if issubclass(origin, Mapping):
            if not members:
                return {"type": "object", "additionalProperties": True}
            schema = {"type": "object", "additionalProperties": self._of(members[1], registry)}
            names = self._of(members[0], "")
            return schema | ({"propertyNames": names} if "enum" in names else {})
        if issubclass(origin, tuple) and members and Ellipsis not in members:
            items = [self._of(member, registry) for member in members]
            return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
        if issubclass(origin, Sequence | AbstractSet):
            return {"type": "array", "items": self._of(members[0], registry) if members else {}}
        return {}


def _any_of(schemas: list[Schema]) -> Schema:
    if all(set(schema) == {"type"} for schema in schemas):
        return {"type": [schema["type"] for schema in schemas]}
    return {"anyOf": schemas}


def _summary(kind: type) -> str:
    return " ".join((inspect.getdoc(kind) or "").partition("\n\n")[0].split())


def _described(schema: Schema, text: str) -> Schema:
    return {**schema, "description": text} if text else schema


def _rules(validator: object) -> Schema:
    """Return the keywords for the bounds that an attrs validator sets; null has none, so `optional` is looked into."""
    operator = getattr(validator, "compare_op", None)
    if operator in _BOUNDS:
        # JSON has no infinity, and no number reaches it.
        bound = getattr(validator, "bound", math.inf)
        return {_BOUNDS[operator]: bound} if math.isfinite(bound) else {}
    inner = (*getattr(validator, "_validators", ()), *filter(None, [getattr(validator, "validator", None)]))
    return {key: value for each in inner for key, value in _rules(each).items()}
