"""
The public test kit for plugins.

- Conformance suites for pytest, such as `RouterSuite`; a plugin's file has some ten lines. But for `GatewaySuite`, the
  same checks without pytest are in `turnwise_testing.checks`, and ``turnwise check NAME`` runs them.
- `ScriptedEngine`, `RandomPolicy`, `Failure`: a fake engine with given outputs, latencies and failures.
- `BigramEngine`: a fake engine with weights that can be updated, dropped and compared with.
- `trajectories`, `scripts`: hypothesis strategies for token records.
- `byte_tokenizer`: a real tokenizer with no download.

The stub `__init__.pyi` lists the names. They are imported when they are asked for, so that a fake engine needs neither
pytest nor hypothesis.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any, Final


def _read_stub() -> dict[str, str]:
    """Return the module of each public name."""
    tree = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


_HOMES: Final = _read_stub()
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
