"""The sessions of a server and their keys."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets

from attrs import define

from turnwise_gateway.calls import CallRefusedError, SessionBackend

_SESSION_ID = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")


@define
class _Entry:
    session_id: str
    digest: bytes
    backend: SessionBackend | None


class SessionDirectory:
    """
    Finds sessions by their keys. A session stays until it is forgotten, so that late calls are told that it is over.

    Args:
        model: name of the served model, for the list of models.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._by_id: dict[str, _Entry] = {}
        self._by_digest: dict[bytes, _Entry] = {}

    def add(self, session_id: str, backend: SessionBackend) -> str:
        """
        Add a session and return its new key.

        Args:
            session_id: 1 to 64 letters, digits, `-` and `_`; a part of URLs.
            backend: answers the calls.

        Raises:
            ValueError: the id has another form, or is in use.
        """
        if not _SESSION_ID.match(session_id):
            raise ValueError(f"a session id has 1 to 64 letters, digits, '-' and '_': {session_id!r}")
        if session_id in self._by_id:
            raise ValueError(f"there is a session {session_id!r} already")
        key = secrets.token_urlsafe(32)
        self._add(_Entry(session_id, digest_key(key.encode("ascii")), backend))
        return key

    def add_ended(self, session_id: str, digest: bytes) -> None:
        """Add a session of an earlier process by the digest of its key: its calls are told that it is over."""
        self._add(_Entry(session_id, digest, None))

    def _add(self, entry: _Entry) -> None:
        self._by_id[entry.session_id] = self._by_digest[entry.digest] = entry

    def end(self, session_id: str) -> None:
        """Let go of a session, so that its records can be freed; its calls are told that it is over."""
        self._by_id[session_id].backend = None

    def forget(self, session_id: str) -> None:
        """Remove a session; its key is unknown from now on."""
        entry = self._by_id.pop(session_id)
        del self._by_digest[entry.digest]

    def find(self, key: bytes, session_id: str | None) -> SessionBackend | None:
        digest = digest_key(key)
        entry = self._by_digest.get(digest) if session_id is None else self._by_id.get(session_id)
        # The time of a lookup by digest says nothing about the key, and the comparison takes the same time for all.
        if entry is None or not hmac.compare_digest(entry.digest, digest):
            return None
        if entry.backend is None:
            raise CallRefusedError("session_closed", "the session is over")
        return entry.backend

    def model_name(self) -> str:
        return self._model


def digest_key(key: bytes) -> bytes:
    """Return the digest by which a key is known; it does not tell the key, which is random."""
    return hashlib.sha256(key).digest()
