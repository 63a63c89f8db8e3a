"""Builds the programs that the tests run."""

import stat

import pytest


@pytest.fixture
def make_program(tmp_path):
    """Write an executable shell script and return its path."""

    def make(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    return make
