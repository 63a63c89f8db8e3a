"""The folder of these tests on the path, so that they import their fakes by name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
