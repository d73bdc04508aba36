"""The built page, read into memory once, so that no request can reach other files."""

from __future__ import annotations

import mimetypes
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from lmhead.server.guard import error_response

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
