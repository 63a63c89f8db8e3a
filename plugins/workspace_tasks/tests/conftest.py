"""Makes the helpers of this folder, and those for runs in workspaces, importable."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "workspaces/tests")]
