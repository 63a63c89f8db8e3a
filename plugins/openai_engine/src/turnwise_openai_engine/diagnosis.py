"""Diagnosis of the engine for external servers on this machine. No server is contacted."""

from __future__ import annotations

from turnwise import Finding
from turnwise_engine_support.diagnosis import package_finding

_INSTALL = "pip install turnwise-openai-engine"
_LIMIT = "not available, because the engine does not control the servers"
_REMEDY = "use the engine vllm or sglang for training"


def diagnose() -> list[Finding]:
    """Return findings about the HTTP client, and the limits of external servers."""
    return [
        package_finding("aiohttp", tested="3.14.5", oldest="3.10", below="4", hint=_INSTALL),
        Finding("device", "ok", "not needed here, because the model runs on the servers of engine.urls"),
        Finding("sleep", "limited", _LIMIT, _REMEDY),
        Finding("weight updates", "limited", _LIMIT, _REMEDY),
    ]
