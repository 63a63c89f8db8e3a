"""Run as ``python -m turnwise``."""

from turnwise.cli import main

raise SystemExit(main())
