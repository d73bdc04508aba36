"""Token files for next-token prediction: text files in, token ids on disk out.

    run/data/train.bin, valid.bin   ids as little-endian uint16 (uint32 above 65,536 tokens)
    run/data/tokenizer.json         the tokenizer
    run/data/tokens.json            counts, and hashes of these files and of the corpus files

Text is read as a stream of pieces, in bounded memory, and the files are mapped into memory. A piece
ends between a non-space character and white space: no token of the vocabularies here, nor of
GPT-2's pre-tokenizer, crosses such a boundary, so the pieces give the tokens of the whole text.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from lmhead.train.run_files import FORMAT, TrainError, file_sha256, new_folder, put_json
from lmhead.train.train_config import TrainConfig
from lmhead.train.vocabulary import END_OF_TEXT, make_vocabulary

Ids = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]

TOKENIZER = "tokenizer.json"
ABOUT = "tokens.json"
FILES = (ABOUT, TOKENIZER, "train.bin", "valid.bin")
_PIECE = 1 << 20  # characters
_PIECES_PER_BATCH = 16  # encoded in parallel
_CUT = re.compile(r"\S(?=\s)")


class CorpusError(ValueError):
    """A corpus file cannot be read or is not text."""


def prepare(
    paths: Sequence[Path], folder: Path, config: TrainConfig, say: Callable[[str], object]
) -> None:
    """Make the token files in a new folder; if it exists, check that the corpus has not changed."""
    if folder.is_dir():
        check_corpus(folder / ABOUT, say)
        return
    if not paths:
        raise ValueError("no corpus: give one text file or more")
    files = describe_files(paths)
    separator = "" if config.tokenizer == "characters" else END_OF_TEXT
    say(f"Reading {', '.join(str(path) for path in paths)}")
    characters, digest = _measure(read_files(paths, separator))
    boundary = int(characters * (1 - config.valid_fraction))
    if not boundary:
        raise ValueError(f"the corpus must hold some text; got {characters} characters")
    say(f"Making the vocabulary: {config.tokenizer}")
    pieces = read_files(paths, separator)
    # Tokens are learned from the training text only, but every character needs an id.
    if config.tokenizer != "characters":
        pieces, _ = split(pieces, boundary)
    tokenizer = make_vocabulary(config.tokenizer, pieces, config.vocab_size)
    size = tokenizer.get_vocab_size()
    say(f"Encoding {characters:,} characters with {size:,} tokens")
    train, valid = split(read_files(paths, separator), boundary)
    with new_folder(folder) as new:
        tokenizer.save(str(new / TOKENIZER))
        about = {
            "format": FORMAT,
            "vocab_size": size,
            "dtype": _dtype(size).name,
            "train_tokens": write_tokens(new / "train.bin", train, tokenizer),
            "valid_tokens": write_tokens(new / "valid.bin", valid, tokenizer),
            "corpus": [str(path) for path in paths],
            "characters": characters,
            "sha256": digest,
        }
        put_about(new / ABOUT, about, files)


@contextmanager
def corpus_errors(path: Path) -> Iterator[None]:
    """Turn the errors of reading a text file into a CorpusError that names it."""
    try:
        yield
    except OSError as error:
        raise CorpusError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CorpusError(f"{path} must be UTF-8 text; found {error.reason}") from None


def read_files(paths: Sequence[Path], separator: str = "") -> Iterator[str]:
    """Yield the text of several files in pieces, with a separator between files."""
    for number, path in enumerate(paths):
        if number and separator:
            yield separator
        yield from read_pieces(path)


def read_pieces(path: Path, size: int = _PIECE) -> Iterator[str]:
    """Yield the text of a file in pieces of about `size` characters that end before white space."""
    rest = ""
    # Line ends are kept; a byte-order mark is dropped.
    with corpus_errors(path), path.open(encoding="utf-8-sig", newline="") as file:
        while block := file.read(size):
            rest += block
            cut = last_cut(rest)
            if cut:
                yield rest[:cut]
                rest = rest[cut:]
    if rest:
        yield rest


def last_cut(text: str) -> int:
    """Return the last index at which a text may be cut; 0 if there is none.

    >>> last_cut("the cat  sat"), last_cut("猫"), last_cut("cat ")
    (7, 0, 3)
    """
    start, width = len(text), 64
    while start > 0:  # search backwards, in growing steps: the text is long, the cut near its end
        start, width = max(0, start - width), 2 * width
        if cuts := list(_CUT.finditer(text, start)):
            return cuts[-1].end()
    return 0


def split(pieces: Iterable[str], characters: int) -> tuple[Iterator[str], Iterator[str]]:
    """Split a text after some characters; consume the first part before the second.

    >>> first, rest = split(["one", " two", " three"], 5)
    >>> list(first), list(rest)
    (['one', ' t'], ['wo', ' three'])
    """
    source = iter(pieces)
    remainder: list[str] = []

    def first() -> Iterator[str]:
        missing = characters
        for piece in source:
            if len(piece) > missing:
                remainder.append(piece[missing:])
                if missing:
                    yield piece[:missing]
                return
            missing -= len(piece)
            yield piece

    return first(), (piece for part in (remainder, source) for piece in part)


def write_tokens(path: Path, pieces: Iterable[str], tokenizer: Tokenizer) -> int:
    """Write the token ids of a text; return their number."""
    dtype, total, source = _dtype(tokenizer.get_vocab_size()), 0, iter(pieces)
    with path.open("wb") as file:
        while batch := list(itertools.islice(source, _PIECES_PER_BATCH)):
            for encoded in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                ids = np.asarray(encoded.ids, dtype)
                file.write(ids.astype(dtype.newbyteorder("<"), copy=False).data)
                total += len(ids)
    return total


class TokenData:
    """The token files of a run; `train` and `valid` are token ids, mapped into memory."""

    def __init__(self, folder: Path) -> None:
        with damage_as_train_error(folder):
            about = read_about(folder / ABOUT)
            self.tokenizer_json = (folder / TOKENIZER).read_text(encoding="utf-8")
            self.tokenizer = Tokenizer.from_str(self.tokenizer_json)
            dtype = np.dtype(about["dtype"]).newbyteorder("<")
            self.train = _map(folder / "train.bin", dtype, about["train_tokens"])
            self.valid = _map(folder / "valid.bin", dtype, about["valid_tokens"])

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary."""
        size: int = self.tokenizer.get_vocab_size()
        return size

    def counts(self) -> npt.NDArray[np.int64]:
        """Return how often each token occurs in the training text, (V,)."""
        total = np.zeros(self.vocab_size, np.int64)
        for start in range(0, len(self.train), 1 << 22):  # bounded memory
            total += np.bincount(self.train[start : start + (1 << 22)], minlength=self.vocab_size)
        return total


def describe_files(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return path, size, modification time and SHA-256 of corpus files."""
    files = []
    for path in paths:
        with corpus_errors(path):
            facts = path.stat()
            if not path.is_file() and not path.is_dir():  # a pipe or a device; folders fail below
                raise CorpusError(
                    f"{path} must be a regular file, because it is read several times; pipe it to "
                    "standard input and give - instead"
                )
            digest = file_sha256(path)
        times = {"bytes": facts.st_size, "modified_ns": facts.st_mtime_ns}
        files.append({"path": str(path), **times, "sha256": digest})
    return files


def put_about(path: Path, about: dict[str, Any], files: list[dict[str, Any]]) -> None:
    """Write the description of token files, with hashes of them and of the corpus files."""
    for before in files:
        facts = Path(before["path"]).stat()
        if (facts.st_size, facts.st_mtime_ns) != (before["bytes"], before["modified_ns"]):
            raise CorpusError(f"{before['path']} changed while it was being read")
    data = {
        file.name: {"bytes": file.stat().st_size, "sha256": file_sha256(file)}
        for file in sorted(path.parent.iterdir())
    }
    put_json(path, about | {"files": files, "data": data})


def read_about(path: Path) -> dict[str, Any]:
    """Read the description of token files; refuse files that have changed since."""
    about: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for name, before in about.get("data", {}).items():
        file = path.parent / name
        _refuse_change(name, before, file.stat().st_size, file_sha256(file))
    return about


def check_corpus(path: Path, say: Callable[[str], object]) -> None:
    """Refuse to resume if a corpus file has changed since the token files were made."""
    with damage_as_train_error(path.parent):
        files = json.loads(path.read_text(encoding="utf-8")).get("files", [])
        recorded = [(Path(file["path"]), file, int(file["modified_ns"])) for file in files]
    for file, before, modified_ns in recorded:
        try:
            facts = file.stat()
            if (facts.st_size, facts.st_mtime_ns) == (before["bytes"], modified_ns):
                continue
            digest = file_sha256(file)
        except OSError as error:
            say(f"{file}: {error.strerror}; continuing with the token files in {path.parent}")
            continue
        try:
            _refuse_change(str(file), before, facts.st_size, digest)
        except ValueError as error:
            raise TrainError(
                f"{error}. Restore the file, start a new run, or move the file elsewhere to "
                f"continue with the token files in {path.parent}"
            ) from None


@contextmanager
def damage_as_train_error(folder: Path) -> Iterator[None]:
    """Turn any error while token files are opened into a TrainError that names the folder."""
    try:
        yield
    except Exception as error:  # also of tokenizers, which raises plain Exception
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise TrainError(
            f"the token files in {folder} are damaged: {reason}. Start a new run"
        ) from error


def _refuse_change(name: str, before: Mapping[str, Any], size: int, digest: str) -> None:
    if digest != before["sha256"]:
        raise ValueError(
            f"{name} has changed since the run began: {before['bytes']:,} bytes with SHA-256 "
            f"{before['sha256'][:8]}... then, {size:,} bytes with {digest[:8]}... now"
        )


def _measure(pieces: Iterable[str]) -> tuple[int, str]:
    """Return the number of characters and the SHA-256 of a text."""
    digest, characters = hashlib.sha256(), 0
    for piece in pieces:
        digest.update(piece.encode("utf-8", "surrogatepass"))
        characters += len(piece)
    return characters, digest.hexdigest()


def _dtype(size: int) -> np.dtype[np.uint16] | np.dtype[np.uint32]:
    return np.dtype(np.uint16) if size <= 1 << 16 else np.dtype(np.uint32)


def _map(path: Path, dtype: np.dtype[np.generic], tokens: int) -> Ids:
    if path.stat().st_size != tokens * dtype.itemsize:
        raise ValueError(f"{path.name} must have {tokens} ids of {dtype.itemsize} bytes")
    if not tokens:  # an empty file cannot be mapped
        return np.zeros(0, np.uint16)
    return np.memmap(path, dtype, "r")
