"""A tiny model behind the server, and ways to ask it: in this process, or over a socket."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import uvicorn
from llama2c_files import tiny_model

from lmhead.models import LanguageModel
from lmhead.server import Limits, create_app
from lmhead.server.launch import bind, server_config

HOST = "127.0.0.1:8000"

T = TypeVar("T")


def write_page(folder: Path) -> Path:
    """A page of two files, for tests that are not about the real one, and a secret beside it."""
    (folder / "assets").mkdir(parents=True)
    (folder / "index.html").write_text("<!doctype html><title>page</title>")
    (folder / "assets" / "a.js").write_text("1")
    (folder.parent / "secret.txt").write_text("secret")
    return folder


def make_app(page: Path, *, models: dict[str, LanguageModel] | None = None, **options: Any) -> Any:
    options.setdefault("hosts", {HOST})
    if models is None:
        models = {"tiny": tiny_model(page.parent)}
    return create_app(models, page=page, **options)


def finish(work: Coroutine[Any, Any, T]) -> T:
    """What it comes to, in a thread of its own: Playwright keeps this one's event loop."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def ask(app: Any, method: str, path: str, **options: Any) -> httpx.Response:
    """One request, as from the server's own page."""

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{HOST}") as client:
            return await client.request(method, path, **options)

    return finish(run())


@contextmanager
def running(page: Path, **options: Any) -> Iterator[int]:
    """A server on a socket, in a thread of its own; gives its port."""
    with listening(lambda hosts: make_app(page, hosts=hosts, **options), **options) as port:
        yield port


@contextmanager
def listening(
    make: Callable[[set[str]], Any], *, limits: Limits | None = None, **_: Any
) -> Iterator[int]:
    """Any application on a socket, in a thread of its own; gives its port."""
    listener = bind("127.0.0.1", 0)
    port: int = listener.getsockname()[1]
    config = server_config(make({f"127.0.0.1:{port}"}), limits)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            thread.join(0.01)
        yield port
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()
