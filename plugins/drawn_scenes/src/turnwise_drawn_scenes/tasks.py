"""Writes drawn scenes as a data set: a file `tasks.jsonl` with one task a line, and a folder of PNG files."""

# ruff: noqa: T201 - a command

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from turnwise_drawn_scenes.drawing import draw, encode
from turnwise_drawn_scenes.scenes import SPLITS, Split, generate_scenes
from turnwise_drawn_scenes.source import make_row


def write_tasks(folder: Path, split: Split, num: int, seed: int) -> None:
    """Write the first `num` scenes of a stream: the tasks of the source `drawn_scenes` with the same options."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    rows = []
    for index, scene in enumerate(islice(generate_scenes(split, seed), num)):
        uid = f"{split}-{seed}-{index}"
        path = f"images/{uid}.png"
        (folder / path).write_bytes(encode(draw(scene)).data)
        rows.append(make_row(scene, uid, {"type": "image", "path": path}))
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; None uses `sys.argv`."""
    prog = "python -m turnwise_drawn_scenes.tasks"
    parser = argparse.ArgumentParser(
        prog=prog, description="Write drawn scenes as JSONL and PNG files.", epilog=f"example: {prog} --out scenes"
    )
    parser.add_argument("--split", choices=SPLITS, default="train", help="split of the tasks (default: train)")
    parser.add_argument("--num", type=int, default=64, help="number of tasks (default: 64)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the stream (default: 0)")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    options = parser.parse_args(arguments)
    if options.num < 1:
        parser.error(f"--num must be at least 1, got {options.num}")
    write_tasks(options.out, options.split, options.num, options.seed)
    print(f"wrote {options.num} {options.split} tasks to {options.out}")


if __name__ == "__main__":
    main()
