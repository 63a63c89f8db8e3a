"""A part whose constructor raises an error of the config: the command ends before any episode, in one line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from picky_parts import PARTS, attempts, write_parts

import turnwise.cli
import turnwise.config.resolve
from turnwise.cli import main
from turnwise.plugin.host import load
from turnwise_testing.whole_runs.scripted_run import SITE, write_scripted_run

IN_REPLICAS: Final = ("engine", "judge")
CASES: Final = [
    (command, runtime, case)
    for command in ("plan", "rollout")
    for runtime in ("local", "ray")
    for case in PARTS
    # tests/test_ray_refusals.py starts the replica that meets it; one engine needs no router.
    if not (command == "rollout" and runtime == "ray" and case in IN_REPLICAS)
    and not (runtime == "local" and case == "router")
]


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let the commands of this module load the plugins once."""
    folder = tmp_path_factory.mktemp("site")
    write_scripted_run(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder / SITE))
        host = load()
        for module in (turnwise.cli, turnwise.config.resolve):  # it takes most of the time of a plan
            patch.setattr(module, "load", lambda recipe=None: host)
        yield


@pytest.mark.many_cases
@pytest.mark.parametrize(("command", "runtime", "case"), CASES)
def test_a_part_that_is_refused_everywhere(
    command: str, runtime: str, case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, one line with the part and the reason, one attempt, and on Ray before Ray starts."""
    overrides, part, _actor = PARTS[case]
    if runtime == "local":
        overrides = [each for each in overrides if "reward_workers" not in each]
    file = write_scripted_run(tmp_path, num_tasks=2, plugins=None, modules=["./own.py"])
    write_parts(tmp_path, 'ConfigError("word: must be at most 3 letters")', everywhere=True)
    out = ["--out", str(tmp_path / "out")] if command == "rollout" else []

    code = main([command, str(file), f"runtime.name={runtime}", *overrides, *out])

    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2
    assert line.startswith("turnwise: error: ")
    assert part.replace("FILE", str(tmp_path / "own.py")) in line
    assert line.endswith("word: must be at most 3 letters")
    assert attempts(tmp_path) == ["driver"]
