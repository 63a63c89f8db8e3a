"""`turnwise view --export`: the choice of episodes, the bound, and the content of the file."""

import base64
import gzip
import hashlib
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from viewer_runs import HOSTILE, build_episode, failed_episode, mixed_run, write_run

from turnwise.cli import main
from turnwise_viewer.html_export import _block as block_of


def export(folder, *options):
    """Export a run; return the text of the file."""
    file = folder / "out" / "page.html"
    assert main(["view", str(folder), "--export", str(file), *options]) == 0
    return file.read_text()


def blocks(text):
    """Return the answers in an exported page by name."""
    found = re.findall(
        r'<script type="text/plain" data-name="([a-z]+(?:/[\w.]+)*|runs)">([A-Za-z0-9+/=]+)</script>', text
    )
    return {name: json.loads(gzip.decompress(base64.b64decode(content))) for name, content in found}


def exported_keys(text):
    return [row["key"] for row in blocks(text)["rows/0"]["rows"]]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), ["task-0000/0", "task-0001/0", "task-0002/0", "task-0003/0"]),
        (("--episodes", "task-0002/0", "task-0000/0"), ["task-0000/0", "task-0002/0"]),
        (("--status", "failed"), ["task-0003/0"]),
        (("--min-reward", "0.5"), ["task-0001/0", "task-0002/0"]),
        (("--max-reward", "0.5", "--tools", "unused"), ["task-0000/0"]),
        (("--uid", "task-0001"), ["task-0001/0"]),
        (("--search", "the ANSWER of task 2"), ["task-0002/0"]),
    ],
)
def test_the_choice_is_exported(tmp_path, options, expected):
    """The file has the chosen episodes with their tokens, in the order of the run, and nothing of the others."""
    run = [build_episode(0, reward=0.0), build_episode(1), build_episode(2), failed_episode(3)]
    text = export(write_run(tmp_path, run), *options)

    found = blocks(text)

    assert exported_keys(text) == expected
    assert [found[f"episode/0/{number}"]["key"] for number in range(len(expected))] == expected
    assert sum(name.startswith("episode/") for name in found) == len(expected)
    with_records = [key for key in expected if key != "task-0003/0"]
    assert sum(name.startswith("tokens/") for name in found) == len(with_records)
    assert found["runs"]["runs"][0]["num_all"] == 4
    assert str(tmp_path) not in json.dumps(found)


def test_a_group_has_the_figures_of_the_whole_run(tmp_path):
    """The mean of a group is that of all its episodes, also when the file has one of them."""
    run = [build_episode(task, n, reward=float(n)) for task in range(2) for n in range(3)]

    groups = blocks(export(write_run(tmp_path, run), "--episodes", "task-0001/2"))["groups/0"]["groups"]

    assert [(each["uid"], each["mean"], len(each["episodes"])) for each in groups] == [("task-0001", 1.0, 3)]


def test_the_policy_names_the_only_script_and_style(tmp_path):
    """The digests of the policy are those of the page's script and style, and there is no other code."""
    text = export(mixed_run(tmp_path))
    policy = re.search('http-equiv="Content-Security-Policy" content="([^"]+)"', text)[1]
    script, style = (
        re.search(f"<{tag}>(.*?)</{tag[:6].strip()}>", text, re.S)[1] for tag in ('script type="module"', "style")
    )

    for name, content in (("script-src", script), ("style-src", style)):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{name} 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    assert len(re.findall('<script(?! type="text/plain")', text)) == 1


@given(st.recursive(st.text() | st.sampled_from([HOSTILE, "</script>", "<!--"]), st.lists))
def test_no_text_is_part_of_the_markup(value):
    """Any text of an episode arrives as it is, and its element ends only at its own end."""
    element = block_of("episode/0/0", {"value": value})

    assert element.count(b"<") == 2
    assert blocks(element.decode())["episode/0/0"]["value"] == value


def test_a_file_that_is_too_large_is_refused(tmp_path, capsys):
    """Above the bound the command says how many episodes fit, and leaves no file behind."""
    run = write_run(tmp_path, [build_episode(task) for task in range(40)])
    out = tmp_path / "out"

    assert main(["view", str(run), "--export", str(out / "page.html"), "--max-mb", "0.09"]) == 2

    error = capsys.readouterr().err
    assert re.search(r"page.html: [1-3]?\d of 40 episodes fit into 0.09 MB; choose fewer with --episodes", error)
    assert list(out.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--export", "{}/page.html", "--episodes", "other/0"], "--episodes: the run has no episode 'other/0'"),
        (["--export", "{}/page.html", "--uid", "other"], "no episode matches"),
        (["--export", "{}/page.html", "--uid", "x", "--episodes", "y"], "leave out --uid"),
        (["--export", "{}/page.html", "--port", "80"], "leave out --port"),
        (["--export", "{}/trajectories.parquet"], "does not end in .html"),
        (["--export", "{}"], "does not end in .html"),
        (["--export", "{}/trajectories.parquet/page.html"], "cannot be written"),
        (["--status", "failed"], "--status needs --export FILE.html"),
        (["--max-mb", "3"], "--max-mb needs --export FILE.html"),
    ],
)
def test_a_bad_export_gets_one_line(tmp_path, capsys, options, reason):
    """Options that do not fit give exit code 2 and one line; the run stays as it was."""
    run = write_run(tmp_path / "run", [build_episode()])
    before = (run / "trajectories.parquet").read_bytes()

    assert main(["view", str(run), *(each.format(run) for each in options)]) == 2

    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1
    assert (run / "trajectories.parquet").read_bytes() == before
    assert [each.name for each in run.iterdir()] == ["trajectories.parquet"]
