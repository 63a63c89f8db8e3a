"""Runs simulations: `python -m turnwise_testing.simulation`. See `turnwise_testing.simulation.worker`."""

from __future__ import annotations

import sys

from turnwise_testing.simulation.patches import install

# Before any module that keeps a reference to a lock or a clock of Python.
install()

from turnwise_testing.simulation.worker import main  # noqa: E402

sys.exit(main(sys.argv[1:]))
