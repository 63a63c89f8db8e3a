#!/bin/sh
set -e
sed -i 's/\bcalc\b/area/g' README.txt shapes/areas.py shapes/total.py
sed -i 's/s=each/shape=each/' shapes/total.py
sed -i 's/(s)/(shape)/; s/\bs\[/shape[/g' shapes/areas.py
cat > shapes/__init__.py <<'PY'
"""Areas of shapes."""

import warnings

from shapes.areas import area
from shapes.total import total

__all__ = ["area", "calc", "total"]


def calc(s):
    """Return the area of a shape; the old name of `area`."""
    warnings.warn("calc is named area now", DeprecationWarning, stacklevel=2)
    return area(s)
PY
