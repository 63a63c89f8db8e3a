"""Checks of new weights against the model's own names, shapes and dtypes, before any weight is replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from attrs import frozen

from turnwise.errors import EngineError
from turnwise_engine_support.arguments import did_you_mean
from turnwise_engine_support.model_directory import checkpoint_shapes
from turnwise_engine_support.picture_families import find_family

FLOAT_DTYPES = frozenset({"bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"})
"""Dtypes that weights may have, by the names that torch, numpy and ml_dtypes share."""
_OUTPUT_LAYER = "lm_head.weight"
_INPUT_TABLE = "embed_tokens.weight"


def check_dtype(name: str, dtype: str) -> None:
    """Raise `EngineError` if the dtype of a weight is not a floating point type."""
    if dtype not in FLOAT_DTYPES:
        raise EngineError(f"weight {name!r} must be of floating point, got {dtype}")


@frozen
class ExpectedWeights:
    """
    The weights that a model has.

    Attributes:
        shapes: shape of each weight, by name; empty if they are unknown, and then names and shapes are not checked.
        tied: whether the output layer shares the input's embedding table. Its weight may be sent, and is not loaded.
        fused: for each layer that the engine builds from several weights, their names in the checkpoint, such as
            `q_proj`, `k_proj` and `v_proj`. Experts of one layer always count as fused.
        rename: the name of `shapes` for a name that an update may have.
    """

    shapes: Mapping[str, tuple[int, ...]]
    tied: bool = False
    fused: Sequence[Sequence[str]] = ()
    rename: Callable[[str], str] = str

    def is_loaded(self, name: str) -> bool:
        """Return whether the engine loads a weight: all but a tied output layer."""
        return not (self.tied and name == _OUTPUT_LAYER)

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Raise `EngineError` if the model has no weight of this name, or one of another shape."""
        if not self.shapes:
            return
        name = self.rename(name)
        if not self.is_loaded(name):
            name = next((other for other in self.shapes if other.endswith(_INPUT_TABLE)), name)
        if name not in self.shapes:
            raise EngineError(f"the model has no weight {name!r}{did_you_mean(name, self.shapes)}")
        if tuple(shape) != self.shapes[name]:
            raise EngineError(f"weight {name!r} has shape {self.shapes[name]}, got {tuple(shape)}")

    def check_complete(self, names: set[str], *, whole: bool) -> None:
        """
        Raise `EngineError` if an update lacks weights that it needs.

        Args:
            names: of the update.
            whole: the engine holds no valid weights, so every weight of the model is needed. Otherwise an update needs
                only the weights that are fused with those it has.
        """
        names = set(map(self.rename, names))
        if whole:
            needed, reason = set(self.shapes), "the engine has no valid weights, so all must be sent"
        else:
            needed = {sibling for name in names for sibling in self._siblings(name)}
            reason = "the engine fuses them into one layer with weights that were sent"
        missing = sorted(name for name in needed.intersection(self.shapes) - names if self.is_loaded(name))
        if missing:
            raise EngineError(f"{len(missing)} weights are missing, such as {missing[0]!r}: {reason}")

    def _siblings(self, name: str) -> Iterator[str]:
        """Yield the weights that the engine can replace only together with this one."""
        if ".experts." in name:
            stem = name.partition(".experts.")[0] + ".experts."
            yield from (other for other in self.shapes if other.startswith(stem))
            return
        module, _, kind = name.rpartition(".")
        parent, _, layer = module.rpartition(".")
        for group in self.fused:
            if layer in group:
                yield from (f"{parent}.{sibling}.{kind}" for sibling in group)


def checkpoint_name(name: str) -> str:
    """Return the name in a checkpoint of Qwen2.5-VL of a weight of the state dict; a name of a checkpoint stays."""
    for prefix, older in (("model.visual.", "visual."), ("model.language_model.", "model.")):
        if name.startswith(prefix):
            return older + name.removeprefix(prefix)
    return name


def expected_weights(path: Path | None, *, fused: Sequence[Sequence[str]] = (), tied: bool = False) -> ExpectedWeights:
    """
    Return the weights of a model directory, by the names of its state dict.

    Args:
        path: of the model; None knows no weights.
        fused: as in `ExpectedWeights`.
        tied: as in `ExpectedWeights`.
    """
    family = find_family(path)
    rename = str if family is None else family.state_name
    shapes = {} if path is None else {rename(name): shape for name, shape in checkpoint_shapes(path).items()}
    return ExpectedWeights(shapes, fused=fused, tied=tied, rename=rename)
