"""Directories of hostile programs are measured and removed."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise_python_sandbox.box import disk_usage
from turnwise_python_sandbox.box.disk_usage import measure_usage
from turnwise_python_sandbox.box.tree_removal import remove_tree, remove_tree_in_child


def make_deep_tree(top: Path, depth: int, name: str) -> None:
    """Make directories inside each other, deeper than any path is long."""
    here = os.open(top, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=here)
        below = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)


def test_a_deep_tree_is_removed(tmp_path) -> None:
    """A tree deeper than the longest path is removed without recursion."""
    top = tmp_path / "top"
    top.mkdir()
    make_deep_tree(top, depth=1000, name="d" * 50)

    remove_tree(str(top))

    assert not top.exists()


def test_closed_directories_and_links_are_removed(tmp_path) -> None:
    """Closed directories are removed, and the targets of links are not."""
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


def test_names_of_the_removal_itself_are_removed(tmp_path) -> None:
    """A program that makes the names which the removal would use does not stop it."""
    top = tmp_path / "top"
    for number in range(20):
        (top / f"..lifted{number}/x/y").mkdir(parents=True)
        (top / f"d{number}/a/b").mkdir(parents=True)

    remove_tree(str(top))

    assert not top.exists()


def test_a_missing_directory_is_no_error(tmp_path) -> None:
    """Removing a directory twice is no error."""
    remove_tree(str(tmp_path / "nothing"))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=5), max_size=12))
def test_any_tree_is_removed(tmp_path_factory, paths: list[list[str]]) -> None:
    """A tree of any shape is removed."""
    top = tmp_path_factory.mktemp("tree") / "top"
    top.mkdir()
    for parts in paths:
        folder = Path(top, *(f"{part}-dir" for part in parts[:-1]))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{parts[-1]}-file").write_text("x")

    remove_tree(str(top))

    assert not top.exists()


def test_usage_counts_once_and_sees_deleted_files(tmp_path, monkeypatch) -> None:
    """Hard links count once, holes do not count, and deleted files count while they are open."""
    monkeypatch.setattr(disk_usage, "_count_written_bytes", lambda _pid: 0)
    (tmp_path / "a").write_bytes(bytes(100_000))
    os.link(tmp_path / "a", tmp_path / "b")
    with open(tmp_path / "hole", "wb") as hole:
        hole.truncate(10**9)
    with open(tmp_path / "gone", "wb") as gone:
        gone.write(os.urandom(200_000))
        gone.flush()
        os.fsync(gone.fileno())
        (tmp_path / "gone").unlink()
        found = measure_usage(str(tmp_path), os.getpid(), 10**9, 100)

    assert found.num_files == 3
    assert 300_000 <= found.num_bytes < 400_000


def test_usage_stops_at_the_limit(tmp_path) -> None:
    """Counting stops one file above the limit."""
    for n in range(50):
        (tmp_path / str(n)).touch()

    assert measure_usage(str(tmp_path), 0, 10**9, 10).num_files == 11


def test_an_unreadable_directory_exceeds_the_limit(tmp_path) -> None:
    """A directory that is closed, or too deep for a path, counts as too many files."""
    if os.geteuid() != 0:
        (tmp_path / "closed").mkdir(mode=0)
        assert measure_usage(str(tmp_path), 0, 10**9, 10).num_files == 11
        (tmp_path / "closed").rmdir()
    make_deep_tree(tmp_path, depth=20, name="d" * 250)

    assert measure_usage(str(tmp_path), 0, 10**9, 100).num_files == 101
    remove_tree(str(tmp_path))
    tmp_path.mkdir()


def test_written_bytes_count_too(tmp_path, monkeypatch) -> None:
    """A program that hides its files is measured by a sixteenth of the bytes that it has written."""
    monkeypatch.setattr(disk_usage, "_count_written_bytes", lambda _pid: 16 * 10**6)

    assert measure_usage(str(tmp_path), 1, 10**7, 10).num_bytes == 10**6


def test_a_directory_is_removed_in_a_child(tmp_path) -> None:
    """The child removes the tree and exits, and needs none of the descriptors of its parent."""
    (tmp_path / "top/inner").mkdir(parents=True)
    (tmp_path / "top/inner/file").write_text("x")
    pid = remove_tree_in_child(str(tmp_path / "top"))

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert not (tmp_path / "top").exists()


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(0, 20_000), max_size=6), max_bytes=st.integers(0, 100_000))
def test_usage_is_the_allocated_space(tmp_path_factory, sizes: list[int], max_bytes: int) -> None:
    """Every file counts with its blocks, whatever the limit, and written bytes of no process add nothing."""
    top = tmp_path_factory.mktemp("usage")
    for number, size in enumerate(sizes):
        (top / str(number)).write_bytes(os.urandom(size))
    found = measure_usage(str(top), 0, max_bytes, 100)
    blocks = sum((top / str(number)).stat().st_blocks for number in range(len(sizes)))

    assert (512 * blocks, len(sizes)) == found


def test_open_files_of_other_file_systems_do_not_count(tmp_path, monkeypatch) -> None:
    """A deleted file on another file system is limited there."""
    monkeypatch.setattr(disk_usage, "_count_written_bytes", lambda _pid: 0)
    fd = os.memfd_create("elsewhere")
    os.write(fd, b"x" * 10**6)
    found = measure_usage(str(tmp_path), os.getpid(), 10**9, 100)
    os.close(fd)

    assert found.num_bytes < 10**6


def test_the_written_bytes_of_a_dead_process_are_none() -> None:
    """A process that is gone, or whose counters are closed, adds nothing."""
    assert disk_usage._count_written_bytes(2**22 + 1) == 0
