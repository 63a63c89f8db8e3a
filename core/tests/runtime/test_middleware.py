"""Middleware wraps the parts of a run when they are built, in its order, and never the requests to the engine."""

import asyncio
import pickle
import sys

import pytest

from turnwise.config.file import structure_config
from turnwise.config.resolve import resolve
from turnwise.plugin.host import load
from turnwise.runtime.build import RunBuilder
from turnwise.runtime.ray.blueprint import ConfigBlueprint
from turnwise.types import PluginRecipe
from turnwise_testing.engines.scripted import ScriptedEngine
from turnwise_testing.whole_runs.installation import install_plugin

PARTS = """
from types import SimpleNamespace

import turnwise
from turnwise_testing.engines.scripted import ScriptedEngine


class StartedEngine(ScriptedEngine):
    started_by = ()


def part(*methods):
    return lambda _config, _resources: SimpleNamespace(**dict.fromkeys(methods, print), wrapped=())


@turnwise.hookimpl
def register_engines(registry):
    registry.add("mw_engine", lambda _config, _resources: StartedEngine())


@turnwise.hookimpl
def register_agents(registry):
    registry.add("mw_agent", part("step"))


@turnwise.hookimpl
def register_rewards(registry):
    registry.add("mw_reward", part("score"))


@turnwise.hookimpl
def register_tool_parsers(registry):
    registry.add("mw_parser", part("parse"))


@turnwise.hookimpl
def register_postprocessors(registry):
    registry.add("mw_fields", part("process"))
"""

MIDDLEWARE = """
from types import SimpleNamespace

import turnwise


class Outer:
    def __init__(self, name):
        self.name = name
        self.kinds = frozenset(("agents", "rewards", "tool_parsers", "postprocessors", *KINDS))

    def wrap(self, kind, part, chat):
        if kind == "engines":
            return Lifecycle(part, self.name)
        return SimpleNamespace(**{**vars(part), "wrapped": (*part.wrapped, self.name)})


class Lifecycle:
    def __init__(self, engine, name):
        self.engine, self.name = engine, name

    async def start(self):
        inner = self.engine
        while hasattr(inner, "engine"):
            inner = inner.engine
        inner.started_by = [*inner.started_by, self.name]
        await self.engine.start()

    async def generate(self, request):
        raise AssertionError("a middleware must not see a request")


KINDS = %s


@turnwise.hookimpl%s
def register_middleware(registry):
    for name in %s:
        registry.add(name, lambda _config, _resources, name=name: Outer(name))
"""


@pytest.fixture
def host(tmp_path, monkeypatch):
    """Plugins with parts, and with middleware of every order."""
    texts = {
        "mw_parts": PARTS,
        "mw_last": MIDDLEWARE % ("('engines',)", "(trylast=True)", ("last",)),
        "mw_plain": MIDDLEWARE % ("()", "", ("one", "two")),
        "mw_zfirst": MIDDLEWARE % ("('engines',)", "(tryfirst=True)", ("first",)),
    }
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in texts.items():
        install_plugin(tmp_path, name, text)
    yield load(PluginRecipe(allow=("builtins", *texts)))
    for name in texts:
        sys.modules.pop(name, None)


def make_config(host, folder, middleware, **changes):
    (folder / "data.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    sections = {"data": {"path": "data.jsonl"}, "engine": "mw_engine", "agent": "mw_agent", "reward": "mw_reward"}
    sections |= {"parser": "mw_parser", "postprocessors": ["mw_fields"], "middleware": middleware, **changes}
    return resolve(structure_config(sections, folder), host)


def test_the_order(host, tmp_path):
    """`tryfirst` is outside, `trylast` inside, and others are in the order of the config, the first outside."""
    builder = RunBuilder(make_config(host, tmp_path, ["last", "two", "one", "first"]), host)
    inside_out = ("last", "one", "two", "first")

    assert inside_out == builder.reward.wrapped
    assert inside_out == builder.resources.parser.wrapped
    assert inside_out == builder.programs["mw_agent"].agent.wrapped
    assert [inside_out] == [each.wrapped for each in builder.plan().postprocessors.values()]


def test_without_middleware_no_part_is_wrapped(host, tmp_path):
    """An installed one that the config does not name costs nothing."""
    builder = RunBuilder(make_config(host, tmp_path, []), host)

    assert () == builder.reward.wrapped
    assert isinstance(builder.build_engine(), ScriptedEngine)


async def _start_and_read(engine):
    await engine.start()
    return engine.started_by


@pytest.mark.parametrize("on_ray", [False, True])
def test_requests_go_to_the_engine_itself(host, tmp_path, on_ray):
    """The lifecycle passes all middleware, also in a replica, which loads no other plugin; `generate` passes none."""
    runtime = {"runtime": {"name": "ray"}} if on_ray else {}
    config = make_config(host, tmp_path, ["one", "first", "last"], **runtime)
    if on_ray:
        blueprint = pickle.loads(pickle.dumps(ConfigBlueprint.of(config, host)))
        assert ("mw_last", "mw_zfirst") == blueprint.middleware_owners
        engine = blueprint.make_engine()
    else:
        engine = RunBuilder(config, host).build_engine()

    assert ["first", "last"] == asyncio.run(_start_and_read(engine))
    assert ScriptedEngine.generate is engine.generate.__func__
    assert engine.capabilities == ScriptedEngine().capabilities
