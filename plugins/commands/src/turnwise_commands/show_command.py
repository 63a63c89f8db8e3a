"""`turnwise show`: look at the trajectories of a run."""

from __future__ import annotations

import argparse
from pathlib import Path


class ShowCommand:
    """Print the episodes of a run, or one of them with the origin of its tokens in colours."""

    help = "list the episodes of a run, or print one with action, observation, forced and replayed tokens in colours"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.epilog = "Examples:\n  turnwise show runs/first\n  turnwise show runs/first 0 --no-color"
        parser.add_argument("dir", type=Path, help="folder of a rollout, as written by `turnwise rollout --out`")
        parser.add_argument("index", nargs="?", type=int, help="which episode, from 0; a table of all when left out")
        parser.add_argument("--no-color", action="store_true", help="mark origins with brackets instead of colours")

    def run(self, arguments: argparse.Namespace) -> int:
        from turnwise_commands.episode_pages import print_episodes

        return print_episodes(arguments)
