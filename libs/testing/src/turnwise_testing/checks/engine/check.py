"""The register of engine checks, with the engines and probes that each applies to."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from attrs import frozen

from turnwise.protocols import Engine
from turnwise.types import Capabilities
from turnwise_testing.probes.engine import EngineProbe

MakeEngine = Callable[[], Engine]
CheckFunction = Callable[[Engine, EngineProbe], Coroutine[Any, Any, None]]


@frozen(kw_only=True)
class EngineCheck:
    """
    One check.

    Attributes:
        function: awaited with the engine and the probe.
        needs: the field of `Capabilities` without which it makes no sense; empty for none.
        fresh: it wants an engine that was not started, and leaves it stopped.
        reference: it compares with `EngineProbe.reference`.
        letters: it needs `EngineProbe.letters`.
        pictures: it needs `EngineProbe.pictures`.
        sleep_level: the level of sleep that it is about; 0 for none.
    """

    function: CheckFunction
    needs: str = ""
    fresh: bool = False
    reference: bool = False
    letters: bool = False
    pictures: bool = False
    sleep_level: int = 0

    def missing(self, capabilities: Capabilities, probe: EngineProbe | None = None) -> str:
        """Return why the check does not apply to such an engine, for a person; empty when it does."""
        if self.needs and not getattr(capabilities, self.needs):
            return f"the engine has no capability {self.needs!r}"
        if self.sleep_level and self.sleep_level not in capabilities.sleep_levels:
            return f"the engine has no sleep level {self.sleep_level}"
        if self.reference and (probe is None or probe.reference is None):
            return "the probe has no reference to compare with"
        if self.letters and (probe is None or probe.letters is None):
            return "the probe has no letters for grammars"
        if self.pictures and (probe is None or probe.pictures is None):
            return "the probe has no pictures"
        return ""


ENGINE_CHECKS: dict[str, EngineCheck] = {}
"""Every check by the name of its function without `check_`, in the order in which they should run."""


def engine_check(**options: Any) -> Callable[[CheckFunction], CheckFunction]:
    """Register a function as a check; the options are fields of `EngineCheck`."""

    def register(function: CheckFunction) -> CheckFunction:
        name = getattr(function, "__name__", "").removeprefix("check_")
        ENGINE_CHECKS[name] = EngineCheck(function=function, **options)
        return function

    return register
