"""Request classes that accept any field."""

from types import SimpleNamespace


class GenerateReqInput(SimpleNamespace):
    """A request for tokens."""


class PauseGenerationReqInput(SimpleNamespace):
    """Pauses generation."""


class ContinueGenerationReqInput(SimpleNamespace):
    """Resumes generation."""


class BeginWeightUpdateReqInput(SimpleNamespace):
    """Opens a session of weight updates."""


class EndWeightUpdateReqInput(SimpleNamespace):
    """Closes the session."""


class UpdateWeightsFromTensorReqInput(SimpleNamespace):
    """Sends weights."""


class UpdateWeightVersionReqInput(SimpleNamespace):
    """Sets the version without weights."""


class ReleaseMemoryOccupationReqInput(SimpleNamespace):
    """Frees memory."""


class ResumeMemoryOccupationReqInput(SimpleNamespace):
    """Restores memory."""
