"""The user's environment: the folder for what can be made again, and whether to stay offline."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the cache: $LMHEAD_CACHE, or lmhead in $XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("LMHEAD_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lmhead"


def is_offline(*also: str) -> bool:
    """Return whether the network must not be used: LMHEAD_OFFLINE is set, or a variable given."""
    names = ("LMHEAD_OFFLINE", *also)
    return any(os.environ.get(name, "").lower() in ("1", "on", "yes", "true") for name in names)
