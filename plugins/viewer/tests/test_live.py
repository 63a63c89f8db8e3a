"""Live pages: the stream of events, runs that start later, and the address that stays the same."""

import json
import os
import socket
import stat
import urllib.request

import pytest
from viewer_runs import build_episode, start_command, write_run

from turnwise.errors import DataError
from turnwise_result_files import TrajectoryWriter
from turnwise_viewer.page_address import PageAddress, address_file, load_address, save_address
from turnwise_viewer.run_folder import RunFolder

TOKEN = "t" * 32


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    """The folder in which addresses are kept."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def read_events(response):
    """Yield the runs of each event of a stream."""
    for line in response:
        if line.startswith(b"data: "):
            yield json.loads(line[6:])["runs"]


def test_each_change_of_a_run_is_an_event(tmp_path, serve):
    """The stream has the runs at once, and again whenever a run writes; other sites get no stream."""
    writer = TrajectoryWriter(tmp_path / "trajectories.parquet", rows_per_group=1)
    writer.write(build_episode(0))
    client = serve(tmp_path)
    with urllib.request.urlopen(f"{client.url}api/v1/events") as response:
        assert response.headers["Content-Type"] == "text/event-stream"
        assert "default-src 'none'" in response.headers["Content-Security-Policy"]
        events = read_events(response)
        first = next(events)[0]
        assert (first["num_episodes"], first["is_partial"]) == (1, True)

        writer.write(build_episode(1))
        while (second := next(events)[0])["num_episodes"] == 1:
            assert second["revision"] != first["revision"]  # half of the batch is on the disk
        assert second["num_episodes"] == 2
        writer.close()
        while (last := next(events)[0])["is_partial"]:
            pass
        assert last["num_episodes"] == 2
    assert client.ask("api/v1/events", headers={"Host": "evil.example"})[0] == 403


def test_a_live_run_may_start_later(tmp_path, serve):
    """A missing folder is a run that has not started. It is read once it is there, and kept when it is removed."""
    folder = tmp_path / "next"
    run = RunFolder.open(folder, may_be_empty=True)
    try:
        assert (run.refresh(), len(run.index), run.describe()["has_started"]) == (False, 0, False)
        folder.mkdir()
        assert run.refresh() is False
        file = write_run(folder, [build_episode(0)]) / "trajectories.parquet"
        assert (run.refresh(), len(run.index), run.describe()["has_started"]) == (True, 1, True)
        file.unlink()
        folder.rmdir()
        assert (run.refresh(), len(run.index)) == (False, 1)
        write_run(folder, [build_episode(task) for task in range(3)])
        assert (run.refresh(), len(run.index)) == (True, 3)
    finally:
        run.close()
    with pytest.raises(DataError, match="does not exist"):
        RunFolder.open(tmp_path / "other")


def test_a_file_that_is_replaced_while_it_is_opened_is_no_error(tmp_path, monkeypatch):
    """A run that gives its file the final name between two looks is read at the next look."""
    write_run(tmp_path, [build_episode(0)])
    run = RunFolder.open(tmp_path)
    file = tmp_path / "trajectories.parquet"
    reopen = RunFolder._reopen

    def replace_first(self, source):
        file.write_text("half a file")
        monkeypatch.setattr(RunFolder, "_reopen", reopen)
        try:
            reopen(self, source)
        finally:
            file.unlink()

    file.unlink()
    write_run(tmp_path, [build_episode(task) for task in range(2)])
    monkeypatch.setattr(RunFolder, "_reopen", replace_first)
    try:
        assert (run.refresh(), len(run.index)) == (False, 1)
        write_run(tmp_path, [build_episode(task) for task in range(2)])
        assert (run.refresh(), len(run.index)) == (True, 2)
    finally:
        run.close()


def test_an_address_is_private_and_belongs_to_its_runs(tmp_path):
    """The file with the token is for its owner alone, and every list of runs has its own."""
    file = address_file([tmp_path / "a"])
    assert load_address(file) is None
    save_address(file, PageAddress(4321, TOKEN))

    assert load_address(file) == PageAddress(4321, TOKEN)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len({address_file(runs) for runs in ([tmp_path / "a"], [tmp_path / "b"], [tmp_path / "a", tmp_path])}) == 3
    assert [each.name for each in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"port": 1}', '{"port": 0, "token": "%s"}', '{"port": 5, "token": ""}']
)
def test_a_broken_address_is_not_used(tmp_path, text):
    """Half a file, or an address with a short token, is as none."""
    file = address_file([tmp_path])
    save_address(file, PageAddress(4321, TOKEN))
    file.write_text(text.replace("%s", TOKEN))

    assert load_address(file) is None


def test_an_address_that_others_can_read_is_not_used(tmp_path):
    """A token that other users of the machine could have read is replaced."""
    file = address_file([tmp_path])
    save_address(file, PageAddress(4321, TOKEN))
    file.chmod(0o644)

    assert load_address(file) is None


def address_of(process):
    return process.stdout.readline().strip()


@pytest.mark.slow
def test_a_live_page_keeps_its_address(tmp_path):
    """After a kill the command has the same address; if its port is taken, and without --live, it has another one."""
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path / "state")}
    view = ["view", "--live", str(tmp_path / "next")]
    with start_command(*view, env=environment) as first:
        url = address_of(first)
        first.kill()
    with start_command(*view, env=environment) as second:
        assert address_of(second) == url
        with start_command(*view, env=environment) as third:
            assert address_of(third) != url
            third.terminate()
            assert "cannot reconnect" in third.stderr.read()
        second.terminate()
        assert second.wait() == 0
    write_run(tmp_path / "next", [build_episode()])
    with start_command("view", str(tmp_path / "next"), env=environment) as plain:
        assert address_of(plain) != url
        plain.terminate()


@pytest.mark.slow
def test_a_chosen_port_that_is_taken_is_an_error(tmp_path):
    """A port that the command line names is that port or an error, also with --live."""
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path / "state")}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with start_command("view", "--live", str(tmp_path / "next"), "--port", port, env=environment) as process:
            assert process.wait() == 2
            assert f"--port {port}: cannot listen" in process.stderr.read()
