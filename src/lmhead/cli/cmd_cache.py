"""`lmhead cache`: list and remove what lmhead keeps in its cache folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import click

from lmhead.cli import _json
from lmhead.cli._terminal import left
from lmhead.user_cache import cache_folder

# Name in the cache folder -> its description.
_KINDS = {
    "gguf": "GGUF models converted to float32",
    "screen": "quantized copies of heads, for --screen",
    "calibration.json": "measurements of this machine",
}


class _Entry(NamedTuple):
    kind: str
    path: Path
    size: int


@click.group("cache")
def command() -> None:
    """List and remove what lmhead keeps in its cache folder.

    Everything there is made again when it is needed. The folder is $LMHEAD_CACHE, or lmhead in
    $XDG_CACHE_HOME or ~/.cache.

    \b
    Examples:
      lmhead cache list
      lmhead cache clear screen
    """


@command.command("list")
@_json.json_option
def list_cache(as_json: bool) -> None:
    """List the files, with their sizes.

    \b
    Examples:
      lmhead cache list
      lmhead cache list --json
    """
    entries = _entries()
    if as_json:
        rows = [{"kind": e.kind, "path": str(e.path), "bytes": e.size} for e in entries]
        _json.write("cache", folder=str(cache_folder()), entries=rows)
        return
    click.echo(f"{cache_folder()}")
    for kind, about in _KINDS.items():
        of_kind = [entry for entry in entries if entry.kind == kind]
        if of_kind:
            click.echo(f"\n{about}")
        for entry in of_kind:
            click.echo(f"  {left(_size(entry.size), 12)}{entry.path.relative_to(cache_folder())}")
    click.echo(f"\n{_size(sum(entry.size for entry in entries))} in all")


@command.command("clear")
@click.argument("kind", type=click.Choice(list(_KINDS)), required=False)
@_json.json_option
def clear(kind: str | None, as_json: bool) -> None:
    """Remove all entries, or those of one KIND.

    \b
    Examples:
      lmhead cache clear
      lmhead cache clear gguf
    """
    removed = [entry for entry in _entries() if kind in (None, entry.kind)]
    for entry in removed:
        if entry.path.is_dir():
            shutil.rmtree(entry.path)
        else:
            entry.path.unlink(missing_ok=True)
    size = sum(entry.size for entry in removed)
    if as_json:
        _json.write("cache", removed=[str(entry.path) for entry in removed], bytes=size)
        return
    count = f"{len(removed)} {'entry' if len(removed) == 1 else 'entries'}"
    click.echo(f"Removed {count}, {_size(size)}.")


def _entries() -> list[_Entry]:
    """Return what is in the cache folder; files of other programs are left alone."""
    entries = []
    for kind in _KINDS:
        folder = cache_folder() / kind
        for path in sorted(folder.iterdir()) if folder.is_dir() else [folder]:
            files = [file for file in (path, *path.rglob("*")) if file.is_file()]
            if path.exists():
                entries.append(_Entry(kind, path, sum(file.stat().st_size for file in files)))
    return entries


def _size(n: int) -> str:
    return f"{n / 1e6:,.1f} MB"
