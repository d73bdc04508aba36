"""From opened models to a page in the browser: the socket, the address, the server's loop."""

from __future__ import annotations

import ipaddress
import socket
import threading
import webbrowser
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlencode

import uvicorn

from lmhead.models import LanguageModel
from lmhead.server.app import create_app
from lmhead.server.limits import Limits

__all__ = ["serve"]


def serve(
    models: Mapping[str, LanguageModel],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    key: str | None = None,
    lang: str | None = None,
    browser: bool = True,
    limits: Limits | None = None,
    run: Path | None = None,
    given: Mapping[str, str] | None = None,
    said: Callable[[str], None] = print,
) -> None:
    """Serve until interrupted.

    Args:
        models: by name.
        host: an address of this machine. Another than loopback needs a `key`.
        port: 0 for any that is free.
        key: what every request must show.
        lang: the page's language; the browser's if not given.
        browser: whether to open the page.
        limits: how much may be asked.
        run: the folder of a training run to watch.
        given: by name, what opens a model again; the name itself if not given.
        said: is told the address, once it can be opened.

    Raises:
        ValueError: a host that others can reach, without a key; or one that cannot be bound.
    """
    if not is_loopback(host) and not key:
        raise ValueError(
            f"host must be a loopback address such as 127.0.0.1, or come with a key; got {host!r}"
        )
    listener = bind(host, port)
    bound = listener.getsockname()[1]
    query = {k: v for k, v in (("key", key), ("lang", lang)) if v}
    name = f"[{host}]" if ":" in host else host
    address = f"http://{name}:{bound}/" + (f"?{urlencode(query)}" if query else "")
    app = create_app(
        models, hosts=own_names(host, bound), key=key, limits=limits, run=run, given=given
    )
    server = _Server(
        uvicorn.Config(
            app,
            # No line for each mistake of a client: they would fill the terminal, and a pipe that
            # nobody reads would stop the server once it is full.
            log_level="error",
            access_log=False,
            server_header=False,
            date_header=False,
            limit_concurrency=256,
            h11_max_incomplete_event_size=32 << 10,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=2,
        ),
        lambda: _ready(address, browser, said),
    )
    server.run(sockets=[listener])


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it.

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
    """The values of the Host header that name this server.

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
    """Addresses of this machine, by its own name."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        return set()
    texts = {str(entry[4][0]).split("%")[0] for entry in found}
    return {f"[{text}]" if ":" in text else text for text in texts}


def bind(host: str, port: int) -> socket.socket:
    """A socket at this address, ready to listen.

    Raises:
        ValueError: the address is taken, or is none of this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named, for the event loop sends at once what it writes only where it knows that this is TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise ValueError(f"host and port must be free; {host}:{port} is not: {reason}") from error
    return listener


def _ready(address: str, browser: bool, said: Callable[[str], None]) -> None:
    said(address)
    if browser:
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()


class _Server(uvicorn.Server):
    """Says when it can be asked."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then tell."""
        await super().startup(sockets)
        self._ready()
