"""A tool of verl, which the file tools.yaml names."""

import operator
import re

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


class Calculator(BaseTool):
    """Computes one operation of integers."""

    async def execute(self, instance_id, parameters, **kwargs):
        """Return the response, the reward of the call and its metrics."""
        found = re.fullmatch(r"\s*(-?\d+)\s*([-+*])\s*(-?\d+)\s*", str(parameters.get("expression")))
        if not found:
            return ToolResponse(text="Error: expected two integers and an operator"), -0.1, {}
        left, sign, right = found.groups()
        return ToolResponse(text=str(OPERATORS[sign](int(left), int(right)))), 0.0, {}
