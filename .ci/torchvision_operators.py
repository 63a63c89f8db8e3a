"""
Lets torchvision's build for CUDA be imported beside torch's build for a CPU.

Its operators cannot be loaded there, and its import fails because two of them are unknown. Nothing that the engines do
with pictures calls them, so their names are enough; a call would raise. `.ci/engine` copies this file into environments
of engines, where a file `.pth` imports it at each start of Python.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_OPERATORS = ("nms", "qnms")


class OperatorNames(importlib.abc.MetaPathFinder):
    """Names the operators when torchvision is first imported, so that a start of Python does not import torch."""

    def __init__(self) -> None:
        self.library: Any = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find nothing: the next finder does."""
        if fullname == "torchvision" and self.library is None:
            import torch

            self.library = torch.library.Library("torchvision", "DEF")  # its names live as long as it does
            for name in _OPERATORS:
                self.library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


sys.meta_path.insert(0, OperatorNames())
