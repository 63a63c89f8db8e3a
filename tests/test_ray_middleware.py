"""A whole run on Ray with the three shipped middlewares: the results are those of one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from turnwise import RolloutManager, Status, load_config
from turnwise_task_files import load_tasks
from turnwise_testing.whole_runs.scripted_run import PLUGIN, SITE, write_scripted_run

CODE = '''
from turnwise import State, ToolCall


def look_up(key: str) -> str:
    """Look a key up."""
    return f"{key}: the token is sk-ant-api03-{'a1B2' * 22}"


class Asks:
    """Calls the tool three times, and samples a turn after each call."""

    def __init__(self, resources):
        self.chat = resources.chat

    async def step(self, episode):
        episode.begin(self.chat.prompt(episode.messages))
        for key in ("one", "two", "three"):
            await episode.generate(max_tokens=4)
            result = await episode.call_tool(ToolCall(name="look_up", arguments={"key": key}))
            episode.messages.append({"role": "tool", "content": result.text})
            episode.observe([len(result.text) % 250 + 1])
        await episode.generate(max_tokens=4)
        return State.TERMINATED


def one(episode):
    return 1.0
'''
MIDDLEWARE = """
middleware:
  - redact_secrets
  - {name: tool_rate, tools: [look_up], max_calls: 2}
  - {name: shape_reward, turn_price: 0.1, free_turns: 2}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run, the agent, the tool and the reward."""
    plugins = [PLUGIN, "plain_functions", "middleware"]
    run = write_scripted_run(
        tmp_path,
        num_tasks=6,
        plugins=plugins,
        modules=["./parts.py"],
        agent="./parts.py:Asks",
        tools=["./parts.py:look_up"],
        reward="./parts.py:one",
    )
    run.write_text(run.read_text(encoding="utf-8") + MIDDLEWARE, encoding="utf-8")
    (tmp_path / "parts.py").write_text(CODE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path / SITE)
    return tmp_path


@pytest.fixture
def ray_with_site(ray_head: str, folder: Path) -> Iterator[None]:
    """A connection to Ray whose workers find the plugin of the run."""
    import ray
    from actor_coverage import make_runtime_env

    ray.init(address=ray_head, namespace="turnwise", runtime_env=make_runtime_env(folder / SITE))
    yield
    ray.shutdown()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("reward_workers", [0, 1])
@pytest.mark.usefixtures("ray_with_site")
def test_three_middlewares_on_ray(folder: Path, reward_workers: int) -> None:
    """Secrets are redacted, the third call is refused, and the score has its price, with reward workers or without."""
    found = {}
    changes = ["runtime=ray", "runtime.num_workers=2", f"runtime.reward_workers={reward_workers}"]
    for runtime, overrides in (("local", []), ("ray", changes)):
        config = load_config(folder / "run.yaml", overrides)
        with RolloutManager.from_config(config) as manager:
            results = manager.rollout(load_tasks(config))
        assert {each.status for each in results} <= {Status.COMPLETED, Status.TRUNCATED}, [r.fault for r in results]
        found[runtime] = sorted(
            (r.uid, r.reward, [str(m["content"]) for m in r.messages], dict(r.metrics.extra)) for r in results
        )
        for result in results:
            texts = [str(message["content"]) for message in result.messages if message["role"] == "tool"]
            assert texts[:2] == [f"{key}: the token is [redacted]" for key in ("one", "two")]
            assert "two: " not in texts[2]
            assert "sk-ant" not in texts[2]
            assert result.reward == pytest.approx(1.0 - 0.1 * 2)  # four turns, of which two are free
            assert any(name.startswith("middleware/shape_reward") for name in result.metrics.extra)
            assert any(name.startswith("tool/middleware/tool_rate") for name in result.metrics.extra)
    assert found["ray"] == found["local"]
