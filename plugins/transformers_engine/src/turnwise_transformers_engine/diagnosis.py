"""Diagnosis of the embedded engine on this machine. torch and transformers are not imported."""

from __future__ import annotations

from importlib.util import find_spec

from turnwise import Finding
from turnwise_engine_support.diagnosis import device_finding, installed_version, package_finding
from turnwise_engine_support.machine import has_gpu

_TORCH = {"tested": "2.13.0", "oldest": "2.6"}
_TRANSFORMERS = {"tested": "5.19.0", "oldest": "5.19", "below": "6"}
_INSTALL = "pip install turnwise-transformers-engine"
_FLASH_PACKAGES = ("flash_attn", "flash_attn_interface")
"""The packages of `attn_implementation` `flash_attention_2` and `flash_attention_3`."""


def diagnose() -> list[Finding]:
    """Return findings about torch, transformers and the device."""
    # The version of a torch build for the CPU ends with its name.
    build = "cpu" if "+cpu" in installed_version("torch")[1] else ""
    findings = [
        package_finding("torch", hint=_INSTALL, **_TORCH),
        package_finding("transformers", hint=_INSTALL, **_TRANSFORMERS),
        device_finding(build, gpu_remedy="install a CUDA build of torch", cpu_remedy=""),
    ]
    if has_gpu() and not any(find_spec(name) for name in _FLASH_PACKAGES):
        findings.append(
            Finding(
                "flash attention",
                "limited",
                "without it, attention covers all running requests at once, which is slow for many long contexts",
                "pip install flash-attn, and set engine.attn_implementation to flash_attention_2",
            )
        )
    findings.append(Finding("sleep", "ok", "sleep levels 1 and 2 are available"))
    findings.append(Finding("weight updates", "ok", "available"))
    return findings
