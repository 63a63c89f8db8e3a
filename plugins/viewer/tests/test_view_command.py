"""The command `turnwise view`."""

import shutil
import signal
import subprocess
import sys
import urllib.request

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from viewer_runs import build_episode, several_records, write_run

from turnwise.cli import main
from turnwise_result_files.row_schema import ADDED, SCHEMA


def test_it_prints_its_address_and_ends_on_ctrl_c(tmp_path):
    """The command prints the address of a page that works, and Ctrl-C ends it with exit code 0."""
    run = write_run(tmp_path, [build_episode()])
    command = [sys.executable, "-c", "import sys; from turnwise.cli import main; sys.exit(main())", "view", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            url = process.stdout.readline().strip()
            with urllib.request.urlopen(f"{url}api/v1/runs") as response:
                assert response.status == 200
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait() == 0


def bad_folder(tmp_path):
    return tmp_path, "holds no run"


def missing(tmp_path):
    return tmp_path / "nothing", "does not exist"


def text_file(tmp_path):
    (tmp_path / "trajectories.parquet").write_text("no Parquet")
    return tmp_path, "cannot be read as episodes"


def other_version(tmp_path):
    table = SCHEMA.empty_table().drop_columns(["weight_versions"])
    pq.write_table(table, tmp_path / "trajectories.parquet")
    return tmp_path, "has no column 'weight_versions'"


def other_type(tmp_path):
    table = SCHEMA.empty_table()
    table = table.set_column(0, "uid", pa.array([], pa.int64()))
    pq.write_table(table, tmp_path / "trajectories.parquet")
    return tmp_path, "column 'uid' has type int64"


def newer_version(tmp_path):
    table = SCHEMA.empty_table().replace_schema_metadata({"turnwise_schema": "99"})
    pq.write_table(table, tmp_path / "trajectories.parquet")
    return tmp_path, "its columns are of another version: 99 in the file, but this turnwise reads versions 1 to 6"


def two_files(tmp_path):
    write_run(tmp_path, [build_episode()])
    shutil.copy(tmp_path / "trajectories.parquet", tmp_path / "trajectories.jsonl")
    return tmp_path, "holds both"


def other_lines(tmp_path):
    (tmp_path / "trajectories.jsonl").write_text('{"question": 1}\n')
    return tmp_path, "has no column 'uid'"


@pytest.mark.parametrize(
    "case",
    [bad_folder, missing, text_file, other_version, other_type, newer_version, two_files, other_lines],
)
def test_a_bad_run_gets_one_line(tmp_path, capsys, case):
    """A path that is no run, or a run of another version, gives exit code 2 and one line with the reason."""
    path, reason = case(tmp_path)

    assert main(["view", str(path)]) == 2

    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1


def test_a_file_of_the_first_version_opens(tmp_path, serve):
    """A file without the columns of later versions has its episodes; the columns that it lacks are null."""
    run = write_run(tmp_path, [build_episode(1), several_records(2)])
    file = run / "trajectories.parquet"
    assert serve(run).get("runs/0/episode", key="task-0001/0")["replicas"] == [1, 3]
    old = pq.read_table(file).drop_columns([*ADDED]).replace_schema_metadata({"turnwise_schema": "1"})
    pq.write_table(old, file, row_group_size=1)

    client = serve(run)

    assert client.get("runs/0/episodes")["total"] == 2
    assert client.get("runs/0/episode", key="task-0002/0")["replicas"] is None
    assert client.get("runs/0/tokens", key="task-0002/0", record=1)["ids"][3:5] == [5, 7]
