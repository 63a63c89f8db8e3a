"""Observers of a run: the ones that the config names, and the ones that enable themselves."""

from pathlib import Path

import pytest
from attrs import define

from turnwise.config.file import structure_config
from turnwise.events.observer import Observer
from turnwise.plugin.host import Host
from turnwise.runtime.build import RunBuilder


@define
class Options:
    endpoint: str = "default"


class Spans(Observer):
    def __init__(self, options, resources):
        self.endpoint = options.endpoint


def config_with(*observers):
    sections = {"data": {"path": "tasks.jsonl"}, "engine": "e", "agent": "a", "observers": list(observers)}
    return structure_config(sections, Path())


def host_with(enabled_if):
    host = Host()
    host.registry("observers").add("spans", Spans, config=Options, enabled_if=enabled_if)
    host.registry("observers").add("other", Spans, config=Options)
    return host


@pytest.mark.parametrize(("enabled", "endpoints"), [(True, ["default"]), (False, [])])
def test_an_observer_enables_itself(enabled, endpoints):
    """An observer whose function returns True is built with its default options."""
    observers = RunBuilder(config_with(), host_with(lambda: enabled)).build_observers()

    assert endpoints == [each.endpoint for each in observers]


def test_a_named_observer_has_the_options_of_the_config():
    """A named observer is built once, and its function is not called."""
    host = host_with(lambda: pytest.fail("called"))
    observers = RunBuilder(config_with({"name": "spans", "endpoint": "mine"}), host).build_observers()

    assert ["mine"] == [each.endpoint for each in observers]
