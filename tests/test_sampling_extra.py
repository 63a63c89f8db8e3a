"""`rollout.sampling.extra` through the command line: passed, recorded, or refused by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from turnwise.cli import main
from turnwise.types import GenerateRequest, SamplingParams
from turnwise_openai_engine.dialects import SglangDialect, VllmDialect
from turnwise_sglang_engine.requests import SAMPLING_OPTIONS as SGLANG_OPTIONS
from turnwise_sglang_engine.requests import sampling_options as sglang_options
from turnwise_testing.whole_runs.scripted_run import SITE, environment_of, write_scripted_run
from turnwise_verl_bridge.engine import SAMPLING_OPTIONS as VERL_OPTIONS
from turnwise_verl_bridge.engine import to_verl_sampling
from turnwise_vllm_engine.requests import SAMPLING_OPTIONS as VLLM_OPTIONS
from turnwise_vllm_engine.requests import sampling_options as vllm_options

RUNTIMES = ["local", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow])]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a scripted run."""
    write_scripted_run(tmp_path, num_tasks=1)
    monkeypatch.syspath_prepend(tmp_path / SITE)
    monkeypatch.setenv("PYTHONPATH", environment_of(tmp_path)["PYTHONPATH"])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rollout(runtime: str, *overrides: str) -> int:
    return main(["rollout", "run.yaml", f"runtime={runtime}", *overrides, "--out", "out"])


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("section", ["sampling", "validation_sampling"])
def test_an_engine_that_does_not_know_an_option_refuses_the_run(
    folder: Path, runtime: str, section: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line names the option and the options that the engine knows; no episode runs."""
    code = rollout(runtime, f"rollout.{section}.extra={{min_p: 0.1}}", "engine.sampling_options=[top_a]")

    assert code != 0
    text = "sampling.extra.min_p: the engine does not know this option; it knows top_a"
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_known_option_reaches_the_engine_and_is_recorded(folder: Path, runtime: str) -> None:
    """The run ends, and the config beside its results has the option."""
    assert rollout(runtime, "rollout.sampling.extra.min_p=0.1", "engine.sampling_options=[min_p]") == 0

    assert "min_p: 0.1" in (folder / "out/config.resolved.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("extra.temperature=1", "rollout.sampling.extra.temperature: must be set as temperature, beside extra"),
        ("extra.logprobs=5", "rollout.sampling.extra.logprobs: must not be set"),
        ("repetition_penalty=1.1", "rollout.sampling.repetition_penalty: unknown key; a key of TRL; use rollout"),
        ("min_p=0.1", "rollout.sampling.min_p: unknown key; a key of TRL; use rollout.sampling.extra: {min_p: VALUE}"),
    ],
)
def test_a_wrong_option_is_named(folder: Path, override: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The error has the path of the key."""
    assert rollout("local", f"rollout.sampling.{override}") != 0

    assert text in capsys.readouterr().err


def options_of(engine: str, sampling: SamplingParams) -> dict[str, object]:
    """Return what an engine sends for some sampling parameters."""
    request = GenerateRequest(request_id="r", trajectory_id="r", token_ids=np.array([1], np.int32), sampling=sampling)
    if engine == "vllm":
        return vllm_options(request, 5)
    if engine == "sglang":
        return sglang_options(sampling, 5, 100, seeds=True)
    if engine == "verl":
        return to_verl_sampling(sampling)
    if engine == "openai vllm":
        return VllmDialect(model="m").body(request, "w", 5)
    return dict(SglangDialect().body(request, "w", 5)["sampling_params"])


KNOWN = {
    "vllm": VLLM_OPTIONS,
    "sglang": SGLANG_OPTIONS,
    "verl": VERL_OPTIONS,
    "openai vllm": VllmDialect(model="m").sampling_options,
    "openai sglang": SglangDialect().sampling_options,
}


@pytest.mark.parametrize(
    ("engine", "name"), [(engine, name) for engine, names in KNOWN.items() for name in sorted(names)]
)
def test_every_engine_sends_the_options_that_it_knows(engine: str, name: str) -> None:
    """An option changes the request in one place and nothing else."""
    plain, changed = (options_of(engine, SamplingParams(extra=extra)) for extra in ({}, {name: 0.5}))

    assert changed == {**plain, name: 0.5}
