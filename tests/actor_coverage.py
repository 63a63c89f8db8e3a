"""Coverage of Ray's actors: they end by SIGKILL, so each of them saves its data all the time."""

import os
import threading
from pathlib import Path
from time import sleep

import coverage

_PERIOD_S = 0.5


def make_runtime_env(folder):
    """Return the environment of actors that import from a folder, and save their data if this process is measured."""
    # With the path of this process, so that actors import the sources that the tests import.
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = os.pathsep.join([str(folder), str(Path(__file__).parent), *filter(None, inherited)])
    hook = {"worker_process_setup_hook": "actor_coverage.save_often"} if coverage.Coverage.current() else {}
    return {"env_vars": {"PYTHONPATH": path}} | hook


def save_often():
    """Save the data of this process twice a second in a thread."""
    threading.Thread(target=_save, args=(coverage.Coverage.current(),), daemon=True).start()


def _save(measured):
    while True:
        sleep(_PERIOD_S)
        measured.save()
