"""
Installs the clients of `versions.toml`, each in a separate folder, and prints the folders.

    python install.py [--check] [NAME ...]

Without names it installs all but the clients for request alone. With `--check` it installs nothing.
The folders are below TURNWISE_GATEWAY_CLIENTS, by default `turnwise-gateway-clients` in the folder for temporary files.
A client that is there in its versions is left alone. The exit code is 1 if one cannot be installed.
"""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

VERSIONS = tomllib.loads(Path(__file__).with_name("versions.toml").read_text(encoding="utf-8"))
ROOT = Path(os.environ.get("TURNWISE_GATEWAY_CLIENTS") or Path(tempfile.gettempdir()) / "turnwise-gateway-clients")


def install(name: str, *, check: bool = False) -> Path:
    """
    Return the folder of a client, which is installed unless it is there.

    Raises:
        subprocess.CalledProcessError, OSError: that failed, or it is only checked and not there.
    """
    kind = "pip" if name in VERSIONS["pip"] else "npm"
    packages = VERSIONS[kind][name]
    folder, done = ROOT / name, ROOT / f"{name}.json"
    if done.is_file() and json.loads(done.read_text(encoding="utf-8")) == packages:
        return folder
    if check:
        raise FileNotFoundError(f"it is not in {ROOT}: make gateway-clients CLIENTS={name}")
    shutil.rmtree(folder, ignore_errors=True)
    if kind == "pip":
        make_environment(folder, VERSIONS["python"].get(name))
        command = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    else:
        folder.mkdir(parents=True)
        command = ["npm", "install", "--silent", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(folder)]
    subprocess.run([*command, *packages], check=True, stdout=sys.stderr)
    done.write_text(json.dumps(packages), encoding="utf-8")
    return folder


def make_environment(folder: Path, python: str | None) -> None:
    """Make a virtual environment, of another version of Python if one is given."""
    if python is None or sys.version_info[:2] == tuple(map(int, python.split("."))):
        venv.create(folder, with_pip=True)
    else:
        subprocess.run([f"python{python}", "-m", "venv", str(folder)], check=True, stdout=sys.stderr)


def main() -> int:
    """Install the clients that the command line names, or all."""
    failed = 0
    names = [name for name in sys.argv[1:] if name != "--check"]
    every = [name for name in (*VERSIONS["pip"], *VERSIONS["npm"]) if name not in VERSIONS["on_request"]]
    ROOT.mkdir(parents=True, exist_ok=True)
    # Workers of one test run ask for the same clients; one installs them, and the others wait.
    with (ROOT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name in names or every:
            try:
                print(install(name, check="--check" in sys.argv[1:]))
            except (subprocess.CalledProcessError, OSError) as error:
                print(f"{name} is not installed: {error}", file=sys.stderr)
                failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
