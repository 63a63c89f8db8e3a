"""A form of the turn that an agent asks for, and that an engine can promise only if it constrains what it samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from attrs import field, frozen

ConstraintKind = Literal["json_object", "json_schema", "named", "allowed", "required", "one_call"]
"""A text that is a JSON object, or fits a schema; a call of one tool, of some tools, of any tool; at most one call."""

_ALWAYS_SERVED: Final = frozenset({"required", "one_call"})


@frozen(kw_only=True)
class Constraint:
    """
    A form of the turn that an agent asks for.

    Attributes:
        kind: of the form.
        param: path of the field that asks for it.
        schema: JSON Schema of the text; None unless the kind is `json_schema`.
        tools: names of the tools that may be called, for the kinds `named` and `allowed`.
        may_answer: the kind is `allowed`, and a turn without a call is fine.
    """

    kind: ConstraintKind
    param: str
    schema: Mapping[str, Any] | None = None
    tools: tuple[str, ...] = field(default=())
    may_answer: bool = False

    @property
    def is_optional(self) -> bool:
        """Whether the option `structured_output` decides; the other kinds are wishes in every session."""
        return self.kind not in _ALWAYS_SERVED

    @property
    def counted(self) -> str:
        """Name by which a session counts it."""
        return f"{self.param}_{self.kind}" if self.param == "tool_choice" else self.param
