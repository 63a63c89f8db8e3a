"""Plugins wrap the parts of a run, by pluggy's hooks and in its order, when they are built and the run asks for it."""

import asyncio
import pickle
import sys
from importlib.metadata import entry_points

import pytest

from turnwise.cli import main
from turnwise.config.file import dump_yaml, load_config, structure_config
from turnwise.config.resolve import load_resolved, resolve
from turnwise.errors import ConfigError, PluginError
from turnwise.plugin.host import load
from turnwise.plugin.wrapping import WRAPPED
from turnwise.protocols import Tool
from turnwise.protocols.wrapper import Wrapper
from turnwise.runtime.build import RunBuilder
from turnwise.runtime.ray.blueprint import ConfigBlueprint
from turnwise.types import PluginRecipe
from turnwise_testing.whole_runs.installation import install_plugin

PARTS = """
from types import SimpleNamespace

import turnwise
from turnwise_testing.engines.scripted import ScriptedEngine

BUILT = []


def part(*methods):
    def make(_config, _resources):
        BUILT.append(SimpleNamespace(**dict.fromkeys(methods, print), wrapped=()))
        return BUILT[-1]

    return make


class Tool:
    wrapped = ()
    schema = {"type": "function", "function": {"name": "wp_tool", "parameters": {"type": "object"}}}

    async def create(self, task): ...
    async def execute(self, session, arguments): ...
    async def release(self, session): ...


class Engine(ScriptedEngine):
    wrapped = ()


@turnwise.hookimpl
def register_engines(registry):
    registry.add("wp_engine", lambda _config, _resources: Engine())


@turnwise.hookimpl
def register_agents(registry):
    registry.add("wp_agent", part("step"))


@turnwise.hookimpl
def register_rewards(registry):
    registry.add("wp_reward", part("score"))


@turnwise.hookimpl
def register_group_rewards(registry):
    registry.add("wp_group", part("score_group", "collect", "unscored"))


@turnwise.hookimpl
def register_interactions(registry):
    registry.add("wp_user", part("create", "respond", "release"))


@turnwise.hookimpl
def register_tools(registry):
    registry.add("wp_tool", lambda _config, _resources: Tool())


@turnwise.hookimpl
def register_tool_parsers(registry):
    registry.add("wp_parser", part("parse"))


@turnwise.hookimpl
def register_postprocessors(registry):
    registry.add("wp_fields", part("process"))
"""

WRAPS = """
import attrs
import turnwise

RUNS = []


@attrs.frozen(kw_only=True)
class Options:
    size: int = 1


class Outer(turnwise.Wrapper):
    @property
    def wrapped(self):
        return (*self.inner.wrapped, NAME)


@turnwise.hookimpl
def config_section():
    return turnwise.Section(options=Options)
"""
HOOK = """

@turnwise.hookimpl{mark}
def wrap_{noun}({noun}, run):
    RUNS.append(("{noun}", run))
    return Outer({noun})
"""
NOUNS = [kind.removesuffix("s") for kind in WRAPPED]


def wrapping_plugin(name, mark="", nouns=NOUNS):
    hooks = "".join(HOOK.format(mark=mark, noun=noun) for noun in nouns)
    return f"NAME = {name!r}\n{WRAPS}{hooks}"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """A function that installs plugins and loads them with the parts."""
    monkeypatch.syspath_prepend(tmp_path)
    texts = {"wp_parts": PARTS}

    def load_all(**more):
        texts.update(more)
        for name, text in texts.items():
            install_plugin(tmp_path, name, text)
        return load(PluginRecipe(allow=("builtins", *texts)))

    yield load_all
    for name in texts:
        sys.modules.pop(name, None)


@pytest.fixture
def host(install):
    """Plugins with parts, and with wrappers of every order."""
    return install(
        wrap_a=wrapping_plugin("wrap_a"),
        wrap_b=wrapping_plugin("wrap_b"),
        wrap_first=wrapping_plugin("wrap_first", "(tryfirst=True)"),
        wrap_last=wrapping_plugin("wrap_last", "(trylast=True)"),
    )


def sections_of(**changes):
    return {
        "data": {"path": "data.jsonl"},
        "engine": "wp_engine",
        "agent": "wp_agent",
        "reward": "wp_reward",
        "group_reward": "wp_group",
        "interaction": "wp_user",
        "tools": ["wp_tool"],
        "parser": "wp_parser",
        "postprocessors": ["wp_fields"],
        **changes,
    }


def make_config(host, folder, **changes):
    (folder / "data.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    return resolve(structure_config(sections_of(**changes), folder), host)


def parts_of(builder):
    """Return every part that hooks wrap, by the noun of its hook."""
    resources = builder.resources
    (postprocessor,) = builder.plan().postprocessors.values()
    return {
        "agent": builder.programs["wp_agent"].agent,
        "engine": builder.build_engine(),
        "group_reward": builder.group_reward,
        "interaction": resources.interaction,
        "postprocessor": postprocessor,
        "reward": builder.reward,
        "tool_parser": resources.parser,
        "tool": resources.tools["wp_tool"],
    }


def test_the_order_is_that_of_pluggy(host, tmp_path):
    """`tryfirst` is outside, `trylast` inside; of the others the last by name is outside. So for every kind of part."""
    config = make_config(host, tmp_path, wrap_a={}, wrap_last={}, wrap_first={}, wrap_b={})
    found = parts_of(RunBuilder(config, host))

    assert sorted(NOUNS) == sorted(found)
    assert {("wrap_last", "wrap_a", "wrap_b", "wrap_first")} == {part.wrapped for part in found.values()}


def test_an_installed_plugin_wraps_nothing_by_itself(host, tmp_path):
    """The parts are the objects that their factories returned."""
    builder = RunBuilder(make_config(host, tmp_path), host)
    found = parts_of(builder)

    assert all(part.wrapped == () for part in found.values())
    built = sys.modules["wp_parts"].BUILT
    assert any(builder.reward is part for part in built)
    assert not any(isinstance(part, Wrapper) for part in found.values())
    assert [] == sys.modules["wrap_a"].RUNS


def test_a_plugin_that_plugins_lists_wraps(host, tmp_path):
    """Without a section it gets its default options."""
    config = make_config(host, tmp_path, plugins=["wp_parts", "wrap_a"])
    reward = RunBuilder(config, host).reward

    assert ("wrap_a",) == reward.wrapped
    assert {1} == {run.section.size for _noun, run in sys.modules["wrap_a"].RUNS}


def test_hooks_get_the_run(host, tmp_path):
    """The config has its defaults, the section its class, and the role is that of the process."""
    config = make_config(host, tmp_path, wrap_a={"size": 3})
    builder = RunBuilder(config, host, role="worker")
    parts_of(builder)
    runs = dict(sys.modules["wrap_a"].RUNS)

    assert {"worker"} == {run.role for run in runs.values()}
    assert {3} == {run.section.size for run in runs.values()}
    run = runs["reward"]
    assert run.section is run.options(sys.modules["wrap_a"].Options)
    assert ({"size": 3}, 1) == (run.config["wrap_a"], run.config["rollout"]["n"])
    assert run.resources is builder.resources
    with pytest.raises(TypeError, match=r"the section is no int, but Options\(size=3\)"):
        run.options(int)


def test_hooks_are_called_when_a_part_is_built(host, tmp_path):
    """Once for a part, however often it is used."""
    builder = RunBuilder(make_config(host, tmp_path, wrap_a={}), host)
    for _again in range(3):
        assert builder.reward is builder.programs["wp_agent"].reward
    nouns = [noun for noun, _run in sys.modules["wrap_a"].RUNS]

    assert sorted(nouns) == ["agent", "interaction", "reward", "tool", "tool_parser"]


BAD = {
    "raise RuntimeError('no luck')": "'wrap_reward' of plugin 'bad' raised RuntimeError: no luck",
    "return object()": "'wrap_reward' of plugin 'bad' returned object, which has no score; expected a Reward or None",
    "return run.options(int)": "'wrap_reward' of plugin 'bad' raised TypeError: the section is no int",
}


@pytest.mark.parametrize("body", BAD)
@pytest.mark.parametrize("runtime", ["local", "ray"])
def test_a_bad_wrapper_ends_the_command(install, tmp_path, capsys, body, runtime):
    """Exit code 2 before any episode, in one line with the plugin and the hook."""
    hook = f"import turnwise\n\n@turnwise.hookimpl\ndef wrap_reward(reward, run):\n    {body}\n"
    make_config(install(bad=hook), tmp_path)
    config = sections_of(group_reward=None, interaction=None, bad={}, plugins=["wp_parts", "bad"])
    config |= {"runtime": {"name": runtime}}
    (tmp_path / "run.yaml").write_text(dump_yaml(structure_config(config, tmp_path)))

    assert main(["plan", str(tmp_path / "run.yaml")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"turnwise: error: {BAD[body]}")


@pytest.mark.parametrize("kind", ["async", "generator", "no argument", "other argument"])
def test_a_hook_that_pluggy_cannot_call_is_refused(install, kind):
    """When the plugin is loaded, and not when a run has its part."""
    texts = {
        "async": ("async def wrap_reward(reward, run): ...", "is async or a wrapper; expected a plain function"),
        "generator": ("def wrap_reward(reward, run):\n    yield", "is async or a wrapper; expected a plain function"),
        "no argument": ("def wrap_reward(): ...", "without an argument; write `def wrap_reward(reward, run)`"),
        "other argument": ("def wrap_reward(part, run): ...", "cannot be registered"),
    }
    text, expected = texts[kind]
    with pytest.raises(PluginError, match="plugin 'bad' of") as raised:
        install(bad=f"import turnwise\n\n@turnwise.hookimpl\n{text}\n")
    assert expected in str(raised.value)


SECTIONS = {
    "return 3": "that returned 3; expected a turnwise.Section",
    "raise KeyError('x')": "that raised KeyError: 'x'",
    "return turnwise.Section(kind='rewards')": "a section of the kind 'rewards'; expected a kind that it adds",
    "return turnwise.Section(options=int)": "a section of <class 'int'>; expected an attrs class",
}


@pytest.mark.parametrize("body", SECTIONS)
def test_a_bad_section_breaks_the_plugin(install, body):
    """The error says what the hook returned."""
    with pytest.raises(PluginError) as raised:
        install(bad=f"import turnwise\n\n@turnwise.hookimpl\ndef config_section():\n    {body}\n")
    assert SECTIONS[body] in str(raised.value)


@pytest.mark.parametrize(
    ("section", "line"),
    [
        ({"wrap_a": {"size": "x"}}, "wrap_a.size: expected an integer, got 'x'"),
        ({"wrap_a": {"sise": 2}}, "wrap_a.sise: unknown key; did you mean 'size'?"),
        ({"wrap_a": ["x"]}, "wrap_a: expected a section of keys, got ['x']"),
        ({"wp_parts": {}}, "wp_parts: unknown key; the plugin 'wp_parts' has no section"),
    ],
)
def test_a_section_is_checked_with_the_config(host, tmp_path, section, line):
    """Its mismatches are those of the config, at the same time."""
    with pytest.raises(ConfigError) as raised:
        make_config(host, tmp_path, **section, reward="no_such")
    lines = str(raised.value).splitlines()
    assert 2 == len(lines)
    assert line in lines


def test_a_section_of_a_plugin_that_is_not_loaded(host, tmp_path):
    """The error says how to load it."""
    smaller = load(PluginRecipe(allow=("wp_parts",)))
    with pytest.raises(ConfigError, match="wrap_a: the section of a plugin that is not loaded; add"):
        make_config(smaller, tmp_path, wrap_a={})


def test_a_section_of_a_missing_plugin_is_an_unknown_key(tmp_path):
    """Where an extra of the core names the package, the error says how to install it."""
    assert not [each for each in entry_points(group="turnwise") if each.name == "no_such_plugin"]
    with pytest.raises(ConfigError, match="no_such_plugin: unknown key"):
        structure_config(sections_of(no_such_plugin={}), tmp_path)


def test_mismatches_of_sections_come_with_those_of_the_core(host, tmp_path):
    """All are reported at once."""
    (tmp_path / "run.yaml").write_text("wrap_a: {size: x}\ndata: {path: 3}\nagent: wp_agent\nengine: wp_engine\n")
    with pytest.raises(ConfigError) as raised:
        load_resolved(tmp_path / "run.yaml")
    text = str(raised.value)
    assert "data.path: expected text" in text
    assert "wrap_a.size: expected an integer, got 'x'" in text


def test_a_config_with_a_section_survives_a_file(host, tmp_path):
    """It is written as a key of the top level."""
    config = make_config(host, tmp_path, wrap_a={"size": 2})
    (tmp_path / "again.yaml").write_text(dump_yaml(config))

    assert config == resolve(load_config(tmp_path / "again.yaml"), host)
    assert 5 == load_config(tmp_path / "again.yaml", ["wrap_a.size=5"]).sections["wrap_a"]["size"]


def test_a_replica_wraps_its_engine(install, tmp_path):
    """It loads the plugins that wrap engines, and no other; requests pass all wrappers."""
    host = install(
        wrap_a=wrapping_plugin("wrap_a"),
        wrap_rewards=wrapping_plugin("wrap_rewards", nouns=["reward"]),
        wrap_unused=wrapping_plugin("wrap_unused"),
    )
    config = make_config(
        host, tmp_path, runtime={"name": "ray", "reward_workers": 1}, wrap_a={"size": 4}, wrap_rewards={}
    )
    blueprint = pickle.loads(pickle.dumps(ConfigBlueprint.of(config, host)))

    assert ("wrap_a",) == blueprint.wrapper_owners
    engine = blueprint.make_engine()
    assert ("wrap_a",) == engine.wrapped
    ((noun, run),) = sys.modules["wrap_a"].RUNS
    assert ("engine", "replica", 4) == (noun, run.role, run.section.size)
    asyncio.run(engine.start())
    components = blueprint.make_components(engine)
    assert ("wrap_a",) == components.programs["wp_agent"].agent.wrapped
    assert {"worker"} == {run.role for noun, run in sys.modules["wrap_a"].RUNS if noun != "engine"}
    assert ("wrap_a", "wrap_rewards") == blueprint.make_reward().wrapped
    assert "reward_worker" == sys.modules["wrap_rewards"].RUNS[-1][1].role


class TestWrapper:
    """The base class of wrappers."""

    def test_it_has_the_attributes_of_its_part(self):
        """Optional methods too, also for `isinstance`; attributes of the wrapper come first."""

        class Part:
            schema = 1
            label = "inner"

            def __init__(self):
                self.later = 1

            async def create(self, task): ...
            async def execute(self, session, arguments): ...
            async def release(self, session): ...
            def suspend(self, session):
                return session

        class Outer(Wrapper):
            def __init__(self, inner, label):
                super().__init__(inner)
                self.label = label

            def suspend(self, session):
                return [self.inner.suspend(session)]

        part = Part()
        outer = Outer.around(Outer.around(part, "middle"), "outer")
        part.later = 2

        assert isinstance(outer, Tool)
        assert (outer.schema, outer.later, outer.label, outer.inner.label) == (1, 2, "outer", "middle")
        assert [["s"]] == outer.suspend("s")
        assert outer.create == part.create
        assert not hasattr(outer, "restore")
        assert "Outer" == type(outer).__name__
        assert isinstance(outer, Outer)
