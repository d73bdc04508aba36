"""Token files: ids one after the other, mapped into memory, never read whole.

In:  text files.
Out: a folder `data` with `train.bin`, `valid.bin` (little-endian uint16, or uint32 for more than
     65,536 words), `tokens.json` (how many, and of what), and the vocabulary beside it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from lmhead.train import corpus
from lmhead.train.config import TrainConfig
from lmhead.train.files import TrainError, new_folder, put_json
from lmhead.train.vocabulary import make_vocabulary, marks_of

Ids = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]

VOCABULARY = "tokenizer.json"
_ABOUT = "tokens.json"
_TOGETHER = 16  # pieces that are encoded side by side


def prepare(
    paths: Sequence[Path], folder: Path, config: TrainConfig, say: Callable[[str], object]
) -> None:
    """Make the folder of tokens, unless it is there.

    Args:
        paths: text files.
        folder: to be made; there is no such folder until all of it is written.
        config: `tokenizer`, `vocab_size` and `valid_fraction` are used.
        say: told what is being done.

    Raises:
        ValueError: a file that cannot be read, or is no text.
    """
    if folder.is_dir():
        return
    if not paths:
        raise ValueError("there is nothing to learn from: give one text file or more")
    mark = marks_of(config.tokenizer)
    say(f"Reading {', '.join(str(path) for path in paths)}")
    characters, digest = corpus.count(paths, mark)
    first = int(characters * (1 - config.valid_fraction))
    if not first:
        raise ValueError(f"the corpus must hold some text; got {characters} characters")
    say(f"Making the vocabulary: {config.tokenizer}")
    pieces = corpus.pieces_of(paths, mark)
    if config.tokenizer != "characters":  # words are learned from the training text alone, but
        pieces, _ = corpus.split(pieces, first)  # every character must have its id
    vocabulary = make_vocabulary(config.tokenizer, pieces, config.vocab_size)
    size = vocabulary.get_vocab_size()
    say(f"Encoding {characters:,} characters, {size:,} words")
    train, valid = corpus.split(corpus.pieces_of(paths, mark), first)
    with new_folder(folder) as part:
        vocabulary.save(str(part / VOCABULARY))
        about = {
            "vocab_size": size,
            "dtype": _dtype(size).name,
            "train_tokens": write_tokens(part / "train.bin", train, vocabulary),
            "valid_tokens": write_tokens(part / "valid.bin", valid, vocabulary),
            "corpus": [str(path) for path in paths],
            "characters": characters,
            "sha256": digest,
        }
        put_json(part / _ABOUT, about)


def write_tokens(path: Path, pieces: Iterable[str], vocabulary: Tokenizer) -> int:
    """Write the ids of a text; returns how many."""
    dtype, total, source = _dtype(vocabulary.get_vocab_size()), 0, iter(pieces)
    with path.open("wb") as file:
        while together := list(itertools.islice(source, _TOGETHER)):
            for encoded in vocabulary.encode_batch_fast(together, add_special_tokens=False):
                ids = np.asarray(encoded.ids, dtype)
                file.write(ids.astype(dtype.newbyteorder("<"), copy=False).data)
                total += len(ids)
    return total


class Tokens:
    """The token files of a run.

    Attributes:
        train, valid: ids, mapped into memory.
        vocabulary: a `tokenizers.Tokenizer`.
        vocabulary_json: its file.
    """

    def __init__(self, folder: Path) -> None:
        try:
            about = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
            self.vocabulary_json = (folder / VOCABULARY).read_text(encoding="utf-8")
            self.vocabulary = Tokenizer.from_str(self.vocabulary_json)
            dtype = np.dtype(about["dtype"]).newbyteorder("<")
            self.train = _map(folder / "train.bin", dtype, about["train_tokens"])
            self.valid = _map(folder / "valid.bin", dtype, about["valid_tokens"])
        except (OSError, KeyError, ValueError) as error:
            raise TrainError(
                f"the token files in {folder} are damaged: {error}. Delete that folder and start "
                "again"
            ) from error

    @property
    def vocab_size(self) -> int:
        """V."""
        size: int = self.vocabulary.get_vocab_size()
        return size

    def counts(self) -> npt.NDArray[np.int64]:
        """How often each word occurs in the training text, (V,)."""
        total = np.zeros(self.vocab_size, np.int64)
        for start in range(0, len(self.train), 1 << 22):  # bounded memory
            part = self.train[start : start + (1 << 22)]
            total += np.bincount(part, minlength=self.vocab_size)
        return total


def _dtype(size: int) -> np.dtype[np.uint16] | np.dtype[np.uint32]:
    return np.dtype(np.uint16) if size <= 1 << 16 else np.dtype(np.uint32)


def _map(path: Path, dtype: np.dtype[np.generic], tokens: int) -> Ids:
    if path.stat().st_size != tokens * dtype.itemsize:
        raise ValueError(f"{path.name} must have {tokens} ids of {dtype.itemsize} bytes")
    if not tokens:  # an empty file cannot be mapped
        return np.zeros(0, np.uint16)
    return np.memmap(path, dtype, "r")
