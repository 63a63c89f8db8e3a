"""Each call finds the plugins of the installed distributions, and no cache hides a change."""

import importlib
import shutil
import sys
from collections import Counter
from importlib.metadata import Distribution, distributions, entry_points

import pluggy
import pytest

from turnwise.plugin.host import load
from turnwise.plugin.requirements import GROUP, plugin_points, read_facts
from turnwise.types import PluginRecipe
from turnwise_testing.whole_runs.installation import install_plugin


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of `sys.path` for fake distributions."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def fakes() -> dict[str, str]:
    """Return the fake plugins that are found, by their names."""
    return {point.name: point.value for point in plugin_points() if point.value.startswith("fake_")}


def test_each_change_of_the_installed_plugins_is_seen(site):
    """A process that stays sees plugins that are installed, changed in their place, and removed, as Python does."""
    assert fakes() == {}
    install_plugin(site, "fake_one", "", entry="one")
    assert fakes() == {"one": "fake_one"}
    install_plugin(site, "fake_two", "", entry="two")
    assert fakes() == {"one": "fake_one", "two": "fake_two"}
    (site / "fake_one-1.0.dist-info/entry_points.txt").write_text("[turnwise]\nuno = fake_one\n")
    assert fakes() == {"uno": "fake_one", "two": "fake_two"}
    shutil.rmtree(next(site.glob("fake_two*.dist-info")))
    assert fakes() == {"uno": "fake_one"}


def test_a_folder_that_joins_the_path_is_searched(tmp_path, monkeypatch):
    """Also if it comes first and hides a distribution: Python takes the first of a name."""
    for folder, entry in (("behind", "one"), ("first", "uno")):
        (tmp_path / folder).mkdir()
        install_plugin(tmp_path / folder, "fake_one", "", entry=entry)
        monkeypatch.syspath_prepend(str(tmp_path / folder))
        assert fakes() == {entry: "fake_one"}


def test_the_points_are_those_of_python():
    """The installed plugins are found, and each knows its distribution."""
    expected = {(point.name, point.value, name_of(point.dist)) for point in entry_points(group=GROUP)}
    assert {(point.name, point.value, name_of(point.dist)) for point in plugin_points()} == expected
    assert len(expected) == len(plugin_points()) >= 40


def name_of(distribution: Distribution | None) -> str:
    return distribution.name if distribution else ""


def test_facts_are_those_of_python():
    """The header of a metadata file has all that is read of it, whoever wrote it."""
    for each in distributions():
        facts = read_facts(each)
        assert (facts.name, facts.version) == (each.metadata["Name"], each.version)
        assert sorted(facts.requirements) == sorted(each.requires or ())


def test_hooks_are_those_of_pluggy():
    """The names of a module that are passed over are no hooks."""
    host, plain = load(), pluggy.PluginManager(GROUP)
    for plugin in host.plugins:
        module = host.wrapping.manager.get_plugin(plugin.name)
        plain.register(module, name=plugin.name)
        expected = {caller.name for caller in plain.get_hookcallers(module)}
        assert {caller.name for caller in host.wrapping.manager.get_hookcallers(module)} == expected


HOOK = """
import turnwise
class Plugin:
    @turnwise.hookimpl
    def register_tools(self, registry):
        registry.add("made", object)
"""
FORMS = {
    "method": "register_tools = Plugin().register_tools",
    "object": "plugin = Plugin()",
}


@pytest.mark.parametrize("form", FORMS)
def test_hooks_of_every_form_are_found(site, monkeypatch, form):
    """A hook of a module may be a bound method, and a plugin may be an object in place of a module."""
    install_plugin(site, "fake_form", f"{HOOK}{FORMS[form]}\n", entry="form")
    if form == "object":
        (site / "fake_form-1.0.dist-info/entry_points.txt").write_text("[turnwise]\nform = fake_form:plugin\n")
    importlib.invalidate_caches()
    monkeypatch.delitem(sys.modules, "fake_form", raising=False)
    assert load(PluginRecipe(allow=("form",))).entry("tools", "made").owner == "form"


def test_a_load_reads_few_files(monkeypatch):
    """Once a process has found the plugins, each load reads two files of each, and none of other distributions."""
    num_plugins = len(load().plugins)
    read: Counter[str] = Counter()
    # A backport of importlib.metadata, which libraries import, finds distributions of another class.
    kind = type(next(distributions(name="turnwise")))
    whole = kind.read_text

    def read_text(self, filename):
        read[filename] += 1
        return whole(self, filename)

    monkeypatch.setattr(kind, "read_text", read_text)
    load()
    assert read["entry_points.txt"] <= num_plugins
    assert read["METADATA"] <= num_plugins + 3  # those of the distributions that the plugins require
