"""Coverage of Ray's actors: they end by SIGKILL, so each of them saves its data all the time."""

import threading
from time import sleep

import coverage

_PERIOD_S = 0.5


def measured_runtime_env():
    """Return the part of a runtime environment that has actors save their data, if this process is measured."""
    return {"worker_process_setup_hook": "actor_coverage.save_often"} if coverage.Coverage.current() else {}


def save_often():
    """Save the data of this process twice a second in a thread."""
    threading.Thread(target=_save, args=(coverage.Coverage.current(),), daemon=True).start()


def _save(measured):
    while True:
        sleep(_PERIOD_S)
        measured.save()
