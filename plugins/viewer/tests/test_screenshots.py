"""The command that takes the pictures of the documentation."""

import struct
import subprocess
import sys

import pytest
from viewer_runs import CHROMIUM, ROOT

pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
pytestmark = pytest.mark.slow


def test_it_takes_every_picture_of_the_documentation(tmp_path):
    """The command runs the examples and writes a picture of each view, for docs/images."""
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    program = [sys.executable, "docs/screenshots.py", "--runs", str(tmp_path / "runs"), "--images", str(tmp_path)]
    subprocess.run([*program, "--chromium", CHROMIUM], cwd=ROOT, check=True)

    pictures = {file.name: file.read_bytes() for file in tmp_path.glob("*.png")}
    assert pictures.keys() == {file.name for file in (ROOT / "docs/images").glob("view-*.png")}
    for name, picture in pictures.items():
        assert struct.unpack(">II", picture[16:24]) == (1280, 800), name
        # A page without content is an even area, which PNG stores in some 10 kB.
        assert len(picture) > 20_000, name
