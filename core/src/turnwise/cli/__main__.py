"""Run as ``python -m turnwise.cli``."""

from turnwise.cli import main

raise SystemExit(main())
