"""What may be asked of the models given at launch, a file for each page.

models   GET  /api/models, /api/vocabulary    names and sizes; the text of every token
next     POST /api/next                       one row of logits behind a prompt
"""

from starlette.routing import Route

from lmhead.server.desk import Desk
from lmhead.server.endpoints import models, next

__all__ = ["all_routes"]


def all_routes(desk: Desk) -> list[Route]:
    """Of every page."""
    return [route for page in (models, next) for route in page.routes(desk)]
