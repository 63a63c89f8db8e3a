"""`turnwise mask`: draws which token of an episode sees which."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from turnwise.errors import ConfigError, DataError
from turnwise.terminal import write_output

if TYPE_CHECKING:
    from turnwise import EpisodeResult


class MaskCommand:
    """Draws one picture per record of an episode."""

    help = "draw which token of an episode sees which"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.epilog = "Examples:\n  turnwise mask runs/first 0 --out mask.png"
        parser.add_argument("run", metavar="RUN", type=Path, help="folder that `turnwise rollout --out` wrote")
        parser.add_argument("episode", metavar="EPISODE", type=int, help="index in the table of `turnwise show`")
        parser.add_argument(
            "--out",
            metavar="FILE",
            type=Path,
            required=True,
            help="picture to write, such as mask.png; further records of the episode get a number in their name",
        )

    def run(self, arguments: argparse.Namespace) -> int:
        from turnwise_observability.mask_image import save_mask

        episode = find_episode(arguments.run, arguments.episode)
        if not episode.trajectories:
            raise ConfigError(f"episode {arguments.episode} of {arguments.run} has no record to draw")
        out: Path = arguments.out
        for number, trajectory in enumerate(episode.trajectories):
            file = out.with_stem(f"{out.stem}-{number}") if number else out
            save_mask(trajectory, file)
            write_output(f"wrote {file}\n")
        return 0


def find_episode(run: Path, index: int) -> EpisodeResult:
    """
    Return an episode of a run by its index in the table of `turnwise show`.

    Raises:
        DataError: there is no run.
        ConfigError: the run has fewer episodes.
    """
    from turnwise_result_files import read_results

    if not run.exists():
        raise DataError(f"{run}: does not exist; give a folder that `turnwise rollout` wrote")
    # The file has the episodes in the order in which they ended; `turnwise show` counts in this order.
    results = sorted(read_results(run), key=lambda each: (each.task.sample_index, each.task.uid, each.rollout_n))
    if not 0 <= index < len(results):
        raise ConfigError(f"{run}: has no episode {index}; it has {len(results)}, counted from 0")
    return results[index]
