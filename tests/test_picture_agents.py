"""Agents and simulated users with pictures, by the command line, and one clear line from those without."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from picture_rollouts import CAT, PLUGINS, roll_out, write_run

from turnwise import EpisodeResult
from turnwise.batch.rollout_batch import collate
from turnwise.layout import Objective
from turnwise_result_files import read_results
from turnwise_testing.inputs.vision import QWEN_3_VL
from turnwise_testing.references.vision_reference import VisionReference
from turnwise_tiny_models import save_random_vision

pytestmark = [pytest.mark.usefixtures("starts_a_process"), pytest.mark.slow]


def write_tiny_run(folder: Path, agent: dict[str, object], plugin: str) -> Path:
    """Write a run of an agent with a random vision-language model."""
    engine = {"name": "transformers", "device": "cpu", "max_context": 512}
    rollout = {"n": 2, "prompt_length": 320, "response_length": 96, "sampling": {"temperature": 1.0}}
    plugins = [*PLUGINS, plugin, "transformers_engine"]
    file = write_run(folder, agent=agent, engine=engine, rollout=rollout, tools=[], parser=None, plugins=plugins)
    save_random_vision("qwen2_5_vl", folder / "tiny", text="Which animal?", chat_template=QWEN_3_VL)
    return file


def check_rows(folder: Path, out: str) -> list[EpisodeResult]:
    """Compare each row that a trainer gets with a forward pass of its ids and pictures; return the results."""
    reference, results = VisionReference(folder / "tiny"), read_results(folder / out)
    assert len(results) == 4
    for result in results:
        assert result.fault is None
        batch = collate([result], pad_token_id=0)
        for number, row in enumerate(batch.rows):
            assert [place.picture.key for place in row.pictures] == [CAT.key]
            ids = batch.input_ids[number][batch.attention_mask[number].bool()].tolist()
            size = int(batch.response_lens[number])
            mask = batch.response_mask[number][:size].bool().numpy()
            logprobs = batch.rollout_log_probs[number][:size].numpy()
            scores, _best = reference.scores(ids, len(ids) - size, temperature=1.0, variant=0, pictures=row.pictures)
            np.testing.assert_allclose(logprobs[mask], scores[mask], atol=1e-4, rtol=0)
    return results


def test_programs_after_a_picture(tmp_path: Path) -> None:
    """`torl_python` samples from a vision-language model with the probabilities of one forward pass."""
    file = write_tiny_run(tmp_path, {"name": "torl_python", "template": "chat", "max_tool_calls": 0}, "torl_python")
    done = roll_out(tmp_path, file, "model.path=tiny")
    assert done.returncode == 0, done.stderr
    check_rows(tmp_path, "out")


def test_parallel_paths_after_a_picture(tmp_path: Path) -> None:
    """Each path is sampled and trained behind the picture; the tag that opens a block is a frequent token."""
    names = ("end_block", "path", "end_path", "summary", "end_summary")
    agent = {"name": "parallel_thinking", "max_blocks": 0, "max_path_tokens": 8, "max_summary_tokens": 8}
    agent["tags"] = dict(zip(names, "~^|{}", strict=True))
    file = write_tiny_run(tmp_path, agent, "parallel_thinking")
    done = roll_out(tmp_path, file, "model.path=tiny", "agent.tags.block=`")
    assert done.returncode == 0, done.stderr
    sampled = "".join(str(each.messages[-1]["content"]) for each in check_rows(tmp_path, "out"))
    ((often, _number),) = Counter(c for c in sampled if c.isascii() and c.isalpha()).most_common(1)
    (tmp_path / "out").rename(tmp_path / "plain")
    done = roll_out(tmp_path, file, "model.path=tiny", f"agent.tags.block={often}", "agent.max_blocks=2")
    assert done.returncode == 0, done.stderr
    results = check_rows(tmp_path, "out")
    assert any(result.trajectories[0].has_blocks for result in results)
    assert {result.objective for result in results} == {Objective.EXPANDED}


def test_exact_paths_refuse_a_picture(tmp_path: Path) -> None:
    """Before the first episode, in one line with the row and the reason."""
    names = ("end_block", "path", "end_path", "summary", "end_summary", "block")
    agent = {"name": "parallel_thinking", "objective": "exact", "tags": dict(zip(names, "~^|{}`", strict=True))}
    file = write_tiny_run(tmp_path, agent, "parallel_thinking")
    done = roll_out(tmp_path, file, "model.path=tiny")
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    line = done.stderr.strip().splitlines()[-1]
    assert "row 0 (task 'task0'): the prompt has pictures, and no engine has parallel paths in a context" in line
    assert "set agent.objective: expanded" in line
    assert not (tmp_path / "out" / "trajectories.parquet").exists()


@pytest.mark.parametrize("takes_pictures", [True, False])
def test_a_simulated_user(tmp_path: Path, takes_pictures: bool) -> None:
    """The model of the user sees the picture that its user shows, or the line says that its engine takes none."""
    engine = {"name": "seeing", "log": str(tmp_path / "judged.jsonl"), "num_calls": 0, "pictures": takes_pictures}
    file = write_run(
        tmp_path,
        agent={"name": "tool_agent", "max_user_turns": 1},
        engine={"name": "seeing", "num_calls": 0},
        judge={"engine": engine, "model": {"path": "model"}},
        interaction={"name": "model_user", "goal": "Learn which animal it is."},
        tools=[],
        parser=None,
        plugins=[*PLUGINS, "simulated_users"],
    )
    done = roll_out(tmp_path, file)
    assert "Traceback" not in done.stderr
    if not takes_pictures:
        assert done.returncode != 0
        assert "judge: its question has pictures, which need an engine with the capability pictures" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    results = read_results(tmp_path / "out")
    assert [[message["role"] for message in result.messages] for result in results] == [
        ["user", "assistant", "user", "assistant"]
    ] * 4
    asked = [json.loads(line)["places"] for line in (tmp_path / "judged.jsonl").read_text().splitlines()]
    assert [[key for _start, _size, key in places] for places in asked] == [[CAT.key]] * 4


def test_external_servers_refuse_a_picture(tmp_path: Path) -> None:
    """Before the first request: nobody listens at the address, and the line names the row and the reason."""
    engine = {"name": "openai", "urls": ["http://127.0.0.1:1"], "max_context": 4096}
    done = roll_out(tmp_path, write_run(tmp_path, engine=engine, plugins=[*PLUGINS, "openai_engine"]))
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    line = done.stderr.strip().splitlines()[-1]
    assert "row 0 (task 'task0') has pictures, which need an engine with the capability pictures" in line
