"""Run the server: socket, address, browser, event loop."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
import webbrowser
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from lmhead.models import LanguageModel
from lmhead.server.app import API_LIMITS, create_api_app, create_app
from lmhead.server.request_limits import Limits

DEFAULT_PORT = 8629


def serve(
    models: Mapping[str, LanguageModel],
    *,
    host: str = "127.0.0.1",
    port: int | None = 0,
    key: str | None = None,
    lang: str | None = None,
    browser: bool = True,
    run: Path | None = None,
    on_ready: Callable[[str], None] = print,
    **options: Any,
) -> None:
    """Serve the page until interrupted.

    A `host` other than a loopback address needs a `key`. `port` is 0 for any free port, None for
    `DEFAULT_PORT` or the next free one after it. `lang` is the browser's if not given. `on_ready`
    is called with the address once the server listens. Other arguments: `create_app`.

    Raises:
        ValueError: a host other than loopback without a key; or one that cannot be bound.
    """
    query = {k: v for k, v in (("key", key), ("lang", lang)) if v}
    path = ("/" if run is None else "/train") + (f"?{urlencode(query)}" if query else "")

    def ready(address: str) -> None:
        on_ready(address + path)
        if browser:
            opened = threading.Thread(target=webbrowser.open, args=(address + path,), daemon=True)
            opened.start()

    def app(hosts: set[str]) -> ASGIApp:
        return create_app(models, hosts=hosts, key=key, run=run, **options)

    _serve(app, host, port, key, options.get("limits") or Limits(), ready)


def serve_api(
    models: Mapping[str, LanguageModel],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    key: str | None = None,
    also: Collection[str] = (),
    on_ready: Callable[[str], None] = print,
    **options: Any,
) -> None:
    """Serve the OpenAI-compatible API until interrupted.

    A `host` other than a loopback address needs a `key`. `also` are more allowed values of the Host
    header, e.g. of a proxy. `on_ready` is called with the address, without /v1, once the server
    listens. Other arguments: `create_api_app`.

    Raises:
        ValueError: a host other than loopback without a key; or one that cannot be bound.
    """

    def app(hosts: set[str]) -> ASGIApp:
        return create_api_app(models, hosts=hosts | set(also), key=key, **options)

    _serve(app, host, port, key, options.get("limits", API_LIMITS), on_ready)


def start_in_background(
    models: Mapping[str, LanguageModel], *, port: int = 0, given: Mapping[str, str] | None = None
) -> BackgroundServer:
    """Serve the page from a thread, on a loopback address; pages of this machine may frame it."""
    listener = bind("127.0.0.1", port)
    bound = listener.getsockname()[1]
    hosts = own_names("127.0.0.1", bound)
    app = create_app(models, hosts=hosts, given=given, frames=True)
    return BackgroundServer(server_config(app), listener, f"http://127.0.0.1:{bound}")


class BackgroundServer:
    """A server in a thread of its own; it listens when the object is made."""

    def __init__(self, config: uvicorn.Config, listener: socket.socket, address: str) -> None:
        self.address = address
        listening = threading.Event()
        self._server = _Server(config, listening.set)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [listener]}, daemon=True
        )
        self._thread.start()
        while self._thread.is_alive() and not listening.wait(0.1):
            pass
        if not listening.is_set():
            raise RuntimeError(f"the server on {address} did not start")

    def close(self) -> None:
        """Stop listening and end the thread."""
        self._server.should_exit = True
        self._thread.join()


def _serve(
    make_app: Callable[[set[str]], ASGIApp],
    host: str,
    port: int | None,
    key: str | None,
    limits: Limits,
    ready: Callable[[str], None],
) -> None:
    if not is_loopback(host) and not key:
        raise ValueError(
            f"host must be a loopback address such as 127.0.0.1 unless a key is given; got {host!r}"
        )
    listener = bind_default(host) if port is None else bind(host, port)
    bound = listener.getsockname()[1]
    name = f"[{host}]" if ":" in host else host
    config = server_config(make_app(own_names(host, bound)), limits)
    server = _Server(config, lambda: ready(f"http://{name}:{bound}"))
    server.run(sockets=[listener])


def server_config(app: ASGIApp, limits: Limits | None = None) -> uvicorn.Config:
    """Return uvicorn's settings, with the limits of connections and headers."""
    limits = limits or Limits()
    return uvicorn.Config(
        app,
        http=_limited_protocol(limits),
        # No log line per client error: it would fill the terminal, and an unread pipe that is full
        # would block the server.
        log_level="error",
        access_log=False,
        server_header=False,
        date_header=False,
        limit_concurrency=limits.connections,
        h11_max_incomplete_event_size=limits.header_bytes,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=2,
    )


def _limited_protocol(limits: Limits) -> type[H11Protocol]:
    """Return uvicorn's protocol with a deadline for headers, which uvicorn does not have.

    Connections without a complete header are closed after `header_seconds`, or after a second if
    there are more than `incomplete`, so that idle connections cannot shut others out.
    """
    waiting: dict[H11Protocol, asyncio.TimerHandle] = {}  # without a complete header, oldest first

    class LimitedProtocol(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._wait()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
                if self.timeout_keep_alive_task is None:
                    self._wait()
            else:
                self._stop_waiting()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def _wait(self) -> None:
            if self in waiting:
                return
            waiting[self] = self.loop.call_later(limits.header_seconds, self.transport.abort)
            if len(waiting) > limits.incomplete:
                old = self.loop.time() - 1.0 + limits.header_seconds
                for other in [other for other, timer in waiting.items() if timer.when() < old]:
                    other.transport.abort()

        def _stop_waiting(self) -> None:
            if (timer := waiting.pop(self, None)) is not None:
                timer.cancel()

    return LimitedProtocol


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the host.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def own_names(host: str, port: int) -> set[str]:
    """Return the values of the Host header that name this server.

    >>> sorted(own_names("127.0.0.1", 80))
    ['127.0.0.1', '127.0.0.1:80', 'localhost', 'localhost:80']
    """
    names = {f"[{host}]" if ":" in host else host}
    if is_loopback(host):
        names.add("localhost")
    elif host in ("0.0.0.0", "::"):
        names |= {"127.0.0.1", "localhost", socket.gethostname().lower(), *_addresses()}
    with_port = {f"{name}:{port}" for name in names}
    return with_port | names if port == 80 else with_port


def _addresses() -> set[str]:
    """Return the addresses that this machine's host name resolves to."""
    try:
        entries = socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        return set()
    texts = {str(entry[4][0]).split("%")[0] for entry in entries}
    return {f"[{text}]" if ":" in text else text for text in texts}


def bind_default(host: str) -> socket.socket:
    """Return a socket on `DEFAULT_PORT`, or on the next free port if it is in use.

    A fixed port keeps links and the browser's history valid from one start to the next.
    """
    for port in range(DEFAULT_PORT, DEFAULT_PORT + 20):
        with suppress(ValueError):
            return bind(host, port)
    return bind(host, 0)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to this address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is given because asyncio sets TCP_NODELAY only if it is IPPROTO_TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise ValueError(f"cannot listen on {host}:{port}: {reason}") from error
    return listener


class _Server(uvicorn.Server):
    """A server that calls a function once it listens."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then call `ready`."""
        await super().startup(sockets)
        self._ready()
