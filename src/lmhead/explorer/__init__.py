"""The page of `lmhead explore`: its sources are in `explorer/`, what Vite makes of them in `dist/`.

In:  nothing. Out: the folder with the built page, or an error that says how to build it.
"""

from pathlib import Path

__all__ = ["page_folder"]

_DIST = Path(__file__).parent / "dist"


def page_folder() -> Path:
    """The folder that holds `index.html` and what it loads.

    Every wheel has it; a checkout of the repository gets it from `make explorer`.
    """
    if not (_DIST / "index.html").is_file():
        raise FileNotFoundError(
            f"the page was not built: {_DIST / 'index.html'} is missing; run `make explorer`"
        )
    return _DIST
