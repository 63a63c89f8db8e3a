"""The tool of the Python agents: a pocket calculator that needs no package."""

import operator
import re

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
OPERATION = re.compile(r"\s*(-?\d{1,12})\s*([-+*])\s*(-?\d{1,12})\s*")


def calculator(expression: str) -> str:
    """Computes one arithmetic operation, for example "23 + 48"."""
    match = OPERATION.fullmatch(expression)
    if match is None:
        return "Error: only one operation per call"
    return str(OPERATIONS[match[2]](int(match[1]), int(match[3])))


def negate(number: str) -> str:
    """Changes the sign of a number."""
    return str(-int(number))
