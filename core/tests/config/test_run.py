"""The classes of a run's config: defaults, checks, and where paths lead."""

import pickle
import sys
from datetime import date
from enum import StrEnum
from pathlib import Path

import pytest
from attrs.exceptions import FrozenInstanceError

from turnwise.config.parts import plain
from turnwise.config.run import (
    Choice,
    DataConfig,
    Deadlines,
    ModelConfig,
    RolloutConfig,
    RunConfig,
)
from turnwise.config.runtime import RuntimeConfig
from turnwise.errors import ConfigError
from turnwise.types import SamplingParams

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def run_config(**changes: object) -> RunConfig:
    return RunConfig(**{"data": DataConfig(path="t"), "agent": Choice("a"), "engine": Choice("e"), **changes})


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package that ships a model and tasks, and that fails when it is imported."""
    folder = tmp_path / "site" / "fake_model_package"
    (folder / "model").mkdir(parents=True)
    (folder / "tasks.jsonl").write_text("{}\n")
    (folder / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return folder


def test_defaults_are_those_that_the_documentation_promises():
    """Defaults: one episode a task, greedy validation, and deadlines in seconds."""
    rollout = run_config().rollout
    assert (rollout.n, rollout.validation_n, rollout.seed, rollout.validation) == (1, 1, 0, False)
    assert SamplingParams() == rollout.sampling
    assert SamplingParams(temperature=0.0) == rollout.validation_sampling
    assert Deadlines(tool_call_s=60, turn_s=600, episode_s=3600, abort_grace_s=5) == rollout.deadlines
    assert (rollout.max_steps, rollout.max_in_flight, rollout.check_invariants) == (1000, 256, True)


def test_config_is_frozen_and_crosses_processes():
    """A config cannot change under a run, and pickling keeps it whole."""
    config = run_config(tools=(Choice("t", {"k": [1]}),))
    with pytest.raises(FrozenInstanceError):
        config.engine = Choice("other")
    assert config == pickle.loads(pickle.dumps(config))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: RolloutConfig(n=0), "'n' must be >= 1: 0"),
        (lambda: RolloutConfig(seed=-1), "'seed' must be >= 0: -1"),
        (lambda: RolloutConfig(max_in_flight=0), "'max_in_flight' must be >= 1"),
        (lambda: Deadlines(turn_s=0), "'turn_s' must be > 0"),
        (lambda: DataConfig(path=""), "'path' must not be empty"),
        (lambda: DataConfig(path="x", limit=0), "'limit' must be >= 1"),
        (lambda: ModelConfig(path=""), "'path' must not be empty"),
        (lambda: Choice(""), "'name' must not be empty"),
        (lambda: Choice("a", {"name": "b"}), "must not hold 'name'"),
        (lambda: Choice("pkg.mod:f.g"), "'name' must be a registered name, 'package.module:Name' or"),
        (lambda: Choice("./file.txt:f"), r"'name' must be .* or './file.py:Name': './file.txt:f'"),
        (lambda: run_config(modules=("a b",)), "'modules' must be names of modules or files that end in .py: 'a b'"),
        (lambda: run_config(agents={"": Choice("a")}), "'agents' must not hold an empty name"),
        (lambda: run_config(agents={"b": Choice("a"), " ": Choice("a")}), "'agents' must not hold an empty name"),
        (lambda: RuntimeConfig(reward_workers=1), "'reward_workers' must be 0 with the runtime local, not 1"),
    ],
)
def test_values_out_of_bounds_are_refused(make, text):
    """A validator's text starts with its field."""
    with pytest.raises(ValueError, match=text):
        make()


@pytest.mark.parametrize("revision", [None, "main", "0123456", COMMIT.upper(), COMMIT + "0"])
def test_remote_code_needs_a_whole_commit(revision):
    """Branches, abbreviations and nothing at all can come to mean other code."""
    with pytest.raises(ValueError, match="'revision' must be a whole commit hash"):
        ModelConfig(trust_remote_code=True, revision=revision)


def test_remote_code_of_a_pinned_commit_reaches_the_model(tmp_path):
    """Factories get the pinned commit."""
    spec = run_config(model=ModelConfig(path=str(tmp_path), trust_remote_code=True, revision=COMMIT)).model_spec()
    assert (spec.trust_remote_code, spec.revision) == (True, COMMIT)


def test_plain_copies_what_a_file_can_hold():
    """Tuples become lists and enums their values; the copy shares nothing that can change."""

    class Colour(StrEnum):
        RED = "red"

    inner = [1]
    copy = plain({"a": (1, 2.5, None), "b": Colour.RED, "c": inner})
    inner.append(2)
    assert copy == {"a": [1, 2.5, None], "b": "red", "c": [1]}


@pytest.mark.parametrize("value", [object(), date(2026, 1, 1), float("nan"), float("inf"), {1: 2}, {"a": [b"x"]}, {1}])
def test_options_hold_nothing_that_a_file_cannot(value):
    """Values that no file can hold would be missing from the record of a run."""
    with pytest.raises(ValueError, match="expected text, a number"):
        Choice("a", {"key": value})


def test_paths_start_from_the_folder_of_the_config(tmp_path, monkeypatch):
    """Relative paths do not depend on where the program was started."""
    monkeypatch.setenv("HOME", "/home/someone")
    config = run_config(base_dir=tmp_path)
    assert tmp_path / "data/x.jsonl" == config.locate("data/x.jsonl")
    assert Path("/abs/x") == config.locate("/abs/x")
    assert Path("/home/someone/x") == config.locate("~/x")


def test_a_relative_base_is_fixed_when_the_config_is_made(tmp_path, monkeypatch):
    """Changing the working directory later moves nothing."""
    monkeypatch.chdir(tmp_path)
    config = run_config(base_dir=Path("runs"))
    monkeypatch.chdir("/")
    assert tmp_path / "runs" == config.base_dir
    assert tmp_path / "runs/t" == config.locate("t")


def test_package_paths_find_files_without_importing_the_package(package):
    """The package of the fixture raises on import, so finding its files cannot have imported it."""
    config = run_config(model=ModelConfig(path="package:fake_model_package", chat_template="t.jinja"))
    assert package / "model" == config.model_spec().path
    assert config.base_dir / "t.jinja" == config.model_spec().chat_template
    assert package / "tasks.jsonl" == config.locate("package:fake_model_package/tasks.jsonl")
    assert "fake_model_package" not in sys.modules


def test_a_config_without_a_model_has_no_model_path():
    """Engines behind a network need no directory."""
    assert run_config().model_spec().path is None


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("package:not_there_at_all", "no package 'not_there_at_all' is installed"),
        ("package:fake_model_package/nothing", "the package 'fake_model_package' does not ship 'nothing'"),
        ("package:fake_model_package/../x", "expected package:NAME/PATH"),
        ("package:fake_model_package//etc", "expected package:NAME/PATH"),
        ("package:", "expected package:NAME/PATH"),
        ("package:a.b", "expected package:NAME/PATH"),
        ("package:json.decoder/x", "expected package:NAME/PATH"),
        ("package:tomllib/nothing", "does not ship"),
        ("package:keyword/nothing", "does not ship"),
    ],
)
def test_package_paths_that_lead_nowhere_say_why(package, path, text):
    """The text starts with the path as the user wrote it."""
    with pytest.raises(ConfigError, match=text) as caught:
        run_config().locate(path)
    assert str(caught.value).startswith(f"{path}: ")
