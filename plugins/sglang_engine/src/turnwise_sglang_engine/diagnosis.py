"""Diagnosis of the SGLang engine on this machine. SGLang is not imported."""

from __future__ import annotations

from importlib.util import find_spec

from turnwise import Finding
from turnwise_engine_support.diagnosis import (
    avx512_finding,
    cpu_platform_finding,
    package_finding,
    shared_memory_finding,
)
from turnwise_engine_support.machine import has_gpu

TESTED, OLDEST, BELOW = "0.5.23", "0.5.23", "0.6"
"""Versions of SGLang: the one that the tests ran with, the oldest that works, and the first that is too new."""
_INSTALL_CUDA = (
    "pip install 'turnwise-sglang-engine[cuda]' (in a virtual environment for SGLang alone, whose python is"
    " runtime.ray.replica_python)"
)
_INSTALL_CPU = "follow the section 'Install' in the README of turnwise-sglang-engine"
_CPU_PACKAGES = ("torch", "transformers")


def diagnose() -> list[Finding]:
    """Return findings about SGLang, the device, and the memory that it needs."""
    gpu = has_gpu()
    hint = _INSTALL_CUDA if gpu else _INSTALL_CPU
    findings = [package_finding("sglang", tested=TESTED, oldest=OLDEST, below=BELOW, hint=hint)]
    if gpu:
        findings.append(Finding("device", "ok", "a GPU is visible"))
    else:
        findings += _cpu_findings()
    findings.append(
        shared_memory_finding(
            use="a bucket of new weights",
            hint="start the container with a larger --shm-size, or lower engine.weight_bucket_bytes",
        )
    )
    findings.append(_sleep_finding(gpu))
    findings.append(Finding("weight updates", "ok", "available"))
    return findings


def _cpu_findings() -> list[Finding]:
    findings = [Finding("device", "ok", "no GPU is visible, so the engine runs on the CPU")]
    # SGLang's own requirements are for CUDA, so pip does not install these for a CPU.
    if missing := [name for name in _CPU_PACKAGES if find_spec(name) is None]:
        findings.append(Finding("packages", "missing", f"{' and '.join(missing)} not installed here", _INSTALL_CPU))
    findings.append(cpu_platform_finding(glibc="2.34"))
    findings.append(avx512_finding(required=True, effect="SGLang's CPU build needs it"))
    return findings


def _sleep_finding(gpu: bool) -> Finding:
    if not gpu:
        return Finding("sleep", "limited", "SGLang frees memory only on a GPU, so there is no sleep on a CPU")
    if find_spec("torch_memory_saver") is None:
        hint = "pip install torch_memory_saver"
        return Finding("sleep", "limited", "sleep needs torch_memory_saver, which is not installed here", hint)
    return Finding("sleep", "ok", "sleep is available: level 1 with weights_cpu_backup, and level 2")
