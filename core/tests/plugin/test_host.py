"""Plugins: discovery, registration, and errors that name the plugin at fault."""

import importlib
import pickle
import subprocess
import sys
import textwrap
from importlib.metadata import version
from pathlib import Path

import attrs
import pytest

from turnwise.config.parts import Choice
from turnwise.config.resolve import build_part
from turnwise.config.run import KIND, RunConfig
from turnwise.errors import ConfigError, DuplicateNameError, PluginError
from turnwise.plugin.host import ALLOW_VARIABLE, KINDS, Host, LoadedPlugin, load
from turnwise.plugin.requirements import InstalledDistributions
from turnwise.protocols import Resources
from turnwise.types import PluginPin, PluginRecipe
from turnwise_testing.whole_runs.installation import install_plugin

HEADER = "from attrs import frozen\nimport turnwise\nfrom turnwise_testing.engines.scripted import ScriptedEngine\n"
ENGINE = """\
    @frozen
    class Config:
        dtype: str = "float32"

    class Made(ScriptedEngine):
        def __init__(self, config, resources):
            super().__init__()
            self.made_of = config.dtype, resources.seed

    @turnwise.hookimpl
    def register_engines(registry):
        registry.add("{name}", Made, config=Config)
    """


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of `sys.path` for fake distributions; their imports are removed afterwards."""
    monkeypatch.delenv(ALLOW_VARIABLE, raising=False)
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("fake_"):
            del sys.modules[name]


def install(site: Path, name: str, code: str = "", *, entry: str = "", version: str = "1.0") -> None:
    """Write a distribution `fake-NAME` with the module `fake_NAME`, announced as the plugin NAME."""
    install_plugin(site, f"fake_{name}", HEADER + textwrap.dedent(code), entry=entry or name, version=version)
    importlib.invalidate_caches()


REMEDY = (
    "; to continue without it: pip uninstall fake-bad, or leave 'bad' out of TURNWISE_PLUGINS"
    " and of the config's plugins"
)


def only(*names: str) -> PluginRecipe:
    return PluginRecipe(allow=names)


def complaint(error: type[Exception], call, *arguments: object, **options: object) -> str:
    with pytest.raises(error) as caught:
        call(*arguments, **options)
    return str(caught.value)


def named(host: Host, *names: str) -> list[LoadedPlugin]:
    return [plugin for plugin in host.plugins if plugin.name in names]


def test_every_hook_has_a_registry_and_every_choice_a_hook():
    """The names of hooks, registries and kinds cannot drift apart."""
    hookspecs = importlib.import_module("turnwise.plugin.specs")
    hooks = {name.removeprefix("register_") for name in vars(hookspecs) if name.startswith("register_")}
    choices = {item.metadata[KIND] for item in attrs.fields(RunConfig) if KIND in item.metadata}
    assert hooks == set(KINDS) == set(Host().kinds)
    assert [*KINDS] == sorted(KINDS)
    assert choices <= hooks


def test_importing_the_host_imports_nothing_heavy_and_loads_nothing():
    """A command line starts fast, and importing turnwise never runs a plugin."""
    code = """
        import sys, turnwise, turnwise.plugin.host
        heavy = {"torch", "ray", "transformers", "vllm", "sglang", "turnwise.builtins"} & set(sys.modules)
        turnwise.plugin.host.load(turnwise.PluginRecipe(allow=()))
        print(sorted(heavy), sorted({"torch", "ray", "transformers"} & set(sys.modules)))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[] []"


def test_a_plugin_is_found_imported_and_asked(site):
    """The host says where each name came from."""
    install(site, "one", ENGINE.format(name="vlm"), version="2.5")
    host = load(only("one"))
    expected = LoadedPlugin(
        name="one", module="fake_one", distribution="fake-one", version="2.5", registers={"engines": ("vlm",)}
    )
    assert [expected] == named(host, "one")
    assert host.registry("engines").names() == ("vlm",)
    assert host.entry("engines", "vlm").owner == "one"
    assert host.broken == ()


def test_the_cores_own_plugin_is_always_loaded(site, monkeypatch):
    """It comes by its entry point, like any other."""
    for recipe in (None, only(), PluginRecipe(pins=load(only()).recipe().pins)):
        [builtins] = named(load(recipe), "builtins")
        assert (builtins.distribution, builtins.module, builtins.state) == ("turnwise", "turnwise.builtins", "ok")
    monkeypatch.setenv(ALLOW_VARIABLE, "")
    assert [plugin.name for plugin in load().plugins] == ["builtins"]


def test_plugins_are_loaded_in_the_order_of_their_names(site):
    """Directory order differs between machines."""
    for name in ("zz", "aa", "mm"):
        install(site, name, "import sys\nsys.modules.setdefault('fake_order', []).append(__name__)\n")
    host = load()
    assert sys.modules["fake_order"] == ["fake_aa", "fake_mm", "fake_zz"]
    names = [plugin.name for plugin in host.plugins]
    assert sorted(names) == names


def test_the_allow_list_comes_from_the_recipe_or_the_environment(site, monkeypatch):
    """A recipe overrides the environment, and plugins outside it are not imported."""
    install(site, "one")
    install(site, "two")
    install(site, "bad", "raise RuntimeError('imported')")
    monkeypatch.setenv(ALLOW_VARIABLE, " one , ")
    host = load()
    assert [plugin.name for plugin in host.plugins] == ["builtins", "one"]
    assert {"two", "bad"} <= set(host.skipped)
    assert [plugin.name for plugin in load(only("two")).plugins] == ["builtins", "two"]
    assert "fake_bad" not in sys.modules


def test_a_plugin_that_was_asked_for_must_be_installed(site, monkeypatch):
    """The text has the closest installed name, or all of them."""
    install(site, "vllm_engine")
    text = complaint(PluginError, load, only("vlm_engine"))
    assert text == "plugin 'vlm_engine' is not installed; did you mean 'vllm_engine'?"
    monkeypatch.setenv(ALLOW_VARIABLE, "qqqqqq")
    text = complaint(PluginError, load)
    assert text.startswith("plugin 'qqqqqq' is not installed; known: ")
    assert "vllm_engine" in text


def test_two_distributions_with_one_plugin_name_are_both_named(site):
    """Which one would be kept follows the order of directories, so neither is; other plugins are loaded."""
    install(site, "one", entry="same", version="1.1")
    install(site, "two", entry="same", version="2.2")
    install(site, "three", ENGINE.format(name="vlm"))
    text = complaint(DuplicateNameError, load, only("same"))
    assert " has a name that two distributions use: " in text
    assert "fake-one 1.1 (module fake_one)" in text
    assert "fake-two 2.2 (module fake_two)" in text
    assert "same" in load(only()).skipped
    host = load()
    assert [(plugin.state, plugin.registers) for plugin in named(host, "same")] == [("broken", {})]
    assert "vlm" in host.registry("engines")


def test_a_name_that_two_plugins_register_belongs_to_neither(site):
    """Only a run that needs the name fails, and the error has both distributions and the hint."""
    install(site, "one", ENGINE.format(name="vlm"))
    install(site, "two", ENGINE.format(name="vlm"))
    install(site, "three", ENGINE.format(name="other"))
    host = load(only("one", "two", "three"))
    assert host.entry("engines", "other").owner == "three"
    assert "vlm" not in host.registry("engines").entries()
    text = complaint(DuplicateNameError, host.entry, "engines", "vlm")
    assert text.startswith(
        "engine 'vlm' is registered by several plugins: 'one' and 'two' ('one' of fake-one 1.0 (module"
    )
    assert text.endswith("'two' of fake-two 1.0 (module fake_two)); uninstall one, or leave it out of TURNWISE_PLUGINS")


def test_a_broken_plugin_takes_no_name_from_another(site):
    """Its registrations are removed when a later hook fails."""
    install(site, "one", ENGINE.format(name="vlm"))
    fails = "\n@turnwise.hookimpl\ndef register_tools(registry):\n    raise KeyError('x')\n"
    install(site, "two", textwrap.dedent(ENGINE.format(name="vlm")) + fails)
    assert load().entry("engines", "vlm").owner == "one"


def test_unmet_requirements_of_an_import_are_named(site):
    """The error of a plugin whose import fails has the command that installs the missing package."""
    install(site, "bad", "import no_such_module_anywhere")
    metadata = site / "fake_bad-1.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text() + "Requires-Dist: no-such-package>=2\nRequires-Dist: attrs>=25.3\n")
    importlib.invalidate_caches()
    text = complaint(PluginError, load, only("bad"))
    expected = "; it needs no-such-package>=2, and it is not installed: pip install 'no-such-package>=2'; to continue"
    assert expected in text
    assert list(InstalledDistributions().unmet_requirements("fake-bad")) == [
        "no-such-package>=2, and it is not installed: pip install 'no-such-package>=2'"
    ]


def test_a_plugin_for_another_turnwise_is_not_imported(site):
    """Its code may need what this version lacks."""
    install(site, "bad", "raise RuntimeError('imported')")
    metadata = site / "fake_bad-1.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text() + "Requires-Dist: turnwise>=9\n")
    importlib.invalidate_caches()
    [bad] = named(load(), "bad")
    here = f"turnwise>=9, and {version('turnwise')} is installed: pip install 'turnwise>=9'"
    assert (bad.state, bad.error) == ("broken", f"needs {here}")
    expected = f"plugin 'bad' of {bad.source} needs {here}; to continue"
    assert complaint(PluginError, load, only("bad")).startswith(expected)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import fake_that_is_not_there", "ModuleNotFoundError: No module named 'fake_that_is_not_there'"),
        ("raise ValueError('two\\nlines')", "ValueError: two lines"),
        ("def broken(:", "SyntaxError: "),
        ("raise SystemExit('no GPU')", "SystemExit: no GPU"),
    ],
)
def test_a_plugin_that_cannot_be_imported(site, code, error):
    """A requested broken plugin stops the run at once; an installed one only when a run needs its parts."""
    install(site, "bad", code)
    text = complaint(PluginError, load, only("bad"))
    assert text.startswith(f"plugin 'bad' of fake-bad 1.0 (module fake_bad) cannot be imported: {error}")
    assert text.endswith(REMEDY)
    host = load()
    [broken] = [plugin for plugin in host.broken if plugin.name == "bad"]
    assert broken.error.startswith(f"cannot be imported: {error}")
    assert "\n" not in broken.error
    unknown = complaint(PluginError, host.entry, "engines", "vlm")
    assert f"; plugin 'bad' is broken, it cannot be imported: {error}" in unknown
    assert "bad" not in [pin.name for pin in host.recipe().pins]


def test_a_name_that_is_there_does_not_mind_broken_plugins(site):
    """A run that needs nothing of a broken plugin continues."""
    install(site, "bad", "import fake_that_is_not_there")
    install(site, "one", ENGINE.format(name="vlm"))
    assert build_part(load(), "engines", "vlm", Resources(seed=3)).made_of == ("float32", 3)


def test_an_unknown_name_has_a_hint_and_says_what_was_not_loaded(site):
    """A plugin that is installed and not allowed is the likeliest reason."""
    install(site, "one", ENGINE.format(name="vllm"))
    install(site, "two")
    text = complaint(PluginError, build_part, load(only("one")), "engines", "vlm", Resources(), path="engine")
    assert text.startswith("engine: unknown engine 'vlm'; did you mean 'vllm'?; installed but not loaded: ")
    assert "two" in text


HOOK = "@turnwise.hookimpl\ndef register_engines(registry):\n    "


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (
            "@turnwise.hookimpl\ndef register_engine(registry): pass",
            "has an unknown hook 'register_engine'; did you mean 'register_engines'?",
        ),
        (
            "@turnwise.hookimpl\ndef set_up(registry): pass",
            "has an unknown hook 'set_up'; known: register_adapters, ",
        ),
        (
            "def register_engines(registry): pass",
            "has a function 'register_engines' that is not marked with @turnwise.hookimpl",
        ),
        (
            "@turnwise.hookimpl\ndef register_engines(registri): pass",
            "cannot be registered: PluginValidationError: ",
        ),
        (
            "@turnwise.hookimpl\ndef register_engines(): pass",
            "has a hook 'register_engines' without an argument; write `def register_engines(registry)`",
        ),
        (f"{HOOK}raise KeyError('x')", "has a hook 'register_engines' that raised KeyError: 'x'"),
        (f"{HOOK}raise SystemExit(3)", "has a hook 'register_engines' that raised SystemExit: 3"),
        (
            "@turnwise.hookimpl\nasync def register_engines(registry): pass",
            "has a hook 'register_engines' that is async or a wrapper; expected a plain function",
        ),
        (
            "@turnwise.hookimpl(wrapper=True)\ndef register_engines(registry):\n    return (yield)",
            "has a hook 'register_engines' that is async or a wrapper; expected a plain function",
        ),
        (
            f"{HOOK}registry.add('e', print, config=dict)",
            "registers engine 'e': expected an attrs class without a field 'name' as config, got <class 'dict'>",
        ),
        (
            f"@frozen\nclass C:\n    name: str = ''\n{HOOK}registry.add('e', print, config=C)",
            "registers engine 'e': expected an attrs class without a field 'name' as config, got <class",
        ),
        (
            f"{HOOK}registry.add('', print)",
            "has a hook 'register_engines' that raised PluginError: engine '': a name has",
        ),
        (f"{HOOK}registry.add('x e!', print)", "has a hook 'register_engines' that raised PluginError: engine 'x e!'"),
        (
            f"{HOOK}registry.add('e', print)\n    registry.add('e', print)",
            "has a hook 'register_engines' that raised PluginError: engine 'e' is registered twice",
        ),
    ],
)
def test_a_mistake_in_a_hook_names_the_plugin(site, code, expected):
    """It stops a run that asked for the plugin, and costs others nothing."""
    install(site, "bad", code)
    install(site, "one", ENGINE.format(name="vlm"))
    text = complaint(PluginError, load, only("bad"))
    assert text.startswith(f"plugin 'bad' of fake-bad 1.0 (module fake_bad) {expected}")
    assert text.endswith(REMEDY)
    host = load()
    [bad] = named(host, "bad")
    assert (bad.state, bad.registers) == ("broken", {})
    assert bad.error.startswith(expected)
    assert host.entry("engines", "vlm").owner == "one"


def test_output_of_an_import_goes_to_standard_error(site, capsys):
    """The standard output of a command is its own, such as JSON."""
    install(site, "one", "print('hello')")
    load()
    assert capsys.readouterr() == ("", "hello\n")


def test_an_optional_hook_may_be_unknown(site):
    """That is how a plugin supports a newer turnwise as well."""
    install(site, "one", "@turnwise.hookimpl(optionalhook=True)\ndef register_planets(registry): pass")
    assert [plugin.registers for plugin in named(load(only("one")), "one")] == [{}]


def test_specifications_that_a_plugin_imports_are_no_hooks_of_its_own(site):
    """Imported specifications have the names of hooks without being unmarked hooks."""
    install(site, "one", "from turnwise.plugin.specs import register_engines")
    assert [plugin.registers for plugin in named(load(only("one")), "one")] == [{}]


def test_a_hook_may_have_another_name(site):
    """That is a way of pluggy; only the hook counts."""
    code = """
        @turnwise.hookimpl(specname="register_tools")
        def mine(registry):
            registry.add("t", print)
    """
    install(site, "one", code)
    assert [plugin.registers for plugin in named(load(only("one")), "one")] == [{"tools": ("t",)}]


def test_one_module_cannot_be_two_plugins(site):
    """Its names would have two owners."""
    install(site, "one")
    (site / "fake_one-1.0.dist-info" / "entry_points.txt").write_text("[turnwise]\none = fake_one\nuno = fake_one\n")
    importlib.invalidate_caches()
    text = complaint(PluginError, load, only("one", "uno"))
    assert text.startswith("plugin 'uno' of fake-one 1.0 (module fake_one) cannot be registered: ValueError")


def test_each_host_starts_from_nothing(site):
    """Two hosts of one process share no registry, so nothing is registered twice."""
    install(site, "one", ENGINE.format(name="vlm"))
    first, second = load(only("one")), load(only("one"))
    one, other = (host.registry("engines") for host in (first, second))
    assert one is not other
    assert one.names() == other.names() == ("vlm",)


def test_a_recipe_makes_the_same_host_again(site, monkeypatch):
    """It crosses to another process as plain data, and the environment there has no say."""
    install(site, "one", ENGINE.format(name="vlm"))
    install(site, "two", "import fake_that_is_not_there")
    recipe = pickle.loads(pickle.dumps(load().recipe()))
    monkeypatch.setenv(ALLOW_VARIABLE, "nothing_like_this")
    host = load(recipe)
    assert recipe == host.recipe()
    assert host.entry("engines", "vlm").owner == "one"
    assert PluginPin(name="one", module="fake_one", distribution="fake-one", version="1.0") in recipe.pins


def test_pins_alone_say_what_to_load(site):
    """The core's own plugin need not be pinned by hand."""
    install(site, "one")
    install(site, "two", "raise RuntimeError('imported')")
    pin = PluginPin(name="one", module="fake_one", distribution="fake-one", version="1.0")
    assert [plugin.name for plugin in load(PluginRecipe(pins=(pin,))).plugins] == ["builtins", "one"]


@pytest.mark.parametrize(
    ("changes", "there"),
    [
        ({"version": "2.0"}, "fake-one 2.0 (module fake_one)"),
        ({"module": "other"}, "fake-one 1.0 (module other)"),
        ({"distribution": "other"}, "other 1.0 (module fake_one)"),
    ],
)
def test_a_difference_from_a_pin_is_found_before_anything_is_imported(site, changes, there):
    """Another version's code must not run."""
    install(site, "one", "raise RuntimeError('imported')")
    pin = attrs.evolve(PluginPin(name="one", module="fake_one", distribution="fake-one", version="1.0"), **changes)
    here = "fake-one 1.0 (module fake_one)"
    text = complaint(PluginError, load, PluginRecipe(pins=(pin,)))
    assert text == f"plugins differ from the driver's: 'one' is {here} here and {there} in the driver"


def test_plugins_that_only_one_side_has_are_differences(site):
    """In either direction, and all are named."""
    install(site, "one")
    pins = (PluginPin(name="two", module="fake_two", distribution="fake-two", version="1.0"),)
    text = complaint(PluginError, load, PluginRecipe(allow=("one",), pins=pins))
    assert "'one' is fake-one 1.0 (module fake_one) here and not loaded in the driver" in text
    assert "'two' is not loaded here and fake-two 1.0 (module fake_two) in the driver" in text
    assert "plugin 'two' is not installed" in complaint(PluginError, load, PluginRecipe(pins=pins))


def test_options_become_the_config_of_the_entry(site):
    """Mismatches have the path of the options."""
    install(site, "one", ENGINE.format(name="vlm"))
    host = load(only("one"))
    assert build_part(host, "engines", Choice("vlm", {"dtype": "x"}), Resources(seed=7)).made_of == ("x", 7)
    call = (build_part, host, "engines", Choice("vlm", {"dtyp": "x", "dtype": 3}), Resources())
    assert complaint(ConfigError, *call, path="engine").splitlines() == [
        "engine.dtype: expected text, got 3; put it in quotes",
        "engine.dtyp: unknown key; did you mean 'dtype'?",
    ]


def test_an_unknown_name_without_a_path_is_just_that():
    """A call from code has no place in a config."""
    assert (
        complaint(PluginError, build_part, Host(), "tools", "t", Resources()) == "unknown tool 't'; none is installed"
    )


def test_an_unknown_name_has_the_package_to_install(site):
    """An extra of turnwise with the name of a part names its package; a package that is installed is not named."""
    core = site / "turnwise-0.1.0.dist-info"
    core.mkdir()
    requirements = ('fake-runner[fast]<0.2,>=0.1; extra == "quick-run"', 'fake-one>=0.1; extra == "two"')
    lines = [f"Requires-Dist: turnwise-{each}" for each in requirements]
    (core / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", "Name: turnwise", "Version: 0.1.0", *lines]))
    (core / "entry_points.txt").write_text("[turnwise]\nbuiltins = turnwise.builtins\n")
    install(site, "one")
    (site / "fake_one-1.0.dist-info").rename(site / "turnwise_fake_one-1.0.dist-info")
    metadata = site / "turnwise_fake_one-1.0.dist-info/METADATA"
    metadata.write_text(metadata.read_text().replace("Name: fake-one", "Name: turnwise-fake-one"))
    host = load(only())

    hint = "; to install it: pip install 'turnwise-fake-runner[fast]'"
    assert complaint(PluginError, host.entry, "engines", "quick_run").endswith(hint)
    for name in ("two", "quick", "run"):
        assert "pip install" not in complaint(PluginError, host.entry, "engines", name)
