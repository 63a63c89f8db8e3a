"""The conformance suite of the hooks `wrap_*`: `turnwise_testing.checks.wrapper`, one test each."""

from __future__ import annotations

import pickle

import pytest

from turnwise.plugin.host import load
from turnwise.types import PluginRecipe
from turnwise_testing.checks.wrapper import WRAPPER_CHECKS, WrapperProbe
from turnwise_testing.suites.plugin import InstalledSuite


class WrapperSuite(InstalledSuite):
    """
    The conformance suite of a plugin that wraps parts. A plugin's whole file::

        class TestTimer(WrapperSuite):
            entry_point = "timer"
            module = "turnwise_timer"

    May be overridden: the fixtures `section` and `probe`.
    """

    checks = WRAPPER_CHECKS

    @pytest.fixture
    def section(self) -> object:
        """The plugin's section; may be overridden, and must be when it has required options."""
        return load(PluginRecipe(allow=(self.entry_point,))).sections[self.entry_point].options()

    @pytest.fixture
    def probe(self, section: object) -> WrapperProbe:
        """The probe of the hooks; may be overridden."""
        host = load(PluginRecipe(allow=(self.entry_point,)))
        return WrapperProbe.of(host, self.entry_point, lambda: section)

    def test_section_survives_a_pickle(self, section: object) -> None:
        """A section crosses process borders, so it survives pickling."""
        assert pickle.loads(pickle.dumps(section)) == section
