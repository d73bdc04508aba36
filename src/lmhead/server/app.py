"""The application: guard, files, and the API on opened models."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from lmhead.explorer import page_folder
from lmhead.models import LanguageModel
from lmhead.server.desk import Desk
from lmhead.server.endpoints import all_routes
from lmhead.server.files import read_page, serve_files
from lmhead.server.guard import Guard, refusal
from lmhead.server.limits import Limits
from lmhead.server.work import Worker

__all__ = ["create_app"]

PAGES = frozenset({"/", "/next", "/text", "/lens", "/compare", "/train"})


def create_app(
    models: Mapping[str, LanguageModel],
    *,
    hosts: Collection[str],
    key: str | None = None,
    limits: Limits | None = None,
    page: Path | None = None,
    run: Path | None = None,
    given: Mapping[str, str] | None = None,
) -> ASGIApp:
    """An ASGI application that serves the page and answers about these models.

    Args:
        models: by the names that requests use; there may be none.
        hosts: values of the Host header that are this server's own, e.g. "127.0.0.1:8000".
        key: a secret that every request must show; None for none.
        limits: how much may be asked.
        page: the folder of the built page; that of the package if not given.
        run: the folder of a training run to watch, which may not have begun yet.
        given: by name, what opens a model again (`lmhead.open_model(...)`), for the lines that
            the page lets be copied; the name itself if not given.
    """
    limits = limits or Limits()
    worker = Worker(limits)
    desk = Desk(models, worker, limits, None if run is None else run.resolve(), given)
    files = serve_files(read_page(page_folder() if page is None else page), PAGES)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        worker.close()

    async def broken(request: Request, error: Exception) -> Response:  # noqa: ARG001
        return refusal(500, "broken", "the server made a mistake; its terminal says which")

    app = Starlette(
        routes=[
            *all_routes(desk),
            Route("/{path:path}", files, methods=["GET", "POST"]),
        ],
        exception_handlers={Exception: broken},
        lifespan=lifespan,
    )
    return Guard(app, hosts=hosts, key=key, limits=limits)
