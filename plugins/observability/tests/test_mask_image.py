"""The picture of which token sees which, and the command `turnwise mask`."""

import builtins

import numpy as np
import pytest
from PIL import Image

from turnwise.cli import main
from turnwise.errors import ConfigError
from turnwise.record.result import EpisodeResult
from turnwise.record.trajectory import Trajectory
from turnwise.types import Status, Task
from turnwise_observability.mask_image import MAX_TOKENS, mask_pixels, save_mask
from turnwise_result_files import TrajectoryWriter
from turnwise_testing.references.dense import visibility


@pytest.fixture
def forked():
    """A record with a block of two paths."""
    trajectory = Trajectory([1, 2])
    paths = trajectory.fork(2)
    for path in paths:
        path.add_forced([3])
        path.add_action([4, 5], [-1, -1])
    trajectory.join(paths)
    trajectory.add_observation([6])
    return trajectory


@pytest.fixture
def run(tmp_path, forked):
    """The folder of a run with one episode."""
    task = Task(messages=({"role": "user", "content": "?"},), uid="a")
    with TrajectoryWriter(tmp_path / "trajectories.parquet") as writer:
        writer.write(EpisodeResult(task=task, status=Status.COMPLETED, trajectories=(forked, Trajectory([7]))))
    return tmp_path


def test_a_pixel_is_filled_where_a_token_sees_another(forked):
    """A pixel is pale where a token does not see another, and each origin has one colour."""
    pixels = mask_pixels(forked)
    pale = pixels[0, 1]

    assert (visibility(forked) == (pixels != pale).any(-1)).all()
    assert 4 == len(np.unique(pixels[np.arange(9), np.arange(9)], axis=0)), "prompt, forced, action, observation"


def test_every_record_of_an_episode_is_drawn(run, capsys):
    """The picture is enlarged, and a second record has a number in its name."""
    assert 0 == main(["mask", str(run), "0", "--out", str(run / "mask.png")])

    with Image.open(run / "mask.png") as image:
        assert (9 * (768 // 9), 9 * (768 // 9)) == image.size
    assert (run / "mask-1.png").exists()
    assert "mask-1.png" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["1", "--out", "mask.png"], "has no episode 1; it has 1, counted from 0"),
        (["-1", "--out", "mask.png"], "has no episode -1"),
        (["0", "--out", "mask.nonsense"], "cannot write"),
    ],
)
def test_bad_arguments_are_rejected(run, arguments, text, capsys, monkeypatch):
    """The error names the argument that is wrong."""
    monkeypatch.chdir(run)

    assert 2 == main(["mask", str(run), *arguments])
    assert text in capsys.readouterr().err


def test_a_missing_run_is_named(tmp_path, capsys):
    """The error names the folder."""
    assert 2 == main(["mask", str(tmp_path / "gone"), "0", "--out", "mask.png"])
    assert f"{tmp_path / 'gone'}: does not exist" in capsys.readouterr().err


def test_an_episode_without_a_record_is_rejected(tmp_path, capsys):
    """An episode that failed before its prompt has nothing to draw."""
    task = Task(messages=({"role": "user", "content": "?"},), uid="a")
    with TrajectoryWriter(tmp_path / "trajectories.parquet") as writer:
        writer.write(EpisodeResult(task=task, status=Status.FAILED))

    assert 2 == main(["mask", str(tmp_path), "0", "--out", str(tmp_path / "mask.png")])
    assert "has no record to draw" in capsys.readouterr().err


@pytest.mark.parametrize("size", [0, MAX_TOKENS + 1])
def test_records_without_a_picture(size):
    """A record without tokens, or with too many, is rejected."""
    with pytest.raises(ConfigError, match=f"1 to {MAX_TOKENS} tokens, this one has {size}"):
        mask_pixels(Trajectory(np.zeros(size, np.int32)))


def test_a_missing_pillow(forked, tmp_path, monkeypatch):
    """The error has the pip command."""
    imported = builtins.__import__

    def without(name, *rest, **options):
        if name == "PIL":
            raise ImportError(name)
        return imported(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"turnwise-observability\[images\]"):
        save_mask(forked, tmp_path / "mask.png")
