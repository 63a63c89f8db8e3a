"""The command line on a scripted engine: files, output, and exit codes."""

import io
import json
import sys

import pytest
import yaml
from cli_runs import rollout

from turnwise.cli import main
from turnwise.events.json_stream import asks_for_json
from turnwise.record.result import EpisodeResult
from turnwise.record.trajectory import Trajectory
from turnwise.types import Status, Task
from turnwise_result_files import TrajectoryWriter, load_batch, read_results
from turnwise_testing.inputs.tokenizers import byte_tokenizer

FILES = ("trajectories.parquet", "batch.safetensors", "metrics.json", "config.resolved.yaml")


class TestRollout:
    """`turnwise rollout`."""

    def test_writes_everything(self, run_dir, capsys):
        """
        Four files, rows in the order of the data, and a table at the end.
        """
        assert rollout(run_dir) == 0

        out = run_dir / "out"
        assert sorted(path.name for path in out.iterdir()) == sorted(FILES)
        batch = load_batch(out / "batch.safetensors")
        assert [(row.sample_index, row.rollout_n) for row in batch.rows] == [(i, n) for i in range(5) for n in (0, 1)]
        results = read_results(out / "trajectories.parquet")
        assert len(results) == 10
        metrics = json.loads((out / "metrics.json").read_text())
        assert metrics["episodes"] == 10
        assert metrics["interrupted"] is False
        printed = capsys.readouterr().out
        assert "reward" in printed
        assert "10 episodes" in printed or "episode" in printed

    def test_the_resolved_config_runs_again(self, run_dir):
        """
        The written config gives the same rollout.
        """
        rollout(run_dir, "rollout.seed=5")
        resolved = run_dir / "out" / "config.resolved.yaml"
        assert main(["rollout", str(resolved), "--out", str(run_dir / "again")]) == 0

        first, again = (
            {r.uid: r.trajectories[0].input_ids.tolist() for r in read_results(run_dir / name)}
            for name in ("out/trajectories.parquet", "again/trajectories.parquet")
        )
        assert first == again

    def test_results_are_not_overwritten_unasked(self, run_dir, capsys):
        """
        A folder with results is kept unless it is given up by name.
        """
        assert rollout(run_dir) == 0
        assert rollout(run_dir) == 2
        assert "add --overwrite" in capsys.readouterr().err
        assert rollout(run_dir, "--overwrite") == 0

    def test_episode_log(self, run_dir, capsys):
        """
        The observer `episode_log` writes a line per episode with its costs and status.
        """
        plugins = "plugins=[scripted_kit,chat_templates,acme_odd,observability,plain_functions]"
        assert rollout(run_dir, plugins, "observers=[episode_log]", "telemetry.log_format=json") == 0
        lines = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
        episodes = [line for line in lines if line["event"] == "episode finished"]

        assert len(episodes) == 10
        assert {line["status"] for line in episodes} <= {"completed", "truncated"}
        assert all(line["tokens"]["action"] > 0 for line in episodes)
        assert {"llm_s", "tool_s", "turns", "mask_ratio", "reward"} <= episodes[0].keys()
        assert not asks_for_json()  # when the command has ended, standard error is its caller's

    def test_trace_needs_a_plugin(self, run_dir, monkeypatch, capsys):
        """
        Without the plugin the error names the observer, before anything is written.
        """
        monkeypatch.setenv("TURNWISE_PLUGINS", "scripted_kit,acme_odd,commands")
        assert rollout(run_dir, "--trace", str(run_dir / "run.json")) == 2

        error = capsys.readouterr().err
        assert "unknown observer 'trace_file'" in error
        assert "installed but not loaded" in error
        assert not (run_dir / "out").exists()

    def test_a_module_beside_the_config(self, run_dir, capsys, monkeypatch):
        """The error has the folder to put on Python's path, which then works."""
        text = 'def beside(x: int) -> int:\n    """Double.\n\n    Args:\n        x: it.\n    """\n    return 2 * x\n'
        (run_dir / "my_tools.py").write_text(text)
        tools = ("tools=[my_tools:beside]", "modules=[my_tools]")
        assert 2 == rollout(run_dir, *tools)
        hint = f"a file beside the config is found by ./FILE.py:NAME, or with PYTHONPATH={run_dir}"
        assert hint in capsys.readouterr().err

        monkeypatch.syspath_prepend(str(run_dir))
        assert 0 == rollout(run_dir, *tools, "--overwrite")

    def test_all_episodes_failed(self, run_dir, capsys):
        """
        A run in which nothing worked is not a success; its records are written all the same.
        """
        assert rollout(run_dir, "engine.num_failures=10") == 1
        assert "all 10 episodes failed, the first by engine: EngineError" in capsys.readouterr().err
        assert {r.status for r in read_results(run_dir / "out" / "trajectories.parquet")} == {Status.FAILED}

    def test_dropped_episodes_are_counted(self, run_dir, capsys):
        """The log names each of them; a run that keeps none has failed."""
        (run_dir / "long.jsonl").write_text(json.dumps({"uid": "a", "prompt": "a" * 60}) + "\n")
        (run_dir / "mixed.jsonl").write_text((run_dir / "long.jsonl").read_text() + '{"uid": "b", "prompt": "b"}\n')
        policy = "data.prompt_policy=drop"

        assert 0 == rollout(run_dir, "data.path=mixed.jsonl", policy, "telemetry.log_format=json")
        lines = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
        assert {"a/0", "a/1"} == {line["episode"] for line in lines if line["event"] == "episode dropped"}
        assert [0] == [line["failed"] for line in lines if line["event"] == "rollout ended"]
        summary = json.loads((run_dir / "out" / "metrics.json").read_text())
        assert (2, 2) == (summary["episodes"], summary["dropped"])

        assert 1 == rollout(run_dir, "data.path=long.jsonl", policy, "--overwrite")
        printed = capsys.readouterr()
        assert "all 2 episodes were dropped: their prompts are too long" in printed.err
        assert "turnwise show" not in printed.out

    @pytest.mark.parametrize(("num_failures", "code"), [(5, 0), (6, 1)])
    def test_most_episodes_failed_by_the_engine(self, run_dir, capsys, num_failures, code):
        """
        A run that lost most of its episodes to the engine is not a success; its batch is written all the same.
        """
        assert rollout(run_dir, f"engine.num_failures={num_failures}") == code

        text = "6 of 10 episodes failed, the first by engine: EngineError"
        assert (text in capsys.readouterr().err) == (code == 1)
        assert (run_dir / "out" / "batch.safetensors").exists()

    def test_resume_is_refused_where_it_cannot_be(self, run_dir, capsys):
        """
        A folder without a run, and options that do not go with it.
        """
        assert main(["rollout", "--resume", str(run_dir)]) == 2
        assert "holds no run" in capsys.readouterr().err
        assert main(["rollout", "run.yaml", "--resume", str(run_dir), "--overwrite"]) == 2
        assert "give no --out and no --overwrite" in capsys.readouterr().err
        assert main(["rollout", "run.yaml"]) == 2
        assert "--out DIR, or --resume DIR" in capsys.readouterr().err


class TestBadInput:
    """Each ends with exit code 2 and one line with the hint."""

    @pytest.mark.many_cases
    @pytest.mark.parametrize(
        ("override", "text"),
        [
            ("data.path=nowhere.jsonl", "nowhere.jsonl"),
            ("data.path=empty.jsonl", "empty"),
            ("data.path=no_messages.jsonl", "messages"),
            ("data.path=latin1.jsonl", "UTF-8"),
            ("data.path=data.xlsx", ".xlsx"),
            ("agent=onc", "unknown agent 'onc'; did you mean 'once'?"),
            ("data.path=other_agent.jsonl", "unknown agent 'nobody'"),
            ("rollout.responce_length=3", "response_length"),
            ("rollout.n=0", "rollout.n: must be >= 1: 0"),
            ("rollout.n=three", "rollout.n"),
            ("engine.speed=3", "engine.speed"),
            ("engine=vlm", "vlm"),
            ("plugins=[scripted_kitt]", "scripted_kit"),
            ("model.path=nowhere", "nowhere"),
            ("model.path=no_template", "chat template"),
            ("rollout.prompt_length=3", "more than prompt_length=3"),
            ("tools=[os.path:join]", "modules"),
            ("tools=[nothing]", "nothing"),
            ("tools_file=bad_tools.yaml", "bad_tools.yaml"),
            ("tools_file=bad_schema.yaml", "schema"),
            ("rollout", "="),
            ("rollout.validation=true", "validation_path"),
        ],
    )
    def test_one_clear_line(self, run_dir, capsys, override, text):
        """
        A bad value is answered with one line on standard error and no traceback.
        """
        (run_dir / "empty.jsonl").write_text("\n")
        (run_dir / "no_messages.jsonl").write_text('{"question": "hi"}\n')
        (run_dir / "latin1.jsonl").write_bytes(b'{"messages": [{"role": "user", "content": "\xe9"}]}\n')
        (run_dir / "data.xlsx").write_text("a,b\n")
        (run_dir / "other_agent.jsonl").write_text(
            '{"agent_name": "nobody", "messages": [{"role": "user", "content": "x"}]}\n'
        )
        (run_dir / "bad_tools.yaml").write_text("tools: [{name: 3}]\n")
        (run_dir / "bad_schema.yaml").write_text(
            "tools:\n- name: json:dumps\n"
            "  schema: {type: function, function: {name: x, parameters: {type: nonsense}}}\n"
        )
        byte_tokenizer(chat_template=None).save_pretrained(run_dir / "no_template")

        assert rollout(run_dir, override, "modules=[json]") == 2
        error = capsys.readouterr().err
        lines = [line for line in error.splitlines() if line.startswith("turnwise: error:")]
        assert len(lines) == 1, error
        assert text in lines[0]
        assert "Traceback" not in error

    @pytest.mark.parametrize(
        ("content", "text"),
        [
            (b"\xff\xfe", "UTF-8"),
            (b"a: [", "run.yaml"),
            (b"a: &x 1\nb: *x", "alias"),
            (b"", "run.yaml"),
            (b"- 1", "expected keys with values"),
        ],
    )
    def test_bad_config_files(self, run_dir, capsys, content, text):
        """
        A config that cannot be read is named.
        """
        (run_dir / "run.yaml").write_bytes(content)

        assert rollout(run_dir) == 2
        assert text in capsys.readouterr().err

    def test_missing_config(self, run_dir, capsys):
        """
        A config that is not there is named.
        """
        assert main(["rollout", str(run_dir / "none.yaml"), "--out", str(run_dir / "out")]) == 2
        assert "none.yaml" in capsys.readouterr().err

    def test_out_is_a_file(self, run_dir, capsys):
        """
        A file where the results should go is refused before anything runs.
        """
        (run_dir / "out").write_text("")
        assert rollout(run_dir) == 2
        assert "File exists" in capsys.readouterr().err


class TestShow:
    """`turnwise show`."""

    def test_table_and_one(self, run_dir, capsys):
        """
        Without an index all episodes are listed, with one its text is shown by origin.
        """
        rollout(run_dir)
        capsys.readouterr()
        assert main(["show", str(run_dir / "out")]) == 0
        statuses = [str(result.status) for result in read_results(run_dir / "out" / "trajectories.parquet")]
        printed = capsys.readouterr().out
        assert {each: statuses.count(each) for each in statuses} == {each: printed.count(each) for each in statuses}
        assert main(["show", str(run_dir / "out"), "0"]) == 0
        assert "Question 0" in capsys.readouterr().out

    def test_a_terminal_without_unicode(self, run_dir, monkeypatch):
        """Characters that it lacks are escaped."""
        (run_dir / "data.jsonl").write_text('{"prompt": "caf\u00e9"}\n', encoding="utf-8")
        rollout(run_dir)
        stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        monkeypatch.setattr(sys, "stdout", stdout)
        assert 0 == main(["show", str(run_dir / "out"), "0"])
        stdout.flush()
        assert b"caf\\xe9" in stdout.buffer.getvalue()

    @pytest.mark.parametrize(("arguments", "text"), [(["99"], "no episode 99"), (["-1"], "no episode -1")])
    def test_index_out_of_range(self, run_dir, capsys, arguments, text):
        """
        An index that is not there is answered with how many there are.
        """
        rollout(run_dir)
        assert main(["show", str(run_dir / "out"), *arguments]) == 2
        assert text in capsys.readouterr().err

    def test_paths_are_wrapped_on_a_narrow_terminal(self, tmp_path, capsys, monkeypatch):
        """
        Parallel paths are columns, whose long lines are wrapped and not cut.
        """
        trajectory = Trajectory([1, 2])
        paths = trajectory.fork(2)
        for path in paths:
            path.add_forced([3])
            path.add_action([4, 5], [-1, -1])
        trajectory.join(paths)
        task = Task(messages=({"role": "user", "content": "?"},), uid="a")
        with TrajectoryWriter(tmp_path / "trajectories.parquet") as writer:
            writer.write(EpisodeResult(task=task, status=Status.COMPLETED, trajectories=(trajectory,)))
        monkeypatch.setenv("COLUMNS", "40")
        assert main(["show", str(tmp_path), "0", "--no-color"]) == 0

        shown = capsys.readouterr().out
        assert "path 0" in shown
        assert "path 1" in shown
        assert "…" not in shown.partition("forced\n")[2]

    def test_no_results_there(self, tmp_path, capsys):
        """
        The error for a folder without results names the expected file.
        """
        assert main(["show", str(tmp_path)]) == 2
        assert "trajectories.parquet" in capsys.readouterr().err


class TestOthers:
    """The smaller commands."""

    def test_values_behind_options(self, run_dir, capsys):
        """They are set like those before options; text that is no value is refused."""
        config, out = str(run_dir / "run.yaml"), str(run_dir / "out")
        assert 0 == main(["rollout", config, "rollout.n=1", "--out", out, "rollout.seed=7"])
        resolved = yaml.safe_load((run_dir / "out" / "config.resolved.yaml").read_text())
        assert (1, 7) == (resolved["rollout"]["n"], resolved["rollout"]["seed"])

        for left in (["--nothing=1"], ["run2.yaml"]):
            with pytest.raises(SystemExit):
                main(["rollout", config, "--out", out, *left])
            assert f"unrecognized arguments: {left[0]}" in capsys.readouterr().err
        with pytest.raises(SystemExit):
            main(["show", out, "0", "rollout.n=1"])

    def test_config_show_and_schema(self, run_dir, capsys):
        """
        The resolved config has the plugin's defaults, and fits the schema.
        """
        import jsonschema_rs

        assert main(["config", "show", str(run_dir / "run.yaml"), "rollout.n=7"]) == 0
        shown = yaml.safe_load(capsys.readouterr().out)
        assert shown["rollout"]["n"] == 7
        assert shown["engine"]["token_latency_s"] == 0.0
        assert main(["config", "schema"]) == 0
        jsonschema_rs.validator_for(json.loads(capsys.readouterr().out)).validate(shown)

    def test_check(self, site, capsys):
        """
        A registered agent is put through the checks of the test kit.
        """
        assert main(["check", "once"]) == 0
        assert "passed  once: finishes" in capsys.readouterr().out
        assert main(["check", "onse"]) == 2
        assert "did you mean 'once'" in capsys.readouterr().err

    @pytest.mark.slow
    def test_check_of_an_engine(self, run_dir, capsys):
        """
        A registered engine is put through the checks with the options of a config.
        """
        config = ["--config", str(run_dir / "run.yaml"), "engine.token_latency_s=0.005", "engine.mean_tokens=200"]
        assert main(["check", "scripted", *config]) == 0
        assert "passed  scripted: abort_returns_what_was_sampled" in capsys.readouterr().out

    @pytest.mark.parametrize("command", ["rollout", "show", "config", "plan"])
    def test_help_has_examples(self, command, capsys):
        """
        Every help text ends with commands that can be copied.
        """
        with pytest.raises(SystemExit, match="0"):
            main([command, "--help"])
        assert "Examples:" in capsys.readouterr().out
