"""A run on Ray, up to its start: one line names a missing package."""

import pickle
import sys

import pytest

from turnwise.config.file import structure_config
from turnwise.errors import ConfigError, PluginError
from turnwise.plugin.host import load
from turnwise.protocols.weights import WeightTransport
from turnwise.runtime.build import RunBuilder
from turnwise.runtime.launch import launch
from turnwise.runtime.ray.blueprint import ConfigBlueprint, build_group_weights
from turnwise.types import PluginRecipe
from turnwise_routers import LeastTokens
from turnwise_testing.engines.scripted import ScriptedEngine
from turnwise_testing.whole_runs.installation import install_plugin

PLUGIN = """
from types import SimpleNamespace

import turnwise
from turnwise_testing.engines.scripted import ScriptedEngine


class Once:
    async def step(self, episode):
        episode.begin([1, 2])
        await episode.generate()
        return "terminated"


class Length:
    def score(self, episode):
        return float(episode.trajectory.num_response_tokens)


@turnwise.hookimpl
def register_engines(registry):
    registry.add("blueprint_scripted", lambda _config, _resources: ScriptedEngine())


@turnwise.hookimpl
def register_agents(registry):
    registry.add("blueprint_once", lambda _config, _resources: Once())


@turnwise.hookimpl
def register_rewards(registry):
    registry.add("blueprint_length", lambda _config, _resources: Length())


@turnwise.hookimpl
def register_group_rewards(registry):
    methods = dict.fromkeys(("score_group", "collect", "unscored"), print)
    registry.add("blueprint_group", lambda _config, _resources: SimpleNamespace(**methods))


@turnwise.hookimpl
def register_weight_transports(registry):
    methods = dict.fromkeys(("publish", "apply", "close"), print)
    registry.add("blueprint_transport", lambda _config, _resources: SimpleNamespace(**methods))
"""


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """A config on Ray, and the loaded plugins, one of which this test has installed."""
    install_plugin(tmp_path, "blueprint_parts", PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    yield make_config(tmp_path), load(PluginRecipe(allow=("builtins", "blueprint_parts", "routers")))
    sys.modules.pop("blueprint_parts", None)


def make_config(folder, **changes):
    (folder / "data.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    sections = {"data": {"path": "data.jsonl"}, "engine": "blueprint_scripted", "agent": "blueprint_once"}
    sections |= {"reward": "blueprint_length", "runtime": {"name": "ray"}, "rollout": {"seed": 7}, **changes}
    return structure_config(sections, folder)


def test_a_missing_ray_is_one_line(parts, monkeypatch):
    """The run ends before it builds anything, with the command that installs Ray."""
    config, host = parts
    monkeypatch.setitem(sys.modules, "ray", None)

    with pytest.raises(ConfigError, match=r"^runtime ray needs ray: pip install 'turnwise\[ray\]'$"):
        launch(config, host)


def test_the_default_router_must_be_loaded(parts):
    """A run whose config leaves its plugin out ends before Ray starts, and the line names the plugin."""
    config, _host = parts
    bare = load(PluginRecipe(allow=("blueprint_parts",)))

    with pytest.raises(PluginError, match=r"unknown router 'least_tokens'.*; installed but not loaded: routers$"):
        launch(config, bare)


class TestConfigBlueprint:
    """The parts that actors build for themselves from the config."""

    def test_an_actor_builds_the_parts_of_the_config(self, parts):
        """The blueprint travels as bytes."""
        blueprint = pickle.loads(pickle.dumps(ConfigBlueprint.of(*parts)))

        engine = blueprint.make_engine()
        assert isinstance(engine, ScriptedEngine)
        components = blueprint.make_components(engine)
        assert "Once" == type(components.programs["blueprint_once"].agent).__name__
        assert "Length" == type(blueprint.make_reward()).__name__
        assert isinstance(blueprint.make_router(), LeastTokens)

    def test_the_group_reward_needs_a_reward_worker(self, parts, tmp_path):
        """It is built in the reward workers; without one, the config is refused."""
        ray = {"name": "ray", "reward_workers": 1}
        config = make_config(tmp_path, group_reward="blueprint_group", runtime=ray)

        assert callable(ConfigBlueprint.of(config, parts[1]).make_group_reward().score_group)
        with pytest.raises(ConfigError, match=r"runtime\.reward_workers: must be at least 1 on Ray"):
            make_config(tmp_path, group_reward="blueprint_group")

    def test_judge_and_transport(self, parts, tmp_path):
        """Replicas build them with their own plugins alone."""
        changes = {"judge": {"engine": "blueprint_scripted"}, "weight_transport": "blueprint_transport"}
        blueprint = ConfigBlueprint.of(make_config(tmp_path, **changes), parts[1])

        assert isinstance(blueprint.make_judge_engine(), ScriptedEngine)
        assert isinstance(blueprint.make_transport(), WeightTransport)

    @pytest.mark.parametrize(("transport", "missing"), [("blueprint_transport", False), (None, True)])
    def test_the_weights_of_a_pool(self, parts, tmp_path, transport, missing):
        """Without a transport the first update says what to install."""
        changes = {"weight_transport": transport} if transport else {}
        weights = build_group_weights(RunBuilder(make_config(tmp_path, **changes), parts[1]))

        assert (weights.updater is None) is missing
        assert ("set weight_transport" in weights.missing) is missing
