"""Parts of a run: shared parts are built once, and an agent when a task needs it."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from turnwise.config.file import structure_config
from turnwise.errors import ConfigError, DataError, PluginError
from turnwise.plugin.host import Host, load
from turnwise.runtime.build import RunBuilder
from turnwise.types import Task
from turnwise.weights.sources import source_of
from turnwise_testing.inputs.tokenizers import byte_tokenizer


def config_with(**changes):
    sections = {"data": {"path": "tasks.jsonl"}, "engine": "e", "agent": "good", **changes}
    return structure_config(sections, Path())


def host_with(built: list[str]) -> Host:
    host = Host()

    def good(_config, _resources):
        built.append("good")
        return SimpleNamespace(step=print)

    def broken(_config, _resources):
        built.append("broken")
        raise RuntimeError("no GPU")

    host.registry("agents").add("good", good)
    host.registry("agents").add("broken", broken)
    return host


def task(agent: str = "") -> Task:
    return Task(messages=({"role": "user", "content": "hi"},), uid="t", agent_name=agent)


def test_an_agent_that_no_task_names_is_never_built():
    """A broken or slow agent of another plugin does not affect the run."""
    built: list[str] = []
    plan = RunBuilder(config_with(), host_with(built)).plan()

    specs = plan.specs([task(), task("good")], global_step=0, validation=False)

    assert ["good", "good"] == [spec.agent_name for spec in specs]
    assert ["good"] == built


def test_a_broken_agent_stops_the_call_whose_task_names_it():
    """The error names the agent and the reason, before any episode starts."""
    plan = RunBuilder(config_with(), host_with([])).plan()

    with pytest.raises(PluginError, match=r"agents\.broken: agent 'broken' .* cannot be built: RuntimeError: no GPU"):
        plan.specs([task("broken")], global_step=0, validation=False)
    with pytest.raises(DataError, match="unknown agent 'goood'; did you mean 'good'"):
        plan.specs([task("goood")], global_step=0, validation=False)


def test_an_agent_that_the_config_names_is_built_at_once():
    """A broken one stops the run before engines start."""
    with pytest.raises(PluginError, match=r"agent: agent 'broken' .* no GPU"):
        RunBuilder(config_with(agent="broken"), host_with([])).plan()
    with pytest.raises(PluginError, match=r"agents\.other: unknown agent 'missing'"):
        RunBuilder(config_with(agents={"other": "missing"}), host_with([])).plan()


def test_shared_parts_are_built_once():
    """Every access returns the same resources and the same programs."""
    builder = RunBuilder(config_with(), host_with([]))

    assert builder.resources is builder.resources
    assert builder.programs["good"] is builder.programs["good"]
    assert {"good", "broken"} == set(builder.programs)
    assert 2 == len(builder.programs)
    with pytest.raises(KeyError):
        builder.programs["unknown"]


def test_the_chat_template_treats_special_tokens_by_the_config(tmp_path):
    """Options of `chat` and `judge.chat` reach the templates of the model and of the judge."""
    byte_tokenizer().save_pretrained(tmp_path)
    forged = [{"role": "user", "content": "<|im_end|>"}]
    found = {}
    for policy in ("text", "parse"):
        chosen = {"model": {"path": str(tmp_path)}, "chat": {"name": "jinja", "special_tokens_in_content": policy}}
        config = config_with(judge={"engine": "e", **chosen}, **chosen)
        resources = RunBuilder(config, load()).resources
        found[policy] = [chat.prompt(forged).tolist().count(258) for chat in (resources.chat, resources.judge.chat)]
    assert {"text": [1, 1], "parse": [2, 2]} == found


def test_a_parser_gets_the_tools_of_the_run():
    """Formats that write every argument as text need the schemas of the tools."""
    seen = []
    host = host_with([])
    tool = fake_tool("add")
    host.registry("tools").add("add", lambda _config, _resources: tool)
    parser = SimpleNamespace(parse=print)
    host.registry("tool_parsers").add("p", lambda _config, resources: seen.append(resources.tool_schemas) or parser)

    assert {"add": tool} == RunBuilder(config_with(parser="p", tools=["add"]), host).resources.tools
    assert [(tool.schema,)] == seen


class TestPartsOfResources:
    """Parts that are built with the parts before them."""

    def test_reasoning_parser_and_interaction(self):
        """A simulated user gets the parsers."""
        host = host_with([])
        reasoning = SimpleNamespace(split=print)
        methods = dict.fromkeys(("create", "respond", "release"), print)
        host.registry("reasoning_parsers").add("r", lambda _config, _resources: reasoning)
        host.registry("interactions").add(
            "i", lambda _config, resources: SimpleNamespace(**methods, reasoning=resources.reasoning_parser)
        )

        resources = RunBuilder(config_with(reasoning_parser="r", interaction="i"), host).resources

        assert (reasoning, reasoning) == (resources.reasoning_parser, resources.interaction.reasoning)

    def test_a_tool_of_two_places_is_refused(self, tmp_path):
        """A tool of `tools_file` never replaces one of `tools`."""
        host, tools_file = host_with([]), tmp_path / "tools.yaml"
        for name in ("add", "multiply"):
            host.registry("tools").add(name, lambda _config, _resources, name=name: fake_tool(name))
        tools_file.write_text("tools: [multiply]")
        config = config_with(tools=["add"], tools_file=str(tools_file))
        assert ["add", "multiply"] == list(RunBuilder(config, host).resources.tools)

        tools_file.write_text("tools: [add]")
        with pytest.raises(ConfigError, match=r"tools\.yaml: tools and tools_file both have a tool 'add'"):
            _ = RunBuilder(config, host).resources

    def test_weights_are_cast_as_the_config_says(self):
        """Without options in `weights` a source passes through."""
        source = source_of([("w", np.ones(3, np.float32))])

        assert RunBuilder(config_with(), host_with([])).make_weight_source(source) is source
        halved = RunBuilder(config_with(weights={"dtype": "float16"}), host_with([])).make_weight_source(source)
        assert [("w", 6)] == [(spec.name, spec.num_bytes) for spec in halved.specs]


def fake_tool(name: str) -> SimpleNamespace:
    schema = {"type": "function", "function": {"name": name, "description": "", "parameters": {"type": "object"}}}
    return SimpleNamespace(schema=schema, create=print, execute=print, release=print)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"sources": []}, "data.path: missing; name a file here or several in data.sources"),
        ({"path": "a.csv", "sources": [{"path": "b.csv"}]}, "data.path: must be null beside data.sources, which"),
        ({"limit": 3, "sources": [{"path": "b.csv"}]}, "data.limit: must be null beside data.sources, which"),
        ({"offset": 3, "sources": [{"path": "b.csv"}]}, "data.offset: must be 0 beside data.sources"),
        ({"sources": [{"path": "b.csv", "weight": 0}]}, "data.sources.0.weight: must be > 0: 0"),
        ({"sources": [{"path": "b.csv", "wieght": 1}]}, "data.sources.0.wieght: unknown key; did you mean 'weight'"),
        ({"sources": [{"weight": 1}]}, "data.sources.0.path: missing"),
        (
            {"sources": [{"path": "a/b.csv"}, {"path": "c/b.json"}]},
            "data.sources: must have different names: 'b' is the name of two",
        ),
    ],
)
def test_a_wrong_mixture(data, message):
    """Each is one line that names the key."""
    with pytest.raises(ConfigError) as caught:
        config_with(data=data)

    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_postprocessor_is_named_with_its_place_and_its_plugin():
    """Twice the same one counts twice, and errors tell them apart."""
    host = host_with([])
    with host.registry("postprocessors").owned_by("fields"):
        host.registry("postprocessors").add("lengths", lambda _config, _resources: SimpleNamespace(process=dict))

    plan = RunBuilder(config_with(postprocessors=["lengths", "lengths"]), host).plan()

    label = "postprocessor 'lengths' of plugin 'fields'"
    assert list(plan.postprocessors) == [f"postprocessors.0: {label}", f"postprocessors.1: {label}"]
