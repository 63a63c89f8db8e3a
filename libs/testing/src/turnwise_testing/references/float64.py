"""Models of transformers that compute in float64 throughout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch


@contextmanager
def float64_throughout() -> Iterator[None]:
    """
    Compute in float64 where code asks for float32 by name, until the end of the context.

    A model that was loaded in float64 still has norms, routers and softmax in float32. They swallow differences of
    1e-16, but one that crosses the border between two float32 numbers becomes one of 1e-7. So two ways to compute the
    same agree nearly always, and seldom differ by far more than float64 explains. The names are torch's own, so all
    threads see the change.
    """
    import torch

    with ExitStack() as stack:
        stack.enter_context(patch.object(torch.Tensor, "float", torch.Tensor.double))
        for name in ("float", "float32"):
            stack.enter_context(patch.object(torch, name, torch.float64))
        yield
