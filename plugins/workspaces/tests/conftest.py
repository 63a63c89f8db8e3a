"""Makes the modules of this folder importable; several tests need the same ones."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for `boxes`, `images`, `engine_service` and `agent_runs`
