"""Files and folders that appear whole or not at all."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from turnwise import files
from turnwise.files import atomic_write, partial_path, replace, write_text


@pytest.fixture
def flushed(monkeypatch) -> list[str]:
    """Names of the files and folders that were flushed, and of the replacement, in order."""
    events: list[str] = []
    fsync, rename = os.fsync, os.replace

    def note_fsync(descriptor: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def note_replace(source: Path, target: Path) -> None:
        events.append(f"{source.name} -> {target.name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    return events


def test_content_is_flushed_before_the_name_changes_and_the_folder_after(tmp_path, flushed):
    """Otherwise a crash leaves an empty file under the final name, or the old name comes back."""
    folder = tmp_path / "runs"
    write_text(folder / "a.json", "{}")

    assert ["a.json.partial", "a.json.partial -> a.json", "runs"] == flushed
    assert (folder / "a.json").read_text() == "{}"


def test_a_failed_write_leaves_the_old_file(tmp_path):
    """The temporary file is removed."""
    target = tmp_path / "a.json"
    write_text(target, "old")

    def fail() -> None:
        with atomic_write(target) as partial:
            partial.write_text("new")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert "old" == target.read_text()
    assert [target] == list(tmp_path.iterdir())


def test_a_folder_appears_with_everything_in_it(tmp_path, flushed):
    """Each file and folder inside is flushed before the folder gets its name."""
    partial = tmp_path / "step_3.partial"
    (partial / "inner").mkdir(parents=True)
    (partial / "inner/model.bin").write_bytes(b"x")
    (partial / "state.json").write_text("{}")

    replace(partial, tmp_path / "step_3")

    renamed = flushed.index("step_3.partial -> step_3")
    assert {"model.bin", "inner", "state.json", "step_3.partial"} == set(flushed[:renamed])
    assert [tmp_path.name] == flushed[renamed + 1 :]
    assert b"x" == (tmp_path / "step_3/inner/model.bin").read_bytes()


def test_a_folder_that_cannot_be_flushed_is_no_error(tmp_path, monkeypatch):
    """Some network file systems refuse to flush folders; files must still be flushed."""
    fsync = os.fsync

    def refuse_folders(descriptor: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_dir():
            raise OSError(22, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse_folders)
    write_text(tmp_path / "a", "x")
    assert "x" == (tmp_path / "a").read_text()

    monkeypatch.setattr(os, "fsync", lambda _descriptor: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        write_text(tmp_path / "b", "x")
    assert not (tmp_path / "b").exists()


def test_a_killed_writer_leaves_the_old_file(tmp_path):
    """A kill -9 between the write and the replacement changes nothing."""
    target = tmp_path / "a"
    write_text(target, "old")
    code = (
        "import os, signal, sys; from turnwise.files import atomic_write\n"
        "with atomic_write(sys.argv[1]) as partial:\n"
        "    partial.write_text('new'); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(target)], check=False)

    assert -signal.SIGKILL == done.returncode
    assert "old" == target.read_text()
    assert "new" == partial_path(target).read_text()
    replace(partial_path(target), target)
    assert "new" == target.read_text()


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_weights_have_the_mode_of_new_files(tmp_path, umask):
    """As the umask has it; a file of another kind keeps its own mode."""
    for name in ("a.safetensors", "secret"):
        (tmp_path / name).touch(mode=0o600)
    code = "import os, sys, pathlib; os.umask(int(sys.argv[2])); from turnwise.files import share_weights\n"
    code += "share_weights(pathlib.Path(sys.argv[1])); (pathlib.Path(sys.argv[1]) / 'new').touch()"

    subprocess.run([sys.executable, "-c", code, str(tmp_path), str(umask)], check=True)

    modes = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()}
    assert {"a.safetensors": 0o666 & ~umask, "new": 0o666 & ~umask, "secret": 0o600} == modes


def test_links_inside_a_folder_stay_links(tmp_path):
    """A link to a missing file does not stop the folder."""
    partial = tmp_path / "f.partial"
    partial.mkdir()
    (partial / "link").symlink_to("missing")

    replace(partial, tmp_path / "f")

    assert (tmp_path / "f/link").is_symlink()
    assert files.PARTIAL == ".partial"
