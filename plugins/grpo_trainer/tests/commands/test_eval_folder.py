"""`turnwise eval --out` keeps the held-out episodes like those of a rollout; real runs of a scripted engine."""

import json
import signal
import subprocess
import sys
import time

import pytest

from turnwise import Status
from turnwise.cli import main
from turnwise.errors import DataError
from turnwise_result_files import load_unfinished, read_results
from turnwise_testing.whole_runs.scripted_run import SITE, environment_of, write_scripted_run


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    """A folder with a config whose held-out tasks are five questions, two episodes each."""
    write_scripted_run(
        tmp_path,
        data={"path": "nowhere.jsonl", "validation_path": "data.jsonl"},
        rollout={"validation_n": 2, "prompt_length": 64, "response_length": 64, "validation_sampling": {}},
    )
    monkeypatch.syspath_prepend(str(tmp_path / SITE))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def evaluate(*arguments):
    return main(["eval", *arguments])


def ids_of(out):
    """Return the tokens of each episode that ended, by its name."""
    ended = [result for result in read_results(out) if result.status is not Status.ABORTED]
    return {result.uid: result.trajectories[0].input_ids.tolist() for result in ended}


def test_the_episodes_are_kept(run_dir, capsys):
    """The folder has the ten held-out episodes that the report counts, and `turnwise show` prints one."""
    assert 0 == evaluate("run.yaml", "--k", "1,2", "--step", "4", "--out", "out")

    results = read_results(run_dir / "out")
    report = json.loads((run_dir / "out/evaluation.json").read_text())
    assert (
        10 == len(results) == report["episodes"] == json.loads((run_dir / "out/metrics.json").read_text())["episodes"]
    )
    assert {(True, 4)} == {(result.validation, result.global_step) for result in results}
    mean = sum(result.reward for result in results) / len(results)
    assert mean == pytest.approx(report["results"]["all"]["mean@2"]["value"])
    capsys.readouterr()
    assert 0 == main(["show", "out", "9"])
    assert "Question 4" in capsys.readouterr().out


def test_the_report_of_a_complete_run_is_computed_again(run_dir, capsys):
    """`--resume` with another k runs no episode, and replaces the report."""
    assert 0 == evaluate("run.yaml", "--out", "out")
    before = (run_dir / "out/trajectories.parquet").stat()

    assert 0 == evaluate("--resume", "out", "--k", "1,2")

    after = (run_dir / "out/trajectories.parquet").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert "pass@2" in json.loads((run_dir / "out/evaluation.json").read_text())["results"]["all"]


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_evaluation_is_resumed(run_dir, how):
    """Ctrl-C or SIGKILL, then --resume: finished episodes and sampled tokens are kept, and no episode is missing."""
    assert 0 == evaluate("run.yaml", "--out", "whole")
    whole = read_results(run_dir / "whole")
    held = {result.uid for result in whole if is_held(result)}
    assert len(held) > 1
    command = [sys.executable, "-m", "turnwise.cli", "eval", "run.yaml", "engine.hold=released", "--out", "cut"]
    process = subprocess.Popen(command, cwd=run_dir, env=environment_of(run_dir), stderr=subprocess.PIPE, text=True)
    try:
        while num_readable(run_dir / "cut") < 10 - len(held):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.05)
        process.send_signal(how)
        _, error = process.communicate(timeout=600)
    finally:
        process.kill()

    interrupted = how is signal.SIGINT
    assert process.returncode == (130 if interrupted else -how), error
    assert not interrupted or "to run the rest: turnwise eval --resume cut" in error
    assert not (run_dir / "cut/evaluation.json").exists()
    kept = load_unfinished(run_dir / "cut/unfinished.jsonl") if interrupted else []
    assert (held if interrupted else set()) == {each.uid for each in kept}
    (run_dir / "released").touch()
    assert 0 == evaluate("--resume", "cut")

    before, after = ids_of(run_dir / "whole"), ids_of(run_dir / "cut")
    assert set(before) == set(after)
    # The rest of an interrupted turn has another seed.
    new = {each.uid for each in kept}
    assert all(before[uid] == after[uid] for uid in set(before) - new)
    for each in kept:
        ids = each.turns[0].result.token_ids.tolist()
        assert ids
        assert after[each.uid][each.trajectories[0].num_prompt_tokens :][: len(ids)] == ids
    assert 10 == json.loads((run_dir / "cut/evaluation.json").read_text())["episodes"]


def is_held(result):
    """Return whether the engine holds an episode: it waits before the third token of the last two questions."""
    return result.task.sample_index in (3, 4) and result.trajectories[0].num_response_tokens > 2


def num_readable(out):
    """Return the number of episodes that a folder's partial file has."""
    try:
        return len(read_results(out / "trajectories.parquet.partial"))
    except DataError:
        return 0


@pytest.mark.parametrize(("num_failures", "code"), [(2, 0), (6, 1), (10, 1)])
def test_lost_episodes_are_named_and_run_again(run_dir, capsys, num_failures, code):
    """A value over the rest would look like a value of the model, so the loss of most of them is a failure."""
    again = "again: turnwise eval --resume out --retry-failed"
    for arguments in (("run.yaml", f"engine.num_failures={num_failures}", "--out", "out"), ("--resume", "out")):
        assert code == evaluate(*arguments)
        assert again in capsys.readouterr().err.splitlines()[-1]
        assert (code == 0) == (run_dir / "out/evaluation.json").exists()
    config = run_dir / "out/config.resolved.yaml"
    config.write_text(config.read_text().replace(f"num_failures: {num_failures}", "num_failures: 0"))

    assert 0 == evaluate("--resume", "out", "--retry-failed")

    assert Status.FAILED not in {result.status for result in read_results(run_dir / "out")}
    assert 10 == json.loads((run_dir / "out/evaluation.json").read_text())["episodes"]


def test_most_episodes_of_an_evaluation_without_a_folder_are_lost(run_dir, capsys):
    """There is nothing that could run again."""
    assert 1 == evaluate("run.yaml", "engine.num_failures=6")
    assert "6 of 10 episodes failed, the first by engine: EngineError" in (error := capsys.readouterr().err)
    assert "--retry-failed" not in error


def test_results_are_replaced_only_when_asked(run_dir, capsys):
    """A folder with results is refused without `--overwrite`, and its files stay."""
    assert 0 == evaluate("run.yaml", "--out", "out")

    assert 2 == evaluate("run.yaml", "rollout.seed=1", "--out", "out")
    assert "holds the results of another run" in capsys.readouterr().err
    assert 10 == len(read_results(run_dir / "out"))
    assert 0 == evaluate("run.yaml", "rollout.validation_n=1", "--out", "out", "--overwrite")
    assert 5 == len(read_results(run_dir / "out"))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "give a config, or --resume DIR"),
        (("--resume", "."), "--resume .: holds no run: config.resolved.yaml is missing; add the config to start one"),
        (("run.yaml", "--overwrite"), "--overwrite needs --out DIR"),
        (("run.yaml", "--retry-failed"), "--retry-failed needs --resume DIR"),
        (("run.yaml", "--out", "run.yaml"), "--out run.yaml: File exists"),
        (("run.yaml", "--out", "run.yaml/eval"), "--out run.yaml/eval: Not a directory"),
        (("run.yaml", "--out", "o" * 300), f"--out {'o' * 300}: File name too long"),
    ],
)
def test_options_that_do_not_fit(run_dir, capsys, arguments, text):
    """One line names the option and the hint, and no folder is made."""
    before = set(run_dir.iterdir())

    assert 2 == evaluate(*arguments)

    assert f"turnwise: error: {text}\n" == capsys.readouterr().err
    assert before == set(run_dir.iterdir())


def test_the_step_of_a_resumed_run(run_dir, capsys):
    """The seeds of a run cannot change in the middle."""
    assert 0 == evaluate("run.yaml", "--out", "out")

    assert 2 == evaluate("--resume", "out", "--step", "2")
    assert "--step: --resume DIR continues with the step of that run" in capsys.readouterr().err
