"""The folder for what can be made again: converted models, measurements of this machine."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the cache: $LMHEAD_CACHE, or lmhead in $XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("LMHEAD_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lmhead"
