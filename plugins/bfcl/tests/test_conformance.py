"""The task source, the reward and the tools pass the conformance suites."""

import pytest
from attrs import evolve
from bfcl_inputs import DATA, tasks_of, text_of

from turnwise.errors import DataError
from turnwise_bfcl.data_files import fetch_wheel
from turnwise_testing import RewardExample, RewardSuite, TaskSourceExample, TaskSourceSuite, ToolSuite


class TestBfclSource(TaskSourceSuite):
    """One category and several, a part of them, and texts that are refused."""

    entry_point = "bfcl"
    module = "turnwise_bfcl"
    registered = "bfcl"

    @pytest.fixture
    def examples(self):
        """All from a folder, so that nothing is downloaded."""
        return (
            TaskSourceExample(text=text_of("simple_python"), num_rows=3),
            TaskSourceExample(text=text_of("simple_python,parallel,live_irrelevance", size=4, seed=3), num_rows=4),
            TaskSourceExample(text="simple_pyton", error="did you mean 'simple_python'?"),
            TaskSourceExample(text=f"multiple,multiple?folder={DATA}", error="category 'multiple' is there twice"),
            TaskSourceExample(text="multiple?sise=3", error="did you mean 'size'?"),
            TaskSourceExample(text="multiple?size=0", error="size"),
        )


class TestBfclReward(RewardSuite):
    """Turns without calls: the suite's agent parses none. `test_reward.py` has turns with calls."""

    entry_point = "bfcl"
    module = "turnwise_bfcl"
    registered = "bfcl"

    @pytest.fixture
    def examples(self):
        """Its agent shows no functions either, so the question names them."""
        (simple, *_), (irrelevant,), (relevant,) = map(tasks_of, ("simple_python", "irrelevance", "live_relevance"))
        named = ({"role": "user", "content": "Do not use kitchen.brew."},)
        return tuple(
            RewardExample(
                answer="No.", ground_truth=task.ground_truth, task=evolve(task, messages=named), expected=value
            )
            for task, value in ((simple, 0.0), (irrelevant, 1.0), (relevant, 0.0))
        )


@pytest.mark.slow
class TestBfclTools(ToolSuite):
    """Without calls, which need a task of a multi-turn category: `test_multi_turn.py` has them."""

    entry_point = "bfcl"
    module = "turnwise_bfcl"
    registered = "bfcl"

    @pytest.fixture(autouse=True)
    def wheel(self):
        """The functions are in the leaderboard's wheel."""
        try:
            fetch_wheel()
        except DataError as error:
            pytest.skip(f"needs the wheel of bfcl-eval from the package index: {error}")

    @pytest.fixture
    def examples(self):
        """None."""
        return ()
