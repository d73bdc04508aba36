"""`lmhead.explore(model)`: the web page of `lmhead explore` in a cell of a notebook.

The server runs in a thread of this process, on a loopback address, and shares the opened models.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from os import PathLike
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from lmhead.models import LanguageModel, open_model

if TYPE_CHECKING:
    from lmhead.server.launch import BackgroundServer

__all__ = ["ExplorerPage", "explore"]

Openable = LanguageModel | str | PathLike[str] | None


class ExplorerPage:
    """The page of a server in this process; a notebook shows it in a frame.

    Attributes:
        address: of the page, for a browser on this machine.
        height: of the frame, in pixels.
    """

    def __init__(self, server: BackgroundServer, path: str, height: int) -> None:
        self._server, self.address, self.height = server, server.address + path, height

    def close(self) -> None:
        """Stop the server; the page no longer answers."""
        self._server.close()

    def __repr__(self) -> str:
        return f"ExplorerPage({self.address!r})"

    def _repr_html_(self) -> str:
        address = escape(self.address)
        return (
            f'<iframe src="{address}" width="100%" height="{self.height}" '
            'style="border: 1px solid #8888" allow="clipboard-write"></iframe>'
            f'<p><a href="{address}" target="_blank" rel="noopener">{address}</a></p>'
        )


def explore(
    model: Openable | Sequence[Openable] = None,
    *,
    lang: str | None = None,
    height: int = 720,
    port: int = 0,
) -> ExplorerPage:
    """Show the explorer's page in a cell of a notebook: next tokens, scores, lens, comparisons.

    Equivalent to: `lmhead explore MODEL ...`, in this process

    Needs the extra `explore`. Only pages of this machine (Jupyter on localhost) may show the frame;
    with a remote kernel, forward the port and open `page.address` in a browser.

    Args:
        model: an opened model, what `open_model` takes, or a list of these; None for the default.
        lang: "en" or "zh"; the browser's language if not given.
        height: of the frame, in pixels.
        port: to listen on; 0 for any free one.

    Returns:
        The page. `page.close()` stops the server, which also ends with the process.

    Example::

        page = lmhead.explore("tiny")
        page          # the last line of a cell: the page appears below it
    """
    if lang not in (None, "en", "zh"):
        raise ValueError(f"lang must be 'en', 'zh' or None; got {lang!r}")
    try:
        from lmhead.server.launch import start_in_background
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("starlette", "uvicorn", "anyio", "h11"):
            raise
        raise ModuleNotFoundError(
            f"{error.name} is not installed; run: pip install 'lmhead[explore]'", name=error.name
        ) from None
    several: Sequence[Any] = model if isinstance(model, list | tuple) else [model]
    opened: dict[str, LanguageModel] = {}
    given: dict[str, str] = {}
    for item in several:
        language_model = item if isinstance(item, LanguageModel) else open_model(item)
        name = base = language_model.name or "model"
        number = 2
        while name in opened:
            name, number = f"{base} ({number})", number + 1
        opened[name] = language_model
        given[name] = str(item) if isinstance(item, str | PathLike) else base
    server = start_in_background(opened, port=port, given=given)
    return ExplorerPage(server, f"/next?{urlencode({'lang': lang})}" if lang else "/next", height)
