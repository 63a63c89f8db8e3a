"""verl's tools run from verl's own YAML files."""

import asyncio
import textwrap

import pytest
import verl_like
from gsm8k_tool import GSM8K, TASK
from PIL import Image

from turnwise import RolloutManager, ToolCall, load_config
from turnwise.errors import ConfigError
from turnwise.media import decode_picture
from turnwise.showing import split_parts
from turnwise_testing import ToolSuite
from turnwise_testing.checks.tool import ToolExample
from turnwise_verl_bridge import make_tools
from turnwise_verl_bridge.config import VerlToolsConfig

OLD = """
tools:
  - {class_name: verl_like.OldTool, config: {type: native}}
"""


@pytest.fixture
def file(tmp_path):
    """Return a function that writes a file of tools and returns its config."""

    def write(text, **options):
        path = tmp_path / "tools.yaml"
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return VerlToolsConfig(file=path, modules=("verl_like",), **options)

    return write


class TestVerlTools(ToolSuite):
    """The standard suite for tools, with a file of verl's."""

    entry_point = "verl_bridge"
    module = "turnwise_verl_bridge"
    registered = "verl"

    @pytest.fixture
    def config(self, file):
        """The file of verl's documentation."""
        return file(GSM8K)

    @pytest.fixture
    def examples(self):
        """A call that works."""
        return (ToolExample(arguments={"answer": "4"}, tool="calc_gsm8k_reward"),)


def calls(config, *answers, task=TASK):
    """Run calls of one episode and return the results and the reward of the release."""

    async def run():
        (tool,) = make_tools(config, None)
        session = await tool.create(task)
        results = [await tool.execute(session, {"answer": answer}) for answer in answers]
        during = dict(verl_like.CountingTool.instances)
        return results, await tool.release(session), during

    found = asyncio.run(run())
    assert verl_like.CountingTool.instances == {}, "an instance was not released"
    return found


def test_an_episode_has_one_instance(file, capsys):
    """Texts, rewards and numeric metrics arrive; `calc_reward` scores the episode; nothing is printed."""
    results, reward, during = calls(file(GSM8K), "1", "2")

    assert [each.text for each in results] == [f"calc_gsm8k_reward: call {n} of 4" for n in (1, 2)]
    assert [(each.reward, dict(each.metrics)) for each in results] == [(0.5, {"seen": 1.0})] * 2
    assert reward == 2.0
    assert [each["kwargs"] for each in during.values()] == [{"create_kwargs": {"level": 3}, "level": 3}]
    assert capsys.readouterr().out == ""


def test_a_call_may_have_an_instance_of_its_own(file):
    """`session: call` creates and releases for each call, as verl's agent loop does."""
    results, reward, during = calls(file(GSM8K, session="call"), "1", "2")

    assert [each.text for each in results] == ["calc_gsm8k_reward: call 1 of 4"] * 2
    assert (reward, during) == (None, {})


def test_a_tool_of_an_earlier_version_works(file):
    """A plain id, plain texts and a schema of the tool's own are accepted."""
    results, reward, _ = calls(file(OLD), "1")

    assert (results[0].text, reward) == ("old: call 1 of None", 1.0)


@pytest.mark.parametrize(("answer", "colors"), [("two images", ["red", "blue"]), ("one image", ["red"])])
def test_images_of_a_response(file, answer, colors):
    """The model sees them, and the text behind them, as verl's loop shows them."""
    results, _, _ = calls(file(GSM8K), answer)

    *pictures, text = split_parts(results[0])
    assert text == "calc_gsm8k_reward: call 1 of 4"
    images = [decode_picture(each) for each in pictures]
    expected = [Image.new("RGB", (4, 4), color) for color in colors]
    assert [each.tobytes() for each in images] == [each.tobytes() for each in expected]


def test_a_video_becomes_a_line(file):
    """The model reads that there was one."""
    results, _, _ = calls(file(GSM8K), "video")

    assert results[0].text.endswith("of 4\n[1 video left out]")


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("raise", "no such answer"),
        ("no image", "an image of the response must be an image of pillow"),
        ("lie", "expected (response, reward"),
    ],
)
def test_a_failing_tool_is_for_the_model(file, answer, text):
    """An exception or a wrong return value becomes the text of an error."""
    from turnwise.tools.toolbox import ToolBox

    async def run():
        async with ToolBox(make_tools(file(GSM8K), None)).session(TASK) as session:
            return await session.call(ToolCall(name="calc_gsm8k_reward", arguments={"answer": answer}))

    result = asyncio.run(run())

    assert result.error
    assert text in result.text


def test_a_config_runs_the_file(tmp_path, monkeypatch):
    """A run names the file relative to its config; the schema reaches the run's tools."""
    (tmp_path / "tools.yaml").write_text(GSM8K, encoding="utf-8")
    (tmp_path / "run.yaml").write_text(
        "model: {path: package:turnwise_calculator_demo}\ndata: {path: tasks.jsonl}\nengine: transformers\n"
        "agent: tool_agent\nparser: hermes\ntools: [{name: verl, file: tools.yaml, modules: [verl_like]}]\n",
        encoding="utf-8",
    )
    with RolloutManager.from_config(load_config(str(tmp_path / "run.yaml"))) as manager:
        assert manager is not None


@pytest.mark.parametrize("modules", ["[verl_like]", "[]"])
def test_a_tools_file_may_be_verls(tmp_path, modules):
    """`tools_file` names verl's file as `tool_config_path` does; its module must be listed in `modules`."""
    (tmp_path / "tools.yaml").write_text(GSM8K, encoding="utf-8")
    (tmp_path / "run.yaml").write_text(
        "model: {path: package:turnwise_calculator_demo}\ndata: {path: tasks.jsonl}\nengine: transformers\n"
        f"agent: tool_agent\nparser: hermes\ntools_file: tools.yaml\nmodules: {modules}\n",
        encoding="utf-8",
    )
    config = load_config(str(tmp_path / "run.yaml"))
    if modules == "[]":
        with pytest.raises(ConfigError, match="module 'verl_like' is not allowed; list it in 'modules'"):
            RolloutManager.from_config(config)
    else:
        with RolloutManager.from_config(config) as manager:
            assert manager is not None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("tools: {}", "expected a list 'tools' of sections with 'class_name'"),
        ("tools: [{config: {}}]", "tools.0: expected a section with 'class_name'"),
        ("tools: [{class_name: os.system}]", "module 'os' is not allowed; list it in 'modules', which has verl_like"),
        ("tools: [{class_name: verl_like.Nothing}]", "cannot be made: AttributeError"),
        ("tools: [{class_name: verl_like.missing.Tool}]", "cannot be imported: No module named"),
        ("tools: [{class_name: verl_like.OldTool, schema: {}}]", "unknown key 'schema'"),
        ("tools: [{class_name: verl_like.OldTool, config: {type: mcp}}]", "tools of type 'mcp' are not supported"),
        ("tools: [{class_name: verl_like.OldTool, tool_schema: {a: 1}}]", "cannot be made: AssertionError"),
        ("tools: [{class_name: verl_like.RiddleInteraction}]", "unexpected keyword argument 'tool_schema'"),
    ],
)
def test_a_wrong_file_is_one_line(file, text, problem):
    """The error names the file, the entry and the problem."""
    with pytest.raises(ConfigError) as caught:
        make_tools(file(text), None)

    assert problem in str(caught.value)
    assert "tools.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)
