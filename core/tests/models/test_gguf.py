"""GGUF files before their conversion: the cache, and what is refused at once."""

import os

import pytest

from turnwise.errors import ConfigError
from turnwise.models import gguf


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A file that starts as a GGUF file does, and a cache beside it."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    return path


def test_a_converted_file_is_found_by_its_state(file):
    """The folder of the same file is taken; a changed file, or one of another time, has another folder."""
    folder = gguf.cache_folder(file)
    folder.mkdir(parents=True)
    assert gguf.convert(file) == folder
    assert folder.is_relative_to(file.parent / "cache" / "turnwise" / "gguf")
    os.utime(file, ns=(1, 1))
    assert gguf.cache_folder(file) != folder
    before = gguf.cache_folder(file)
    file.write_bytes(b"GGUF" + bytes(99) + b"1")
    os.utime(file, ns=(1, 1))
    assert gguf.cache_folder(file) not in (before, folder)


@pytest.mark.parametrize("start", [b"", b"GGU", b"PK\3\4", b"\0" * 64])
def test_another_file_is_refused(file, start):
    """A file of another kind is named before anything is imported."""
    file.write_bytes(start)
    with pytest.raises(ConfigError, match=r"^--model: '.*tiny\.gguf' is no GGUF file: it does not start with 'GGUF'$"):
        gguf.convert(file, "--model")


def test_missing_packages_are_named(file, monkeypatch):
    """Without the package the line has the command that installs it."""
    monkeypatch.setattr(gguf, "find_spec", lambda name: None if name == "gguf" else object())
    with pytest.raises(ConfigError, match=r"needs gguf to be converted: pip install 'turnwise\[gguf\]'"):
        gguf.convert(file)


def test_a_cache_that_cannot_be_made_is_named(file, monkeypatch):
    """A file in the place of the cache is an error of one line."""
    monkeypatch.setattr(gguf, "find_spec", lambda name: object())
    (file.parent / "cache").write_text("")
    with pytest.raises(ConfigError, match=r"^model\.path: converting '.*tiny\.gguf': .*cache.*: .*(exists|directory)"):
        gguf.convert(file)
