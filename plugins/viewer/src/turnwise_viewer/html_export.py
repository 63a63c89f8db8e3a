"""
An exported page: runs, the page's script and its style in one HTML file that opens without a server.

Each answer of the API is compressed and in base64, so no text of a model is part of the markup. The policy of the file
names the digests of its script and its style: a browser runs nothing else.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray
from rich.progress import track

from turnwise.console import Console
from turnwise.errors import DataError
from turnwise.files import atomic_write
from turnwise.types import JsonDict
from turnwise_viewer.episode_groups import describe_group
from turnwise_viewer.episode_index import Filter, group_numbers
from turnwise_viewer.plain_json import encode
from turnwise_viewer.run_folder import RunFolder
from turnwise_viewer.training_metrics import read_series

_PAGE: Final = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'sha256-{script_digest}'; \
style-src 'sha256-{style_digest}'; img-src data:; base-uri 'none'; form-action 'none'">
<meta name="referrer" content="no-referrer">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:image/svg+xml;base64,{icon}">
<style>{style}</style>
</head>
<body>
<div id="app"></div>
<noscript>This page needs JavaScript.</noscript>
"""
_END: Final = """\
<script type="module">{script}</script>
</body>
</html>
"""


@frozen
class Choice:
    """
    The episodes of an export.

    Attributes:
        keys: of the episodes; when there are any, the other attributes are not used.
        wanted: conditions on the episodes.
        text: that an episode must have.
    """

    keys: Sequence[str] = ()
    wanted: Filter = field(factory=Filter)
    text: str = ""


def export(runs: Sequence[RunFolder], choice: Choice, file: Path, max_bytes: int) -> int:
    """
    Write the chosen episodes of some runs to an HTML file, whole or not at all. Return their number.

    Raises:
        DataError: no episode is chosen, a key is unknown, or the file would have more than `max_bytes`.
        OSError: the file cannot be written.
    """
    chosen = _choose(runs, choice)
    total = sum(len(numbers) for numbers in chosen)
    if not total and choice != Choice():  # a training that keeps no episodes has curves all the same
        raise DataError("no episode matches, so there is nothing to export")
    script, style = (_asset(name).decode() for name in ("app.js", "app.css"))
    head = _PAGE.format(
        script_digest=_digest(script),
        style_digest=_digest(style),
        style=style,
        icon=base64.b64encode(_asset("icon.svg")).decode(),
        title=html.escape(f"{', '.join(run.name for run in runs)} · turnwise"),
    )
    end = _END.format(script=script).encode()
    size = len(end)
    with atomic_write(file) as partial, partial.open("wb") as stream:
        for num_done, text in _parts(runs, chosen, head):
            size += len(text)
            if size > max_bytes:
                raise DataError(
                    f"{file}: {num_done} of {total} episodes fit into {max_bytes / 1e6:g} MB; choose fewer with "
                    f"--episodes or a filter such as --step, or raise --max-mb"
                )
            stream.write(text)
        for text in _fitting_pictures(runs, chosen, max_bytes - size):
            stream.write(text)
        stream.write(end)
    return total


def _fitting_pictures(
    runs: Sequence[RunFolder], chosen: Sequence[NDArray[np.int64]], num_bytes: int
) -> Iterator[bytes]:
    """Yield the pictures of the episodes, as far as they fit; the page says which ones it has not."""
    for place, (run, numbers) in enumerate(zip(runs, chosen, strict=True)):
        done: set[str] = set()
        for number in numbers.tolist():
            episode: dict[str, Any] = run.episode(number)
            for name, described in episode["pictures"].items():
                if name in done or described["problem"] is not None or described["bytes"] > num_bytes:
                    continue
                done.add(name)
                block = _picture_block(f"picture/{place}/{name}", run, number, name)
                if block is not None and len(block) <= num_bytes:
                    num_bytes -= len(block)
                    yield block


def _picture_block(block: str, run: RunFolder, number: int, name: str) -> bytes | None:
    try:
        picture = run.picture(number, name)
    except DataError:  # its bytes have another digest; the page says that it has no such picture
        return None
    url = f"data:{picture.media_type};base64,{base64.b64encode(picture.data).decode()}"
    return _block(block, {"url": url})


def _choose(runs: Sequence[RunFolder], choice: Choice) -> list[NDArray[np.int64]]:
    """Return the numbers of the chosen episodes of each run, in the order of its file."""
    if not choice.keys:
        return [_search(run, choice) if choice.text else run.index.select(choice.wanted) for run in runs]
    found = [{number for key in choice.keys for number in run.index.numbers(key)} for run in runs]
    for key in choice.keys:
        if not any(len(run.index.numbers(key)) for run in runs):
            raise DataError(f"--episodes: {'the run has' if len(runs) == 1 else 'the runs have'} no episode {key!r}")
    return [np.array(sorted(numbers), np.int64) for numbers in found]


def _search(run: RunFolder, choice: Choice) -> NDArray[np.int64]:
    while (found := run.search(choice.text, choice.wanted, len(run.index))).num_open:
        pass
    return found.numbers


def _parts(runs: Sequence[RunFolder], chosen: Sequence[NDArray[np.int64]], head: str) -> Iterator[tuple[int, bytes]]:
    """Yield the number of episodes so far, and the next bytes of the file, without its end."""
    yield 0, head.encode()
    described = [
        run.describe()
        | {"path": run.name, "error": run.problem, "num_episodes": len(numbers), "is_partial": False}
        | {"num_all": len(run.index), "num_running": 0, "running_revision": ""}
        for run, numbers in zip(runs, chosen, strict=True)
    ]
    yield 0, _block("runs", {"version": 1, "runs": described})
    num_done = 0
    for place, (run, numbers) in enumerate(zip(runs, chosen, strict=True)):
        for name, value in _shared(run, numbers):
            yield num_done, _block(f"{name}/{place}", value)
        for number, blocks in enumerate(_with_progress(run, numbers)):
            yield num_done, b"".join(_block(f"{kind}/{place}/{number}{rest}", value) for kind, rest, value in blocks)
            num_done += 1


def _shared(run: RunFolder, numbers: NDArray[np.int64]) -> Iterator[tuple[str, JsonDict]]:
    """Yield the blocks of a run that are of no single episode; groups are whole, so that their figures are right."""
    index = run.index
    rows = index.rows(numbers) if len(index) else []
    groups = group_numbers(index, range(len(index))) if len(index) else []
    kept = [each for each in groups if np.isin(each, numbers).any()]
    yield "rows", {"rows": rows}
    yield "groups", {"groups": [describe_group(index, each, run.advantages) for each in kept]}
    yield "metrics", read_series(run.folder).as_json()
    yield "timeline", {"timeline": _shorten(run.timeline(), {row["key"] for row in rows})}


def _shorten(timeline: dict[str, Any] | None, keys: set[str]) -> JsonDict | None:
    """Return a timeline without the slices of episodes that are not exported."""
    if timeline is None:
        return None
    rows = [
        row | {"slices": [each for each in row["slices"] if each[4] is None or each[4] in keys]}
        for row in timeline["rows"]
    ]
    return timeline | {"rows": [row for row in rows if row["slices"]]}


def _with_progress(run: RunFolder, numbers: NDArray[np.int64]) -> Iterator[Iterable[tuple[str, str, JsonDict]]]:
    console = Console(stderr=True)
    for number in track(numbers, run.name, console=console, transient=True, disable=not console.is_terminal):
        episode: dict[str, Any] = run.episode(int(number))
        tokens = (run.tokens(int(number), each) for each in range(len(episode["records"])))
        # The reason has paths of this machine, which are nothing to the people who get the file.
        reason = {"no_pieces_because": "the tokenizer of the run was not there when the page was exported"}
        kept = (each if each["pieces"] is not None else each | reason for each in tokens)
        try:
            case: JsonDict = {"source": run.case(int(number))}
        except DataError as error:  # an episode with pictures, for example, which a test has no place for
            case = {"problem": str(error)}
        records = [("tokens", f"/{record}", each) for record, each in enumerate(kept)]
        yield [("episode", "", episode), ("case", "", case), *records]


def _block(name: str, value: JsonDict) -> bytes:
    """Return an element that no browser runs or shows; its content has letters, digits and `+/=` only."""
    content = base64.b64encode(gzip.compress(encode(value), mtime=0))
    return f'<script type="text/plain" data-name="{name}">'.encode() + content + b"</script>\n"


def _asset(name: str) -> bytes:
    return (files("turnwise_viewer") / "static" / name).read_bytes()


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
