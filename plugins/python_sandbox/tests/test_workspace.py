"""Directories that a hostile program left are measured and removed."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise_python_sandbox.box import workspace
from turnwise_python_sandbox.box.workspace import remove_tree, usage


def test_a_deep_tree_is_removed(tmp_path) -> None:
    """Depth beyond any path length costs neither stack nor errors."""
    top = tmp_path / "top"
    top.mkdir()
    here = os.open(top, os.O_RDONLY)
    for _ in range(1000):
        os.mkdir("d" * 50, dir_fd=here)
        below = os.open("d" * 50, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)

    remove_tree(str(top))

    assert not top.exists()


def test_closed_directories_and_links_are_removed(tmp_path) -> None:
    """Modes do not protect anything, and what a link names stays."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x")
    top = tmp_path / "top"
    (top / "a/b").mkdir(parents=True)
    (top / "a/b/f").write_text("x")
    (top / "link").symlink_to(outside)
    (top / "a/loop").symlink_to(top)
    os.mkfifo(top / "pipe")
    (top / "a/b").chmod(0)
    (top / "a").chmod(0)
    top.chmod(0)

    remove_tree(str(top))

    assert not top.exists()
    assert (outside / "kept").exists()


def test_what_is_not_there_is_removed_already(tmp_path) -> None:
    """Removing twice is no error."""
    remove_tree(str(tmp_path / "nothing"))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=5), max_size=12))
def test_any_tree_is_removed(tmp_path_factory, paths: list[list[str]]) -> None:
    """Whatever the shape."""
    top = tmp_path_factory.mktemp("tree") / "top"
    top.mkdir()
    for parts in paths:
        folder = Path(top, *(f"{part}-dir" for part in parts[:-1]))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{parts[-1]}-file").write_text("x")

    remove_tree(str(top))

    assert not top.exists()


def test_usage_counts_once_and_sees_deleted_files(tmp_path, monkeypatch) -> None:
    """Hard links count once, holes not at all, deleted files as long as they are open."""
    monkeypatch.setattr(workspace, "_written", lambda _pid: 0)
    (tmp_path / "a").write_bytes(bytes(100_000))
    os.link(tmp_path / "a", tmp_path / "b")
    with open(tmp_path / "hole", "wb") as hole:
        hole.truncate(10**9)
    with open(tmp_path / "gone", "wb") as gone:
        gone.write(os.urandom(200_000))
        gone.flush()
        os.fsync(gone.fileno())
        (tmp_path / "gone").unlink()
        found = usage(str(tmp_path), os.getpid(), 10**9, 100)

    assert found.num_files == 3
    assert 300_000 <= found.num_bytes < 400_000


def test_usage_stops_at_the_limit(tmp_path) -> None:
    """A million files are not counted to the last one."""
    for n in range(50):
        (tmp_path / str(n)).touch()

    assert usage(str(tmp_path), 0, 10**9, 10).num_files == 11


def test_what_is_hidden_counts_as_too_much(tmp_path) -> None:
    """A directory that is closed, or too deep for a path, may hold anything."""
    if os.geteuid() != 0:
        (tmp_path / "closed").mkdir(mode=0)
        assert usage(str(tmp_path), 0, 10**9, 10).num_files == 11
        (tmp_path / "closed").rmdir()
    here = os.open(tmp_path, os.O_RDONLY)
    for _ in range(20):
        os.mkdir("d" * 250, dir_fd=here)
        below = os.open("d" * 250, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)

    assert usage(str(tmp_path), 0, 10**9, 100).num_files == 101
    remove_tree(str(tmp_path))
    tmp_path.mkdir()


def test_what_was_written_counts_in_the_end(tmp_path, monkeypatch) -> None:
    """A program that hides its files is stopped by how much it wrote, not before sixteen times its quota."""
    monkeypatch.setattr(workspace, "_written", lambda _pid: 16 * 10**6)

    assert usage(str(tmp_path), 1, 10**7, 10).num_bytes == 10**6
