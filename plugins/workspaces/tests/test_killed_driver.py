"""A driver that is killed leaves nothing that the next run, or `turnwise workspaces reap`, does not remove."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from boxes import list_boxes, why_no_boxes
from images import ENGINE, IMAGE, RUN_OPTIONS, list_containers, list_snapshots, why_no_containers

from turnwise_workspaces.ownership import LABEL, Owner, read_owner, this_process

DRIVER = Path(__file__).with_name("killed_driver.py")
CONTAINERS = {"command": ENGINE, "run_options": RUN_OPTIONS}


def start_driver(
    folder: Path, backend: str, options: object, image: str, *more: str
) -> tuple[subprocess.Popen[str], str]:
    """Start a driver with two workspaces, and return it with its label."""
    arguments = [backend, json.dumps(options), image, str(folder), *more]
    driver = subprocess.Popen([sys.executable, DRIVER, *arguments], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    with driver.stdout:
        return driver, driver.stdout.readline().strip()


def wait_until_gone(list_left) -> None:
    """Wait for the system to end what it ends by itself."""
    for _ in range(3000):
        if not list_left():
            return
        time.sleep(0.01)
    raise AssertionError(f"left: {list_left()}")


def sleepers() -> list[str]:
    """Return the processes that a driver's commands have left in the background."""
    done = subprocess.run(["pgrep", "-f", "sleep 98764"], capture_output=True, text=True, check=False)
    return done.stdout.split()


@pytest.mark.skipif(bool(why_no_boxes()), reason=why_no_boxes())
@pytest.mark.parametrize("warm", [(), ("warm",)], ids=["open", "one of them warm"])
def test_boxes_end_with_a_killed_driver(warm, tmp_path):
    """The system kills them: processes, mounts and files are gone, and the slots are free."""
    driver, label = start_driver(tmp_path, "bubblewrap", {}, "", *warm)
    assert len(list_boxes(label)) >= 2

    driver.kill()
    driver.wait()

    wait_until_gone(lambda: list_boxes(label))
    wait_until_gone(sleepers)
    again, _ = start_driver(tmp_path, "bubblewrap", {}, "")  # it takes the same two slots
    again.kill()
    again.wait()
    wait_until_gone(sleepers)


@pytest.mark.slow
@pytest.mark.skipif(bool(why_no_boxes()), reason=why_no_boxes())
def test_boxes_end_with_an_interrupted_driver(tmp_path):
    """An exception out of the loop runs the exit hook."""
    driver, label = start_driver(tmp_path, "bubblewrap", {}, "")

    driver.send_signal(2)
    driver.wait()

    wait_until_gone(lambda: list_boxes(label))


@pytest.mark.slow
@pytest.mark.parametrize("disk", ["tmpfs", "none"])
def test_reap_removes_the_containers_of_a_killed_driver(disk, tmp_path):
    """
    Containers stay behind a killed driver; the command lists and removes them, and spares a living driver's.

    With `disk: none` each of them has an image of its files, too. With `tmpfs` these were files without names.
    """
    if reason := why_no_containers():
        pytest.skip(reason)
    config, num_images = {**CONTAINERS, "disk": disk}, 2 if disk == "none" else 0
    killed, _ = start_driver(tmp_path / "a", "containers", config, IMAGE)
    alive, _ = start_driver(tmp_path / "b", "containers", config, IMAGE)
    try:
        assert (len(list_containers()), len(list_snapshots())) == (4, 2 * num_images)
        killed.kill()
        killed.wait()
        options = ["--backend", "containers", "--options", json.dumps(config)]
        command = [sys.executable, "-m", "turnwise.cli", "workspaces"]

        found = subprocess.run([*command, "find", *options], capture_output=True, text=True, check=True)
        assert found.stdout.count("containers: found turnwise-") == 2
        assert found.stdout.count("containers: found localhost/turnwise-snapshot:") == num_images
        reaped = subprocess.run([*command, "reap", *options], capture_output=True, text=True, check=True)
        assert reaped.stdout.count("containers: removed turnwise-") == 2
        again = subprocess.run([*command, "reap", *options], capture_output=True, text=True, check=True)
        assert again.stdout == "containers: nothing is left\n"
        assert (len(list_containers()), len(list_snapshots())) == (2, num_images)
    finally:
        alive.kill()
        alive.wait()
        subprocess.run([*command, "reap", *options], capture_output=True, text=True, check=True)
    assert (list_containers(), list_snapshots()) == ([], [])


@pytest.mark.slow
def test_reap_removes_the_warm_containers_of_a_killed_driver(tmp_path):
    """A warm one has the same label as one with an episode."""
    if reason := why_no_containers():
        pytest.skip(reason)
    driver, _ = start_driver(tmp_path, "containers", CONTAINERS, IMAGE, "warm")
    driver.kill()
    driver.wait()
    options = ["--backend", "containers", "--options", json.dumps(CONTAINERS)]
    command = [sys.executable, "-m", "turnwise.cli", "workspaces", "reap", *options]

    reaped = subprocess.run(command, capture_output=True, text=True, check=True)

    assert reaped.stdout.count("containers: removed turnwise-") == 2
    assert list_containers() == []


@pytest.mark.slow
def test_an_image_that_has_lost_its_name_is_found(tmp_path):
    """Engines take the name alone of an image that a container still has, and a killed driver leaves it behind."""
    if reason := why_no_containers():
        pytest.skip(reason)
    mine, name = this_process(), f"turnwise-test-{uuid.uuid4().hex}"
    owner = Owner(mine.host, mine.boot, mine.pid, "1")
    subprocess.run([*ENGINE, "create", "--name", name, IMAGE, "true"], capture_output=True, check=True)
    commit = [*ENGINE, "commit", "--change", f"LABEL {LABEL}={owner}", name]
    image = subprocess.run(commit, capture_output=True, text=True, check=True).stdout.strip().removeprefix("sha256:")
    subprocess.run([*ENGINE, "rm", "-f", name], capture_output=True, check=True)
    options = ["--backend", "containers", "--options", json.dumps(CONTAINERS)]
    command = [sys.executable, "-m", "turnwise.cli", "workspaces"]
    removed = subprocess.run([*command, "reap", *options], capture_output=True, text=True, check=True)
    assert f"containers: removed sha256:{image}" in removed.stdout
    again = subprocess.run([*command, "find", *options], capture_output=True, text=True, check=True)
    assert image not in again.stdout


def test_an_owner_is_gone_when_another_process_has_its_id():
    """The start time tells processes with one id apart; machines and boots count, too."""
    mine = this_process()

    assert read_owner(str(mine)) == mine
    assert not mine.is_gone
    assert Owner(mine.host, mine.boot, mine.pid, "1").is_gone
    assert Owner(mine.host, "another boot", mine.pid, mine.started).is_gone
    assert not Owner("another machine", mine.boot, mine.pid, "1").is_gone
    assert [read_owner(text) for text in ("", "a/b/c/d", "a/b/1", "a/b/1/2/3")] == [None] * 4
