"""
Completes the objects that griffe reads for the reference: constructors of attrs classes and values of enums.

griffe reads sources and imports nothing, so it does not see the `__init__` that attrs writes. This extension derives
the signature from the fields.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import griffe

_DECORATORS = {"attrs.frozen", "attrs.define"}
_ENUMS = {"Enum", "IntEnum", "StrEnum"}


class AttrsSignatures(griffe.Extension):
    """Adds constructors to attrs classes and values to enums, and turns `::` before code into Markdown."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Remove the second colon of `::`, which announces a block of code in docstrings."""
        if obj.docstring:
            obj.docstring.value = obj.docstring.value.replace("::\n", ":\n")

    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Complete a class when griffe has read it."""
        decorator = next((each for each in cls.decorators if each.callable_path in _DECORATORS), None)
        if decorator is not None and "__init__" not in cls.members:
            is_keyword_only = "kw_only=True" in str(decorator.value)
            constructor = griffe.Function("__init__", parameters=griffe.Parameters(*parameters(cls, is_keyword_only)))
            cls.set_member("__init__", constructor)
        if cls.docstring and any(str(base).rpartition(".")[2] in _ENUMS for base in cls.bases):
            values = ", ".join(f"`{each.value}`" for each in cls.attributes.values() if each.value is not None)
            cls.docstring.value += f"\n\nValues: {values}."


def parameters(cls: griffe.Class, is_keyword_only: bool) -> Iterator[griffe.Parameter]:
    """Yield `self` and a parameter for each field of an attrs class."""
    yield griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
    kind = griffe.ParameterKind.keyword_only if is_keyword_only else griffe.ParameterKind.positional_or_keyword
    for field in cls.attributes.values():
        options = field_options(field.value)
        if not is_field(field) or options.get("init") == "False":
            continue
        default = options.get("default", f"{options['factory']}()" if "factory" in options else None)
        yield griffe.Parameter(field.name.lstrip("_"), annotation=field.annotation, kind=kind, default=default)


def is_field(attribute: griffe.Attribute) -> bool:
    """Return whether an attribute is a field: annotated, and neither a property nor a class variable."""
    return (
        attribute.annotation is not None
        and "property" not in attribute.labels
        and "ClassVar" not in str(attribute.annotation)
    )


def field_options(value: griffe.Expr | str | None) -> dict[str, str]:
    """Return the options of `field(...)`, or the plain value as its default."""
    if value is None:
        return {}
    if isinstance(value, griffe.ExprCall) and str(value.function) in ("field", "attrs.field"):
        return {each.name: str(each.value) for each in value.arguments if isinstance(each, griffe.ExprKeyword)}
    return {"default": str(value)}
