"""Results on disk survive kills, interrupts, full disks, odd values and a second run; all in real processes."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter

import pytest
from cli_runs import NUM_HELD, environment_of, rollout, started, wait_for

from turnwise import RolloutManager
from turnwise.cli import main
from turnwise.errors import EngineError
from turnwise.files import partial_path
from turnwise.types import Status
from turnwise_result_files import TrajectoryWriter, load_batch, load_unfinished, read_results


def resume(folder, *arguments):
    return main(["rollout", "--resume", str(folder), *arguments])


def check_complete(folder):
    """Check that a folder holds ten episodes once each, their batch and their metrics; return the episodes."""
    results = read_results(folder)
    assert len({result.uid for result in results}) == len(results) == 10
    assert len(load_batch(folder / "batch.safetensors").rows) == 10
    assert json.loads((folder / "metrics.json").read_text())["episodes"] == 10
    assert not (folder / "unfinished.jsonl").exists()
    assert not list(folder.glob("*.partial"))
    return results


def contents(folder):
    """Return the bytes of each file of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def slow(*values):
    """Return the parameters of a test that is slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


class TestInterrupts:
    """Ctrl-C, SIGTERM, SIGHUP and SIGKILL."""

    @pytest.mark.slow
    @pytest.mark.parametrize("how", [signal.SIGINT, *(slow(each) for each in (signal.SIGTERM, signal.SIGHUP))])
    def test_running_episodes_are_written_with_their_tokens(self, run_dir, site, how):
        """The exit code is 130, and the running episodes are aborted."""
        with started(run_dir, site) as process:
            process.send_signal(how)
            code = process.wait(timeout=600)

        assert code == 130, (run_dir / "log").read_text()
        assert "Traceback" not in (run_dir / "log").read_text()
        results = read_results(run_dir / "out" / "trajectories.parquet")
        assert len(results) == 10
        assert json.loads((run_dir / "out" / "metrics.json").read_text())["interrupted"] is True
        aborted = [r for r in results if r.status is Status.ABORTED]
        assert len(aborted) == NUM_HELD
        assert all(r.trajectories[0].num_response_tokens > 0 for r in aborted)

    @pytest.mark.slow
    def test_an_interrupt_that_ended_the_reader_of_the_log_too(self, run_dir, site):
        """Ctrl-C also ends `tee`, so the line that announces the end has no reader."""
        reader, writer = os.pipe()
        with started(run_dir, site, stderr=writer) as process:
            os.close(writer)
            os.close(reader)
            process.send_signal(signal.SIGINT)
            code = process.wait(timeout=600)

        assert code == 130, (run_dir / "log").read_text()
        assert len(read_results(run_dir / "out" / "trajectories.parquet")) == 10
        assert json.loads((run_dir / "out" / "metrics.json").read_text())["interrupted"] is True
        assert len(load_unfinished(run_dir / "out" / "unfinished.jsonl")) == NUM_HELD

    @pytest.mark.parametrize("how", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL])
    def test_an_interrupted_run_is_resumed(self, run_dir, site, how):
        """Ctrl-C or SIGKILL, then --resume: finished episodes are kept, the rest runs, with the same results."""
        assert rollout(run_dir) == 0
        expected = read_results(run_dir / "out")
        with started(run_dir, site, out="cut") as process:
            process.send_signal(how)
            assert process.wait(timeout=600) == (130 if how is signal.SIGINT else -how)
        before = [r for r in read_results(run_dir / "cut") if r.status is not Status.ABORTED]
        assert len(before) == 10 - NUM_HELD
        kept = load_unfinished(run_dir / "cut" / "unfinished.jsonl") if how is signal.SIGINT else []
        assert len(kept) == (NUM_HELD if how is signal.SIGINT else 0)
        metrics = run_dir / "cut" / "metrics.json"
        earlier = json.loads(metrics.read_text()) if how is signal.SIGINT else None

        (run_dir / "released").touch()
        assert resume(run_dir / "cut") == 0
        results = check_complete(run_dir / "cut")
        assert Counter(r.uid for r in expected) == Counter(r.uid for r in results)
        assert {r.status for r in results} <= {Status.COMPLETED, Status.TRUNCATED}
        after = {r.uid: r.trajectories[0].input_ids.tolist() for r in results}
        assert all(after[r.uid] == r.trajectories[0].input_ids.tolist() for r in before)
        responses = {r.uid: r.trajectories[0].response_ids.tolist() for r in results}
        for each in kept:
            ids = each.turns[0].result.token_ids.tolist()
            assert responses[each.uid][: len(ids)] == ids
        # Rates are over the time of all parts, and unknown where one was killed.
        whole = json.loads(metrics.read_text())
        assert (whole["wall_s"] is None) == (whole["episodes_per_s"] is None) == (earlier is None)
        assert earlier is None or whole["wall_s"] > earlier["wall_s"]
        assert resume(run_dir / "cut") == 0

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("at", "how"),
        [
            ("start", signal.SIGTERM),
            *(slow("start", each) for each in (signal.SIGINT, signal.SIGHUP)),
            ("stop", signal.SIGINT),
            *(slow("stop", each) for each in (signal.SIGTERM, signal.SIGHUP)),
        ],
    )
    def test_an_engine_that_hangs_can_be_interrupted(self, run_dir, site, at, how):
        """
        Nothing bounds how long an engine may load; a signal ends it. One that hangs at its end costs no result, and the
        exit code is that of the written run.
        """
        command = [sys.executable, "-m", "turnwise.cli", "rollout", "run.yaml", f"engine={{name: hangs, at: {at}}}"]
        with (run_dir / "log").open("w") as log:
            environment = environment_of(site)
            process = subprocess.Popen([*command, "--out", "out"], cwd=run_dir, env=environment, stdout=log, stderr=log)
        try:
            wait_for((run_dir / "hangs").exists, process)
            process.send_signal(how)
            assert process.wait(timeout=600) == (130 if at == "start" else 0), (run_dir / "log").read_text()
        finally:
            process.kill()
            process.wait()

        assert "Traceback" not in (run_dir / "log").read_text()
        if at == "stop":
            check_complete(run_dir / "out")
            assert "wrote out" in (run_dir / "log").read_text()

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("runtime", "part"), [("local", "engine"), pytest.param("ray", "replica 0", marks=pytest.mark.ray)]
    )
    def test_a_run_that_waits_says_for_what(self, run_dir, site, runtime, part):
        """With the number of episodes and the part, in the log, without any event that the run could report."""
        with started(run_dir, site, f"runtime={runtime}") as process:
            wait_for(lambda: f"{NUM_HELD} episodes: {part} for" in (run_dir / "log").read_text(), process)
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=600) == 130

    @pytest.mark.slow
    def test_show_reads_a_killed_run(self, run_dir, site, capsys):
        """Without a complete file, the episodes of the partial one are listed."""
        with started(run_dir, site) as process:
            process.kill()
            process.wait()

        assert main(["show", str(run_dir / "out")]) == 0
        assert capsys.readouterr().out.count("completed") + capsys.readouterr().out.count("truncated") >= 1

    @pytest.mark.parametrize("left", [(), ("batch.safetensors",)])
    def test_a_kill_after_the_last_episode_loses_neither_batch_nor_metrics(self, run_dir, left):
        """All episodes are there and only the last files are missing: --resume writes them."""
        assert rollout(run_dir) == 0
        out = run_dir / "out"
        for name in {"batch.safetensors", "metrics.json"} - set(left):
            (out / name).unlink()

        assert resume(out) == 0
        check_complete(out)

    @pytest.mark.parametrize("removed", [("batch.safetensors", "metrics.json"), ()])
    def test_a_resume_removes_what_a_killed_part_left(self, run_dir, removed):
        """A kill in the end phase leaves temporary files: after --resume the folder is that of an undisturbed run."""
        assert rollout(run_dir) == 0
        out = run_dir / "out"
        whole = {path.name for path in out.iterdir()}
        for name in removed:
            (out / name).unlink()
        for name in ("running.json", "running.json.partial", "trajectories.parquet.complete", ".tmpaB3xY9"):
            (out / name).write_text("half")
        for name in ("batch.safetensors.partial", "metrics.json.partial", "rescued-trajectories.parquet.partial"):
            (out / name).write_text("half")

        assert resume(out) == 0
        check_complete(out)
        assert {path.name for path in out.iterdir()} == whole

    def test_episodes_of_an_outage_run_again_when_asked(self, run_dir, capsys):
        """--resume alone keeps failed episodes and says how the run ended; with --retry-failed they run again."""
        assert rollout(run_dir, "engine.num_failures=10") == 1
        out = run_dir / "out"
        config = (out / "config.resolved.yaml").read_text()
        capsys.readouterr()
        assert resume(out) == 1
        printed = capsys.readouterr().err
        assert "all 10 episodes have finished, and 10 of them failed" in printed
        assert printed.splitlines()[-1].startswith("turnwise: error: all 10 episodes failed, the first by engine: ")
        assert printed.endswith(f"to run the lost ones again: turnwise rollout --resume {out} --retry-failed\n")
        (out / "config.resolved.yaml").write_text(config.replace("num_failures: 10", "num_failures: 0"))

        assert resume(out, "--retry-failed") == 0
        assert {r.status for r in check_complete(out)} <= {Status.COMPLETED, Status.TRUNCATED}

    def test_a_few_lost_episodes_are_named(self, run_dir, capsys):
        """A run that lost some episodes is no failure, but its last line says how to run them again, now and later."""
        assert rollout(run_dir, "engine.num_failures=2") == 0
        again = f"again: turnwise rollout --resume {run_dir / 'out'} --retry-failed"
        assert again in capsys.readouterr().err
        assert resume(run_dir / "out") == 0
        printed = capsys.readouterr().err
        assert "all 10 episodes have finished, and 2 of them failed" in printed
        assert again in printed

    @pytest.mark.many_cases(2)
    @pytest.mark.parametrize("there", ["nothing", "folder", "config", "whole"])
    def test_a_job_may_always_resume(self, run_dir, there):
        """With its config, --resume starts a run where there is none, and continues one from whatever is there."""
        out = run_dir / "out"
        if there == "folder":
            out.mkdir()
        elif there != "nothing":
            assert rollout(run_dir) == 0
        if there == "config":
            for path in out.iterdir():
                if path.name != "config.resolved.yaml":
                    path.unlink()

        for _again in range(2):
            assert main(["rollout", str(run_dir / "run.yaml"), "--resume", str(out)]) == 0
            check_complete(out)

    def test_a_resume_with_another_config_is_refused(self, run_dir, capsys):
        """The line names the value that differs, and the results stay as they are."""
        assert rollout(run_dir) == 0
        before = (run_dir / "out/metrics.json").read_bytes()
        assert main(["rollout", str(run_dir / "run.yaml"), "rollout.n=4", "--resume", str(run_dir / "out")]) == 2
        error = capsys.readouterr().err
        assert "out: holds the run of another config: 'n: 2' there, 'n: 4' given" in error
        assert (run_dir / "out/metrics.json").read_bytes() == before

    def test_a_resume_of_nothing_asks_for_the_config(self, run_dir, capsys):
        """Without a run and without a config there is nothing to start."""
        assert resume(run_dir / "out") == 2
        assert "holds no run: config.resolved.yaml is missing; add the config to start one" in capsys.readouterr().err


class TestOneWriter:
    """A folder belongs to one run at a time."""

    @pytest.mark.slow
    def test_a_second_run_is_refused(self, run_dir, site, capsys):
        """Also with --overwrite and --resume, and the first run is complete in the end."""
        with started(run_dir, site) as process:
            assert rollout(run_dir, "--overwrite") == 2
            assert "another run writes to this folder" in capsys.readouterr().err
            assert resume(run_dir / "out") == 2
            assert "another run writes to this folder" in capsys.readouterr().err
            process.kill()
            process.wait()
        (run_dir / "released").touch()
        assert resume(run_dir / "out") == 0
        check_complete(run_dir / "out")

    def test_results_stay_when_the_engine_does_not_start(self, run_dir):
        """--overwrite removes the old results when there are new ones, and not before."""
        assert rollout(run_dir) == 0
        before = contents(run_dir / "out")
        assert rollout(run_dir, "engine.breaks=true", "--overwrite") == 1
        assert contents(run_dir / "out") == before

        assert rollout(run_dir, "rollout.seed=9", "--overwrite") == 0
        assert "seed: 9" in (run_dir / "out" / "config.resolved.yaml").read_text()
        check_complete(run_dir / "out")

    @pytest.mark.many_cases(2)
    @pytest.mark.parametrize("killed", [False, True])
    @pytest.mark.parametrize(
        ("values", "code", "text"),
        [
            (["rollout.prompt_length=1", "data.prompt_policy=drop"], 1, "all 10 episodes were dropped"),
            (["agent=interrupts"], 130, "turnwise: interrupted"),
        ],
    )
    def test_results_stay_when_the_new_run_has_none(self, run_dir, capsys, values, code, text, killed):
        """Results of a killed run stay too; the new run leaves no file, and a new folder tells its config."""
        assert rollout(run_dir) == 0
        out = run_dir / "out"
        if killed:
            with partial_path(out / "trajectories.parquet").open("wb") as file:
                file.write(b"cut")
            (out / "trajectories.parquet").unlink()
        before = contents(out)

        assert rollout(run_dir, *values, "--overwrite") == code
        assert text in capsys.readouterr().err
        assert contents(out) == before

        assert main(["rollout", str(run_dir / "run.yaml"), *values, "--out", str(run_dir / "new")]) == code
        assert (run_dir / "new" / "config.resolved.yaml").exists()

    def test_results_stay_when_the_new_run_fails_before_its_first_result(self, run_dir, monkeypatch):
        """The file of the trajectories is replaced with the first episode, and an error ends the run before it."""
        assert rollout(run_dir) == 0
        before = contents(run_dir / "out")

        def fail(*_arguments, **_options):
            raise EngineError("the last replica is gone")
            yield

        monkeypatch.setattr(RolloutManager, "iterate_numbered", fail)
        assert rollout(run_dir, "--overwrite") == 1
        assert contents(run_dir / "out") == before


class TestOddValues:
    """Values of plugins that no file has a place for."""

    def test_one_odd_reward_costs_no_episode(self, run_dir):
        """Keys that are no texts, circles, depth, huge integers and objects are written as texts."""
        assert rollout(run_dir, "reward=odd") == 0
        results = check_complete(run_dir / "out")
        assert {r.reward for r in results} == {1.0}
        odd = [r.scores[0].extra for r in results if r.task.sample_index == 1]
        assert len(odd) == 2
        assert all(extra["(1, 2)"] == 3 and "contains itself" in str(extra["circle"]) for extra in odd)

    def test_an_index_beyond_the_file_is_refused(self, run_dir, capsys):
        """Before anything runs, with the row."""
        row = {"messages": [{"role": "user", "content": "x"}], "sample_index": 10**19}
        (run_dir / "data.jsonl").write_text(json.dumps(row))
        assert rollout(run_dir) == 2
        assert "expected an integer from 0 to 2**63 - 1" in capsys.readouterr().err


class TestDisk:
    """A disk that takes no more."""

    def test_a_folder_that_is_removed_at_the_first_row_ends_the_run(self, run_dir, monkeypatch, capsys):
        """The run has looked for the folder, and opens the file of the rows."""
        write = TrajectoryWriter.write

        def remove_and_write(*arguments):
            shutil.rmtree(run_dir / "out")
            return write(*arguments)

        monkeypatch.setattr(TrajectoryWriter, "write", remove_and_write)

        assert rollout(run_dir) == 2
        printed = capsys.readouterr().err
        assert "Traceback" not in printed
        assert "removed while the run wrote to it" in printed.splitlines()[-1]

    def test_a_folder_that_cannot_be_made_is_one_line(self, run_dir, capsys):
        """A name that is too long, a place below a file, and a loop of links."""
        (run_dir / "file").write_text("")
        (run_dir / "loop").symlink_to(run_dir / "loop")
        for out in (run_dir / ("x" * 300), run_dir / "file" / "out", run_dir / "loop"):
            assert main(["rollout", str(run_dir / "run.yaml"), "--out", str(out)]) == 2
            (line,) = [each for each in capsys.readouterr().err.splitlines() if "error" in each]
            assert line.startswith(f"turnwise: error: --out {out}: ")
