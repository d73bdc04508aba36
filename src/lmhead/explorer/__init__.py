"""The web page of `lmhead explore`, built by Vite from `explorer/` into `dist/`."""

from pathlib import Path

__all__ = ["page_folder"]

_DIST = Path(__file__).parent / "dist"


def page_folder() -> Path:
    """Return the folder of the built page.

    Wheels contain it; in a clone of the repository `make explorer` builds it.
    """
    if not (_DIST / "index.html").is_file():
        raise FileNotFoundError(
            f"the web page is not built: {_DIST / 'index.html'} is missing; run `make explorer`"
        )
    return _DIST
