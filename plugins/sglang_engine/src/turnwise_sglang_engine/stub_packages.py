"""
Stubs of packages that SGLang always imports but uses only on a GPU.

SGLang imports `triton`, `torchvision` and, on a CPU, `sgl_kernel` while it loads. Generation on a plain CPU calls none
of them, but their wheels are large or need CUDA to load. A finder at the end of the import path provides stubs for
missing modules, so a real package always wins. A stub raises when it is called, so it can never produce a wrong number.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

UNCALLED_FUNCTIONS = {
    "sgl_kernel": (
        "assign_draft_cache_locs_contiguous_cpu",
        "assign_extend_cache_locs_cpu",
        "assign_req_to_token_pool_cpu",
        "build_draft_decode_metadata_cpu",
        "build_tree_kernel_efficient_cpu",
        "copy_all_layer_kv_cache_cpu",
        "fill_accept_out_cache_loc_cpu",
        "fill_bonus_tokens_cpu",
        "rotate_input_ids_cpu",
        "verify_tree_greedy_cpu",
    ),
    "sgl_kernel.mamba": (
        "causal_conv1d_fn_cpu",
        "causal_conv1d_update_cpu",
        "chunk_gated_delta_rule_cpu",
    ),
}
"""Functions that SGLang imports unconditionally. It imports others too, with a fallback if they are missing."""
WILDCARD_PACKAGES = ("torchvision", "triton")
"""Packages whose names serve as decorators, annotations and base classes at import time: their stubs have any name."""


class _Anything(type):
    """A class whose every attribute is the class itself."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class _Name(metaclass=_Anything):
    """Any name of a wildcard package: a decorator with or without arguments, a base class, a constant."""

    def __new__(cls, *arguments: object, **options: object) -> Any:
        if cls is not _Name:
            return object.__new__(cls)
        if len(arguments) == 1 and callable(arguments[0]) and not options:
            return arguments[0]
        return lambda function=None, *_, **__: function


class _Module(types.ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name


def _make_stub(name: str) -> Any:
    def stub(*_arguments: object, **_options: object) -> Any:
        raise NotImplementedError(f"{name} was called, but its package is not installed")

    return stub


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and makes the stubs."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in UNCALLED_FUNCTIONS and fullname.partition(".")[0] not in WILDCARD_PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name) if spec.name in UNCALLED_FUNCTIONS else _Module(spec.name)
        module.__dict__["__version__"] = "0.0"
        for name in UNCALLED_FUNCTIONS.get(spec.name, ()):
            setattr(module, name, _make_stub(f"{spec.name}.{name}"))
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: `create_module` returned a complete module."""


def install() -> None:
    """Provide the stubs in this process, after all other finders. Idempotent."""
    if not any(isinstance(finder, StubFinder) for finder in sys.meta_path):
        sys.meta_path.append(StubFinder())
