"""Where and with what a benchmark ran: processor, threads, versions, commit. Loads no torch."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("lmhead", "torch", "numpy", "transformers", "cut-cross-entropy")


def checkout() -> Path | None:
    """The root of the repository that this file is in; None for an installed package."""
    root = Path(__file__).resolve().parents[3]
    return root if (root / "pyproject.toml").is_file() and (root / "benchmarks").is_dir() else None


def describe(threads: int | None) -> dict[str, Any]:
    """What stands beside every figure.

    Args:
        threads: of torch.

    >>> sorted(describe(2))
    ['commit', 'date', 'machine', 'threads', 'versions']
    """
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "memory_gib": _gib(_meminfo("MemTotal")),
            "system": f"{platform.system()} {platform.machine()}",
            "python": platform.python_version(),
        },
        "threads": threads,
        "versions": {name: v for name in _PACKAGES if (v := version(name)) is not None},
    }


def version(package: str) -> str | None:
    """Of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """Of the checkout, with "+" behind it if files were changed since."""
    root = checkout()
    if root is None:
        return None

    def git(*arguments: str) -> str | None:
        try:
            run = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
        except OSError:
            return None
        return run.stdout.strip() if run.returncode == 0 else None

    head = git("rev-parse", "--short=12", "HEAD")
    if head is None:
        return None
    # Results that are being written are no change of what is measured.
    changed = git("status", "--porcelain", "--", ":!benchmarks/results")
    return head + ("+" if changed else "")


def available_bytes() -> int | None:
    """Memory that a new process could get; None where the system does not say."""
    return _meminfo("MemAvailable")


def _meminfo(key: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")


def _gib(size: int | None) -> float | None:
    return None if size is None else round(size / 2**30, 1)
