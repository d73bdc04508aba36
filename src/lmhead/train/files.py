"""Files that are there whole or not at all, and a lock on a folder.

In:  paths, text, tensors.
Out: files and folders that survive `kill -9` and a power cut at any instant.

A file or folder is written under a temporary name, flushed to the disk (fsync), renamed, and the
rename is flushed too. A temporary name begins with a dot and ends in `.part`; what a killed run
has left under such names is removed when the next one starts.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

try:
    import fcntl
except ImportError:  # no such locks on Windows: two runs in one folder are the user's care there
    fcntl = None  # type: ignore[assignment]


class TrainError(RuntimeError):
    """A run that cannot go on: no space, a folder that cannot be written, a damaged checkpoint."""


def write_text(path: Path, text: str) -> None:
    """Replace a file at once.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "notes.txt"
    >>> write_text(path, "whole")
    >>> path.read_text(), [file.name for file in path.parent.iterdir()]
    ('whole', ['notes.txt'])
    """
    part = part_of(path)
    put_text(part, text)
    sync(part)
    os.replace(part, path)
    sync(path.parent)


def put_text(path: Path, text: str) -> None:
    """Write a text file in a `new_folder`, which flushes it."""
    path.write_text(text, encoding="utf-8", newline="")


def put_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file in a `new_folder`."""
    put_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def put_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file in a `new_folder`."""
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:  # of the system, as Rust words it
        raise OSError(None, str(error), str(path)) from None


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which gets its name when it is whole.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "step-1"
    >>> with new_folder(path) as folder:
    ...     put_text(folder / "a.txt", "a")
    ...     path.exists()
    False
    >>> path.exists()
    True
    """
    part = part_of(path)
    remove(part)
    part.mkdir(parents=True)
    try:
        yield part
        for file in part.iterdir():
            sync(file)
        sync(part)
        os.rename(part, path)
        sync(path.parent)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def remove(path: Path) -> None:
    """Delete a folder; under its name it is there whole until it is gone.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp()) / "old"
    >>> folder.mkdir()
    >>> remove(folder)
    >>> folder.exists()
    False
    """
    if not path.exists():
        return
    if not _is_part(path):
        gone = part_of(path)
        shutil.rmtree(gone, ignore_errors=True)
        os.rename(path, gone)
        path = gone
    shutil.rmtree(path, ignore_errors=True)


def sweep_parts(folder: Path) -> None:
    """Remove what a killed run has left half-written in a folder."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if _is_part(path):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def part_of(path: Path) -> Path:
    """The temporary name of a file or folder, beside it."""
    return path.with_name(f".{path.name}.part")


def _is_part(path: Path) -> bool:
    return path.name.startswith(".") and path.name.endswith(".part")


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    if path.is_dir() and os.name == "nt":  # folders cannot be opened there
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder for this process; the system lets go of it when the process ends, however.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with locked(folder), locked(folder):
    ...     pass
    Traceback (most recent call last):
        ...
    lmhead.train.files.TrainError: another run is writing to ...: wait for its end, or ...
    """
    with (folder / ".lock").open("a") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise TrainError(
                    f"another run is writing to {folder}: wait for its end, or choose another "
                    "folder"
                ) from None
            except OSError:  # a file system without locks
                pass
        yield


@contextmanager
def explained(doing: str, remedy: Callable[[], str] = str) -> Iterator[None]:
    """Say what could not be written in place of a bare OSError, and what to do.

    >>> with explained("write the log", lambda: "Free some space."):
    ...     raise OSError(28, "No space left on device", "run/log.jsonl")
    Traceback (most recent call last):
        ...
    lmhead.train.files.TrainError: cannot write the log: No space left on device. Free some space.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise TrainError(f"cannot {doing}: {reason}. {remedy()}".rstrip()) from error


def usable(folder: Path) -> None:
    """Make a folder and try to write in it, before work is done that would be lost."""
    with explained(f"write to {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe.part"
        probe.write_bytes(b"x")
        with suppress(FileNotFoundError):
            probe.unlink()
