"""
Pictures that a client names by the URL of another server. Only servers that the run lists are asked.

A redirect could lead to any other server, so none is followed, and no header of the client is passed on. Requests are
read in threads, so this uses the standard library and not aiohttp, which needs the event loop.
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Collection
from http.client import HTTPException, HTTPResponse
from typing import Final
from urllib.parse import SplitResult, urlsplit

from turnwise.errors import DataError
from turnwise.media import MAX_PICTURE_BYTES

FETCH_S: Final = 30.0
"""Longest time of a fetch."""
_CHUNK: Final = 1 << 16


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_arguments: object, **_options: object) -> None:
        return None


def is_fetchable(url: str) -> bool:
    """Return whether a URL names another server."""
    return url[:8].lower().startswith(("http://", "https://"))


def fetch_picture(url: str, hosts: Collection[str], deadline_s: float = FETCH_S) -> bytes:
    """
    Return the bytes of a URL; it blocks, so it runs in a thread.

    Args:
        url: of the scheme `http` or `https`.
        hosts: that may be asked, in the form of `SessionOptions.picture_hosts`.
        deadline_s: seconds for the whole answer.

    Raises:
        DataError: the host is not listed, the server answers with another status than 200 or not in time, or the
            answer is too large.
    """
    shown = f"the URL {url[:60]!r}"
    if (host := _host_of(url, shown)) not in hosts:
        raise DataError(f"{shown} is of the host {host!r}, which is not in agent.picture_hosts")
    ends = time.monotonic() + deadline_s
    opener = urllib.request.build_opener(_NoRedirects)
    try:
        with opener.open(urllib.request.Request(url), timeout=deadline_s) as answer:
            return _read(answer, shown, ends)
    except urllib.error.HTTPError as error:
        error.close()
        raise DataError(f"{shown} cannot be fetched: its server answers with the status {error.code}") from None
    except (OSError, HTTPException, ValueError) as error:
        reason = " ".join(str(getattr(error, "reason", "") or error).split()) or type(error).__name__
        raise DataError(f"{shown} cannot be fetched: {reason}") from error


def _host_of(url: str, shown: str) -> str:
    try:
        parts: SplitResult = urlsplit(url)
        name, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise DataError(f"{shown} cannot be read: {error}") from error
    if "@" in parts.netloc:
        raise DataError(f"{shown} has a user or a password, which is not taken")
    name = f"[{name}]" if ":" in name else name
    return name if port is None else f"{name}:{port}"


def _read(answer: HTTPResponse, shown: str, ends: float) -> bytes:
    if answer.status != 200:
        raise DataError(f"{shown} cannot be fetched: its server answers with the status {answer.status}")
    data = bytearray()
    while chunk := answer.read1(_CHUNK):
        data += chunk
        if len(data) > MAX_PICTURE_BYTES:
            raise DataError(f"{shown} has more than {MAX_PICTURE_BYTES} bytes")
        if time.monotonic() > ends:
            raise DataError(f"{shown} cannot be fetched: its server takes too long")
    if answer.length:
        raise DataError(f"{shown} cannot be fetched: the answer ends too early")
    return bytes(data)
