"""
The JSON API of the viewer, version 1.

Every route is a GET below `/TOKEN/api/v1`; `events` is a stream of server-sent events, and `picture` is a file. An
error is `{"error": "one line"}` with status 400 or 404. docs/how-to/view-a-run.md describes the routes for programs.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

from aiohttp import web
from attrs import define, field

from turnwise.errors import DataError
from turnwise.media import Picture
from turnwise.types import JsonDict
from turnwise_viewer.episode_groups import list_groups
from turnwise_viewer.episode_index import Filter
from turnwise_viewer.plain_json import encode
from turnwise_viewer.run_events import RunEvents
from turnwise_viewer.run_folder import RunFolder
from turnwise_viewer.text_search import Found, check_searchable
from turnwise_viewer.timeline_bounds import bound
from turnwise_viewer.training_metrics import read_series

VERSION: Final = 1
_LARGEST_PAGE: Final = 500
_MISSING_NUMBER: Final = -1


@define(eq=False)
class Routes:
    """The routes over some runs, which requests name by their number."""

    runs: Sequence[RunFolder]
    events: RunEvents = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.events = RunEvents(self._describe_runs)

    def list(self) -> list[web.RouteDef]:
        """Return the routes."""
        run = f"/api/v{VERSION}/runs/{{run}}"
        return [
            web.get(f"/api/v{VERSION}/runs", self._list_runs),
            web.get(f"/api/v{VERSION}/events", self.events.stream),
            web.get(f"{run}/episodes", self._answer(_list_episodes)),
            web.get(f"{run}/episode", self._answer(lambda run, query: run.episode(query.text("key")))),
            web.get(f"{run}/picture", self._answer(_show_picture)),
            web.get(f"{run}/case", self._answer(lambda run, query: {"source": run.case(query.text("key"))})),
            web.get(f"{run}/tokens", self._answer(_show_tokens)),
            web.get(f"{run}/running", self._answer(lambda run, _query: run.running(), needs_episodes=False)),
            web.get(f"{run}/groups", self._answer(_list_groups)),
            web.get(f"{run}/metrics", self._answer(_show_metrics, needs_episodes=False)),
            web.get(f"{run}/timeline", self._answer(_show_timeline)),
        ]

    async def _list_runs(self, _request: web.Request) -> web.Response:
        return await _respond(self._describe_runs)

    def _describe_runs(self) -> JsonDict:
        return {"version": VERSION, "runs": [_describe_run(run) for run in self.runs]}

    def _answer(
        self, answer: Callable[[RunFolder, Query], JsonDict | Picture], *, needs_episodes: bool = True
    ) -> Callable[[web.Request], Any]:
        # A damaged file of episodes must not cost the answers that come from other files.
        async def handle(request: web.Request) -> web.Response:
            number = request.match_info["run"]
            if not (number.isdecimal() and number.isascii() and len(number) < 9 and int(number) < len(self.runs)):
                return json_response({"error": f"there is no run {number!r}"}, 404)
            run = self.runs[int(number)]

            return await _respond(lambda: answer(_fresh(run) if needs_episodes else run, Query(request)))

        return handle


class Query:
    """The parameters of a request; a bad one is a `DataError`."""

    def __init__(self, request: web.Request) -> None:
        self._values = request.query

    def text(self, name: str, default: str | None = None) -> str:
        """Return a text; without a default it must be there."""
        value = self._values.get(name, default)
        if value is None:
            raise DataError(f"the parameter {name!r} is missing")
        return value

    def number(self, name: str) -> float | None:
        """Return a finite number, None if it is not there."""
        text = self._values.get(name, "")
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise DataError(f"{name}: {text!r} is not a number")
        return value

    def whole(self, name: str, default: int) -> int:
        """Return a whole number from 0."""
        value = self.number(name)
        if value is None:
            return default
        if value < 0 or value != int(value) or value > 2**53:
            raise DataError(f"{name}: {value:g} is not a whole number from 0")
        return int(value)

    def page(self) -> slice:
        """Return the rows that `offset` and `limit` name."""
        offset, limit = self.whole("offset", 0), self.whole("limit", 100)
        if limit > _LARGEST_PAGE:
            raise DataError(f"limit: {limit} is more than {_LARGEST_PAGE}")
        return slice(offset, offset + limit)

    def step(self) -> int | None:
        """Return the step of a training that the request names; None if it names none."""
        step = self.whole("step", _MISSING_NUMBER)
        return None if step == _MISSING_NUMBER else step

    def filter(self) -> Filter:
        """Return the conditions on episodes."""
        kind = self.text("validation", "")
        if kind not in ("", "true", "false"):
            raise DataError(f"validation: {kind!r} is neither true nor false")
        return Filter(
            status=tuple(self._values.getall("status", [])),
            min_reward=self.number("min_reward"),
            max_reward=self.number("max_reward"),
            tools=self.text("tools", ""),
            step=self.step(),
            validation=None if not kind else kind == "true",
            uid=self.text("uid", ""),
        )


def _list_episodes(run: RunFolder, query: Query) -> JsonDict:
    page, wanted, text = query.page(), query.filter(), check_searchable(query.text("q", ""))
    index = run.index
    if not len(index):
        return {"total": 0, "at_most": 0, "searched": 1.0, "settled": True, "episodes": []}
    order, sort = query.text("order", "asc"), query.text("sort", "row")
    if order not in ("asc", "desc"):
        raise DataError(f"order: {order!r} is neither asc nor desc")
    if text:
        found = run.search(text, wanted, page.stop, sort, descending=order == "desc")
    else:
        found = Found(index.sort(index.select(wanted), sort, descending=order == "desc"))
    return {
        "total": len(found.numbers),
        "at_most": len(found.numbers) + found.num_open,
        "searched": found.searched,
        "settled": found.is_settled,
        "episodes": index.rows(found.numbers[page]),
    }


def _list_groups(run: RunFolder, query: Query) -> JsonDict:
    return list_groups(run.index, query.filter(), query.page(), query.text("sort", "order"), run.advantages)


def _show_picture(run: RunFolder, query: Query) -> Picture:
    return run.picture(query.text("key"), query.text("name"))


def _show_tokens(run: RunFolder, query: Query) -> JsonDict:
    return run.tokens(query.text("key"), query.whole("record", 0))


def _show_metrics(run: RunFolder, _query: Query) -> JsonDict:
    return read_series(run.folder).as_json()


def _show_timeline(run: RunFolder, query: Query) -> JsonDict:
    step = -1 if query.text("step", "") == "last" else query.step()
    timeline = run.timeline(query.text("key", ""), step)
    return {"timeline": None if timeline is None else bound(timeline)}


def _describe_run(run: RunFolder) -> JsonDict:
    """Return a run, with the error if a file cannot be read now; the other runs must not suffer for it."""
    try:
        return _fresh(run).describe() | {"error": run.problem}
    except DataError as error:
        return run.describe() | {"error": str(error)}


def _fresh(run: RunFolder) -> RunFolder:
    run.refresh()
    return run


async def _respond(answer: Callable[[], JsonDict | Picture]) -> web.Response:
    """Answer in a thread, because files are read; errors of the caller become one line."""
    try:
        return await asyncio.to_thread(lambda: _write(answer()))
    except DataError as error:
        return json_response({"error": str(error)}, 400)


def _write(found: JsonDict | Picture) -> web.Response:
    """Return a response of JSON, or of a picture, whose type its bytes have told."""
    if isinstance(found, Picture):
        return web.Response(body=found.data, content_type=found.media_type)
    return json_response(found)


def json_response(value: JsonDict, status: int = 200) -> web.Response:
    """Return a response of JSON."""
    return web.Response(body=encode(value), status=status, content_type="application/json")
