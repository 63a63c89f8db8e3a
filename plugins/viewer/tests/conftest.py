"""Fixtures: a running server, and a client of its API."""

import asyncio
import json
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from attrs import define

sys.path.insert(0, str(Path(__file__).parent))

from viewer_runs import CHROMIUM, GUARD_S

from turnwise_viewer import text_search
from turnwise_viewer.run_folder import RunFolder
from turnwise_viewer.text_search import TextSearch
from turnwise_viewer.viewer_server import ViewerServer

FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


@define
class Client:
    """Requests to a running server."""

    url: str

    def get(self, path: str, **parameters: object) -> dict:
        """Return the JSON of a request that succeeds."""
        status, body, _headers = self.ask(f"api/v1/{path}", **parameters)
        assert status == 200, body
        return json.loads(body)

    def error(self, path: str, **parameters: object) -> tuple[int, str]:
        """Return status and error of a request that fails."""
        status, body, _headers = self.ask(f"api/v1/{path}", **parameters)
        assert status >= 400, body
        return status, json.loads(body)["error"]

    def ask(self, path: str, headers: dict | None = None, **parameters: object) -> tuple[int, bytes, dict]:
        """Return status, body and headers of any request below the token."""
        query = urllib.parse.urlencode(parameters, doseq=True, errors="surrogatepass")
        request = urllib.request.Request(f"{self.url}{path}?{query}", headers=headers or {})
        try:
            with urllib.request.urlopen(request) as response:
                return response.status, response.read(), dict(response.headers)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read(), dict(error.headers)


@pytest.fixture
def serve() -> Iterator[Callable[..., Client]]:
    """Return a function that serves runs until the end of the test."""
    with ExitStack() as stack:

        def start(*paths: Path) -> Client:
            runs = [RunFolder.open(path) for path in paths]
            for run in runs:
                stack.callback(run.close)
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=loop.run_forever)
            thread.start()
            server = ViewerServer(runs)
            asyncio.run_coroutine_threadsafe(server.start(), loop).result()

            def stop() -> None:
                asyncio.run_coroutine_threadsafe(server.stop(), loop).result()
                asyncio.run_coroutine_threadsafe(loop.shutdown_default_executor(), loop).result()
                loop.call_soon_threadsafe(loop.stop)
                thread.join()
                loop.close()

            stack.callback(stop)
            return Client(server.url)

        yield start


@pytest.fixture
def reads(monkeypatch):
    """The groups that searches have read, in order; a search reads one group at a time, and `hold` holds some back."""

    class Reads(list):
        held = frozenset()
        released = threading.Event()

        def hold(self, groups):
            self.held, self.released = frozenset(groups), threading.Event()

    reads = Reads()
    search = TextSearch._search

    def watch(self, groups, batch):
        if reads.held & {*batch}:
            assert reads.released.wait(GUARD_S)
        reads.extend(batch)
        return search(self, groups, batch)

    monkeypatch.setattr(TextSearch, "_search", watch)
    monkeypatch.setattr(text_search, "_ROWS_AT_ONCE", 1)
    monkeypatch.setattr(text_search, "_NUM_THREADS", 2)
    yield reads
    reads.released.set()


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    """A headless Chromium with a new profile; needs `apt-get install chromium` and `pip install playwright`."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    # Tests wait for states of the page; the limit is a guard against a hang, as a busy machine takes its time.
    sync_api.expect.set_options(timeout=GUARD_S * 1000)
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS, timeout=GUARD_S * 1000)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser) -> Iterator[Callable[..., object]]:
    """Return a function that opens an address; an error in the console, or a foreign request, fails the test."""
    problems, contexts = [], []

    def open_page(url: str, place: str = "", scheme: str = "light", width: int = 1280):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        context.set_default_timeout(GUARD_S * 1000)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("dialog", lambda dialog: problems.append(f"dialog: {dialog.message}"))
        page.on("request", lambda each: None if each.url.startswith((url, "data:")) else problems.append(each.url))
        page.goto(f"{url}#/{place}")
        page.wait_for_selector("#heading")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []


@pytest.fixture
def look(serve, visit) -> Callable[..., object]:
    """Return a function that serves runs and opens their page, as `visit`; pages close before their server stops."""
    return lambda *runs, **options: visit(serve(*runs).url, **options)
