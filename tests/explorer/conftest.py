"""A browser, servers with the built page, and a guard against requests to other hosts.

The browser resolves no host but this machine, and a request to any other host fails the test.
Requests are listened to, not intercepted: interception switches the browser's cache off, and then
every page is fetched and compiled again.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from llama2c_files import (
    random_weights,
    tiny_model,
    vocabulary,
    write_checkpoint,
    write_vocabulary,
)
from playwright.sync_api import Browser, Page, Request, sync_playwright
from server.serve_tiny import running

from explorer.sites import HOSTILE
from lmhead.explorer import page_folder
from lmhead.models import LanguageModel, load_llama2c, open_model

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
THIS_MACHINE = ("127.0.0.1", "localhost")
OPTIONS = [
    "--no-sandbox",
    f"--host-resolver-rules=MAP * ~NOTFOUND, {', '.join(f'EXCLUDE {h}' for h in THIS_MACHINE)}",
]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    found = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if found is None:
        message = "no Chromium here: apt-get install chromium"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=OPTIONS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def site() -> Iterator[str]:
    """The address of a server with the built page and no model."""
    with running(page_folder(), models={}) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="session")
def watched(browser: Browser, site: str) -> Iterator[tuple[Page, list[str]]]:
    """A page, and its console messages, errors and requests to other hosts."""
    context = browser.new_context(base_url=site, locale="en-US", reduced_motion="reduce")
    messages: list[str] = []

    def only_here(request: Request) -> None:
        address = urlsplit(request.url)
        if address.scheme not in ("data", "blob") and address.hostname not in THIS_MACHINE:
            messages.append(f"request to {address.netloc}")

    context.on("request", only_here)
    page = context.new_page()
    page.set_default_timeout(10_000)
    page.on("console", lambda message: messages.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: messages.append(str(error)))
    yield page, messages
    context.close()


@pytest.fixture
def page(watched: tuple[Page, list[str]]) -> Iterator[Page]:
    """The page; a test fails on a console message or on a request to another host."""
    page, messages = watched
    page.set_viewport_size({"width": 1280, "height": 900})
    yield page
    clear_storage(page)
    found, messages[:] = list(messages), []
    assert not found


def clear_storage(page: Page) -> None:
    """Remove what the tab has stored: prompts being typed, the state of pages."""
    if page.url.startswith("http"):
        page.evaluate("() => sessionStorage.clear()")


def hostile_model(folder: Path) -> LanguageModel:
    """A model with tokens that are markup, for pages that must show them as text."""
    folder.mkdir()
    write_vocabulary(folder / "tok300.bin", vocabulary([" ", "a", "b", *HOSTILE]))
    return load_llama2c(write_checkpoint(folder / "tiny.bin", random_weights(3)))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the models of `models` are: tiny.bin, hostile/tiny.bin."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def models(folder: Path) -> dict[str, LanguageModel]:
    return {"tiny": tiny_model(folder), "hostile": hostile_model(folder / "hostile")}


@pytest.fixture(scope="session")
def address(models: dict[str, LanguageModel]) -> Iterator[str]:
    """The address of a server with these models."""
    with running(page_folder(), models=models) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="session")
def bilingual() -> Iterator[str]:
    """The address of a server with `tiny`, which has tokens for both languages."""
    with running(page_folder(), models={"tiny": open_model("tiny")}) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def origin(watched: tuple[Page, list[str]], address: str) -> Iterator[str]:
    """`address`; the page is left, which ends its requests, before the server there ends."""
    yield address
    page, _ = watched
    clear_storage(page)
    page.goto("about:blank")


@pytest.fixture
def here(page: Page, origin: str) -> Iterator[Page]:
    """The page may use the clipboard at this address.

    A test begins on the page of the test before it: from `about:blank` each would start a process.
    """
    page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=origin)
    yield page
    page.evaluate("() => window.stop()")  # aborts pending requests
