"""Requests: whatever they are given."""

from types import SimpleNamespace


class GenerateReqInput(SimpleNamespace):
    """A request."""


class PauseGenerationReqInput(SimpleNamespace):
    """A pause."""


class ContinueGenerationReqInput(SimpleNamespace):
    """Its end."""


class BeginWeightUpdateReqInput(SimpleNamespace):
    """A session of weights."""


class EndWeightUpdateReqInput(SimpleNamespace):
    """Its end."""


class UpdateWeightsFromTensorReqInput(SimpleNamespace):
    """Weights."""


class UpdateWeightVersionReqInput(SimpleNamespace):
    """A version without weights."""


class ReleaseMemoryOccupationReqInput(SimpleNamespace):
    """Sleep."""


class ResumeMemoryOccupationReqInput(SimpleNamespace):
    """Its end."""
