"""Pictures of episodes: what the server gives, what it refuses, and what an exported page has."""

import os

import pytest
from picture_runs import CAT, DOG, SVG, build_pictured, digest, fake, pictured_run, reference
from test_export import blocks, export
from viewer_runs import build_episode, write_run, write_step

KEY = "task-0000/0"


def ask(client, name, key=KEY):
    return client.ask("api/v1/runs/0/picture", key=key, name=name)


def test_the_files_of_an_episode(tmp_path, serve):
    """An episode lists its pictures with their sizes, and each is served as the type that its bytes have."""
    client = serve(pictured_run(tmp_path))

    files = client.get("runs/0/episode", key=KEY)["pictures"]
    assert {reference(each): {"bytes": len(each.data), "problem": None} for each in (CAT, DOG)} == files
    for picture in (CAT, DOG):
        status, body, headers = ask(client, reference(picture))
        assert (200, picture.data, picture.media_type) == (status, body, headers["Content-Type"])
        assert "nosniff" == headers["X-Content-Type-Options"]
        assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert [[1, 3, reference(CAT)], [8, 2, reference(DOG)]] == client.get("runs/0/tokens", key=KEY)["pictures"]


def test_an_episode_without_pictures(tmp_path, serve):
    """It lists none."""
    client = serve(write_run(tmp_path, [build_episode()]))

    assert {} == client.get("runs/0/episode", key=KEY)["pictures"]
    assert [] == client.get("runs/0/tokens", key=KEY)["pictures"]


def test_the_files_of_a_training(tmp_path, serve):
    """They are beside the files of its steps."""
    write_step(tmp_path, 1, [build_pictured()], 0.5)
    (tmp_path / "metrics.jsonl").write_text("")

    status, body, _headers = ask(serve(tmp_path), reference(CAT), key=f"{KEY}@1")
    assert (200, CAT.data) == (status, body)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "media",
        "../trajectories.parquet",
        "media/../trajectories.parquet",
        "/etc/passwd",
        "media/../../../../../../../../etc/passwd",
        f"media/{'0' * 64}.png",
        f"media/{digest(b'x')}.svg",
        f"./{reference(CAT)}",
        f"{reference(CAT)}/../{DOG.file_name}",
        f"{reference(CAT)}\0.png",
        reference(CAT).upper(),
    ],
)
def test_names_that_the_episode_has_not(tmp_path, serve, name):
    """There is no way to another file, and the line has no path of the machine."""
    run = pictured_run(tmp_path / "run")
    status, error = serve(run).error("runs/0/picture", key=KEY, name=name)

    assert (400, True) == (status, error.startswith("the episode has no picture"))
    assert str(tmp_path) not in error


def test_pictures_of_other_episodes(tmp_path, serve):
    """The file is there, and the episode does not refer to it."""
    client = serve(pictured_run(tmp_path, build_pictured(0), build_episode(1)))

    assert 200 == ask(client, reference(CAT))[0]
    assert 400 == ask(client, reference(CAT), key="task-0001/0")[0]


@pytest.mark.parametrize("data", [SVG, b"<html><script>1</script></html>", b"MZ\x90", b"\xef\xbb\xbf<?xml?>"])
def test_files_that_are_no_pictures(tmp_path, serve, data):
    """The file has the digest of its name, and is refused for its bytes, whatever its name ends in."""
    picture = fake(data)
    client = serve(pictured_run(tmp_path, build_pictured(0, picture)))

    status, error = client.error("runs/0/picture", key=KEY, name=reference(picture))
    assert (400, True) == (status, "no picture of a known type" in error)
    files = client.get("runs/0/episode", key=KEY)["pictures"]
    assert "its file is no picture of a known type" == files[reference(picture)]["problem"]


def test_missing_and_changed_files(tmp_path, serve):
    """Each is a reason, and the rest of the episode is shown."""
    client = serve(pictured_run(tmp_path))
    (tmp_path / reference(CAT)).unlink()
    (tmp_path / reference(DOG)).write_bytes(DOG.data + b"more")

    files = client.get("runs/0/episode", key=KEY)["pictures"]
    assert "its file is missing" == files[reference(CAT)]["problem"]
    assert "its file is missing" in client.error("runs/0/picture", key=KEY, name=reference(CAT))[1]
    assert "has changed since it was written" in client.error("runs/0/picture", key=KEY, name=reference(DOG))[1]


def test_links_to_other_files(tmp_path, serve):
    """A link in the folder gives nothing of its target, for the bytes have another digest."""
    run = pictured_run(tmp_path / "run")
    secret = tmp_path / "secret.png"
    secret.write_bytes(CAT.data + b"secret")
    (run / reference(CAT)).unlink()
    (run / reference(CAT)).symlink_to(secret)
    (run / reference(DOG)).unlink()
    os.mkfifo(run / reference(DOG))
    client = serve(run)

    assert "has changed" in client.error("runs/0/picture", key=KEY, name=reference(CAT))[1]
    assert "is missing" in client.error("runs/0/picture", key=KEY, name=reference(DOG))[1]


def test_an_exported_page_has_each_picture_once(tmp_path):
    """As a data URL; a broken one is left out, and the episode has the reason."""
    svg = fake(SVG)
    text = export(pictured_run(tmp_path, build_pictured(0), build_pictured(1), build_pictured(2, CAT, svg)))

    found = {name: value["url"] for name, value in blocks(text).items() if name.startswith("picture/")}
    assert {f"picture/0/{reference(CAT)}", f"picture/0/{reference(DOG)}"} == found.keys()
    assert found[f"picture/0/{reference(CAT)}"].startswith("data:image/png;base64,")
    assert "known type" in blocks(text)["episode/0/2"]["pictures"][reference(svg)]["problem"]
    assert text.count(f'data-name="picture/0/{reference(CAT)}"') == 1


def test_an_exported_page_without_room(tmp_path):
    """The pictures that do not fit are left out, and smaller ones are there."""
    large = fake(CAT.data + os.urandom(300_000))
    run = pictured_run(tmp_path, build_pictured(0, large, DOG))
    size = len(export(run))
    text = export(run, "--max-mb", str((size - 100_000) / 1e6))

    names = {name for name in blocks(text) if name.startswith("picture/")}
    assert {f"picture/0/{reference(DOG)}"} == names
