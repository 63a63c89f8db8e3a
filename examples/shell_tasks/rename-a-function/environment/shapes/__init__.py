"""Areas of shapes."""

from shapes.areas import calc
from shapes.total import total

__all__ = ["calc", "total"]
