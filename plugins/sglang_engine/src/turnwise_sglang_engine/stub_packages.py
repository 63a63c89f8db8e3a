"""
Stand-ins for packages that SGLang imports everywhere and uses on a GPU only.

SGLang imports `triton`, `torchvision` and, on a CPU, `sgl_kernel` while it loads. Generation on a plain CPU calls none
of them, but their wheels are large, or need CUDA to load. A finder at the end of the path answers for those that are
not installed: real packages win. What is called all the same raises, so that no number ever comes from here.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

NEVER_CALLED = {
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
"""Functions that SGLang imports without a condition. It asks for others too, and has a way round when they lack."""
DECORATING = ("torchvision", "triton")
"""Their names also decorate, annotate and are inherited from while modules load, so every name is there."""


class _Anything(type):
    """A class whose every attribute is a class like it."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class _Name(metaclass=_Anything):
    """Any name of a decorating package: a decorator with or without arguments, a base class, a constant."""

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
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


def _absent(name: str) -> Any:
    def call(*_arguments: Any, **_options: Any) -> Any:
        raise NotImplementedError(f"{name} was called, and its package is not installed")

    return call


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages above and everything in them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Answer for a package above that nobody else has found."""
        if fullname not in NEVER_CALLED and fullname.partition(".")[0] not in DECORATING:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Make a module that has the names that are asked for."""
        module = types.ModuleType(spec.name) if spec.name in NEVER_CALLED else _Module(spec.name)
        module.__dict__["__version__"] = "0.0"
        for name in NEVER_CALLED.get(spec.name, ()):
            setattr(module, name, _absent(f"{spec.name}.{name}"))
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: the module is complete."""


def install() -> None:
    """Answer for the packages in this process, behind all other finders."""
    if not any(isinstance(finder, StandIns) for finder in sys.meta_path):
        sys.meta_path.append(StandIns())
