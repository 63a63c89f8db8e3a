"""The picture of which token sees which, and `turnwise show --mask`."""

import builtins

import numpy as np
import pytest
from PIL import Image

from turnwise.cli import main
from turnwise.errors import ConfigError
from turnwise.mask_image import MAX_TOKENS, mask_pixels, save_mask
from turnwise.result import EpisodeResult
from turnwise.storage import TrajectoryWriter
from turnwise.testing.dense import visibility
from turnwise.trajectory import Trajectory
from turnwise.types import Status, Task


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
    """Nothing but the pale colour where it does not, and one colour for each origin."""
    pixels = mask_pixels(forked)
    pale = pixels[0, 1]

    assert (visibility(forked) == (pixels != pale).any(-1)).all()
    assert 4 == len(np.unique(pixels[np.arange(9), np.arange(9)], axis=0)), "prompt, forced, action, observation"


def test_show_draws_every_record_of_an_episode(run, capsys):
    """The picture is enlarged, and a second record has a number in its name."""
    assert 0 == main(["show", str(run), "0", "--no-color", "--mask", str(run / "mask.png")])

    with Image.open(run / "mask.png") as image:
        assert (9 * (768 // 9), 9 * (768 // 9)) == image.size
    assert (run / "mask-1.png").exists()
    assert "mask-1.png" in capsys.readouterr().out


def test_paths_keep_their_ends_on_a_narrow_terminal(run, capsys, monkeypatch):
    """Side by side, and wrapped rather than cut."""
    monkeypatch.setenv("COLUMNS", "40")
    main(["show", str(run), "0", "--no-color"])

    shown = capsys.readouterr().out
    assert "path 0" in shown
    assert "path 1" in shown
    assert "…" not in shown.partition("forced\n")[2]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(["--mask", "mask.png"], "say which"), (["0", "--mask", "mask.nonsense"], "cannot write")],
)
def test_bad_arguments_are_refused(run, arguments, text, capsys, tmp_path):
    """One line says what to do instead."""
    arguments = [str(tmp_path / each) if each.startswith("mask") else each for each in arguments]

    assert 2 == main(["show", str(run), *arguments])
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("size", [0, MAX_TOKENS + 1])
def test_records_without_a_picture(size):
    """No tokens, or too many."""
    with pytest.raises(ConfigError, match=f"1 to {MAX_TOKENS} tokens, this one has {size}"):
        mask_pixels(Trajectory(np.zeros(size, np.int32)))


def test_pillow_is_asked_for_by_name(forked, tmp_path, monkeypatch):
    """Without it the text says what to install."""
    imported = builtins.__import__

    def without(name, *rest, **options):
        if name == "PIL":
            raise ImportError(name)
        return imported(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"turnwise\[images\]"):
        save_mask(forked, tmp_path / "mask.png")
