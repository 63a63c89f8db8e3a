"""
Scrolls through an episode in the page of `turnwise view`, and reports its frames from the browser's own trace.

    python benchmarks/viewer_frames.py                       32,768 tokens; needs Chromium and Playwright
    python benchmarks/viewer_frames.py --tokens 8192 --trace frames.json

The token view is scrolled from its start to its end by turns of the wheel. The time of a frame is the time since the
frame before it; a task is work of the page's own thread, during which it draws and answers nothing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from playwright.sync_api import Browser, sync_playwright

from turnwise import EpisodeResult, Status, Task, Trajectory, TrajectoryScore
from turnwise_result_files import TrajectoryWriter

PROGRAM = [sys.executable, "-c", "import sys; from turnwise.cli import main; sys.exit(main())"]
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
CATEGORIES = ["toplevel", "devtools.timeline", "disabled-by-default-devtools.timeline.frame", "devtools.timeline.frame"]
WHEEL = 600
"""Pixels of a turn of the wheel: most of a window."""


def write_run(folder: Path, num_tokens: int) -> str:
    """Write a run of one episode with turns of 500 tokens; return its key."""
    rng = np.random.default_rng(0)
    record = Trajectory(rng.integers(0, 50_000, 200))
    while record.num_response_tokens < num_tokens - 200:
        size = min(500, num_tokens - 200 - record.num_response_tokens)
        if record.num_response_tokens // 500 % 3 == 2:
            record.add_observation(rng.integers(0, 50_000, size))
        else:
            record.add_action(rng.integers(0, 50_000, size), -rng.exponential(size=size), weight_version=1)
    task = Task(messages=({"role": "user", "content": "a long task"},), uid="long")
    with TrajectoryWriter(folder / "trajectories.parquet") as writer:
        writer.write(
            EpisodeResult(
                task=task, status=Status.COMPLETED, trajectories=(record,), scores=(TrajectoryScore(value=1.0),)
            )
        )
    return "long/0"


def scroll(browser: Browser, url: str) -> tuple[list[dict[str, Any]], float]:
    """Scroll through the tokens; return the events of the trace, and the MiB of the page's objects."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(url)
    view = page.locator(".tokenview")
    view.locator("[data-i]").first.wait_for()
    view.hover()
    browser.start_tracing(page=page, categories=CATEGORIES)
    at = -1.0
    while (now := float(view.evaluate("each => each.scrollTop"))) != at:
        at = now
        page.mouse.wheel(0, WHEEL)
        # Two frames: the scroll itself, and the tokens that it brought near.
        page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    events = json.loads(browser.stop_tracing())["traceEvents"]
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")
    metrics = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
    return events, metrics["JSHeapUsedSize"] / 2**20


def report(events: list[dict[str, Any]], heap_mib: float) -> None:
    """Print the frames and the tasks of a trace."""
    main_thread = {
        (each["pid"], each["tid"])
        for each in events
        if each["name"] == "thread_name" and each["args"]["name"] == "CrRendererMain"
    }
    starts = np.sort([each["ts"] for each in events if each["name"] == "DrawFrame"]) / 1e3
    frames = np.diff(starts)
    tasks = np.array(
        [
            each["dur"] / 1e3
            for each in events
            if each["name"] in ("RunTask", "ThreadControllerImpl::RunTask")
            and each["ph"] == "X"
            and (each["pid"], each["tid"]) in main_thread
        ]
    )
    print(f"{len(frames)} frames over {(starts[-1] - starts[0]) / 1e3:.1f} s")
    for name, values in (("frame", frames), ("task of the page", tasks[tasks > 1])):
        middle, high, top = np.quantile(values, [0.5, 0.95, 1.0])
        num_long = (values > 50).sum()
        print(
            f"{name:20} median {middle:6.1f} ms   95 % {high:6.1f} ms   longest {top:6.1f} ms   over 50 ms: {num_long}"
        )
    print(f"{'objects of the page':20} {heap_mib:6.1f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the frames of the token view of turnwise view.")
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="keep the trace, for chrome://tracing or Perfetto")
    parser.add_argument(
        "--chromium", default=shutil.which("chromium"), help="the browser; found by its name by default"
    )
    options = parser.parse_args()
    if options.chromium is None:
        parser.error("Chromium is not installed; name it with --chromium")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        key = write_run(Path(folder), options.tokens)
        browser = playwright.chromium.launch(executable_path=options.chromium, args=FLAGS)
        with subprocess.Popen([*PROGRAM, "view", folder], stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                url = f"{server.stdout.readline().strip()}#/0/episode?key={key}&view=tokens"
                events, heap_mib = scroll(browser, url)
            finally:
                server.terminate()
        browser.close()
    if options.trace:
        options.trace.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    report(events, heap_mib)


if __name__ == "__main__":
    main()
