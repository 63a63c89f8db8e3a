"""Pictures in a real browser: in the turns, behind the placeholders of a record, and in an exported page."""

import os
from pathlib import Path

import pytest
from picture_runs import CAT, DOG, SVG, build_pictured, fake, pictured_run, reference

from turnwise.cli import main

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
pytestmark = pytest.mark.slow

AXE = Path(__file__).parents[1] / "web/node_modules/axe-core/axe.min.js"
PLACE = "0/episode?key=task-0000/0"


def alt_of(picture):
    return f"picture {picture.key[:12]}{Path(picture.file_name).suffix}, {len(picture.data):,} bytes"


def expect_drawn(image, picture, size):
    """Wait until the browser has drawn a picture of this size."""
    sync_api.expect(image).to_have_attribute("alt", alt_of(picture))
    image.scroll_into_view_if_needed()
    image.evaluate("each => each.complete || new Promise((done) => each.addEventListener('load', done))")
    assert list(size) == image.evaluate("each => [each.naturalWidth, each.naturalHeight]")


def lines_of(page):
    return page.locator("p.picture")


def test_turns_draw_pictures(tmp_path, look):
    """A picture is between the texts beside it, and that of a tool is in its folded result."""
    page = look(pictured_run(tmp_path), place=PLACE)
    question = page.locator(".message.user")

    expect_drawn(question.locator("img"), CAT, (40, 30))
    assert question.inner_text().split() == ["#0", "user", "Before.", *alt_of(CAT).split(), "Behind."]
    sync_api.expect(page.locator(".message.tool .preview")).to_have_text("Seen: [picture]")
    page.keyboard.press("f")
    expect_drawn(page.locator(".message.tool img"), DOG, (64, 20))


def test_placeholders_open_to_their_picture(tmp_path, look):
    """Each run is marked, is folded above the tokens, and is beside them where one of its tokens is chosen."""
    page = look(pictured_run(tmp_path), place=f"{PLACE}&view=tokens")
    runs = page.locator(".pictures details")
    sync_api.expect(runs).to_have_count(2)
    sync_api.expect(runs.nth(0)).to_have_text("picture at tokens 1 to 3")
    sync_api.expect(page.locator(".tokenview .placed")).to_have_text(
        ["▧ 3 tokens of a picture", "▧ 2 tokens of a picture"]
    )
    assert page.locator("main img").count() == 0

    for number, (picture, size, token) in enumerate([(CAT, (40, 30), 3), (DOG, (64, 20), 8)]):
        runs.nth(number).locator("summary").click()
        expect_drawn(runs.nth(number).locator("img"), picture, size)
        page.locator(f'[data-i="{token}"]').click()
        expect_drawn(page.locator("aside img"), picture, size)
    if AXE.exists():
        page.evaluate(f"{AXE.read_text()}; undefined")
        found = page.evaluate("axe.run()")["violations"]
        assert [
            (each["id"], each["nodes"][0]["html"]) for each in found if each["impact"] in ("serious", "critical")
        ] == []


def test_files_that_cannot_be_shown(tmp_path, look):
    """Each is a line with the reason, and no script of a file runs."""
    run = pictured_run(tmp_path, build_pictured(), build_pictured(1, CAT, fake(SVG)))
    (run / reference(CAT)).unlink()
    (run / reference(DOG)).write_bytes(SVG)
    page = look(run, place=PLACE)
    page.get_by_role("button", name="Unfold").click()

    lines = lines_of(page)
    sync_api.expect(lines).to_have_count(2)
    sync_api.expect(lines.nth(0)).to_contain_text("its file is missing")
    sync_api.expect(lines.nth(1)).to_contain_text("its file is no picture of a known type")
    page = look(run, place=PLACE.replace("task-0000", "task-0001"))
    page.get_by_role("button", name="Unfold").click()
    sync_api.expect(lines_of(page).nth(1)).to_contain_text("data:image/png;base64,")
    sync_api.expect(lines_of(page).nth(1)).to_contain_text("it is no file of the run")
    assert page.locator("main img").count() == 0
    assert "owned" not in page.title()


def test_an_exported_page(tmp_path, visit):
    """It draws the pictures that it has, and says which one was left out."""
    large = fake(CAT.data + os.urandom(300_000))
    file = tmp_path / "page.html"
    run = pictured_run(tmp_path / "run", build_pictured(0, large, DOG), build_pictured(1))
    assert main(["view", str(run), "--export", str(file)]) == 0
    size = file.stat().st_size
    page = visit(file.as_uri(), place=PLACE)
    expect_drawn(page.locator(".message.user img"), large, (40, 30))
    page.get_by_role("button", name="Copy as a test").click()
    sync_api.expect(page.get_by_text("not copied: the source of a test has no place for pictures")).to_be_visible()

    assert main(["view", str(run), "--export", str(file), "--max-mb", str((size - 200_000) / 1e6)]) == 0
    page = visit(file.as_uri(), place=PLACE)
    line = page.locator(".message.user p.picture")
    sync_api.expect(line).to_contain_text("left out of this file, for its size; --max-mb allows more")
    page.get_by_role("button", name="Unfold").click()
    expect_drawn(page.locator(".message.tool img"), DOG, (64, 20))
    page.get_by_role("link", name="Tokens", exact=True).click()
    page.locator(".pictures summary").nth(1).click()
    expect_drawn(page.locator(".pictures img"), DOG, (64, 20))
