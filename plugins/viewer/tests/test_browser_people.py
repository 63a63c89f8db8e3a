"""The page for people: screen readers, small and large screens, light and dark."""

from pathlib import Path

import pytest
from viewer_runs import mixed_run

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
pytestmark = pytest.mark.slow

AXE = Path(__file__).parents[1] / "web/node_modules/axe-core/axe.min.js"
PLACES = {
    "episodes": "tbody tr",
    "groups": ".cards",
    "training": ".heldout",
    "time": ".lane",
    "episode?key=task-0006/0": ".message",
    "episode?key=task-0003/0&view=paths": "canvas",
    "episode?key=task-0005/0&view=tokens": "[data-i]",
    "episode?key=task-0005/0&view=data": ".text",
    "episode?key=task-0005/0&view=time": ".lane",
}
"""Each view, and an element that it has when it is complete."""

SMALLEST_TEXT = """() => {
    const sizes = [];
    for (const each of document.querySelectorAll("body *")) {
        const own = [...each.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.textContent.trim());
        if (!own || !each.checkVisibility() || each.closest(".hidden, .skip")) continue;
        // The text of a picture has the scale of the picture.
        const scale = each instanceof SVGGraphicsElement ? each.getScreenCTM().a : 1;
        sizes.push([parseFloat(getComputedStyle(each).fontSize) * scale, each.outerHTML.slice(0, 100)]);
    }
    return sizes.sort((a, b) => a[0] - b[0])[0];
}"""


@pytest.fixture(
    params=[(800, "dark"), (1280, "light"), (1280, "dark"), (1920, "light"), (3840, "dark"), (3840, "light")]
)
def views(request, tmp_path, look):
    """Go through the views at a width and in a scheme; yield the width, the page and the place of each."""
    width, scheme = request.param
    page = look(mixed_run(tmp_path), scheme=scheme, width=width)
    base = page.url.partition("#")[0]

    def walk():
        for place, complete in PLACES.items():
            page.goto(f"{base}#/0/{place}")
            page.reload()
            page.wait_for_selector(complete)
            yield width, page, place

    return walk()


def test_nothing_serious_for_screen_readers(views):
    """axe finds nothing serious in any view, at four widths, light and dark."""
    if not AXE.exists():
        pytest.skip("axe-core is not installed: run `make viewer-packages`")
    for _width, page, place in views:
        page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
        if place == "groups":
            page.wait_for_selector(".columns .text")
        page.evaluate(f"{AXE.read_text()}; undefined")
        found = page.evaluate("axe.run()")["violations"]
        serious = [
            (each["id"], each["nodes"][0]["html"][:200]) for each in found if each["impact"] in ("serious", "critical")
        ]
        assert serious == [], place


def test_every_view_fits_and_is_large_enough(views):
    """No view is wider than the window, and no text is smaller than 10 pixels, or than 13 on a screen of 3840."""
    for width, page, place in views:
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), place
        size, element = page.evaluate(SMALLEST_TEXT)
        assert size >= (13 if width == 3840 else 10), (place, element)
