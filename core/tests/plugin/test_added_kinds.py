"""Kinds that plugins add: other plugins register parts of them as of the core's, in any order of the names."""

import importlib
import json
import sys
import textwrap

import pytest

from turnwise.cli import main
from turnwise.config.resolve import build_part
from turnwise.errors import PluginError
from turnwise.plugin.host import KINDS, load
from turnwise.protocols import Resources
from turnwise.types import PluginRecipe
from turnwise_testing.whole_runs.installation import install_plugin

OWNER = """\
    from typing import Protocol, runtime_checkable

    @runtime_checkable
    class Planet(Protocol):
        def orbit(self): ...

    @turnwise.hookspec
    def register_planets(registry): pass

    @turnwise.hookimpl
    def add_hookspecs(specs):
        specs.add(register_planets, part="planet", contract=Planet, checks="fake_checks:planet_checks")
    """
STRANGER = """\
    class Mars:
        def __init__(self, config, resources): pass
        def orbit(self): return 687

    @turnwise.hookimpl
    def register_planets(registry):
        registry.add("mars", Mars)
    """
CHECKS = """
def check_orbit(planet):
    \"\"\"A planet needs more than a year.\"\"\"
    assert planet.orbit() > 365, "too fast"

def planet_checks(make_planet):
    return {"orbit": check_orbit}, make_planet()
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of `sys.path` for fake distributions; their imports are removed afterwards."""
    monkeypatch.delenv("TURNWISE_PLUGINS", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("fake_")]:
        del sys.modules[name]


def install(site, name, code):
    """Write a distribution with a plugin of this name."""
    install_plugin(site, f"fake_{name}", "import turnwise\n" + textwrap.dedent(code), entry=name)
    importlib.invalidate_caches()


def only(*names):
    """Return a recipe of these plugins."""
    return PluginRecipe(allow=names)


def named(host, *names):
    """Return the plugins of these names."""
    return [plugin for plugin in host.plugins if plugin.name in names]


def complaint(error, call, *arguments):
    """Return the text of the error that a call raises."""
    with pytest.raises(error) as caught:
        call(*arguments)
    return str(caught.value)


@pytest.fixture(params=[("astronomy", "mars"), ("zenith", "mars")], ids=["owner first", "stranger first"])
def owner(request, site):
    """The name of a plugin that adds a kind, beside a stranger that has a part of it."""
    owner, stranger = request.param
    install(site, owner, OWNER)
    install(site, stranger, STRANGER)
    (site / "fake_checks.py").write_text(CHECKS)
    return owner


def test_the_order_does_not_matter(owner):
    """A stranger marks its function as for the core's hooks, whichever plugin is loaded first."""
    host = load(only(owner, "mars"))

    assert [{"planets": ("mars",)}] == [plugin.registers for plugin in named(host, "mars")]
    assert (*KINDS, "planets") == host.kinds
    assert 687 == build_part(host, "planets", "mars", Resources()).orbit()
    assert "unknown planet 'marz'; did you mean 'mars'?" in complaint(
        PluginError, build_part, host, "planets", "marz", Resources()
    )


def test_workers_add_the_same_kinds(owner):
    """A recipe makes the same host in another process."""
    host = load(only(owner, "mars"))

    assert ("mars",) == load(host.recipe()).registry("planets").names()


def test_a_part_that_lacks_a_method(owner, site):
    """The contract of the kind is checked when a part is built; the error names its package."""
    install(site, "moon", STRANGER.replace("def orbit", "def fly").replace('"mars"', '"moon"'))
    host = load(only(owner, "moon"))

    text = complaint(PluginError, build_part, host, "planets", "moon", Resources())
    assert "its factory returned Mars, which has no orbit; expected fake_" in text


def test_a_name_of_two_plugins(owner, site):
    """It belongs to neither, as for the core's kinds."""
    install(site, "moon", STRANGER)
    host = load(only(owner, "mars", "moon"))

    text = complaint(PluginError, build_part, host, "planets", "mars", Resources())
    assert "planet 'mars' is registered by several plugins: 'mars' and 'moon'" in text


def test_commands_know_the_kind(owner, capsys, monkeypatch):
    """`turnwise plugins` lists the parts, and `turnwise check` runs the checks of the kind."""
    monkeypatch.setenv("TURNWISE_PLUGINS", f"{owner},mars,testing")
    assert 0 == main(["plugins", "--json"])
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["plugins"]}
    assert {"planets": ["mars"]} == rows["mars"]["registers"]

    assert 0 == main(["check", "mars"])
    assert "orbit" in capsys.readouterr().out


def test_a_failed_check(owner, site, capsys, monkeypatch):
    """A check that fails ends `turnwise check` with code 1 and the reason."""
    install(site, "moon", STRANGER.replace("687", "27").replace('"mars"', '"moon"'))
    monkeypatch.setenv("TURNWISE_PLUGINS", f"{owner},moon,testing")

    assert 1 == main(["check", "moon"])
    assert "too fast" in capsys.readouterr().out


def test_without_the_owner(site):
    """The stranger is broken, because nothing would call its function; the others work."""
    install(site, "mars", STRANGER)

    (plugin,) = named(load(), "mars")
    assert plugin.error.startswith("has an unknown hook 'register_planets'")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("@turnwise.hookspec\n", "\n", "PluginError: 'register_planets' is no function register_KIND that is marked"),
        ("register_planets", "planets", "PluginError: 'planets' is no function register_KIND that is marked"),
        ("register_planets(registry)", "register_planets(planets)", "'register_planets' must have one argument"),
        ("register_planets", "register_engines", "adds the hook 'register_engines', which turnwise has"),
        ("specs.add(", "specs.ad(", "has a hook 'add_hookspecs' that raised AttributeError"),
        ("@turnwise.hookimpl\n", "\n", "has a function 'add_hookspecs' that is not marked with @turnwise.hookimpl"),
    ],
)
def test_a_mistake_of_the_owner(site, old, new, message):
    """Only the owner is broken, with the reason, and adds no kind."""
    install(site, "astronomy", OWNER.replace(old, new))

    host = load()

    (plugin,) = named(host, "astronomy")
    assert ("broken", True) == (plugin.state, message in plugin.error), plugin.error
    assert KINDS == host.kinds[: len(KINDS)]
    assert "planets" not in host.kinds


def test_two_plugins_add_one_kind(site):
    """The second by name is broken."""
    install(site, "astronomy", OWNER)
    install(site, "zodiac", OWNER)

    first, second = named(load(), "astronomy", "zodiac")
    assert "ok" == first.state
    assert "the hook 'register_planets' is added by 'astronomy' too; uninstall one" in second.error
