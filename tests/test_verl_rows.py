"""A data set of verl, as its own scripts write it, in a run of turnwise."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from turnwise.cli import main
from turnwise_result_files import read_results

ROOT = Path(__file__).parents[1]


def verl_row(number: int, agent: str | None) -> dict[str, object]:
    """Return a row with the columns of verl's GSM8K script, and its agent, if one is named."""
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"Calculate {number} + 2."}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": f"{number + 2}"},
        "extra_info": {"split": "train", "index": number, "answer": f"#### {number + 2}", "question": "?"},
    }
    return row if agent is None else {**row, "agent_name": agent}


@pytest.mark.parametrize(
    ("agent", "num_turns"), [(None, {1, 2, 3, 4, 5, 6}), ("tool_agent", {1, 2, 3, 4, 5, 6}), ("single_turn_agent", {1})]
)
def test_rows_of_verl_run_unchanged(tmp_path: Path, agent: str | None, num_turns: set[int]) -> None:
    """Each agent name that verl ships runs here, and rows without one run with the agent of the config."""
    pq.write_table(pa.Table.from_pylist([verl_row(n, agent) for n in range(2)]), tmp_path / "train.parquet")
    changes = [f"data.path={tmp_path / 'train.parquet'}", "rollout.n=1"]

    assert main(["rollout", str(ROOT / "examples/calculator.yaml"), *changes, "--out", str(tmp_path / "out")]) == 0

    results = list(read_results(tmp_path / "out/trajectories.parquet"))
    expected = {None: "tool_agent", "tool_agent": "tool_agent", "single_turn_agent": "single_turn"}[agent]
    assert [expected] * 2 == [each.agent_name for each in results]
    assert [["2", "3"], ["openai/gsm8k"] * 2] == [
        sorted(str(each.task.ground_truth) for each in results),
        [each.task.data_source for each in results],
    ]
    assert {each.metrics.num_turns for each in results} <= num_turns
