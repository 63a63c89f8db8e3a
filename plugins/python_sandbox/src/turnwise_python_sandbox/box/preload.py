"""
First uses of libraries, done once in the server: what a library imports and computes on first use, no program pays for.

For sympy that is half of what its import costs (measured: 0.38 s for the import, 0.15 s for the first `solve`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Final


def _sympy(library: Any) -> None:
    x, y = library.symbols("x y")
    library.solve(x**2 - 2, x)
    library.solve([x + y - 3, x - y - 1], [x, y])
    library.simplify(library.sin(x) ** 2 + library.cos(x) ** 2)
    library.integrate(x**2 * library.exp(x), x)
    library.series(library.exp(x), x, 0, 3)
    library.Matrix([[1, 2], [3, 4]]).inv()
    library.limit(library.sin(x) / x, x, 0)
    library.nsolve(x**2 - 2, 1)
    str(library.factor(x**2 - 1)) + library.latex(library.sympify("x/2"))


def _numpy(library: Any) -> None:
    matrix = library.eye(3)
    library.linalg.inv(matrix)
    library.linalg.eigvals(matrix)
    library.random.rand(2)
    str(matrix @ matrix)


_EXERCISES: Final[dict[str, Callable[[Any], None]]] = {"sympy": _sympy, "numpy": _numpy}


def warm_up(name: str) -> None:
    """Import a module and use it once; any exception is the module's own."""
    module = importlib.import_module(name)
    exercise = _EXERCISES.get(name)
    if exercise is not None:
        exercise(module)
