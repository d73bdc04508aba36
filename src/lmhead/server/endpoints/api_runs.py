"""New lines in the log of a training run, whose folder was given at launch.

GET /api/run?after=END&mark=MARK    both from the last response; without them, from the start

The response: `{"run": null}` if no folder was given, else

    run     {"name", "steps", "task", "head"}; the settings are null until the run has started
    start   0 if the lines replace all earlier ones: the log is new, or this is the first request
    end     value of `after` for the next request, with `mark`
    more    whether more lines are available now
    age     seconds since the log was written to; null if there is none yet
    lines   as in the log: step, loss, rate, tokens_per_second, seconds, valid, sample, ...

This endpoint does not use the worker, so a busy model does not delay it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lmhead.server.api_context import ApiContext
from lmhead.server.request_fields import wrong_value
from lmhead.train.run_folder import SETTINGS
from lmhead.train.train_config import make_config
from lmhead.train.training_log import follow
from lmhead.train.training_loop import LOG


def routes(api: ApiContext) -> list[Route]:
    """Return the route of this file."""

    async def run(request: Request) -> Response:
        query = request.query_params
        after, mark = _integer(query.get("after", "0")), query.get("mark", "")
        if api.run is None:
            return JSONResponse({"run": None})
        return JSONResponse(await anyio.to_thread.run_sync(_new_lines, api.run, after, mark))

    return [Route("/api/run", run)]


def _new_lines(folder: Path, after: int, mark: str) -> dict[str, Any]:
    # The settings are written before the log and read before it, so a log has its settings.
    about = {"name": folder.name, **_settings(folder)}
    return {"run": about, **follow(folder / LOG, after, mark)._asdict()}


def _settings(folder: Path) -> dict[str, Any]:
    names = ("steps", "task", "head")
    try:
        config = make_config(file=folder / SETTINGS)
    except (ValueError, TypeError):  # not started yet, or written by another version
        return dict.fromkeys(names)
    return {name: getattr(config, name) for name in names}


def _integer(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise wrong_value("after must be an integer, the last `end`")
    return int(text)
