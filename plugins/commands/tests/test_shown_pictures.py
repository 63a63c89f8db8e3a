"""`turnwise show` prints a line for each picture of a record."""

import numpy as np

from turnwise.cli import main
from turnwise.media import find_picture
from turnwise.record.trajectory import Trajectory
from turnwise.types import MediaTokens, PlacedPicture
from turnwise_result_files import TrajectoryWriter
from turnwise_testing.inputs.small_episodes import episode

CAT = find_picture(b"\x89PNG\r\n\x1a\n cat" + bytes(2000), "image/png")


def test_a_record_with_a_picture(tmp_path, capsys):
    """The line has the tokens, the type, the size and the beginning of the name of its file."""
    record = Trajectory(
        MediaTokens(token_ids=np.arange(6), pictures=[PlacedPicture(start=1, num_tokens=4, picture=CAT)])
    )
    record.add_action([7], [-0.5])
    with TrajectoryWriter(tmp_path / "trajectories.parquet") as writer:
        writer.write(episode(record))

    assert main(["show", str(tmp_path), "0", "--no-color"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"picture: tokens 1:5, image/png, 2,012 bytes, {CAT.key[:12]}….png" in lines
