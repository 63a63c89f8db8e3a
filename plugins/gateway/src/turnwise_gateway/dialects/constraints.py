"""Reads the forms of the turn that a request asks for: the format of the text, and the tools that are called."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from attrs import evolve, frozen

from turnwise.types import ToolSchema
from turnwise_gateway.calls import Constraint, ToolChoice
from turnwise_gateway.constraint import ConstraintKind
from turnwise_gateway.dialects.fields import MAX_NAME_CHARS, Fields, refuse, refuse_unsupported

_FORMATS: Final = ("json_object", "json_schema")
_MODES: Final = ("auto", "required")
"""Of a choice of some tools."""


def read_format(owner: Fields, key: str, inner: str = "") -> tuple[Constraint, ...]:
    """
    Return the format that a request asks for, if it is not plain text.

    Args:
        owner: the object with the field.
        key: of the format.
        inner: key of the object in the format that has the schema; empty if the format itself has it.
    """
    form = owner.object(key)
    kind = "text" if form is None else form.required_text("type")
    if form is None or kind == "text":
        return ()
    if kind == "json_object":
        return (Constraint(kind="json_object", param=form.path),)
    if kind != "json_schema":
        raise refuse_unsupported(form.path, f"its type is {kind!r}, expected text, {' or '.join(_FORMATS)}")
    holder = form.object(inner) if inner else form
    if holder is None:
        raise refuse(form.name(inner), "must be an object")
    schema = holder.object("schema")
    return (Constraint(kind="json_schema", param=form.path, schema={} if schema is None else schema.values),)


@frozen(kw_only=True)
class ChoiceForms:
    """
    The forms of a tool choice in a dialect.

    Attributes:
        words: the choices that name no tool, by their words.
        named: type of a choice of one tool.
        holder: key of the object with the name of a tool; empty if the name is beside the type.
        allowed: key of the object with the allowed tools, empty if they are beside the type; None if the dialect has no
            choice of some tools.
    """

    words: Mapping[str, ToolChoice]
    named: str
    holder: str = ""
    allowed: str | None = None
    one_call: str = ""

    def read(
        self, request: Fields, tools: Iterable[ToolSchema], ignored: set[str], further: Collection[str] = ()
    ) -> tuple[ToolChoice, tuple[Constraint, ...]]:
        """
        Return the tool choice, and the forms of the turn that it asks for.

        Args:
            request: fields of the body.
            tools: of the request.
            ignored: receives the names of ignored fields.
            further: names by which a choice may call a tool besides those in `tools`.
        """
        value = request.value("tool_choice")
        if value is None:
            return "auto", ()
        if not isinstance(value, dict | str):
            raise refuse("tool_choice", f"must be one of {', '.join(self.words)}, or an object")
        choice = Fields(value if isinstance(value, dict) else {"type": value}, "tool_choice")
        word = choice.text("type") or ""
        if word in self.words:
            kind = self.words[word]
            found = (Constraint(kind="required", param="tool_choice"),) if kind == "required" else ()
        else:
            kind, found = "auto", (self._read_tools(choice, word, tools, further),)
        if self.one_call:
            found = (*found, *read_parallel(choice, self.one_call, is_one=True))
        ignored.update(choice.unread())
        return kind, found

    def _read_tools(
        self, choice: Fields, word: str, tools: Iterable[ToolSchema], further: Collection[str]
    ) -> Constraint:
        if word == self.named:
            return _constrain("named", [self._read_name(choice)], tools, further)
        if word == "allowed_tools" and self.allowed is not None:
            names, may_answer = self._read_allowed(choice, self.allowed)
            return evolve(_constrain("allowed", names, tools, further), may_answer=may_answer)
        served = ", ".join((*self.words, self.named, *(() if self.allowed is None else ("allowed_tools",))))
        raise refuse_unsupported("tool_choice", f"it is {word[:MAX_NAME_CHARS]!r}, expected one of {served}")

    def _read_allowed(self, choice: Fields, key: str) -> tuple[list[str], bool]:
        """Return the names of the tools, and whether the model may answer without a call."""
        owner = choice.object(key) if key else choice
        if owner is None:
            raise refuse(choice.name(key), "must be an object")
        if (mode := owner.text("mode")) not in _MODES:
            raise refuse(owner.name("mode"), f"must be {' or '.join(_MODES)}")
        names = [self._read_name(tool) for tool in owner.objects("tools") if tool.text("type") == self.named]
        if not names:
            raise refuse(owner.name("tools"), f"must have a tool of type {self.named}")
        return names, mode == "auto"

    def _read_name(self, tool: Fields) -> str:
        holder = tool.object(self.holder) if self.holder else tool
        if holder is None:
            raise refuse(tool.name(self.holder), "must be an object")
        return holder.required_text("name")


def _constrain(
    kind: ConstraintKind, names: Sequence[str], tools: Iterable[ToolSchema], further: Collection[str]
) -> Constraint:
    known = {*further, *(tool["function"]["name"] for tool in tools)}
    for name in names:
        if name not in known:
            raise refuse("tool_choice", f"names the tool {name[:MAX_NAME_CHARS]!r}, which is not among the tools")
    return Constraint(kind=kind, param="tool_choice", tools=tuple(names))


def read_parallel(owner: Fields, key: str, *, is_one: bool) -> tuple[Constraint, ...]:
    """Return the wish for one call at most, which the value `is_one` of a flag asks for."""
    if owner.value(key) is None or owner.flag(key) is not is_one:
        return ()
    return (Constraint(kind="one_call", param=owner.name(key)),)
