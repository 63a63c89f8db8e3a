"""
The pictures of a replica, which holds each once and asks for the ones that it lacks.

A request carries the names of its pictures. So the bytes of a picture come once for each replica, whichever worker is
asked first, and no worker has to know what a replica holds: one that restarts asks again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

from attrs import define, field

from turnwise.media import Picture, PictureName, find_held
from turnwise.sized_cache import SizedCache

Ask = Callable[[PictureName], None]
"""Asks the sender of a request for a picture of the request."""

_MAX_BYTES: Final = 512 << 20


@define(eq=False)
class _Wanted:
    """A picture that was asked for, and the requests that wait for it; the first one's sender was asked."""

    arrived: asyncio.Future[Picture]
    waiting: dict[object, Ask] = field(factory=dict)


@define(eq=False)
class PictureStore:
    """
    Pictures by name.

    Attributes:
        max_bytes: of the pictures that it holds itself; it keeps the ones that were asked for last.
        find_in_use: returns a picture that the process holds for other reasons, such as a running request.
    """

    max_bytes: int = _MAX_BYTES
    find_in_use: Callable[[PictureName], Picture | None] = find_held
    _held: SizedCache[PictureName, Picture] = field(init=False)
    _wanted: dict[PictureName, _Wanted] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self._held = SizedCache(self.max_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of the pictures that it holds itself."""
        return self._held.size

    def add(self, picture: Picture) -> None:
        """Keep a picture, and give it to the requests that wait for it."""
        self._keep(picture)
        if wanted := self._wanted.pop(picture.name, None):
            wanted.arrived.set_result(picture)

    async def find(self, names: Iterable[PictureName], ask: Ask) -> dict[PictureName, Picture]:
        """
        Return the pictures of a request; wait for the ones that are not here.

        Each is asked for once, also if many requests wait for it. If the request whose sender was asked ends meanwhile,
        the sender of another one is asked.
        """
        found: dict[PictureName, Picture] = {}
        waits: dict[PictureName, _Wanted] = {}
        request = object()
        try:
            for name in dict.fromkeys(names):
                if held := self._get(name):
                    found[name] = held
                else:
                    waits[name] = self._join(name, request, ask)
            if waits:
                # Not the futures themselves: the end of this request must not cancel the wait of others.
                await asyncio.wait([wanted.arrived for wanted in waits.values()])
            return found | {name: wanted.arrived.result() for name, wanted in waits.items()}
        finally:
            for name, wanted in waits.items():
                self._leave(name, wanted, request)

    def _get(self, name: PictureName) -> Picture | None:
        # A picture that was forgotten here and is still in use is kept again.
        if picture := self._held.get(name) or self.find_in_use(name):
            self._keep(picture)
        return picture

    def _keep(self, picture: Picture) -> None:
        self._held.put(picture.name, picture, len(picture.data))

    def _join(self, name: PictureName, request: object, ask: Ask) -> _Wanted:
        if (wanted := self._wanted.get(name)) is None:
            wanted = self._wanted[name] = _Wanted(asyncio.get_running_loop().create_future())
            ask(name)
        wanted.waiting[request] = ask
        return wanted

    def _leave(self, name: PictureName, wanted: _Wanted, request: object) -> None:
        if wanted.arrived.done():
            return
        was_asked = next(iter(wanted.waiting)) is request
        del wanted.waiting[request]
        if not wanted.waiting:
            del self._wanted[name]
        elif was_asked:
            next(iter(wanted.waiting.values()))(name)
