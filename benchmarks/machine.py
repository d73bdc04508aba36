"""The machine and the software that a benchmark ran on: processor, versions, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
# The folder of all data files: models, texts, hidden states.
DATA = Path(os.environ.get("LMHEAD_DATA") or ROOT.parent / "shared" / "data")

_PACKAGES = ("lmhead", "torch", "numpy", "transformers", "cut-cross-entropy")
_VENDORS = {"AuthenticAMD": "amd", "GenuineIntel": "intel", "Apple": "apple"}


def describe(threads: int) -> dict[str, Any]:
    """Return what is reported with every figure; `threads` are torch's.

    >>> sorted(describe(2))
    ['commit', 'date', 'machine', 'threads', 'versions']
    """
    total = read_meminfo("MemTotal")
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": {
            "processor": _cpuinfo("model name") or platform.processor() or "unknown",
            "family": cpu_family(),
            "cores": os.cpu_count(),
            "memory_gib": None if total is None else round(total / 2**30, 1),
            "system": f"{platform.system()} {platform.machine()}",
            "python": platform.python_version(),
        },
        "threads": threads,
        "versions": {name: v for name in _PACKAGES if (v := version(name)) is not None},
    }


def cpu_family() -> str:
    """Return vendor and widest vectors or tile unit, e.g. "amd-avx2": a folder of results.

    AMD's Zen 5 has a folder of its own: it computes vectors of 512 bits whole, Zen 4 in halves,
    and torch's library multiplies equally fast on both.
    """
    arm = platform.machine().lower() in ("aarch64", "arm64")
    vendor = "apple" if arm and platform.system() == "Darwin" else "arm" if arm else "other"
    vendor = _VENDORS.get(_cpuinfo("vendor_id"), vendor)
    capability = torch.backends.cpu.get_cpu_capability().lower()
    vectors = "neon" if arm else capability if capability.startswith("avx") else "sse"
    if torch.cpu._is_amx_tile_supported():
        vectors = "amx"
    elif (vendor, vectors, _cpuinfo("cpu family")) == ("amd", "avx512", "26"):
        vectors = "avx512-zen5"
    return f"{vendor}-{vectors}"


def set_threads(threads: int | None) -> int:
    """Set torch's number of threads, None for torch's default, and return it."""
    if threads is not None:
        torch.set_num_threads(threads)
    return torch.get_num_threads()


def version(package: str) -> str | None:
    """Return the version of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """Return the commit of the clone, followed by "+" if files were changed since."""

    def git(*arguments: str) -> str | None:
        try:
            run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        except OSError:
            return None
        return run.stdout.strip() if run.returncode == 0 else None

    head = git("rev-parse", "--short=12", "HEAD")
    # Results that are being written do not change what is measured.
    changed = git("status", "--porcelain", "--", ":!benchmarks/results")
    return None if head is None else head + ("+" if changed else "")


def read_meminfo(key: str) -> int | None:
    """Return a figure of /proc/meminfo in bytes; None where there is none."""
    value = _lookup(Path("/proc/meminfo"), key)
    return int(value.split()[0]) * 1024 if value else None


def _cpuinfo(key: str) -> str:
    return _lookup(Path("/proc/cpuinfo"), key)


def _lookup(file: Path, key: str) -> str:
    """Return the value of the first line `key: value`; empty where there is none."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in pairs if name.strip() == key), "")
