"""
Takes the pictures of `turnwise view` in docs/images: runs the examples, serves them, and drives Chromium.

    python docs/screenshots.py                     needs Chromium and Playwright
    python docs/screenshots.py --runs DIR          keeps the runs in DIR, and uses existing ones
    python docs/screenshots.py --images DIR        writes the pictures there
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any, Final

from playwright.sync_api import Browser, sync_playwright

ROOT: Final = Path(__file__).parents[1]
IMAGES: Final = ROOT / "docs/images"
PROGRAM: Final = [sys.executable, "-c", "import sys; from turnwise.cli import main; sys.exit(main())"]
SHORT: Final = ["train.num_steps=5", "train.tasks_per_step=3", "train.validation.limit=12"]
RUNS: Final = {
    "demo": ["rollout", "examples/calculator.yaml", "--trace", "{}/trace.json"],
    "parallel": ["rollout", "examples/parallel_thinking.yaml"],
    "train": ["train", "examples/train_calculator.yaml", *SHORT],
}
FLAGS: Final = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


def make_runs(folder: Path) -> list[Path]:
    """Run the examples that are not there yet; return their folders."""
    for name, command in RUNS.items():
        if not (folder / name).exists():
            arguments = [each.format(folder / name) for each in command]
            subprocess.run([*PROGRAM, *arguments, "--out", str(folder / name)], cwd=ROOT, check=True)
    return [folder / name for name in RUNS]


def first_key(url: str, run: int, sort: str) -> str:
    """Return the key of the episode with the largest value of a column."""
    with urllib.request.urlopen(f"{url}api/v1/runs/{run}/episodes?limit=1&order=desc&sort={sort}") as response:
        page: dict[str, Any] = json.load(response)
    return str(page["episodes"][0]["key"])


def take_pictures(browser: Browser, url: str, images: Path) -> None:
    """Write a picture of each view."""
    demo, parallel = first_key(url, 0, "num_turns"), first_key(url, 1, "reward")
    views = {
        "episodes": ("0/episodes?sort=reward&order=desc", "tbody tr"),
        "turns": (f"0/episode?key={demo}", ".message"),
        "tokens": (f"0/episode?key={demo}&view=tokens&token=45", ".tokenview"),
        "paths": (f"1/episode?key={parallel}&view=paths", "canvas"),
        "groups": ("2/groups?step=2", ".cards"),
        "training": ("2/training", ".chart"),
        "time": ("0/time", ".lane"),
    }
    for name, (place, selector) in views.items():
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.goto(f"{url}#/{place}")
        page.wait_for_selector(selector, timeout=120_000)
        page.wait_for_load_state("networkidle")
        page.screenshot(path=images / f"view-{name}.png")
        page.close()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Take the pictures of turnwise view in docs/images.")
    parser.add_argument("--runs", type=Path, metavar="DIR", help="folder of the runs; a temporary one by default")
    parser.add_argument(
        "--chromium", default=shutil.which("chromium"), help="the browser; found by its name by default"
    )
    parser.add_argument("--images", type=Path, default=IMAGES, metavar="DIR", help="docs/images by default")
    options = parser.parse_args()
    if options.chromium is None:
        parser.error("Chromium is not installed; name it with --chromium")
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        runs = make_runs(options.runs or Path(temporary))
        browser = playwright.chromium.launch(executable_path=options.chromium, args=FLAGS)
        command = [*PROGRAM, "view", *map(str, runs)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                take_pictures(browser, server.stdout.readline().strip(), options.images)
            finally:
                server.terminate()
        browser.close()


if __name__ == "__main__":
    main()
