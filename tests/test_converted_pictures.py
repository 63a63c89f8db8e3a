"""A rollout to a folder keeps the pictures that other files there refer to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from turnwise import EpisodeResult, Status, Task, Trajectory
from turnwise.cli import main
from turnwise.media import picture_part
from turnwise.types import MediaTokens, PlacedPicture
from turnwise_result_files import TrajectoryWriter
from turnwise_testing.inputs.vision import make_picture
from turnwise_testing.whole_runs.scripted_run import SITE, write_scripted_run

CAT = make_picture(20, 30, "red")
REFERENCE = f"media/{CAT.file_name}"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The config of a run without pictures."""
    monkeypatch.syspath_prepend(str(tmp_path / SITE))
    return write_scripted_run(tmp_path)


def write_seen(folder: Path) -> Path:
    """Write the file of a rollout with a picture to a folder."""
    asked = {"role": "user", "content": [picture_part(CAT)]}
    prompt = MediaTokens(token_ids=np.arange(3), pictures=[PlacedPicture(start=0, num_tokens=2, picture=CAT)])
    record = Trajectory(prompt)
    record.add_action([7], [-0.5])
    messages = (asked, {"role": "assistant", "content": "A cat."})
    with TrajectoryWriter(folder / "trajectories.parquet") as writer:
        writer.write(
            EpisodeResult(
                task=Task(messages=(asked,), uid="seen"),
                status=Status.COMPLETED,
                messages=messages,
                trajectories=(record,),
                agent_name="once",
            )
        )
    return folder


@pytest.mark.parametrize("form", ["atif", "sft"])
@pytest.mark.parametrize("holds_run", [False, True])
def test_pictures_of_a_converted_file_stay(config: Path, form: str, holds_run: bool) -> None:
    """Whether the folder holds a run too, which the rollout replaces, or not."""
    out = config.parent / "out"
    if holds_run:
        assert main(["rollout", str(config), "--out", str(out)]) == 0
    seen = write_seen(out if holds_run else config.parent / "seen")
    assert main(["convert", str(seen), "--to", form, "--out", str(out / "converted")]) == 0
    assert (out / REFERENCE).read_bytes() == CAT.data

    assert main(["rollout", str(config), "--out", str(out), *(["--overwrite"] if holds_run else [])]) == 0

    assert (out / REFERENCE).read_bytes() == CAT.data


@pytest.mark.parametrize("cut", ["", ".partial"])
def test_pictures_of_a_replaced_run_do_not_stay(config: Path, cut: str) -> None:
    """No other file refers to them, also where the run was killed."""
    out = config.parent / "out"
    assert main(["rollout", str(config), "--out", str(out)]) == 0
    write_seen(out)
    (out / "trajectories.parquet").rename(out / f"trajectories.parquet{cut}")
    assert (out / REFERENCE).exists()

    assert main(["rollout", str(config), "--out", str(out), "--overwrite"]) == 0

    assert not (out / "media").exists()
