"""The interpreter of the sandbox: its paths, and the directories that another user cannot enter."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise_python_sandbox import SandboxUnavailableError, interpreter
from turnwise_python_sandbox.interpreter import Interpreter, find_blocking_directory, find_interpreter

pytestmark = pytest.mark.usefixtures("starts_a_process")

OTHER_UID = 64999


def make_script(path: Path, text: str) -> str:
    """Write an executable shell script and return its path."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_the_own_interpreter_is_found() -> None:
    """Without an option it is this one, by its real paths."""
    found = find_interpreter("")

    assert os.path.realpath(found.executable) == found.executable
    assert os.path.realpath(sys.base_prefix) == found.home
    assert any(path.endswith("site-packages") for path in found.packages)


def test_an_interpreter_is_asked_in_isolation(monkeypatch) -> None:
    """Variables such as PYTHONPATH of this process do not change the answer."""
    expected = find_interpreter("")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("PYTHONHOME", "/nowhere")

    assert expected == find_interpreter(sys.executable)


def test_an_old_interpreter_is_refused(tmp_path) -> None:
    """The error has the path, its version and the version that is needed."""
    answer = '{"version": [3, 9], "executable": "/x", "home": "/x", "packages": []}'
    script = make_script(tmp_path / "python", f"echo '{answer}'")

    with pytest.raises(SandboxUnavailableError, match=rf"{script} is Python 3\.9, but the sandbox needs 3\.11"):
        find_interpreter(script)


@pytest.mark.parametrize("text", ["exit 3", "kill -9 $$"])
def test_an_interpreter_that_fails_is_refused(tmp_path, text: str) -> None:
    """The error names the interpreter and how it failed."""
    script = make_script(tmp_path / "python", text)

    with pytest.raises(SandboxUnavailableError, match=rf"cannot run the interpreter '{script}'"):
        find_interpreter(script)


def test_an_interpreter_that_hangs_is_refused(tmp_path, monkeypatch) -> None:
    """The sandbox does not wait forever for an answer."""
    monkeypatch.setattr(interpreter, "_TIMEOUT_S", 0.1)
    script = make_script(tmp_path / "python", "exec sleep 600")

    with pytest.raises(SandboxUnavailableError, match="timed out"):
        find_interpreter(script)


def test_a_file_that_is_not_executable_is_refused(tmp_path) -> None:
    """The error has the operating system's reason."""
    (tmp_path / "python").touch()

    with pytest.raises(SandboxUnavailableError, match="Permission denied"):
        find_interpreter(str(tmp_path / "python"))


@given(paths=st.lists(st.lists(st.sampled_from("ab"), min_size=1, max_size=3).map("/".join), max_size=6))
def test_no_readable_path_lies_within_another(tmp_path_factory, paths: list[str]) -> None:
    """Each path that exists is in the list, or below a path of it."""
    root = tmp_path_factory.mktemp("root")
    for path in paths:
        (root / path).mkdir(parents=True, exist_ok=True)
    extra = tuple(f"{root}/{path}" for path in paths)
    found = Interpreter(executable=sys.executable, home="/none", packages=()).list_readable_paths(extra)

    assert not [(a, b) for a in found for b in found if a.startswith(f"{b}/")]
    assert all(any(path == each or path.startswith(f"{each}/") for each in found) for path in extra)
    assert sorted(found) == list(found)


def test_a_sibling_with_a_longer_name_is_not_below(tmp_path) -> None:
    """`/a/lib64` does not lie within `/a/lib`."""
    for name in ("lib", "lib64"):
        (tmp_path / name).mkdir()
    found = Interpreter(executable=sys.executable, home=str(tmp_path), packages=()).list_readable_paths(())

    assert {f"{tmp_path}/lib", f"{tmp_path}/lib64"} <= set(found)


def test_missing_paths_are_left_out() -> None:
    """A path that does not exist cannot be bound into a box."""
    found = Interpreter(executable="/no/python", home="/no", packages=("/no/packages",)).list_readable_paths(("/no/x",))

    assert not [path for path in found if path.startswith("/no")]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree of folders that everybody may enter."""
    (tmp_path / "a/b/c").mkdir(parents=True)
    for path in (*list(tmp_path.parents)[:-2], tmp_path, tmp_path / "a", tmp_path / "a/b"):
        path.chmod(path.stat().st_mode | 0o055)
    return tmp_path


def test_the_topmost_closed_directory_blocks(tree: Path) -> None:
    """Of several closed directories the one nearest to the root is returned."""
    assert find_blocking_directory(f"{tree}/a/b/c", OTHER_UID) is None
    (tree / "a/b").chmod(0o700)
    assert f"{tree}/a/b" == find_blocking_directory(f"{tree}/a/b/c", OTHER_UID)
    (tree / "a").chmod(0o750)

    assert f"{tree}/a" == find_blocking_directory(f"{tree}/a/b/c", OTHER_UID)


def test_the_directory_itself_blocks(tree: Path) -> None:
    """A directory that a user may not enter blocks the way to its own contents; a file does not."""
    (tree / "a/b/file").touch(0o600)
    assert find_blocking_directory(f"{tree}/a/b/file", OTHER_UID) is None
    (tree / "a/b").chmod(0o700)

    assert f"{tree}/a/b" == find_blocking_directory(f"{tree}/a/b", OTHER_UID)


def test_the_owner_is_judged_by_the_owner_bit(tree: Path) -> None:
    """A directory that others may enter can still be closed to its owner."""
    (tree / "a").chmod(0o055)

    assert find_blocking_directory(f"{tree}/a/b", OTHER_UID) is None
    assert f"{tree}/a" == find_blocking_directory(f"{tree}/a/b", os.getuid())
    (tree / "a").chmod(0o755)
