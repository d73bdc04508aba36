"""Sentence pairs for translation: read, split by hash, encoded to token files, cut into batches.

    pairs.tsv                  lines "source <tab> target"; further columns are ignored
    run/data/ids.bin           token ids of all pairs
    run/data/lengths.bin       two lengths per pair
    run/data/tokenizer.json    one byte-level BPE vocabulary for both languages
    run/data/pairs.json        counts, and hashes of these files and of the corpus files
    run/data/held_out.tsv      the held-out pairs, as text

Which pairs are held out depends on the source sentence only: those with the lowest SHA-256. The
same file always gives the same split, for any order of its lines, and no sentence is on both
sides with two translations.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from lmhead.train import token_data
from lmhead.train.run_files import FORMAT, new_folder, put_text
from lmhead.train.train_config import TrainConfig
from lmhead.train.vocabulary import make_bpe

PAD, BEGIN, END = "<pad>", "<s>", "</s>"  # ids 0, 1 and 2
HELD_OUT = "held_out.tsv"
ABOUT, _IDS, _LENGTHS = "pairs.json", "ids.bin", "lengths.bin"
FILES = (ABOUT, token_data.TOKENIZER, HELD_OUT, _IDS, _LENGTHS)


class Pair(NamedTuple):
    """A sentence and its translation."""

    source: str
    target: str


def read_pairs(paths: Sequence[Path], *, reverse: bool = False) -> list[Pair]:
    """Read the pairs of tab-separated files; skip empty lines."""
    pairs: list[Pair] = []
    for path in paths:
        with token_data.corpus_errors(path):
            text = path.read_text(encoding="utf-8-sig")
        for number, line in enumerate(text.split("\n"), 1):
            columns = [column.strip() for column in line.split("\t")[:2]]
            if columns == [""]:
                continue
            if len(columns) < 2 or not all(columns):
                raise token_data.CorpusError(
                    f"line {number} of {path} must be a sentence, a tab and its translation; "
                    f"got {line[:80]!r}"
                )
            pairs.append(Pair(*(columns[::-1] if reverse else columns)))
    return pairs


def split_pairs(pairs: Sequence[Pair], held_out: int) -> tuple[list[Pair], list[Pair]]:
    """Split into training pairs and `held_out` others that share no source sentence with them.

    >>> train, held_out = split_pairs([Pair(str(i % 8), str(i)) for i in range(16)], 3)
    >>> len(held_out), {p.source for p in held_out} & {p.source for p in train}
    (3, set())
    """
    hashed = sorted(pairs, key=lambda p: (hashlib.sha256(p.source.encode()).digest(), p.target))
    held = hashed[:held_out]
    sources = {pair.source for pair in held}
    return [pair for pair in pairs if pair.source not in sources], held


def prepare(
    paths: Sequence[Path], folder: Path, config: TrainConfig, say: Callable[[str], object]
) -> None:
    """Make the token files in a new folder; if it exists, check that the corpus has not changed.

    Pairs with more than `config.block` tokens on either side are left out, and counted.
    """
    if folder.is_dir():
        token_data.check_corpus(folder / ABOUT, say)
        return
    if not paths:
        raise ValueError("no corpus: give one file of sentence pairs or more")
    files = token_data.describe_files(paths)
    say(f"Reading {', '.join(str(path) for path in paths)}")
    train, held_out = split_pairs(read_pairs(paths, reverse=config.reverse), config.held_out)
    if not train:
        raise ValueError(
            f"held_out must leave pairs to train on; got {config.held_out} of {len(held_out)}"
        )
    say(f"Making the vocabulary of {len(train):,} pairs")
    texts = (text for pair in train for text in pair)
    tokenizer = make_bpe(texts, config.vocab_size, [PAD, BEGIN, END], min_frequency=2)
    ids, lengths = encode_pairs(tokenizer, train)
    fits = (lengths <= config.block).all(1)
    if not fits.any():
        raise ValueError(
            f"block must be at least {int(lengths.max(1).min())}, the length of the shortest pair; "
            f"got {config.block}"
        )
    _, others = encode_pairs(tokenizer, held_out)
    held_out = [held_out[i] for i in np.flatnonzero((others <= config.block).all(1))]
    with new_folder(folder) as new:
        tokenizer.save(str(new / token_data.TOKENIZER))
        np.concatenate([ids[i] for i in np.flatnonzero(fits)]).tofile(new / _IDS)
        lengths[fits].tofile(new / _LENGTHS)
        lines = "".join(f"{pair.source}\t{pair.target}\n" for pair in held_out)
        put_text(new / HELD_OUT, lines)
        about = {
            "format": FORMAT,
            "pairs": int(fits.sum()),
            "too_long": int((~fits).sum()),
            "held_out": len(held_out),
            "ids": int(lengths[fits].sum()),
            "corpus": [str(path) for path in paths],
        }
        token_data.put_about(new / ABOUT, about, files)


def special_id(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a special token, which every tokenizer here has."""
    id = tokenizer.token_to_id(token)
    if id is None:
        raise ValueError(f"the tokenizer must have {token!r}")
    return id


def encode_pairs(
    tokenizer: Tokenizer, pairs: Sequence[Pair]
) -> tuple[list[npt.NDArray[np.int32]], npt.NDArray[np.int32]]:
    """Return the ids of each pair, source then target, each with its end; and lengths (N, 2)."""
    end = special_id(tokenizer, END)
    sides = [
        [[*encoded.ids, end] for encoded in tokenizer.encode_batch([pair[side] for pair in pairs])]
        for side in (0, 1)
    ]
    ids = [np.array(a + b, np.dtype("<i4")) for a, b in zip(*sides, strict=True)]
    lengths = np.array([[len(a), len(b)] for a, b in zip(*sides, strict=True)], np.dtype("<i4"))
    return ids, lengths.reshape(-1, 2)


class PairData:
    """The token files of a run: `ids` of all pairs, mapped into memory, and their `lengths` (N, 2).

    Lengths of source and target include the ends. `too_long` is the number of pairs left out.
    """

    def __init__(self, folder: Path) -> None:
        with token_data.damage_as_train_error(folder):
            about = token_data.read_about(folder / ABOUT)
            self.tokenizer_json = (folder / token_data.TOKENIZER).read_text(encoding="utf-8")
            self.tokenizer = Tokenizer.from_str(self.tokenizer_json)
            self.lengths = np.fromfile(folder / _LENGTHS, np.dtype("<i4")).reshape(-1, 2)
            self.ids = np.memmap(folder / _IDS, np.dtype("<i4"), "r")
            if (len(self.lengths), len(self.ids)) != (about["pairs"], about["ids"]):
                raise ValueError(f"{_IDS} and {_LENGTHS} must be as long as {ABOUT} says")
            self.too_long = int(about["too_long"])
            self.held_out = read_pairs([folder / HELD_OUT])
        ends = self.lengths.sum(1, dtype=np.int64).cumsum()
        self._starts = np.concatenate([[0], ends])

    def __getitem__(self, index: int) -> tuple[list[int], list[int]]:
        """Return the ids of source and target of a pair."""
        start, (source, _) = self._starts[index], self.lengths[index]
        return (
            self.ids[start : start + source].tolist(),
            self.ids[start + source : self._starts[index + 1]].tolist(),
        )


def cut_batches(lengths: npt.NDArray[np.int32], tokens: int) -> list[tuple[int, int]]:
    """Cut pairs, sorted by length (source, then target), into batches (begin, end).

    A batch has at most `tokens` tokens on either side, padding included, or is a single pair. The
    cuts depend on the lengths only: pairs of equal lengths may be exchanged.

    >>> cut_batches(np.array([[1, 1], [1, 2], [2, 2], [9, 9]], np.int32), 4)
    [(0, 2), (2, 3), (3, 4)]
    """
    cuts, begin, width = [], 0, 0
    for end, longest in enumerate(lengths.max(1).tolist()):
        if end > begin and max(width, longest) * (end - begin + 1) > tokens:
            cuts.append((begin, end))
            begin, width = end, 0
        width = max(width, longest)
    cuts.append((begin, len(lengths)))
    return cuts
