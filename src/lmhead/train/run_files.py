"""Atomic writes of files and folders, deletion of our own files only, and a lock on a folder.

A file or folder is written under a temporary name, flushed to disk (fsync) and renamed; the rename
is flushed too. So it is complete or absent, even after `kill -9` or a power cut. Temporary names
begin with a dot and end in `.lmhead-part`; the next run removes what a killed run left under them.

The folder of a run holds the file `.lmhead-run`, which is also its lock. A folder is deleted only
if it holds a description with "format": "lmhead" and no file that lmhead does not write.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

RUN_MARK = ".lmhead-run"
FORMAT = "lmhead"


class TrainError(RuntimeError):
    """A run cannot continue: disk full, folder not writable, checkpoint damaged, loss diverged."""


def write_text(path: Path, text: str) -> None:
    """Write or replace a text file atomically.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "notes.txt"
    >>> write_text(path, "text")
    >>> path.read_text(), [file.name for file in path.parent.iterdir()]
    ('text', ['notes.txt'])
    """
    temporary = temporary_name(path)
    put_text(temporary, text)
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)


def put_text(path: Path, text: str) -> None:
    """Write a text file inside a `new_folder`, which flushes it."""
    path.write_text(text, encoding="utf-8", newline="")


def put_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file inside a `new_folder`."""
    put_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def put_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file inside a `new_folder`."""
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:  # wraps the operating system's error
        raise OSError(None, str(error), str(path)) from None


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Create a folder atomically: yield a temporary folder to fill, then rename it to `path`.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "step-1"
    >>> with new_folder(path) as folder:
    ...     put_text(folder / "a.txt", "a")
    ...     path.exists()
    False
    >>> path.exists()
    True
    """
    temporary = temporary_name(path)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for file in temporary.iterdir():
            sync(file)
        sync(temporary)
        os.rename(temporary, path)
        sync(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def remove(path: Path) -> None:
    """Delete a folder atomically: rename it first, so that it is never seen half deleted."""
    temporary = temporary_name(path)
    shutil.rmtree(temporary, ignore_errors=True)
    os.rename(path, temporary)
    shutil.rmtree(temporary, ignore_errors=True)


def not_ours(folder: Path, files: Iterable[str], description: str) -> list[str]:
    """Return the names in a folder that lmhead did not write; [] if it may be deleted.

    `description` is the one of `files` that is a JSON object with "format": "lmhead".
    """
    names = {path.name for path in folder.iterdir()}
    try:
        ours = json.loads((folder / description).read_text(encoding="utf-8"))["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError):
        ours = False
    return sorted(names - set(files)) if ours else sorted(names)


def remove_temporary(*folders: Path) -> None:
    """Remove the temporary files and folders that a killed run left in some folders."""
    for path in (path for folder in folders if folder.is_dir() for path in folder.iterdir()):
        if is_temporary(path.name):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def temporary_name(path: Path) -> Path:
    """Return the temporary name of a file or folder, in the same folder."""
    return path.with_name(f".{path.name}.lmhead-part")


def is_temporary(name: str) -> bool:
    """Return whether a name is one of `temporary_name`."""
    return name.startswith(".") and name.endswith(".lmhead-part")


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    if path.is_dir() and os.name == "nt":  # Windows cannot open folders
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder for this process; the system releases the lock however the process ends.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with locked(folder), locked(folder):
    ...     pass
    Traceback (most recent call last):
        ...
    lmhead.train.run_files.TrainError: another run (process ... on ...) is writing to ...
    """
    with (folder / RUN_MARK).open("a+", encoding="utf-8") as file:
        if not _try_lock(file):
            owner = _read_owner(file)
            who = f" (process {owner['pid']} on {owner['host']})" if owner else ""
            raise TrainError(
                f"another run{who} is writing to {folder}: wait until it ends, or choose another "
                "folder"
            )
        with os_errors_as_train_errors(f"write to {folder}"):
            file.truncate(0)
            owner = {"format": FORMAT, "pid": os.getpid(), "host": socket.gethostname()}
            file.write(json.dumps(owner) + "\n")
            file.flush()
        yield


def _try_lock(file: IO[str]) -> bool:
    try:
        if sys.platform == "win32":
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # a file system without locks: is the process that wrote the file alive?
        owner = _read_owner(file)
        if sys.platform == "win32" or owner is None or owner["host"] != socket.gethostname():
            return True
        try:
            os.kill(owner["pid"], 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return bool(owner["pid"] == os.getpid())
    return True


def _read_owner(file: IO[str]) -> dict[str, Any] | None:
    try:
        file.seek(0)
        owner = json.load(file)
        return {"pid": int(owner["pid"]), "host": str(owner["host"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextmanager
def os_errors_as_train_errors(action: str, advice: Callable[[], str] = str) -> Iterator[None]:
    """Turn an OSError into a TrainError that says which action failed and what to do.

    >>> with os_errors_as_train_errors("write the log", lambda: "Free some space."):
    ...     raise OSError(28, "No space left on device", "run/log.jsonl")
    Traceback (most recent call last):
        ...
    lmhead.train.run_files.TrainError: cannot write the log: No space left on device. Free ...
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise TrainError(f"cannot {action}: {reason}. {advice()}".rstrip()) from error


def check_writable(folder: Path) -> None:
    """Create a folder and write a test file in it, before work is done that would be lost."""
    with os_errors_as_train_errors(f"write to {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        probe = temporary_name(folder / "probe")
        probe.write_bytes(b"x")
        with suppress(FileNotFoundError):
            probe.unlink()
