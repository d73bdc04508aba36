"""The built page, read into memory once: a request never becomes a path on this machine."""

from __future__ import annotations

import mimetypes
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from lmhead.server.guard import refusal

__all__ = ["File", "read_page", "serve_files"]

# Not every machine's table knows these.
_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


class File(NamedTuple):
    """Bytes and what they are."""

    content: bytes
    media_type: str


def read_page(folder: Path) -> dict[str, File]:
    """Every file of a folder, by the address it will have: "/assets/index.js"."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            kind = _TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0]
            address = "/" + path.relative_to(folder).as_posix()
            found[address] = File(path.read_bytes(), kind or "application/octet-stream")
    return found


def serve_files(
    files: Mapping[str, File], pages: frozenset[str]
) -> Callable[[Request], Awaitable[Response]]:
    """An endpoint for these files; `pages` are addresses that all show index.html."""

    async def endpoint(request: Request) -> Response:
        path = request.url.path
        file = files.get("/index.html" if path in pages else path)
        if file is None or request.method == "POST":
            return refusal(404, "not_found", "there is nothing at this address")
        return Response(file.content, media_type=file.media_type)

    return endpoint
