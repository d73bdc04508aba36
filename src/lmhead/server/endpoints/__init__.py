"""The API of the web page, one file per page.

api_models   GET  /api/models, /api/vocabulary          names and sizes; the text of every token
api_next     POST /api/next, /api/products              one row of logits, and how it is computed
api_paths    POST /api/paths                            greedy, sampled and beam continuations
api_text     POST /api/score                            every token of a text, and its totals
api_lens     POST /api/lens                             logit lens: layers x positions
api_compare  GET  /api/comparable, POST /api/compare    two models or samplers, along a text
api_runs     GET  /api/run                              new lines in the log of a training run
api_translate POST /api/translate                       a translation by the training run
"""

from starlette.routing import Route

from lmhead.server.api_context import ApiContext
from lmhead.server.endpoints import (
    api_compare,
    api_lens,
    api_models,
    api_next,
    api_paths,
    api_runs,
    api_text,
    api_translate,
)

__all__ = ["all_routes"]

_PAGES = (api_models, api_next, api_paths, api_text, api_lens, api_compare, api_runs, api_translate)


def all_routes(api: ApiContext) -> list[Route]:
    """Return the routes of every page."""
    return [route for page in _PAGES for route in page.routes(api)]
