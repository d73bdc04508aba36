"""Checks of every request before any other code sees it: host, origin, key, type, size.

Any website can make a browser send requests to this machine. So every request must carry an
allowed Host header (which a rebound DNS name does not), come from our own page or from no page, and
send JSON, which no HTML form can. There is no CORS: other pages cannot read responses.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple
from urllib.parse import urlencode

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lmhead.server.request_limits import Limits

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
# Content security policy that allows a notebook on this machine to show the page in a frame.
_LOCAL = "'self' http://localhost:* http://127.0.0.1:* https://localhost:* https://127.0.0.1:*"
_FRAMED = {
    **{name: value for name, value in _HEADERS.items() if name != "x-frame-options"},
    "content-security-policy": POLICY.replace(
        "frame-ancestors 'none'", f"frame-ancestors {_LOCAL}"
    ),
}
_METHODS = ("GET", "HEAD", "POST")
_COOKIE = "lmhead_key"


def error_response(
    status: int,
    code: str,
    message: str,
    facts: Mapping[str, float] | None = None,
    *,
    param: str | None = None,
    **headers: str,
) -> JSONResponse:
    """Return an error response in OpenAI's format, with facts in numbers.

    `{"error": {"message": ..., "type": ..., "param": null, "code": ..., **facts}}`; the page
    translates the error by its code and facts.
    """
    error_type = "server_error" if status >= 500 else "invalid_request_error"
    error = {
        "message": message,
        "type": "rate_limit_error" if status == 429 else error_type,
        "param": param,
        "code": code,
        **(facts or {}),
    }
    names = {k.replace("_", "-"): v for k, v in headers.items()}
    return JSONResponse({"error": error}, status, headers=names)


class RequestRecord(NamedTuple):
    """The logged part of a request: never the query, a header or the body.

    These may hold the key or a prompt.
    """

    client: str
    method: str
    path: str
    status: int
    seconds: float

    def __str__(self) -> str:
        path = self.path[:80].encode("unicode_escape").decode("ascii")
        return f"{self.client} {self.method} {path} {self.status} {self.seconds:.3f} s"


class Guard:
    """ASGI middleware that refuses foreign requests and bounds the size of the others.

    `hosts` are the allowed values of the Host header. A request must carry `key`, unless it is
    None, in `Authorization: Bearer ...` or in the cookie that `/?key=...` sets. `log` is called
    with a record of every request. With `frames`, pages of this machine may show the page in a
    frame.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        hosts: Collection[str],
        key: str | None,
        limits: Limits,
        log: Callable[[RequestRecord], object] | None = None,
        frames: bool = False,
    ) -> None:
        self._headers = _FRAMED if frames else _HEADERS
        self.app, self.key, self.limits, self.log = app, key, limits, log
        self.hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # websockets are not supported
            await send({"type": "websocket.close", "code": 1008})
            return
        started = time.monotonic()
        guarded = _with_headers(scope, send, self._headers)
        try:
            await self._handle(scope, receive, guarded)
        finally:
            if self.log is not None:
                client = (scope.get("client") or ("-",))[0]
                status = scope.get("lmhead.status", 499)  # none was sent: the client has left
                seconds = time.monotonic() - started
                self.log(RequestRecord(client, scope["method"], scope["path"], status, seconds))

    async def _handle(self, scope: Scope, receive: Receive, guarded: Send) -> None:
        headers = Headers(scope=scope)
        refused = self._refuse(scope, headers)
        if refused is None and scope["method"] == "POST":
            try:
                receive = await self._body(scope, receive)
            except _BodyTooLarge:
                refused = self._too_large()
            except TimeoutError:
                refused = error_response(
                    408, "too_slow", "the body did not arrive", connection="close"
                )
            except ClientDisconnect:
                return
        if refused is not None and refused.headers.get("connection") == "close":
            await self._refuse_and_close(refused, scope, receive, guarded)
        else:
            await (refused or self.app)(scope, receive, guarded)

    def _refuse(self, scope: Scope, headers: Headers) -> Response | None:
        """Return the error response for a request that is not allowed; None if it is."""
        limit = self.limits.header_lines
        if len(scope["headers"]) > limit:
            return error_response(
                431, "too_many_headers", f"at most {limit} header lines are allowed"
            )
        named = headers.getlist("host")
        if len(named) != 1 or named[0].lower() not in self.hosts:
            return error_response(
                421, "wrong_host", "the Host header is not one of this server's names"
            )
        if scope["method"] not in _METHODS:
            return error_response(405, "wrong_method", "use GET or POST", allow=", ".join(_METHODS))
        own = f"http://{named[0].lower()}"
        foreign = any(origin.lower() != own for origin in headers.getlist("origin"))
        if headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            # A link on another page may open this page, and nothing else.
            opened = headers.get("sec-fetch-mode") == "navigate" and scope["method"] == "GET"
            foreign = foreign or not opened or scope["path"].startswith(("/api/", "/v1/"))
        if foreign:
            return error_response(403, "wrong_origin", "requests from other pages are not allowed")
        keyless = self._without_key(scope, headers)
        if keyless is not None or scope["method"] != "POST":
            return keyless
        content_type = headers.get("content-type", "").split(";")[0].strip().lower()
        if content_type != "application/json":
            return error_response(415, "wrong_type", "the content type must be application/json")
        length = headers.get("content-length", "0")
        if not length.isascii() or not length.isdigit() or int(length) > self.limits.body_bytes:
            return self._too_large()
        return None

    def _too_large(self) -> Response:
        limit = self.limits.body_bytes
        message = f"the body must be at most {limit} bytes"
        return error_response(413, "too_large", message, {"most": limit}, connection="close")

    def _without_key(self, scope: Scope, headers: Headers) -> Response | None:
        if self.key is None:
            return None
        request = Request(scope)
        shown = headers.get("authorization", "").removeprefix("Bearer ")
        if _same(shown, self.key) or _same(request.cookies.get(_COOKIE, ""), self.key):
            return None
        query = request.query_params
        if scope["path"] == "/" and _same(query.get("key", ""), self.key):
            kept = {k: v for k, v in query.items() if k != "key"}
            answer = RedirectResponse("/" + (f"?{urlencode(kept)}" if kept else ""), 303)
            answer.set_cookie(_COOKIE, self.key, httponly=True, samesite="strict")
            return answer
        return error_response(
            401, "no_key", "the key is missing or wrong", www_authenticate="Bearer"
        )

    async def _body(self, scope: Scope, receive: Receive) -> Receive:
        """Read the whole body, within time and size; return a `receive` that replays it."""
        parts: list[bytes] = []
        size = 0
        with anyio.fail_after(self.limits.body_seconds):
            async for part in Request(scope, receive).stream():
                size += len(part)
                if size > self.limits.body_bytes:
                    raise _BodyTooLarge
                parts.append(part)
        body = b"".join(parts)
        replayed = False

        async def replay() -> Message:
            nonlocal replayed
            if replayed:
                return await receive()  # waits for the client to disconnect
            replayed = True
            return {"type": "http.request", "body": body, "more_body": False}

        return replay

    async def _refuse_and_close(
        self, refused: Response, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Send the response to a body that is not read, then close the connection.

        Closing a socket with unread data resets the connection, and the client may lose the
        response. So the response is sent first, and the rest of the body is discarded for a while.
        """

        async def unfinished(message: Message) -> None:
            await send({**message, "more_body": True} if "body" in message else message)

        await refused(scope, receive, unfinished)
        with anyio.move_on_after(self.limits.linger_seconds):
            while (await receive()).get("more_body", False):
                pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _BodyTooLarge(Exception):  # noqa: N818
    pass


def _with_headers(scope: Scope, send: Send, added: Mapping[str, str]) -> Send:
    async def guarded(message: Message) -> None:
        if message["type"] == "http.response.start":
            scope["lmhead.status"] = message["status"]
            headers = MutableHeaders(scope=message)
            for name, value in added.items():
                headers[name] = value
            kept = scope["path"].startswith("/assets/") and message["status"] == 200
            headers["cache-control"] = "max-age=31536000, immutable" if kept else "no-store"
        await send(message)

    return guarded


def _same(given: str, key: str) -> bool:
    """Compare keys in constant time."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), key.encode("utf-8"))
