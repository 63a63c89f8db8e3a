"""The task source, the tool and the reward pass the conformance suites."""

import pytest

from turnwise import Task
from turnwise.media import picture_part
from turnwise_drawn_scenes.drawing import draw, encode
from turnwise_drawn_scenes.scenes import generate_scenes
from turnwise_testing import RewardExample, RewardSuite, TaskSourceExample, TaskSourceSuite, ToolExample, ToolSuite
from turnwise_testing.checks.tool import ToolProbe


class TestSceneSource(TaskSourceSuite):
    """Both splits, and texts that are refused."""

    entry_point = "drawn_scenes"
    module = "turnwise_drawn_scenes"
    registered = "drawn_scenes"

    @pytest.fixture
    def examples(self):
        """Few tasks each."""
        return (
            TaskSourceExample(text="train?num_tasks=3", num_rows=3),
            TaskSourceExample(text="test?num_tasks=2&seed=4", num_rows=2),
            TaskSourceExample(text="tests", error="unknown split 'tests': expected train or test"),
            TaskSourceExample(text="train?num_task=3", error="did you mean 'num_tasks'?"),
            TaskSourceExample(text="train?num_tasks=0", error="num_tasks"),
        )


class TestCrop(ToolSuite):
    """The tool on the picture of a task."""

    entry_point = "drawn_scenes"
    module = "turnwise_drawn_scenes"
    registered = "crop"

    @pytest.fixture
    def examples(self):
        """A part, and edges that describe none."""
        bad = {
            (100, 0, 200, 32): "Error: the picture has 128 x 128 pixels",
            (64, 0, 32, 32): "Error: a part needs at least 8 x 8 pixels",
        }
        return (
            ToolExample(arguments=_edges(0, 32, 32, 64), text=""),
            *(ToolExample(arguments=_edges(*edges), text=text, error=True) for edges, text in bad.items()),
        )

    @pytest.fixture
    def probe(self, config, resources, examples):
        """The usual one, with a task that has a picture."""
        part = picture_part(encode(draw(next(generate_scenes("train", 0)))))
        task = Task(messages=({"role": "user", "content": [part]},), uid="scene")
        factory = self.entry().factory
        return ToolProbe(make_tool=lambda: factory(config, resources), examples=examples, task=task)


class TestSceneReward(RewardSuite):
    """Right and wrong answers."""

    entry_point = "drawn_scenes"
    module = "turnwise_drawn_scenes"
    registered = "drawn_scenes"

    @pytest.fixture
    def examples(self):
        """The last word counts."""
        return (
            RewardExample(answer="It has rings.", ground_truth="rings", expected=1.0),
            RewardExample(answer="Rings, or dots?", ground_truth="rings", expected=0.0),
            RewardExample(answer="", ground_truth="rings", expected=0.0),
        )


def _edges(*edges: int) -> dict[str, int]:
    return dict(zip(("left", "top", "right", "bottom"), edges, strict=True))
