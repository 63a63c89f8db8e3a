"""Diagnoses of turnwise itself and of Ray. The packages that they check are not imported."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from turnwise.errors import ConfigError
from turnwise.files import expanded
from turnwise.models.inspection import inspect_hub
from turnwise.plugin.host import ALLOW_VARIABLE, Host, load
from turnwise.protocols import Finding
from turnwise.types import PluginRecipe

_OPTIONAL: Final = (
    ("torch", "torch", "batches as tensors"),
    ("transformers", "tokenizers", "tokenizers and chat templates of models"),
)
"""Distribution, the extra of turnwise that installs it, and its use."""
_RAY_TOKEN_FILE: Final = "~/.ray/auth_token"


def installed_version(distribution: str) -> str:
    """Return the version of an installed distribution, or an empty text."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


class TurnwiseDiagnostic:
    """Checks the interpreter, turnwise, its plugins and its optional packages."""

    def diagnose(self) -> Iterator[Finding]:
        yield Finding("Python", "ok", f"{platform.python_version()} at {sys.executable}")
        yield Finding("turnwise", "ok", f"{version('turnwise')} is installed")
        host = load(PluginRecipe())
        yield _plugins(host)
        yield _engines(host)
        for distribution, extra, use in _OPTIONAL:
            if found := installed_version(distribution):
                yield Finding(distribution, "ok", f"{found} is installed")
            else:
                explanation = f"not installed, so there are no {use}"
                yield Finding(distribution, "limited", explanation, f"pip install 'turnwise[{extra}]'")
        yield _hub()


def _hub() -> Finding:
    """Return whether models can be taken from the hub of Hugging Face; it is not asked."""
    item = "model hub"
    try:
        state = inspect_hub()
    except ConfigError as error:
        hint = "pip install 'turnwise[tokenizers]'"
        return Finding(item, "limited", f"no model can be named by its id: {error}", hint)
    token = "with a token" if state.token else "without a token, so gated and private models are out of reach"
    where = f"{state.endpoint}, {token}; the cache {state.cache} has {state.free / 1e9:.1f} GB left"
    if state.offline:
        return Finding(
            item, "limited", f"HF_HUB_OFFLINE is set, so only cached models run: {where}", "unset HF_HUB_OFFLINE"
        )
    if state.free == 0:
        return Finding(item, "limited", f"the cache cannot be written: {where}", "set HF_HOME to another disk")
    return Finding(item, "ok", where)


def _plugins(host: Host) -> Finding:
    loaded = f"{sum(plugin.state == 'ok' for plugin in host.plugins)} plugins are loaded"
    if host.broken:
        names = ", ".join(plugin.name for plugin in host.broken)
        return Finding("plugins", "broken", f"{loaded}; {names} cannot be imported", "see `turnwise plugins`")
    if host.skipped:
        explanation = f"{loaded}; the variable {ALLOW_VARIABLE} leaves out {', '.join(host.skipped)}"
        return Finding("plugins", "limited", explanation, f"unset {ALLOW_VARIABLE}")
    return Finding("plugins", "ok", loaded)


def _engines(host: Host) -> Finding:
    if names := host.registry("engines").names():
        return Finding("engines", "ok", f"plugins register {', '.join(names)}")
    return Finding("engines", "missing", "no plugin registers an engine", "install the plugin of an engine")


class RayDiagnostic:
    """Checks Ray and its token authentication, without starting or joining a cluster."""

    def diagnose(self) -> Iterator[Finding]:
        found = installed_version("ray")
        if not found:
            yield Finding("Ray", "missing", "not installed; `runtime: ray` needs it", "pip install 'turnwise[ray]'")
            return
        yield Finding("Ray", "ok", f"{found} is installed")
        yield _ray_token()


def _ray_token() -> Finding:
    """Return whether processes of a cluster authenticate themselves, by Ray's environment variables and token file."""
    mode = os.environ.get("RAY_AUTH_MODE", "").lower()
    path = expanded(os.environ.get("RAY_AUTH_TOKEN_PATH") or _RAY_TOKEN_FILE)
    has_token = bool(os.environ.get("RAY_AUTH_TOKEN")) or path.is_file()
    if mode == "disabled":
        explanation = "RAY_AUTH_MODE is disabled: who reaches a port of the cluster can run code on its machines"
        return Finding("Ray token", "limited", explanation, "unset RAY_AUTH_MODE")
    if has_token:
        return Finding("Ray token", "ok", "a token is present; to join a cluster by address, set RAY_AUTH_MODE=token")
    if mode == "token":
        explanation = "RAY_AUTH_MODE is token, but this machine has no token, so a run can join no running cluster"
        hint = f"copy {_RAY_TOKEN_FILE} from the head of the cluster, or set RAY_AUTH_TOKEN"
        return Finding("Ray token", "limited", explanation, hint)
    return Finding("Ray token", "ok", "no token yet; Ray creates one for a cluster that a run starts")
