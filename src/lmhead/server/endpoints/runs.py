"""A training run in a folder that was given at launch: what is new in its log.

GET /api/run?after=END&mark=MARK    both from the last answer; without them, from the beginning

The answer: `{"run": null}` if no folder was given, else

    run     {"name", "steps", "task", "head"}; the settings are null until the run has begun
    start   0 if the lines replace all earlier ones: the log was written anew, or this is the first
    end     what to ask with the next time, with `mark`
    more    whether to ask again at once
    age     seconds since the log was written to; null if there is none yet
    lines   as in the log: step, loss, rate, tokens_per_second, seconds, valid, sample, ...

Nothing of it needs the worker: a busy model does not stop the curve.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lmhead.server.desk import Desk, Refused, answering
from lmhead.train.config import make_config
from lmhead.train.follow import follow
from lmhead.train.loop import LOG
from lmhead.train.run import SETTINGS

__all__ = ["routes"]


def routes(desk: Desk) -> list[Route]:
    """The one of this file."""

    async def run(request: Request) -> Response:
        asked = request.query_params
        after, mark = _whole(asked.get("after", "0")), asked.get("mark", "")
        if desk.run is None:
            return JSONResponse({"run": None})
        return JSONResponse(await anyio.to_thread.run_sync(_news, desk.run, after, mark))

    return [Route("/api/run", answering(run))]


def _news(folder: Path, after: int, mark: str) -> dict[str, Any]:
    # The settings first: they are written before the log, so a log never comes without them.
    about = {"name": folder.name, **_settings(folder)}
    return {"run": about, **follow(folder / LOG, after, mark)._asdict()}


def _settings(folder: Path) -> dict[str, Any]:
    names = ("steps", "task", "head")
    try:
        config = make_config(file=folder / SETTINGS)
    except (ValueError, TypeError):  # not begun yet, or not by a run of this version
        return dict.fromkeys(names)
    return {name: getattr(config, name) for name in names}


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise Refused(400, "wrong_value", "after must be a whole number, as `end` was")
    return int(text)
