"""Commands refuse an output folder that they cannot write or must not replace, before they start anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

import pytest
from _pytest.mark import ParameterSet

from turnwise import RolloutManager
from turnwise.cli import main
from turnwise.plugin.host import Host, load
from turnwise_calculator_demo import model_dir
from turnwise_grpo_trainer.commands import training
from turnwise_grpo_trainer.report.run_config import save_config
from turnwise_grpo_trainer.train_setup import read_setup

EXAMPLES: Final = Path(__file__).parents[1] / "examples"
ROLLOUT, TRAIN = str(EXAMPLES / "calculator.yaml"), str(EXAMPLES / "train_calculator.yaml")
COMMANDS: Final = {
    "rollout": ["rollout", ROLLOUT, "--out", "OUT"],
    "rollout over": ["rollout", ROLLOUT, "--out", "OUT", "--overwrite"],
    "eval": ["eval", TRAIN, "--out", "OUT"],
    "eval over": ["eval", TRAIN, "--out", "OUT", "--overwrite"],
    "serve": ["gateway", "serve", ROLLOUT, "--out", "OUT"],
    "serve over": ["gateway", "serve", ROLLOUT, "--out", "OUT", "--overwrite"],
    "train": ["train", TRAIN, "--out", "OUT"],
    "train over": ["train", TRAIN, "--out", "OUT", "--overwrite"],
    "train again": ["train", TRAIN, "--out", "OUT", "--resume"],
    "export": ["export", "RUN", "--to", "OUT"],
    "export over": ["export", "RUN", "--to", "OUT", "--overwrite"],
    "trl": ["trl", ROLLOUT, "--out", "OUT"],
    "sft": ["sft", "ROWS", "--model", str(model_dir()), "--out", "OUT"],
    "convert": ["convert", "ROWS", "--to", "sft", "--model", str(model_dir()), "--out", "OUT"],
}
RUN: Final = {"config.resolved.yaml": "engine: x\n"}
TRAINING: Final = {"config.yaml": "engine: x\n", "metrics.jsonl": '{"step": 1}\n'}


hosts: dict[str, Host] = {}


@pytest.fixture(autouse=True, scope="module")
def few_hosts() -> Iterator[None]:
    """Load the plugins once: every command would look for them again, which takes longer than to run."""
    with pytest.MonkeyPatch.context() as patch:
        hosts["now"] = load()
        for module in ("turnwise.cli", "turnwise.config.resolve"):
            patch.setattr(f"{module}.load", lambda *_arguments, **_options: hosts["now"])
        yield
        hosts.clear()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The work that commands started, which are not run."""
    names: list[str] = []

    def start(name: str) -> Callable[..., None]:
        def refuse(*_arguments: object, **_options: object) -> None:
            names.append(name)
            raise KeyboardInterrupt

        return refuse

    monkeypatch.setattr(RolloutManager, "__enter__", start("engine"))
    monkeypatch.setattr(training, "run_training", start("training"))
    return names


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a training that has a checkpoint, and with rows for SFT."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "run/checkpoints/step-00000001").mkdir(parents=True)
    save_config(read_setup(TRAIN, ()).run, folder / "run")
    (folder / "rows.parquet").write_bytes(b"")
    return folder


def write(folder: Path, files: dict[str, str]) -> Path:
    """Write files, by their paths in a folder; a path that ends in a slash is an empty folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            (folder / name).mkdir()
        else:
            (folder / name).write_text(text)
    return folder


def contents(folder: Path) -> dict[str, str]:
    """Return all files and folders, with the content of files."""
    return {
        str(path.relative_to(folder)): f"-> {os.readlink(path)}" if path.is_symlink() else path.read_text()
        for path in folder.rglob("*")
        if not path.is_dir() or path.is_symlink()
    } | {f"{path.relative_to(folder)}/": "" for path in folder.rglob("*") if path.is_dir() and not path.is_symlink()}


def run(name: str, out: Path | str, site: Path) -> int:
    places = {"OUT": str(out), "RUN": str(site / "run"), "ROWS": str(site / "rows.parquet")}
    if name.startswith("serve"):
        hosts["now"] = load()  # it registers an agent of its own
    return main([places.get(word, word) for word in COMMANDS[name]])


def link(path: Path, target: str) -> Path:
    path.symlink_to(target)
    return path


def first_quick(names: Iterable[str]) -> list[ParameterSet]:
    """Return the parameters of a test with each command, of which the quick tests run the first."""
    return [pytest.param(name, marks=[pytest.mark.slow] if number else []) for number, name in enumerate(names)]


NO_FOLDERS: Final[dict[str, Callable[[Path], Path]]] = {
    "a file": lambda place: write(place, {"file": "mine"}) / "file",
    "below a file": lambda place: write(place, {"file": "mine"}) / "file/x",
    "a link to a file": lambda place: link(write(place, {"file": "mine"}) / "link", "file"),
    "a circle of links": lambda place: link(place / "link", "link"),
    "below a circle of links": lambda place: link(place / "link", "link") / "out",
    "of the kernel": lambda _place: Path("/proc/turnwise/out"),
    "a long name": lambda place: place / ("x" * 300),
}


@pytest.mark.parametrize("kind", first_quick(NO_FOLDERS))
@pytest.mark.parametrize("name", COMMANDS)
def test_a_place_that_is_no_folder(
    tmp_path: Path, site: Path, started: list[str], capfd: pytest.CaptureFixture[str], name: str, kind: str
) -> None:
    """The command ends in one line that names the place, and the files there stay."""
    out = NO_FOLDERS[kind](tmp_path)
    before = contents(tmp_path)

    code = run(name, out, site)

    error = capfd.readouterr().err
    assert (2, 1, []) == (code, error.count("\n"), started), error
    assert str(out) in error
    assert contents(tmp_path) == before


PROJECT: Final = {
    ".gitignore": "*",
    "config.yaml": "# mine\nengine: x\n",
    "README.md": "mine",
    "model/model.safetensors": "mine",
    "metrics.json": "mine",
    "metrics.jsonl": "[1]\n",
    "requests/one.jsonl": "mine",
    "checkpoints/step-100.ckpt": "mine",
    "src/": "",
}


@pytest.mark.parametrize("place", first_quick(["named", "current", "home", "repository", "linked"]))
@pytest.mark.parametrize("name", COMMANDS)
def test_a_folder_of_somebody_else(
    tmp_path: Path,
    site: Path,
    started: list[str],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    place: str,
) -> None:
    """Files that the command would replace, and that no run wrote, stay, whatever the options are."""
    project = write(tmp_path / "project", PROJECT)
    out: Path | str = project
    if place == "current":
        monkeypatch.chdir(project)
        out = "."
    elif place == "home":
        monkeypatch.setenv("HOME", str(project))
    elif place == "repository":
        write(project, {".git/": ""})
    elif place == "linked":
        out = link(tmp_path / "link", "project")
    before = contents(tmp_path)

    code = run(name, out, site)

    error = capfd.readouterr().err
    assert (2, 1, []) == (code, error.count("\n"), started), error
    assert f" {out}" in error
    assert contents(tmp_path) == before


@pytest.mark.parametrize("place", ["/", "~", "repository"])
@pytest.mark.parametrize("name", ["rollout", "eval", "serve", "train"])
def test_a_folder_of_everything(
    tmp_path: Path,
    site: Path,
    started: list[str],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    place: str,
) -> None:
    """The root, the home directory and a repository are refused even if no file is in the way."""
    home = write(tmp_path / "home", {"notes": "mine", "work/.git/": ""})
    monkeypatch.setenv("HOME", str(home))
    out = {"/": "/", "~": str(home), "repository": str(home / "work")}[place]

    assert 2 == run(name, out, site)

    error = capfd.readouterr().err
    assert error.startswith(f"turnwise: error: --out {out}: is the "), error
    assert (1, []) == (error.count("\n"), started)


IN_THE_WAY: Final = {
    "rollout over": RUN | {"trajectories.parquet/": "", "batch.safetensors": ""},
    "eval over": RUN | {"evaluation.json/keep": "mine"},
    "serve over": RUN | {"trajectories.parquet/keep": "mine"},
    "train over": TRAINING | {"metrics.jsonl": "[]\n"},
    "train again": TRAINING | {"metrics.jsonl": "[]\n"},
    "export over": {"README.md": "---\n of a training with turnwise 1", "data/": ""},
}


NO_TRAINING: Final = [{"config.yaml": "# mine\nengine: x\n"}, {"model/model.safetensors": "mine"}]


@pytest.mark.parametrize(
    ("name", "files"),
    [
        *IN_THE_WAY.items(),
        *((name, files) for name in ("train", "train over", "train again") for files in NO_TRAINING),
    ],
)
def test_a_folder_in_the_way(
    tmp_path: Path,
    site: Path,
    started: list[str],
    capfd: pytest.CaptureFixture[str],
    name: str,
    files: dict[str, str],
) -> None:
    """A folder under the name of a file, or a file that is none of the run's, is named and stays."""
    out = write(tmp_path / "out", files)
    before = contents(tmp_path)

    code = run(name, out, site)

    error = capfd.readouterr().err
    assert (2, 1, []) == (code, error.count("\n"), started), error
    assert f" {out}: " in error
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["rollout", "eval", "serve", "train", "train again"])
@pytest.mark.parametrize("kind", first_quick(["beside others", "new", "empty", "current", "linked"]))
def test_a_folder_that_fits(
    tmp_path: Path, site: Path, started: list[str], monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    """A new folder, an empty one, the current one, a link to one, and one with other files are written to."""
    out: Path | str = tmp_path / "out"
    if kind != "new":
        write(tmp_path / "out", {"thesis.txt": "mine"} if kind == "beside others" else {})
    if kind == "current":
        monkeypatch.chdir(out)
        out = "."
    elif kind == "linked":
        out = link(tmp_path / "link", "out")

    assert 130 == run(name, out, site)

    assert len(started) == 1
    assert (tmp_path / "out/thesis.txt").exists() == (kind == "beside others")


FULL: Final = {
    "rollout over": RUN | {"trajectories.parquet": "", "metrics.json": "{}"},
    "eval over": RUN | {"trajectories.parquet": "", "metrics.json": "{}"},
    "serve over": RUN | {"trajectories.parquet": ""},
    "train over": TRAINING | {"checkpoints/step-00000001/": ""},
    "train again": TRAINING,
    "export over": {"README.md": "---\n of a training with turnwise 1"},
}
SCRIPT: Final = """
import json, sys
from turnwise.cli import main
commands = json.loads(sys.argv[1])
codes = {}
for name, words in commands.items():
    print("command", name, file=sys.stderr, flush=True)
    codes[name] = main(words)
print(json.dumps(codes))
"""
_MOUNT: Final = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0"'


UNSHARED: Final = ["unshare", "-m", "sh", "-c"]
"""Runs a script with mounts of its own."""


def can_mount(folder: Path) -> bool:
    try:
        return subprocess.run([*UNSHARED, _MOUNT, str(folder)], capture_output=True).returncode == 0
    except OSError:
        return False


@pytest.mark.slow
def test_a_read_only_disk(tmp_path: Path, site: Path) -> None:
    """On a disk that cannot be written, each command ends in one line about the folder, also for one that exists."""
    if not can_mount(tmp_path):
        pytest.skip("a read-only mount needs root and `unshare`")
    commands = {}
    for name, words in COMMANDS.items():
        for kind in ("new", "old"):
            out = tmp_path / f"{name}-{kind}".replace(" ", "-")
            if kind == "old":
                write(out, FULL.get(name, {}))
            places = {"OUT": str(out), "RUN": str(site / "run"), "ROWS": str(site / "rows.parquet")}
            commands[f"{name}, {kind}"] = [places.get(word, word) for word in words]
    before = contents(tmp_path)

    done = subprocess.run(
        [*UNSHARED, f'{_MOUNT} && exec "$@"', tmp_path, sys.executable, "-c", SCRIPT, json.dumps(commands)],
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout.splitlines()[-1]).values()) == {2}, done.stderr
    for part in done.stderr.split("command ")[1:]:
        name, line, *more = part.splitlines()
        assert line.startswith("turnwise: error: "), part
        assert commands[name][-1 if "--out" not in commands[name] else commands[name].index("--out") + 1] in line or (
            "exists" in line or name.startswith("export")
        )
        assert more == [], part
    assert contents(tmp_path) == before
