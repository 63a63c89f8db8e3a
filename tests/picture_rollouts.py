"""Runs with pictures by the command line: a scripted engine that needs no model, and a camera as a tool."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from turnwise.media import Picture
from turnwise_testing.inputs.vision import make_picture, save_qwen
from turnwise_testing.whole_runs.installation import install_plugin
from turnwise_testing.whole_runs.scripted_run import PLUGIN, SITE, environment_of, write_scripted_run

SOURCE = Path(__file__).with_name("turnwise_pictures.py").read_text(encoding="utf-8")
CAT, DOG = make_picture(20, 30, "red"), make_picture(50, 20, "blue", "JPEG")
PLUGINS = [PLUGIN, "pictures", "tool_agent", "single_turn", "hermes_parser"]


def write_run(folder: Path, *, picture: Picture = CAT, **sections: object) -> Path:
    """Write a run with two tasks about a cat; its camera shows a dog."""
    usual: dict[str, object] = {
        "engine": {"name": "seeing", "log": str(folder / "requests.jsonl")},
        "agent": "tool_agent",
        "parser": "hermes",
        "tools": [{"name": "camera", "file": str(folder / "dog.jpg")}],
        "rollout": {"n": 2, "prompt_length": 2048, "response_length": 512},
    }
    file = write_scripted_run(folder, **{**usual, "plugins": PLUGINS, **sections})
    install_plugin(folder / SITE, "turnwise_pictures", SOURCE, entry="pictures")
    save_qwen(folder / "model")
    (folder / "images").mkdir()
    (folder / "images" / "cat.png").write_bytes(picture.data)
    (folder / "dog.jpg").write_bytes(DOG.data)
    content = [{"type": "text", "text": "Which animal?"}, {"type": "image", "path": "images/cat.png"}]
    rows = [{"messages": [{"role": "user", "content": content}], "uid": f"task{number}"} for number in range(2)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return file


def roll_out(folder: Path, file: Path | str, *words: str) -> subprocess.CompletedProcess[str]:
    out = () if "--resume" in words else ("--out", str(folder / "out"))
    command = [sys.executable, "-m", "turnwise.cli", "rollout", *([str(file)] if file else []), *words, *out]
    return subprocess.run(command, env=environment_of(folder), capture_output=True, text=True, check=False, timeout=300)


def start_roll_out(folder: Path, file: Path) -> subprocess.Popen[str]:
    """Start a run that the test ends."""
    command = [sys.executable, "-m", "turnwise.cli", "rollout", str(file), "--out", str(folder / "out")]
    pipes: dict[str, int] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=environment_of(folder), text=True, **pipes)
