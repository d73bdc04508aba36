r"""Pairs of sentences: read, split by a hash, turned into token files, cut into batches by length.

In:  files of lines "source <tab> target", which may have more columns, e.g. who wrote them.
Out: a folder `data` with the vocabulary, `ids.bin` (all ids, one after the other), `lengths.bin`
     (two per pair), `pairs.json` (how many, and of what) and `held_out.tsv`, as text.

Which pairs are held out depends on the source sentence alone: SHA-256 of it, the lowest come first.
The same file always gives the same split, another order of its lines too, and no sentence is on
both sides with two translations.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from lmhead.train.config import TrainConfig
from lmhead.train.corpus import CorpusError
from lmhead.train.files import TrainError, new_folder

PAD, BEGIN, END = "<pad>", "<s>", "</s>"  # ids 0, 1 and 2
VOCABULARY, HELD_OUT = "tokenizer.json", "held_out.tsv"
_ABOUT, _IDS, _LENGTHS = "pairs.json", "ids.bin", "lengths.bin"


class Pair(NamedTuple):
    """A sentence and its translation."""

    source: str
    target: str


def read_pairs(paths: Sequence[Path], *, reverse: bool = False) -> list[Pair]:
    """The pairs of tab-separated files; empty lines are skipped.

    Raises:
        CorpusError: a file that cannot be read, or a line without two columns.
    """
    pairs: list[Pair] = []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8-sig")
        except OSError as error:
            raise CorpusError(f"cannot read {path}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise CorpusError(f"{path} must be text in UTF-8; {error.reason} in it") from None
        for number, line in enumerate(text.split("\n"), 1):
            columns = [column.strip() for column in line.split("\t")[:2]]
            if columns == [""]:
                continue
            if len(columns) < 2 or not all(columns):
                raise CorpusError(
                    f"line {number} of {path} must be a sentence, a tab and its translation; "
                    f"got {line[:80]!r}"
                )
            pairs.append(Pair(*(columns[::-1] if reverse else columns)))
    return pairs


def split_pairs(pairs: Sequence[Pair], held_out: int) -> tuple[list[Pair], list[Pair]]:
    """Pairs to learn from, and `held_out` others; a source of these is none of those.

    >>> train, held_out = split_pairs([Pair(str(i % 8), str(i)) for i in range(16)], 3)
    >>> len(held_out), {p.source for p in held_out} & {p.source for p in train}
    (3, set())
    """

    def place(pair: Pair) -> tuple[bytes, str]:
        return hashlib.sha256(pair.source.encode()).digest(), pair.target

    ordered = sorted(pairs, key=place)
    held = ordered[:held_out]
    sources = {pair.source for pair in held}
    return [pair for pair in pairs if pair.source not in sources], held


def make_vocabulary(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE for all languages together: any text has ids, and comes back as it was.

    >>> vocabulary = make_vocabulary(["low lower", "猫猫狗"], 300)
    >>> vocabulary.decode(vocabulary.encode("slow 猫 🐈").ids)
    'slow 猫 🐈'
    >>> [vocabulary.token_to_id(mark) for mark in (PAD, BEGIN, END)]
    [0, 1, 2]
    """
    marks = [PAD, BEGIN, END]
    least = 256 + len(marks)
    if vocab_size < least:
        raise ValueError(f"vocab_size must be at least {least} for bytes; got {vocab_size}")
    vocabulary = Tokenizer(models.BPE())
    vocabulary.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    vocabulary.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=marks,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    vocabulary.train_from_iterator(texts, trainer)
    return vocabulary


def prepare(
    paths: Sequence[Path], folder: Path, config: TrainConfig, say: Callable[[str], object]
) -> None:
    """Make the folder of token files, unless it is there.

    Args:
        paths: tab-separated files.
        folder: to be made; there is no such folder until all of it is written.
        config: `vocab_size`, `held_out`, `reverse` and `block` are used; pairs with more tokens
            than a block on either side are left out, and counted.
        say: told what is being done.
    """
    if folder.is_dir():
        return
    if not paths:
        raise ValueError("there is nothing to learn from: give one file of pairs or more")
    say(f"Reading {', '.join(str(path) for path in paths)}")
    train, held_out = split_pairs(read_pairs(paths, reverse=config.reverse), config.held_out)
    if not train:
        raise ValueError(
            f"held_out must leave pairs to learn from; got {config.held_out} of {len(held_out)}"
        )
    say(f"Making the vocabulary of {len(train):,} pairs")
    vocabulary = make_vocabulary((text for pair in train for text in pair), config.vocab_size)
    ids, lengths = encode_pairs(vocabulary, train)
    fits = (lengths <= config.block).all(1)
    if not fits.any():
        raise ValueError(
            f"block must hold some pairs; got {config.block}, and the shortest has "
            f"{int(lengths.max(1).min())} tokens"
        )
    _, others = encode_pairs(vocabulary, held_out)
    held_out = [held_out[i] for i in np.flatnonzero((others <= config.block).all(1))]
    with new_folder(folder) as part:
        vocabulary.save(str(part / VOCABULARY))
        np.concatenate([ids[i] for i in np.flatnonzero(fits)]).tofile(part / _IDS)
        lengths[fits].tofile(part / _LENGTHS)
        lines = "".join(f"{pair.source}\t{pair.target}\n" for pair in held_out)
        (part / HELD_OUT).write_text(lines, encoding="utf-8", newline="")
        about = {
            "pairs": int(fits.sum()),
            "too_long": int((~fits).sum()),
            "held_out": len(held_out),
            "ids": int(lengths[fits].sum()),
            "corpus": [str(path) for path in paths],
        }
        (part / _ABOUT).write_text(json.dumps(about, indent=2), encoding="utf-8")


def id_of(vocabulary: Tokenizer, mark: str) -> int:
    """The id of a mark, which every vocabulary here has."""
    id = vocabulary.token_to_id(mark)
    if id is None:
        raise ValueError(f"the vocabulary must have {mark!r}")
    return id


def encode_pairs(
    vocabulary: Tokenizer, pairs: Sequence[Pair]
) -> tuple[list[npt.NDArray[np.int32]], npt.NDArray[np.int32]]:
    """Per pair the ids of source and target, each with its end; lengths (N, 2)."""
    end = id_of(vocabulary, END)
    sides = [
        [[*encoded.ids, end] for encoded in vocabulary.encode_batch([pair[side] for pair in pairs])]
        for side in (0, 1)
    ]
    ids = [np.array(a + b, np.dtype("<i4")) for a, b in zip(*sides, strict=True)]
    lengths = np.array([[len(a), len(b)] for a, b in zip(*sides, strict=True)], np.dtype("<i4"))
    return ids, lengths.reshape(-1, 2)


class Pairs:
    """The token files of a run.

    Attributes:
        ids: of all pairs, one after the other, mapped into memory.
        lengths: (N, 2), of source and target, ends included.
        vocabulary: a `tokenizers.Tokenizer`.
        vocabulary_json: its file.
        held_out: pairs of text.
        too_long: how many pairs were left out.
    """

    def __init__(self, folder: Path) -> None:
        try:
            about = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
            self.vocabulary_json = (folder / VOCABULARY).read_text(encoding="utf-8")
            self.vocabulary = Tokenizer.from_str(self.vocabulary_json)
            self.lengths = np.fromfile(folder / _LENGTHS, np.dtype("<i4")).reshape(-1, 2)
            self.ids = np.memmap(folder / _IDS, np.dtype("<i4"), "r")
            if (len(self.lengths), len(self.ids)) != (about["pairs"], about["ids"]):
                raise ValueError(f"{_IDS} and {_LENGTHS} must be as long as {_ABOUT} says")
            self.too_long = int(about["too_long"])
            self.held_out = read_pairs([folder / HELD_OUT])
        except (OSError, KeyError, ValueError) as error:
            raise TrainError(
                f"the token files in {folder} are damaged: {error}. Delete that folder and start "
                "again"
            ) from error
        ends = self.lengths.sum(1, dtype=np.int64).cumsum()
        self._starts = np.concatenate([[0], ends])

    def __getitem__(self, index: int) -> tuple[list[int], list[int]]:
        """Ids of source and target of one pair."""
        start, (source, _) = self._starts[index], self.lengths[index]
        return (
            self.ids[start : start + source].tolist(),
            self.ids[start + source : self._starts[index + 1]].tolist(),
        )


def cut_batches(lengths: npt.NDArray[np.int32], tokens: int) -> list[tuple[int, int]]:
    """Where to cut pairs, in the order of their lengths (source, then target), into batches.

    A batch (begin, end) takes at most `tokens` places on either side, padding included, or is one
    pair. The cuts depend on the lengths alone: pairs of equal lengths may change places.

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
