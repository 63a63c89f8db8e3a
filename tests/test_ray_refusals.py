"""
Errors that only an actor meets: `turnwise rollout` on Ray says the reason in one line, with no traceback before it.

An error of the config is final. Another attempt would meet it again, so the actor is started once.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from picky_parts import PARTS, attempts, write_parts

from turnwise_testing.whole_runs.scripted_run import environment_of, write_scripted_run

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.one_part]

TWO_LINES = 'ConfigError("reward.limit: must be at most 3, got 4\\nreward.least: missing")'
DATA_ERROR = 'DataError("words.txt: row 7 has no word")'
CONFIG_ERROR = 'ConfigError("word: must be at most 3 letters")'

CASES = {
    **{case: (CONFIG_ERROR, overrides, actor) for case, (overrides, _part, actor) in PARTS.items() if actor},
    "server of an agent": (CONFIG_ERROR, ["agent=./own.py:Server"], "worker 0"),
    "two lines": (TWO_LINES, PARTS["parser"][0], "worker 0"),
    "data": (DATA_ERROR, PARTS["reward in its worker"][0], "reward worker 0"),
}
"""The error, the overrides, and the actor that meets it."""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Ray node on loopback whose actors find the plugin of the scripted runs."""
    from ray.cluster_utils import Cluster

    folder = tmp_path_factory.mktemp("site")
    write_scripted_run(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", environment_of(folder)["PYTHONPATH"])
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 8, "include_dashboard": False})
    yield cluster.address
    cluster.shutdown()


def rollout(folder: Path, address: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Run `turnwise rollout` on the cluster, whose actors find the installed plugins and the files of the folder."""
    file = write_scripted_run(folder, num_tasks=2, plugins=None, modules=["./own.py"])
    command = [sys.executable, "-m", "turnwise.cli", "rollout", str(file), "runtime=ray"]
    command += [f"runtime.ray.address={address}", "runtime.ray.trusted_network=true", "runtime.ray.backoff_s=0.05"]
    environment = {**environment_of(folder), "COLUMNS": "200"}
    environment.pop("TURNWISE_PLUGINS", None)
    return subprocess.run(
        [*command, *overrides, "--out", str(folder / "out")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def expect_lines(done: subprocess.CompletedProcess[str], code: int) -> list[str]:
    """Return the lines of the error, before which stand some lines of the log and nothing of Ray's tracebacks."""
    assert done.returncode == code, done.stderr
    noise = [line for line in done.stderr.splitlines() if "Traceback" in line or '  File "' in line]
    assert noise == []
    before, found, error = done.stderr.partition("turnwise: error: ")
    assert found, done.stderr
    assert len(before.splitlines()) < 12, done.stderr
    return error.splitlines()


@pytest.mark.parametrize("case", CASES)
def test_an_error_of_the_config_ends_the_start_at_once(case: str, address: str, tmp_path: Path) -> None:
    """The command exits with 2 after the lines of the error, and one actor was started."""
    error, overrides, actor = CASES[case]
    write_parts(tmp_path, error)

    lines = expect_lines(rollout(tmp_path, address, *overrides), 2)

    texts = error.partition('"')[2].removesuffix('")').split("\\n")
    assert lines[0].startswith(f"{actor} could not be started: ")
    assert len(lines) == len(texts)
    assert all(line.endswith(f": {text}") for line, text in zip(lines, texts, strict=True))
    assert case not in PARTS or PARTS[case][1].replace("FILE", str(tmp_path / "own.py")) in lines[0]
    assert len(attempts(tmp_path)) == 1


def test_an_engine_that_cannot_start_here_is_tried_once(address: str, tmp_path: Path) -> None:
    """A missing model is an error of the config, also where the engine's process finds it."""
    write_parts(tmp_path, CONFIG_ERROR)
    done = rollout(tmp_path, address, "judge={engine: {name: transformers, model: ./nothing}}")

    (line,) = expect_lines(done, 2)

    assert line.startswith("judge replica 0 could not be started: the model directory ")
    assert line.endswith("does not exist")


def test_any_other_error_is_tried_again_and_stays_one_line(address: str, tmp_path: Path) -> None:
    """A server may be there at the next attempt."""
    write_parts(tmp_path, CONFIG_ERROR)
    judge = "judge={engine: {name: openai, urls: [http://127.0.0.1:1]}}"

    done = rollout(tmp_path, address, judge, "runtime.ray.max_starts=2")

    (line,) = expect_lines(done, 1)
    assert line.startswith("judge replica 0 could not be started: EngineError: no server is healthy: ")
    assert line.endswith(" (2 tries)")
