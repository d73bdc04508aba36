"""The ASGI applications: guard, web page, and the APIs on opened models.

The built page is read into memory once, so that no request can reach other files.
"""

from __future__ import annotations

import mimetypes
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp

from lmhead.explorer import page_folder
from lmhead.models import LanguageModel
from lmhead.server.api_context import ApiContext
from lmhead.server.endpoints import all_routes
from lmhead.server.guard import Guard, RequestRecord, error_response
from lmhead.server.metrics import Metrics
from lmhead.server.openai_api import openai_routes
from lmhead.server.request_fields import RequestError
from lmhead.server.request_limits import Limits
from lmhead.server.worker import Worker

PAGES = frozenset({"/", "/learn", "/next", "/text", "/lens", "/compare", "/train", "/glossary"})


def create_app(
    models: Mapping[str, LanguageModel],
    *,
    hosts: Collection[str],
    key: str | None = None,
    limits: Limits | None = None,
    page: Path | None = None,
    run: Path | None = None,
    given: Mapping[str, str] | None = None,
    log: Callable[[RequestRecord], object] | None = None,
    frames: bool = False,
) -> ASGIApp:
    """Return an ASGI application that serves the page, its API, and the OpenAI-compatible API.

    One worker runs the models for both APIs.

    Args:
        models: by the names that requests use; there may be none.
        hosts: allowed values of the Host header, e.g. "127.0.0.1:8000".
        key: secret that every request must carry; None for none.
        limits: bounds of a request; by default those of `Limits` for the page and `API_LIMITS` for
            the OpenAI-compatible API.
        page: folder of the built page; the package's if not given.
        run: folder of a training run to watch, which may not exist yet.
        given: by name, the argument of `lmhead.open_model` that opens the model again, for the
            page's export; the name itself if not given.
        log: called with a record of every request, without prompt and key.
        frames: whether pages of this machine, such as a notebook, may show the page in a frame.
    """
    api_limits = limits or API_LIMITS
    limits = limits or Limits()
    worker = Worker(limits)
    api = ApiContext(models, worker, limits, None if run is None else run.resolve(), given)
    metrics = Metrics()
    openai = openai_routes(ApiContext(models, worker, api_limits), metrics, {})
    files = serve_files(read_page(page_folder() if page is None else page), PAGES)
    app = _application([*all_routes(api), *openai], files, worker)
    record = metrics.recorder(openai, log)
    return Guard(app, hosts=hosts, key=key, limits=api_limits, log=record, frames=frames)


# More than the web page needs: a request may generate up to the model's context.
API_LIMITS = Limits(
    body_bytes=4 << 20, prompt_tokens=1 << 20, new_tokens=1 << 17, waiting=64, seconds=600.0
)


def create_api_app(
    models: Mapping[str, LanguageModel],
    *,
    hosts: Collection[str],
    key: str | None = None,
    limits: Limits = API_LIMITS,
    log: Callable[[RequestRecord], object] | None = None,
    screened: Mapping[str, LanguageModel] | None = None,
) -> ASGIApp:
    """Return an ASGI application with only the OpenAI-compatible API on these models.

    Arguments are those of `create_app`; `screened` has the same models with a screened head, for
    requests with `certified`.
    """
    worker = Worker(limits)
    metrics = Metrics()
    routes = openai_routes(ApiContext(models, worker, limits), metrics, screened or {})

    async def not_found(request: Request) -> Response:  # noqa: ARG001
        return error_response(404, "not_found", "not found")

    app = _application(routes, not_found, worker)
    return Guard(app, hosts=hosts, key=key, limits=limits, log=metrics.recorder(routes, log))


def _application(
    routes: list[Route], otherwise: Callable[[Request], Awaitable[Response]], worker: Worker
) -> Starlette:
    """Return the routes as an application; `otherwise` answers what none of them does."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        worker.close()

    async def anything_else(request: Request) -> Response:
        for route in routes:
            if route.matches(request.scope)[0] is Match.PARTIAL:
                allowed = ", ".join(sorted(route.methods or ()))
                message = f"use {allowed} for this path"
                return error_response(405, "wrong_method", message, allow=allowed)
        return await otherwise(request)

    async def request_error(request: Request, error: Exception) -> Response:  # noqa: ARG001
        assert isinstance(error, RequestError)
        return error.response

    async def internal_error(request: Request, error: Exception) -> Response:  # noqa: ARG001
        return error_response(500, "broken", "internal error; see the server log")

    return Starlette(
        routes=[*routes, Route("/{path:path}", anything_else, methods=["GET", "POST"])],
        exception_handlers={RequestError: request_error, Exception: internal_error},
        lifespan=lifespan,
    )


# Some systems' type tables lack these.
_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


class File(NamedTuple):
    """Content and media type of a file."""

    content: bytes
    media_type: str


def read_page(folder: Path) -> dict[str, File]:
    """Return every file of a folder, by URL path: "/assets/index.js"."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            kind = _TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0]
            address = "/" + path.relative_to(folder).as_posix()
            files[address] = File(path.read_bytes(), kind or "application/octet-stream")
    return files


def serve_files(
    files: Mapping[str, File], pages: frozenset[str]
) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint for these files; every path in `pages` serves index.html."""

    async def endpoint(request: Request) -> Response:
        path = request.url.path
        file = files.get("/index.html" if path in pages else path)
        # A browser that asks for a page, not for a file, gets one that says so; programs get JSON.
        navigates = request.method == "GET" and "text/html" in request.headers.get("accept", "")
        api = path.startswith(("/api/", "/v1/"))
        if file is None and navigates and not api and "." not in path:
            file = files["/index.html"]
            return Response(file.content, 404, media_type=file.media_type)
        if file is None or request.method == "POST":
            return error_response(404, "not_found", "not found")
        return Response(file.content, media_type=file.media_type)

    return endpoint
