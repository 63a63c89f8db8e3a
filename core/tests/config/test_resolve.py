"""Building registered parts, and resolving a config against the plugins' registrations."""

from pathlib import Path

import pytest
from attrs import field, frozen

from turnwise.config.resolve import build_part, load_resolved, resolve
from turnwise.config.run import Choice, DataConfig, RunConfig
from turnwise.config.structuring import structure
from turnwise.errors import ConfigError, EngineError, PluginError
from turnwise.plugin.host import Host
from turnwise.plugin.registry import NoConfig
from turnwise.protocols import Resources


@frozen
class Options:
    """Options of fakes with a default, a path and a number."""

    path: Path = Path("x")
    size: int = 1


def complaint(error: type[Exception], call, *arguments: object, **options: object) -> str:
    with pytest.raises(error) as caught:
        call(*arguments, **options)
    return str(caught.value)


def config_of(**changes: object) -> RunConfig:
    changes = {"agent": Choice("a"), "engine": Choice("e"), **changes}
    return RunConfig(data=DataConfig(path="t"), base_dir=Path("/base"), **changes)


def host_with(factory=lambda config, resources: config, **names: str) -> Host:
    """Return a host with `Options` under these names."""
    host = Host()
    for kind, name in names.items():
        registry = host.registry(kind)
        with registry.owned_by("fake"):
            registry.add(name, factory, config=Options)
    return host


def test_what_a_factory_raises_on_purpose_passes_unchanged():
    """Its text was written for the user."""
    error = EngineError("no device")

    def factory(config, resources):
        raise error

    with pytest.raises(EngineError) as caught:
        build_part(host_with(factory, engines="e"), "engines", "e", Resources())
    assert error is caught.value


def test_what_a_factory_raises_by_mistake_names_the_plugin():
    """The user learns whom to ask."""

    def factory(config, resources):
        raise KeyError("x")

    host = host_with(factory, engines="e")
    text = "engine 'e' of plugin 'fake' cannot be built: KeyError: 'x'"
    assert f"engine: {text}" == complaint(PluginError, build_part, host, "engines", "e", Resources(), path="engine")
    assert f"engines: {text}" == complaint(PluginError, build_part, host, "engines", "e", Resources())


def test_resolving_fills_in_the_defaults_of_plugins():
    """Every choice of a config is resolved, in every section; paths start from the config's folder."""
    host = host_with(agents="a", engines="e", tools="t", observers="o", rewards="r")
    config = config_of(
        agent=Choice("a", {"size": 2}),
        agents={"other": Choice("a", {"path": "y"})},
        reward=Choice("r"),
        tools=(Choice("t"), Choice("m:f", {"k": 1})),
        modules=("m",),
        observers=(Choice("o", {"path": "/abs"}),),
    )
    resolved = resolve(config, host)
    assert Choice("a", {"path": "/base/x", "size": 2}) == resolved.agent
    assert {"other": Choice("a", {"path": "/base/y", "size": 1})} == resolved.agents
    assert Choice("e", {"path": "/base/x", "size": 1}) == resolved.engine
    assert Choice("r", {"path": "/base/x", "size": 1}) == resolved.reward
    assert (Choice("t", {"path": "/base/x", "size": 1}), Choice("m:f", {"k": 1})) == resolved.tools
    assert (Choice("o", {"path": "/abs", "size": 1}),) == resolved.observers
    assert resolved.parser is None


def test_resolving_twice_changes_nothing_more():
    """A run that is started from the config it recorded is the same run."""
    host = host_with(agents="a", engines="e")
    once = resolve(config_of(agent=Choice("a", {"path": "y"})), host)
    assert once == resolve(once, host)


def test_resolving_reports_every_mismatch():
    """One line for each, with its path."""
    host = host_with(agents="a", tools="t")
    config = config_of(
        agent=Choice("a", {"size": "x", "siz": 1}),
        agents={"b": Choice("aa")},
        tools=(Choice("t"), Choice("t", {"path": 3})),
    )
    assert complaint(ConfigError, resolve, config, host).splitlines() == [
        "agent.size: expected an integer, got 'x'",
        "agent.siz: unknown key; did you mean 'size'?",
        "engine: unknown engine 'e'; none is installed",
        "agents.b: unknown agent 'aa'; did you mean 'a'?",
        "tools.1.path: expected a path, got 3",
    ]


def test_a_part_without_options_takes_none():
    """The hint does not offer keys that are not there."""
    host = Host()
    host.registry("agents").add("a", print, config=NoConfig)
    host.registry("engines").add("e", print)
    config = config_of(agent=Choice("a", {"x": 1}))
    assert complaint(ConfigError, resolve, config, host) == "agent.x: unknown key; there are no options"


def test_mismatches_of_the_core_and_of_plugins_come_together(tmp_path, monkeypatch):
    """A wrong key, a wrong plugin option and an unknown name are three lines of one error."""
    file = tmp_path / "run.yaml"
    file.write_text("data: {path: t}\nagent: {name: a, siz: 1}\nengine: ee\nrollout: {seeed: 3}\n")
    host = host_with(agents="a", engines="e")
    monkeypatch.setattr("turnwise.config.resolve.load", lambda _recipe: host)
    lines = complaint(ConfigError, load_resolved, file).splitlines()
    assert lines == [
        f"{file}: rollout.seeed: unknown key; did you mean 'seed'?",
        f"{file}: agent.siz: unknown key; did you mean 'size'?",
        f"{file}: engine: unknown engine 'ee'; did you mean 'e'?",
    ]


def test_paths_in_nested_defaults_start_from_the_folder_of_the_config():
    """A default that holds a path means the same as the path written in the file."""

    @frozen
    class Inner:
        file: Path = Path("inner")

    @frozen
    class Outer:
        inner: Inner = field(factory=Inner)
        files: tuple[Path, ...] = (Path("a"), Path("/b"))
        none: Path | None = None

    found = structure({}, Outer, base_dir=Path("/base"))
    assert Outer(Inner(Path("/base/inner")), (Path("/base/a"), Path("/b"))) == found
    assert Outer() == structure({}, Outer)


def test_own_code_comes_from_allowed_modules_only():
    """A listed module allows its submodules, and no module whose name merely starts alike; nothing is imported."""
    host = host_with(agents="a", engines="e")
    own = {"reward": Choice("mine.rewards:f"), "tools": (Choice("other:C"), Choice("./own.py:f"))}
    allowed = config_of(**own, modules=("mine", "other", "../base/own.py"))
    assert resolve(allowed, host) == resolve(resolve(allowed, host), host)
    assert complaint(
        ConfigError, resolve, config_of(**own, modules=("min", "mine.reward", "others")), host
    ).splitlines() == [
        "reward: module 'mine.rewards' is not allowed; list it in modules, which holds min, mine.reward, others",
        "tools.0: module 'other' is not allowed; list it in modules, which holds min, mine.reward, others",
        "tools.1: file './own.py' is not allowed; list it in modules, which holds min, mine.reward, others",
    ]
