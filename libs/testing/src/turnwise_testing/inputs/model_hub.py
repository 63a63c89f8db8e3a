"""
A hub of models on loopback, for tests that download without a network.

    with ModelHub() as hub:
        commit = hub.push("owner/model", folder)
        environment = hub.environment(cache)  # for processes that download

It answers the requests of `huggingface_hub` as the hub of Hugging Face does: small files directly, weights by a
redirect to another address, parts of files, errors with `X-Error-Code`. It can break connections off, to test
interruptions.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final, Self
from urllib.parse import unquote, urlsplit

from attrs import define, field

LARGE: Final = (".safetensors", ".bin", ".gguf", ".onnx")
"""Ends of the files that the hub keeps elsewhere and redirects to."""
_CHUNK: Final = 1 << 16


@define
class HubModel:
    """
    A repository.

    Attributes:
        commits: content of the files by path, by commit.
        refs: commit of each branch and tag.
        readers: tokens that may read it; None is everybody.
        gated: whoever may not read it is told that it exists.
    """

    commits: dict[str, dict[str, bytes]] = field(factory=dict)
    refs: dict[str, str] = field(factory=dict)
    readers: frozenset[str] | None = None
    gated: bool = False


@define(eq=False)
class ModelHub:
    """
    The server.

    Attributes:
        models: repositories by id.
        requests: method and path of each request, in order.
        cut_after: the connection of a large file ends after so many bytes of its answer; None sends all of it.
        on_cut: called when a connection was cut.
        ranges: the parts of files that were asked for, as in `bytes=100-`.
        sizes: sizes that the list of files states, by path, where they are not the true ones.
    """

    models: dict[str, HubModel] = field(factory=dict)
    requests: list[str] = field(factory=list)
    cut_after: int | None = None
    on_cut: Callable[[], None] = field(default=lambda: None)
    ranges: list[str] = field(factory=list)
    sizes: dict[str, int] = field(factory=dict)
    port: int = 0
    _server: ThreadingHTTPServer | None = field(default=None, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    @property
    def url(self) -> str:
        """Address of the hub, for `HF_ENDPOINT`."""
        return f"http://127.0.0.1:{self.port}"

    def push(
        self, name: str, files: Path | Mapping[str, bytes], *refs: str, readers: tuple[str, ...] | None = None
    ) -> str:
        """Add a commit with the files of a folder, move the refs to it, `main` if none is given, and return it."""
        if isinstance(files, Path):
            paths = [each for each in sorted(files.rglob("*")) if each.is_file()]
            files = {each.relative_to(files).as_posix(): each.read_bytes() for each in paths}
        model = self.models.setdefault(name, HubModel())
        if readers is not None:
            model.readers = frozenset(readers)
        digest = hashlib.sha1(usedforsecurity=False)
        for path, content in sorted(files.items()):
            digest.update(f"{len(model.commits)} {path} {len(content)}".encode() + content)
        commit = digest.hexdigest()
        model.commits[commit] = dict(files)
        model.refs |= dict.fromkeys(refs or ("main",), commit)
        return commit

    def environment(self, cache: Path, **variables: str) -> dict[str, str]:
        """Return the variables of a process that downloads from this hub into a cache."""
        hub = {"HF_ENDPOINT": self.url, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1"}
        inherited = {key: value for key, value in os.environ.items() if key not in ("HF_TOKEN", "HF_HUB_CACHE")}
        return inherited | hub | variables

    def downloads(self) -> list[str]:
        """Return the files that were sent, in order."""
        sent = [each.split(" ", 1)[1] for each in self.requests if each.startswith("GET ")]
        files = [each for each in sent if "/resolve/" in each or each.startswith("/large/")]
        return [each.split("/resolve/", 1)[1].split("/", 1)[1] if "/resolve/" in each else each for each in files]

    def start(self) -> None:
        """Listen, at the same port as before if there was one."""
        hub = self

        class Handler(_Handler):
            server_hub = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Refuse further connections."""
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()


class _Handler(BaseHTTPRequestHandler):
    server_hub: ModelHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *_arguments: object) -> None:
        """Print nothing."""

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server_hub.requests.append(f"{self.command} {path}")
        if path.startswith("/api/models/"):
            self._answer_api(path.removeprefix("/api/models/"))
        elif path.startswith("/large/"):
            name, commit, file = path.removeprefix("/large/").split("@", 2)
            self._send_file(self.server_hub.models[name].commits[commit][file], {})
        else:
            self._answer_file(path.removeprefix("/"))

    def _answer_api(self, path: str) -> None:
        name, kind, revision = path, "", "main"
        for kind in ("/revision/", "/tree/"):
            if kind in path:
                name, revision = path.split(kind, 1)
                break
        else:
            kind = ""
        model = self._model(name, content=False)
        commit = self._commit(model, revision)
        if model is None or commit is None:
            return
        files = model.commits[commit]
        if kind == "/tree/":
            self._send_json([self._entry(each, files[each]) for each in sorted(files)])
        else:
            siblings = [{"rfilename": each} for each in sorted(files)]
            gated = "manual" if model.gated else False
            info = {"id": name, "sha": commit, "private": False, "gated": gated, "tags": [], "siblings": siblings}
            self._send_json(info)

    def _entry(self, path: str, content: bytes) -> dict[str, object]:
        size = self.server_hub.sizes.get(path, len(content))
        entry: dict[str, object] = {"type": "file", "path": path, "size": size, "oid": _git_id(content)}
        if path.endswith(LARGE):
            entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": size, "pointerSize": 134}
        return entry

    def _answer_file(self, path: str) -> None:
        name, _, rest = path.partition("/resolve/")
        revision, _, file = rest.partition("/")
        model = self._model(name, content=True)
        commit = self._commit(model, revision)
        if model is None or commit is None:
            return
        content = model.commits[commit].get(file)
        if content is None:
            self._refuse(404, "EntryNotFound", commit=commit)
        elif file.endswith(LARGE):
            headers = {
                "X-Repo-Commit": commit,
                "X-Linked-Etag": f'"{hashlib.sha256(content).hexdigest()}"',
                "X-Linked-Size": str(len(content)),
                "Location": f"http://localhost:{self.server_hub.port}/large/{name}@{commit}@{file}",
            }
            self._send(302, b"", headers)
        else:
            self._send_file(content, {"X-Repo-Commit": commit, "ETag": f'"{_git_id(content)}"'})

    def _model(self, name: str, *, content: bool) -> HubModel | None:
        model = self.server_hub.models.get(name)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if model is None or (model.readers is not None and not model.gated and token not in model.readers):
            self._refuse(404 if token else 401, "RepoNotFound")
            return None
        if content and model.gated and token not in (model.readers or ()):
            self._refuse(403 if token else 401, "GatedRepo")
            return None
        return model

    def _commit(self, model: HubModel | None, revision: str) -> str | None:
        if model is None:
            return None
        commit = model.refs.get(revision, revision)
        if commit not in model.commits:
            self._refuse(404, "RevisionNotFound")
            return None
        return commit

    def _send_file(self, content: bytes, headers: Mapping[str, str]) -> None:
        start = 0
        if wanted := self.headers.get("Range"):
            self.server_hub.ranges.append(wanted)
            start = int(wanted.removeprefix("bytes=").split("-")[0])
            ranged = {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
            headers = {**headers, **ranged}
        self._send(206 if wanted else 200, content[start:], {**headers, "Accept-Ranges": "bytes"})

    def _send_json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str, commit: str | None = None) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": code}
        self._send(status, b"", headers if commit is None else {**headers, "X-Repo-Commit": commit})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        cut = self.server_hub.cut_after if self.path.startswith("/large/") else None
        try:
            for place in range(0, len(body) if cut is None else min(cut, len(body)), _CHUNK):
                self.wfile.write(body[place : place + _CHUNK if cut is None else min(place + _CHUNK, cut)])
            self.wfile.flush()
        except OSError:  # the reader has gone
            self.close_connection = True
        if cut is not None and cut < len(body):
            self.close_connection = True
            self.server_hub.on_cut()


def _git_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
