"""Options of the tool `calculator`."""

from __future__ import annotations

from attrs import field, frozen

from turnwise_calculator_demo.calculator import MAX_OPERATIONS


@frozen
class CalculatorConfig:
    """
    Options of the tool `calculator`.

    Attributes:
        max_operations: limit of binary operations per call; the shipped model was trained with 1. None: no limit, so
            a larger model can compute a whole expression in one turn.
    """

    max_operations: int | None = field(default=MAX_OPERATIONS)

    @max_operations.validator
    def _check_max_operations(self, _attribute: object, value: int | None) -> None:
        if value is not None and value < 1:
            raise ValueError(f"'max_operations' must be at least 1 or None: {value}")
