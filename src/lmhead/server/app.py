"""The ASGI applications: guard, web page, and the APIs on opened models."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from lmhead.explorer import page_folder
from lmhead.models import LanguageModel
from lmhead.server.api_context import ApiContext
from lmhead.server.endpoints import all_routes
from lmhead.server.guard import Guard, RequestRecord, error_response
from lmhead.server.metrics import Metrics
from lmhead.server.openai_api import openai_routes
from lmhead.server.request_limits import Limits
from lmhead.server.static_files import read_page, serve_files
from lmhead.server.worker import Worker

__all__ = ["create_api_app", "create_app"]

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
    """Return an ASGI application that serves the page and the API on these models.

    Args:
        models: by the names that requests use; there may be none.
        hosts: allowed values of the Host header, e.g. "127.0.0.1:8000".
        key: secret that every request must carry; None for none.
        limits: bounds of a request.
        page: folder of the built page; the package's if not given.
        run: folder of a training run to watch, which may not exist yet.
        given: by name, the argument of `lmhead.open_model` that opens the model again, for the
            page's export; the name itself if not given.
        log: called with a record of every request, without prompt and key.
        frames: whether pages of this machine, such as a notebook, may show the page in a frame.
    """
    limits = limits or Limits()
    worker = Worker(limits)
    api = ApiContext(models, worker, limits, None if run is None else run.resolve(), given)
    files = serve_files(read_page(page_folder() if page is None else page), PAGES)

    app = _application(
        [*all_routes(api), Route("/{path:path}", files, methods=["GET", "POST"])], worker
    )
    return Guard(app, hosts=hosts, key=key, limits=limits, log=log, frames=frames)


# More than the web page needs: a request may generate up to the model's context.
API_LIMITS = Limits(
    body_bytes=16 << 20, prompt_tokens=1 << 20, new_tokens=1 << 17, waiting=64, seconds=600.0
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
    """Return an ASGI application with the OpenAI-compatible API on these models.

    Args:
        models: by the names that requests use.
        hosts: allowed values of the Host header, e.g. "127.0.0.1:8000".
        key: secret that every request must carry, OpenAI's `api_key`; None for none.
        limits: bounds of a request.
        log: called with a record of every request, without prompt and key.
        screened: by name, the same models with a screened head, for requests with `certified`.
    """
    worker = Worker(limits)
    metrics = Metrics()
    routes = openai_routes(ApiContext(models, worker, limits), metrics, screened or {})
    metrics.paths = frozenset(route.path for route in routes)

    async def not_found(request: Request) -> Response:  # noqa: ARG001
        return error_response(404, "not_found", "not found")

    def record(request: RequestRecord) -> None:
        metrics.add(request)
        if log is not None:
            log(request)

    anywhere = Route("/{path:path}", not_found, methods=["GET", "POST"])
    app = _application([*routes, anywhere], worker)
    return Guard(app, hosts=hosts, key=key, limits=limits, log=record)


def _application(routes: list[Route], worker: Worker) -> Starlette:
    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        worker.close()

    async def internal_error(request: Request, error: Exception) -> Response:  # noqa: ARG001
        return error_response(500, "broken", "internal error; see the server log")

    return Starlette(
        routes=routes, exception_handlers={Exception: internal_error}, lifespan=lifespan
    )
