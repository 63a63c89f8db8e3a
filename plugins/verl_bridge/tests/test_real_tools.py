"""Tools that subclass verl's own classes; without verl these tests are skipped."""

import asyncio

import pytest
from gsm8k_tool import GSM8K, TASK

from turnwise_verl_bridge import make_interaction, make_tools
from turnwise_verl_bridge.config import VerlInteractionConfig, VerlToolsConfig

pytest.importorskip("verl.tools.base_tool", reason="verl is not installed", exc_type=ImportError)

pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("ignore")]


def run_calls(config, *answers):
    """Return the texts and rewards of the calls of an episode, and the reward of its end."""

    async def run():
        (tool,) = make_tools(config, None)
        session = await tool.create(TASK)
        results = [await tool.execute(session, {"answer": answer}) for answer in answers]
        return [(each.text, each.reward) for each in results], await tool.release(session)

    return asyncio.run(run())


@pytest.mark.parametrize("session", ["episode", "call"])
def test_verls_base_tool_runs(tmp_path, session):
    """verl's base class itself is a tool: it gets verl's schema object, and returns verl's response."""
    path = tmp_path / "tools.yaml"
    path.write_text(GSM8K.replace("verl_like.CountingTool", "verl.tools.base_tool.BaseTool"), encoding="utf-8")

    results, reward = run_calls(VerlToolsConfig(file=path, session=session), "4")

    assert results == [("Updated the tool state.", 0.0)]
    assert reward == (0.0 if session == "episode" else None)


def test_the_tool_of_verls_documentation_runs(tmp_path):
    """verl 0.5's file for GSM8K runs as it is: a better answer costs nothing, and the last one is scored."""
    pytest.importorskip("verl.tools.gsm8k_tool", reason="this verl has no Gsm8kTool", exc_type=ImportError)
    path = tmp_path / "gsm8k_tool_config.yaml"
    path.write_text(GSM8K.replace("verl_like.CountingTool", "verl.tools.gsm8k_tool.Gsm8kTool"), encoding="utf-8")

    results, reward = run_calls(VerlToolsConfig(file=path), "5", "4")

    assert results == [
        ("Current parsed answer='5' reward=0.0", -0.05),
        ("Current parsed answer='4' reward=1.0", 0.0),
    ]
    assert reward == 1.0


def test_the_interaction_of_verls_documentation_runs(tmp_path):
    """verl 0.5's file for GSM8K runs as it is."""
    pytest.importorskip("verl.interactions.gsm8k_interaction", reason="this verl has no interactions")
    path = tmp_path / "gsm8k_interaction_config.yaml"
    name = "verl.interactions.gsm8k_interaction.Gsm8kInteraction"
    text = f'interaction:\n  - name: "gsm8k"\n    class_name: "{name}"\n    config: {{}}\n'
    path.write_text(text, encoding="utf-8")

    async def run():
        interaction = make_interaction(VerlInteractionConfig(file=path), None)
        session = await interaction.create(TASK)
        replies = [
            await interaction.respond(session, [{"role": "assistant", "content": f"#### {answer}"}]) for answer in "54"
        ]
        await interaction.release(session)
        return [(each.reward, each.should_terminate) for each in replies]

    assert asyncio.run(run()) == [(0.0, False), (1.0, True)]
