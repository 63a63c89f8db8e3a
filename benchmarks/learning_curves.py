"""
Draws the rewards of several trainings over their steps into one picture.

    turnwise train examples/train_calculator.yaml --out runs/train
    PYTHONPATH=examples/external_openai turnwise train examples/external_openai/train.yaml --out runs/train_external
    python benchmarks/learning_curves.py docs/images/learning.svg \
        "tool_agent=runs/train" "agent with openai=runs/train_external"
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

GREY = "#7d8794"
"""Readable on light and on dark pages."""
COLOURS = ("#3a5bc7", "#c7623a", "#3a9c6b", "#8f5bc7")
STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "turnwise",  # the same runs give the same file
    "font.family": "sans-serif",
    "text.color": GREY,
    "axes.labelcolor": GREY,
    "axes.edgecolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def read_points(folder: Path, name: str) -> list[tuple[int, float]]:
    """Return the steps of a training with the values of a metric."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [(line["step"], line[name]) for line in lines if line.get(name) is not None]


def draw(runs: dict[str, Path], out: Path) -> None:
    """Draw the mean reward of each step as a line, and of held-out tasks as large points."""
    with rc_context(STYLE):
        figure = Figure(figsize=(8, 3.6), layout="constrained")
        axes = figure.subplots()
        for colour, (label, folder) in zip(COLOURS, runs.items(), strict=False):
            axes.plot(*zip(*read_points(folder, "reward/mean"), strict=True), color=colour, label=label)
            held_out = read_points(folder, "validation/reward/mean")
            axes.plot(*zip(*held_out, strict=True), "o", color=colour, label=f"{label}, held out")
            print(f"{label}: {held_out[0][1]:.3f} -> {held_out[-1][1]:.3f} held out")
        axes.set(xlabel="step", ylabel="reward", ylim=(0, 1))
        axes.grid(visible=True, alpha=0.3)
        axes.legend(frameon=False, loc="lower right")
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Title": "Rewards over the steps"})


def main() -> None:
    """Read the names of the runs from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="SVG file")
    parser.add_argument("runs", nargs="+", metavar="LABEL=FOLDER", help=f"at most {len(COLOURS)} trainings")
    arguments = parser.parse_args()
    runs = {label: Path(folder) for label, _, folder in (text.rpartition("=") for text in arguments.runs)}
    if len(runs) > len(COLOURS) or not all(runs):
        parser.error(f"expected LABEL=FOLDER, at most {len(COLOURS)} with different labels")
    draw(runs, arguments.out)


if __name__ == "__main__":
    main()
