"""What may be asked of the models given at launch, a file for each page.

models   GET  /api/models, /api/vocabulary          names and sizes; the text of every token
next     POST /api/next                             one row of logits behind a prompt
paths    POST /api/paths                            how greedy choice, a sampler and beams go on
text     POST /api/score                            every token of a text, and what it comes to
lens     POST /api/lens                             layers x positions, read with the head
compare  GET  /api/comparable, POST /api/compare    two models or samplers, along a text
runs     GET  /api/run                              what is new in the log of a training run
"""

from starlette.routing import Route

from lmhead.server.desk import Desk
from lmhead.server.endpoints import compare, lens, models, next, paths, runs, text

__all__ = ["all_routes"]

_PAGES = (models, next, paths, text, lens, compare, runs)


def all_routes(desk: Desk) -> list[Route]:
    """Of every page."""
    return [route for page in _PAGES for route in page.routes(desk)]
