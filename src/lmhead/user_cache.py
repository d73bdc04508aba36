"""The user's settings from environment variables: the cache folder, and offline mode."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the cache: $LMHEAD_CACHE, or lmhead in $XDG_CACHE_HOME or ~/.cache."""
    if configured := os.environ.get("LMHEAD_CACHE"):
        return Path(configured).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lmhead"


def is_offline(*other_variables: str) -> bool:
    """Return whether LMHEAD_OFFLINE, or one of the other variables, forbids network access."""
    names = ("LMHEAD_OFFLINE", *other_variables)
    return any(os.environ.get(name, "").lower() in ("1", "on", "yes", "true") for name in names)
