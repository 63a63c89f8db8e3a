"""Each command that reads a path says in one line why it cannot."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from turnwise_calculator_demo import model_dir

EXAMPLES: Final = Path(__file__).parents[1] / "examples"
ROLLOUT, TRAIN = str(EXAMPLES / "calculator.yaml"), str(EXAMPLES / "train_calculator.yaml")
COMMANDS: Final = (
    "show PLACE",
    "show PLACE 0",
    "mask PLACE 0 --out OUT",
    "view PLACE --export OUT",
    "export PLACE --to OUT",
    "export RUN --to PLACE",
    "rollout PLACE --out OUT",
    "rollout --resume PLACE",
    "rollout ROLLOUT --resume PLACE",
    "rollout ROLLOUT --out PLACE",
    "rollout ROLLOUT --out OUT model.path=PLACE",
    "rollout ROLLOUT --out OUT data.path=PLACE",
    "eval TRAIN --resume PLACE",
    "eval TRAIN model.path=PLACE",
    "train TRAIN --out OUT model.path=PLACE",
    "train TRAIN --out PLACE --resume",
    "plan ROLLOUT model.path=PLACE",
    "config show PLACE",
    "gateway serve --resume PLACE",
    "gateway serve ROLLOUT --out OUT model.path=PLACE",
    "gateway replay PLACE",
    "convert PLACE --to openai --out OUT",
    "convert PLACE --to sft --model MODEL --out OUT",
    "convert RUN --to atif --out PLACE",
    "convert RUN --to openai --tools PLACE --out OUT",
    "pool status PLACE",
    "bench routing --trace PLACE",
    "tags PLACE --to OUT",
    "doctor --python PLACE",
    "check tasks PLACE",
    "check agent:tool_agent --config PLACE",
    "sandbox run PLACE",
    "sft PLACE --model MODEL --out OUT",
    "new agent acme --folder PLACE",
    "trl ROLLOUT --out PLACE",
)
ENTER: Final = """
import contextlib, io, json, os, sys
from turnwise.cli import main
from turnwise.plugin.host import load

host = load()
import turnwise.cli, turnwise.config.resolve
turnwise.cli.load = turnwise.config.resolve.load = lambda *_arguments, **_options: host  # it takes a second each time
found = []
for words in json.load(sys.stdin):
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main(words)
        except SystemExit as ended:
            code = ended.code
    found.append((code, printed.getvalue()))
print(json.dumps(found), file=sys.__stdout__)
"""


@pytest.fixture
def without_rights() -> list[str]:
    """The beginning of a command line that takes the right to read all files from root."""
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("root reads every folder, and there is no setpriv to take this right away")
    return ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["closed", "x" * 300])
def test_a_path_that_cannot_be_read_is_one_line(tmp_path: Path, without_rights: list[str], place: str) -> None:
    """The line names the path; no command has a traceback."""
    (tmp_path / "closed").mkdir()
    path = tmp_path / ("closed/x" if place == "closed" else place)
    run = tmp_path / "run"
    run.mkdir()
    places = {
        **{"PLACE": str(path), "OUT": str(tmp_path / "out"), "RUN": str(run), "MODEL": str(model_dir())},
        **{"ROLLOUT": ROLLOUT, "TRAIN": TRAIN},
    }
    lines = [[replaced(word, places) for word in command.split()] for command in COMMANDS]
    (tmp_path / "closed").chmod(0)
    try:
        done = subprocess.run(
            [*without_rights, sys.executable, "-c", ENTER],
            input=json.dumps(lines),
            capture_output=True,
            text=True,
            check=True,
            timeout=500,
            cwd=tmp_path,
        )
    finally:
        (tmp_path / "closed").chmod(0o755)

    wrong = {
        command: printed[-400:]
        for command, (code, printed) in zip(COMMANDS, json.loads(done.stdout), strict=True)
        if code not in (1, 2) or "Traceback" in printed or not names(printed, path, code)
    }
    assert {} == wrong


def replaced(word: str, places: dict[str, str]) -> str:
    key, equals, value = word.rpartition("=")
    return key + equals + places.get(value, value)


def names(printed: str, path: Path, code: int) -> bool:
    """Whether the last line of an error has the path, as far as errors show long names."""
    return str(path)[:60] in printed and (code == 1 or printed.splitlines()[-1].startswith("turnwise: error: "))
