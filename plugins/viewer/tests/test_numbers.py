"""The page's texts of numbers, and the scales of its charts, for any number; run by node from the page's sources."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

WEB = Path(__file__).parents[1] / "web"
ESBUILD = WEB / "node_modules/.bin/esbuild"
EDGES = [
    0.0,
    1e308,
    -1e308,
    1.7976931348623157e308,
    -1.7976931348623157e308,
    5e-324,
    1e16,
    1e16 + 2,
    0.1,
    1e-3,
    99999.95,
]
EDGES += [999_999_999_999.0, 1e12, -1e12, 123456.789, -0.0009999, 1e5, 2.0**53]
NUMBERS = st.sampled_from(EDGES) | st.floats(allow_nan=False, allow_infinity=False)
PROGRAM = """
import { cut, literal, logProbability, number, seconds, shorten, signed } from "WEB/src/text.ts";
import { scaleOf } from "WEB/src/scale.ts";
import { createInterface } from "node:readline";
for await (const line of createInterface({ input: process.stdin })) {
  const [values, text, length] = JSON.parse(line);
  const { low, high, ticks, place } = scaleOf(values);
  console.log(JSON.stringify({
    texts: values.map((at) => [number(at), number(at, 2), signed(at), seconds(Math.abs(at)), logProbability(at)]),
    ends: [low, high], ticks, places: values.map(place), marks: ticks.map(place),
    cut: cut(text, length), shorten: shorten(text, length), whole: literal(text),
  }));
}
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Return a function that calls the page's functions in one process of node."""
    if shutil.which("node") is None or not ESBUILD.exists():
        pytest.skip("node is not installed, or `npm --prefix plugins/viewer/web ci` has not run")
    folder = tmp_path_factory.mktemp("node")
    (folder / "program.ts").write_text(PROGRAM.replace("WEB", str(WEB)))
    built = folder / "program.mjs"
    subprocess.run(
        [ESBUILD, folder / "program.ts", "--bundle", "--platform=node", "--format=esm", f"--outfile={built}"],
        check=True,
        capture_output=True,
    )
    with subprocess.Popen(["node", built], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def call(values, text="", length=1):
            process.stdin.write(json.dumps([values, text, length]) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield call
        process.stdin.close()


@settings(max_examples=200)
@given(value=NUMBERS)
def test_a_number_is_short(page, value):
    """No number has more than 15 characters and a sign, and its text is the number up to its last digit."""
    (texts,) = page([value])["texts"]

    assert all(len(each) <= 16 for each in texts), texts
    plain = float(texts[0].replace(",", ""))
    if abs(value) < 1.79e308:  # the text of a larger one is 1.80e+308, which no float can hold
        assert plain == pytest.approx(value, rel=6e-3, abs=1e-320)
    assert texts[2].lstrip("+").replace("\N{MINUS SIGN}", "-") == texts[0]
    if value == int(value) and abs(value) < 1e12:
        assert plain == value


@settings(max_examples=200)
@given(values=st.lists(NUMBERS, min_size=1, max_size=5))
def test_a_scale_has_every_value(page, values):
    """Whatever the values are, all are drawn between the ends, and the marks are few, in order, and between them."""
    answer = page(values)
    (low, high), ticks, marks = answer["ends"], answer["ticks"], answer["marks"]

    assert low <= min(values)
    assert max(values) <= high
    assert low < high
    assert 2 <= len(ticks) <= 12
    assert ticks == sorted({*ticks})
    assert all(-1e-6 <= each <= 1 + 1e-6 for each in [*marks, *answer["places"]])


@given(text=st.text(st.characters(categories=["L", "So", "Zs"])), length=st.integers(1, 12))
def test_a_cut_text_says_so(page, text, length):
    """A text that is longer than its place has a mark and its length; a character of two units is not divided."""
    answer = page([1.0], text, length)

    units = len(text.encode("utf-16-le")) // 2
    assert text.startswith(answer["cut"])
    if units <= length:
        assert answer["whole"] == answer["shorten"]
    else:
        assert answer["shorten"].endswith(f" … ({units} characters)")
        assert length - 1 <= len(answer["cut"].encode("utf-16-le")) // 2 <= length
