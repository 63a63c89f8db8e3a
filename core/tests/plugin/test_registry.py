"""The registry that each hook receives."""

import pytest

from turnwise.errors import PluginError
from turnwise.plugin.registry import Registry


def make_part(config, resources):
    return object()


def test_an_observer_can_say_when_a_run_has_it():
    """`enabled_if` is kept with the entry, and is not called by the registration."""
    registry = Registry("observer")
    registry.add("spans", make_part, enabled_if=lambda: pytest.fail("called"))
    registry.add("log", make_part)

    assert registry.get("spans").enabled_if is not None
    assert registry.get("log").enabled_if is None


def test_other_parts_cannot_enable_themselves():
    """A part that only a config can choose is refused, with its kind and name."""
    with pytest.raises(PluginError, match="router 'warmest': only an observer can be registered with enabled_if"):
        Registry("router").add("warmest", make_part, enabled_if=bool)
