"""Requirements of every adapter, as plain functions without pytest; a check takes an `AdapterProbe`."""

from __future__ import annotations

from collections.abc import Callable

from attrs import field, frozen

from turnwise.errors import ConfigError
from turnwise.plugin.host import KINDS, Host
from turnwise.protocols import Adapter
from turnwise.types import JsonObject
from turnwise_testing.checks.check import Check, register
from turnwise_testing.checks.part import PartChecks
from turnwise_testing.probes.engine import expect


@frozen(kw_only=True)
class AdapterExample:
    """
    An object that the adapter knows.

    Attributes:
        kind: registry of the part, such as `tools`.
        value: the object.
        options: keys of a config's section.
    """

    kind: str
    value: object
    options: JsonObject = field(factory=dict)


@frozen(kw_only=True)
class AdapterProbe:
    """
    The probe of an adapter.

    Attributes:
        make_adapter: builds it, as the registered factory does.
        examples: objects that it knows.
    """

    make_adapter: Callable[[], Adapter]
    examples: tuple[AdapterExample, ...] = ()


ADAPTER_CHECKS: dict[str, Check] = {}
"""Every check by the name of its function without `check_`."""
ADAPTERS = PartChecks(
    checks=ADAPTER_CHECKS,
    probe=lambda part: AdapterProbe(make_adapter=part.make, examples=part.examples),
    examples="AdapterExamples",
)
_check = register(ADAPTER_CHECKS)
_NO_EXAMPLES = "the probe has no examples"


@_check
def check_fulfils_the_protocol(probe: AdapterProbe) -> None:
    """The factory returns an object with the method of an adapter."""
    made = probe.make_adapter()
    expect(isinstance(made, Adapter), f"{type(made).__name__} has no method `adapt`")


@_check
def check_leaves_strange_objects_alone(probe: AdapterProbe) -> None:
    """An object that no adapter can know gives None, for every kind of part."""
    adapter = probe.make_adapter()
    for kind in KINDS:
        for value in (object(), None, 3):
            part = adapter.adapt(kind, value, {})
            expect(part is None, f"adapt({kind!r}, {value!r}) gave {part!r}, expected None")


@_check
def check_makes_parts_of_the_kind(probe: AdapterProbe) -> str | None:
    """A part that is made of an object fulfils the protocol of its kind."""
    adapter = probe.make_adapter()
    for each in probe.examples:
        part = adapter.adapt(each.kind, each.value, each.options)
        expect(part is not None, f"adapt({each.kind!r}, {each.value!r}) gave None")
        mismatch = Host().registry(each.kind).mismatch(part)
        expect(not mismatch, f"it gave {mismatch}")
    return None if probe.examples else _NO_EXAMPLES


@_check
def check_refuses_unknown_options(probe: AdapterProbe) -> str | None:
    """An option that the object does not have is a `ConfigError` of one line."""
    adapter = probe.make_adapter()
    for each in probe.examples:
        try:
            adapter.adapt(each.kind, each.value, {**each.options, "no_such_option": 1})
        except ConfigError as error:
            expect("\n" not in str(error), f"the error has several lines: {error}")
        else:
            expect(False, f"{each.value!r} accepts the option 'no_such_option'")
    return None if probe.examples else _NO_EXAMPLES
