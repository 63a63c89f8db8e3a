"""
The common part of all conformance suites: a plugin is found, imports lightly, and registers its parts.

A plugin subclasses the suite of its kind, sets the names and overrides the fixtures; the standard tests come with it
and may be neither removed nor replaced. A known failure is shown as such::

    @pytest.mark.xfail(strict=True, reason="the server merges equal requests")
    def test_concurrent_requests_keep_identity(self, checker):
        super().test_concurrent_requests_keep_identity(checker)

The suites are part of the core's version: a new test comes with a minor release.
"""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any, ClassVar

import pytest

from turnwise.plugin.registry import Entry, Registry
from turnwise.protocols import Resources
from turnwise_testing.checks.check import CHECK_TIMEOUT_S, Check, promise_of, run_check

HEAVY_MODULES = ("torch", "ray", "vllm", "sglang", "transformers")
_META_TEST = "test_no_standard_test_is_overridden"


class CheckedSuite:
    """
    The base of all suites: makes a test of each check, within a time limit.

    Attributes:
        checks: functions of the fixture `probe`; each becomes a test, whose docstring is the check's promise.
        check_timeout_s: longest time of one check in seconds.
    """

    checks: ClassVar[Mapping[str, Check]] = {}
    check_timeout_s: ClassVar[float] = CHECK_TIMEOUT_S
    left_out: ClassVar[frozenset[str]] = frozenset()
    """Standard tests that an option of the suite leaves to another class; set by the suite of a kind."""

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        if "checks" in vars(cls):
            cls.add_tests()
        # The test that finds overridden tests cannot find that it was overridden itself.
        if _META_TEST in vars(cls):
            raise TypeError(f"{cls.__name__} must not override {_META_TEST}")

    @classmethod
    def add_tests(cls) -> None:
        """Make a test of each check."""
        for name, check in cls.checks.items():
            setattr(cls, f"test_{name}", _test_of(check))

    def test_no_standard_test_is_overridden(self) -> None:
        """A plugin adds tests; it removes and replaces none, but for known failures that say why."""
        assert overridden_tests(type(self)) == []


class InstalledSuite(CheckedSuite):
    """
    The tests of every plugin.

    Must be set by the plugin:
        entry_point: name in the entry-point group `turnwise`.
        module: that the entry point loads.
    """

    entry_point: ClassVar[str]
    module: ClassVar[str]

    def test_entry_point_is_discovered(self) -> None:
        """The installed distribution announces the plugin under its name."""
        found = [each.value for each in entry_points(group="turnwise", name=self.entry_point)]

        assert found == [self.module]

    def test_import_is_light(self) -> None:
        """Importing the plugin in a fresh interpreter loads no engine and no tensor library."""
        assert imported_in_a_fresh_interpreter(self.module) == (0, "\n", "")


@cache  # a plugin has a suite for each of its parts, and they import the same module
def imported_in_a_fresh_interpreter(module: str) -> tuple[int, str, str]:
    """Return the exit code, the names of the heavy modules that importing a module loads, and the standard error."""
    code = f"import sys, {module}; print(*[name for name in {HEAVY_MODULES!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


class PluginSuite(InstalledSuite):
    """
    The conformance suite of all plugins that register parts.

    Must be set by the plugin:
        entry_point: name in the entry-point group `turnwise`.
        module: that the entry point loads.
        registered: the name that configs use.

    Set by the suite of each kind:
        hook: which hook registers it, such as `register_engines`.
        checks: functions of the fixture `probe`; each becomes a test, whose docstring is the check's promise.

    May be overridden: the fixtures `config` and `resources`, and `check_timeout_s`, the longest time of one check.
    """

    registered: ClassVar[str]
    hook: ClassVar[str]

    @pytest.fixture
    def config(self) -> object:
        """An instance of the registered config class; may be overridden, and must be when it has required options."""
        return self.entry().config()

    @pytest.fixture
    def resources(self) -> Resources:
        """The resources of the factory; may be overridden."""
        return Resources()

    def entry(self) -> Entry[Any]:
        """Return the entry that the plugin's hook registers, without any other plugin."""
        registry: Registry[Any] = Registry(self.hook.removeprefix("register_").removesuffix("s"))
        with registry.owned_by(self.entry_point):
            getattr(importlib.import_module(self.module), self.hook)(registry=registry)
        return registry.get(self.registered)

    def test_registers_its_name(self) -> None:
        """The hook registers a factory and an attrs config class, and does so again in the next process."""
        entry, again = self.entry(), self.entry()

        assert callable(entry.factory)
        assert hasattr(entry.config, "__attrs_attrs__")
        assert (again.name, again.config) == (entry.name, entry.config)

    def test_config_survives_a_pickle(self, config: object) -> None:
        """A config crosses process borders, so it survives pickling."""
        assert pickle.loads(pickle.dumps(config)) == config


def _test_of(check: Check) -> Any:
    """Return a check as a test method."""

    def test(self: CheckedSuite, probe: object) -> None:
        if reason := run_check(check, probe, self.check_timeout_s):
            pytest.skip(reason)

    test.__doc__ = promise_of(check)
    return test


def overridden_tests(suite: type) -> list[str]:
    """Return the standard tests that a suite removes or replaces without a strict xfail and its reason, sorted."""
    standard = {
        name: function
        for base in reversed(suite.__mro__)
        if base.__module__.startswith("turnwise_testing.")
        for name, function in vars(base).items()
        if name.startswith("test_")
    }
    left_out: frozenset[str] = getattr(suite, "left_out", frozenset())
    changed = [
        name
        for name, function in standard.items()
        if name not in left_out and getattr(suite, name, None) is not function
    ]
    return sorted(name for name in changed if not _is_known_failure(getattr(suite, name, None)))


def _is_known_failure(test: object) -> bool:
    marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "xfail"]
    return any(mark.kwargs.get("strict") is True and mark.kwargs.get("reason") for mark in marks)
