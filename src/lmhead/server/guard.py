"""Who may ask: the door of the server, before any other code sees a request.

A page on the web can make a browser send requests to this machine. So every request must name one
of our own hosts (which a rebound DNS name does not), come from our own page or from none at all,
and send JSON, which no form of a foreign page can. There is no CORS: other pages read nothing.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection, Mapping
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, urlencode

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lmhead.server.limits import Limits

__all__ = ["Guard", "refusal"]

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
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
_METHODS = ("GET", "HEAD", "POST")
_COOKIE = "lmhead_key"


def refusal(
    status: int,
    code: str,
    message: str,
    facts: Mapping[str, float] | None = None,
    **headers: str,
) -> JSONResponse:
    """An answer that says no: `{"error": {"code": ..., "message": ...}}`, and numbers to it.

    With code and numbers a page can say the same in another language.
    """
    error = {"error": {"code": code, "message": message, **(facts or {})}}
    return JSONResponse(error, status, headers={k.replace("_", "-"): v for k, v in headers.items()})


class Guard:
    """ASGI middleware that refuses what is not ours, and bounds what is.

    Args:
        app: what is guarded.
        hosts: the values of the Host header that are ours, e.g. "127.0.0.1:8000".
        key: a secret that every request must show, in `Authorization: Bearer ...` or in the cookie
            that `/?key=...` sets; None for none.
        limits: of the body.
    """

    def __init__(
        self, app: ASGIApp, *, hosts: Collection[str], key: str | None, limits: Limits
    ) -> None:
        self.app, self.key, self.limits = app, key, limits
        self.hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # a websocket: we have none
            await send({"type": "websocket.close", "code": 1008})
            return
        guarded = _with_headers(scope, send)
        headers = Headers(scope=scope)
        refused = self._refuse(scope, headers)
        if refused is None and scope["method"] == "POST":
            try:
                receive = await self._body(receive)
            except _TooMuch:
                refused = self._too_large()
            except TimeoutError:
                refused = refusal(408, "too_slow", "the body did not arrive", connection="close")
            except _Left:
                return
        if refused is not None and refused.headers.get("connection") == "close":
            await self._last(refused, scope, receive, guarded)
        else:
            await (refused or self.app)(scope, receive, guarded)

    def _refuse(self, scope: Scope, headers: Headers) -> Response | None:
        """What is wrong with the request, as an answer; None for nothing."""
        named = headers.getlist("host")
        if len(named) != 1 or named[0].lower() not in self.hosts:
            return refusal(421, "wrong_host", "this server is not known by that name")
        if scope["method"] not in _METHODS:
            return refusal(405, "wrong_method", "use GET or POST", allow=", ".join(_METHODS))
        origins = headers.getlist("origin")
        if any(origin.lower() != f"http://{named[0].lower()}" for origin in origins):
            return refusal(403, "wrong_origin", "only this server's own page may ask")
        if headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            # A link from elsewhere may open the page, and nothing else.
            opened = headers.get("sec-fetch-mode") == "navigate" and scope["method"] == "GET"
            if not opened or scope["path"].startswith("/api/"):
                return refusal(403, "wrong_origin", "only this server's own page may ask")
        keyless = self._without_key(scope, headers)
        if keyless is not None or scope["method"] != "POST":
            return keyless
        kind = headers.get("content-type", "").split(";")[0].strip().lower()
        if kind != "application/json":
            return refusal(415, "wrong_type", "the content type must be application/json")
        length = headers.get("content-length", "0")
        if not length.isascii() or not length.isdigit() or int(length) > self.limits.body_bytes:
            return self._too_large()
        return None

    def _too_large(self) -> Response:
        most = self.limits.body_bytes
        message = f"the body must be at most {most} bytes"
        return refusal(413, "too_large", message, {"most": most}, connection="close")

    def _without_key(self, scope: Scope, headers: Headers) -> Response | None:
        if self.key is None:
            return None
        shown = headers.get("authorization", "").removeprefix("Bearer ")
        if _same(shown, self.key) or _same(_cookie(headers), self.key):
            return None
        query = parse_qs(scope["query_string"].decode("latin-1"))
        if scope["path"] == "/" and _same(query.get("key", [""])[0], self.key):
            kept = {k: v[0] for k, v in query.items() if k != "key"}
            answer = RedirectResponse("/" + (f"?{urlencode(kept)}" if kept else ""), 303)
            answer.set_cookie(_COOKIE, self.key, httponly=True, samesite="strict")
            return answer
        return refusal(401, "no_key", "this server needs its key", www_authenticate="Bearer")

    async def _body(self, receive: Receive) -> Receive:
        """The whole body, once it has arrived in time and in size; then as one message."""
        parts: list[bytes] = []
        size = 0
        with anyio.fail_after(self.limits.body_seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise _Left
                part = message.get("body", b"")
                size += len(part)
                if size > self.limits.body_bytes:
                    raise _TooMuch
                parts.append(part)
                if not message.get("more_body", False):
                    break
        whole = b"".join(parts)
        told = False

        async def replay() -> Message:
            nonlocal told
            if told:
                return await receive()  # waits for the client to leave
            told = True
            return {"type": "http.request", "body": whole, "more_body": False}

        return replay

    async def _last(self, refused: Response, scope: Scope, receive: Receive, send: Send) -> None:
        """The answer to a body that is not read, before its connection ends.

        A connection closed over bytes that nobody has read is reset, and takes the answer with it.
        So the answer goes out, and what still comes is thrown away for a while.
        """

        async def unfinished(message: Message) -> None:
            await send({**message, "more_body": True} if "body" in message else message)

        await refused(scope, receive, unfinished)
        with anyio.move_on_after(self.limits.linger_seconds):
            while (await receive()).get("more_body", False):
                pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _TooMuch(Exception):  # noqa: N818
    pass


class _Left(Exception):  # noqa: N818
    pass


def _with_headers(scope: Scope, send: Send) -> Send:
    async def guarded(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers[name] = value
            kept = scope["path"].startswith("/assets/") and message["status"] == 200
            headers["cache-control"] = "max-age=31536000, immutable" if kept else "no-store"
        await send(message)

    return guarded


def _same(shown: str, key: str) -> bool:
    """Whether a secret was shown, in a time that tells nothing about it."""
    return hmac.compare_digest(shown.encode("utf-8", "replace"), key.encode("utf-8"))


def _cookie(headers: Headers) -> str:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(_COOKIE)
    except CookieError:
        return ""
    return "" if found is None else found.value
