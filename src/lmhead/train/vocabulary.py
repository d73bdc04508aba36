r"""Make a vocabulary from text: byte-level BPE, characters, or words.

In:  pieces of text.
Out: a `tokenizers.Tokenizer`, whose JSON file any program with that library can read.

    bpe         256 bytes and the pairs that occur most; any text has ids, and comes back as it was
    characters  those that occur, in the order of their code points
    words       " the", "cat", "\n": what stands between white space, with the space before it; the
                most frequent ones, and <unk> for all others
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from lmhead.train.corpus import END

UNKNOWN = "<unk>"
_WORD = r" ?[^\s]+|\s"


def make_vocabulary(kind: str, pieces: Iterable[str], vocab_size: int) -> Tokenizer:
    r"""A vocabulary of at most `vocab_size` words; all characters of the text for "characters".

    >>> vocabulary = make_vocabulary("characters", ["to be ", "or not"], 0)
    >>> vocabulary.get_vocab_size(), vocabulary.encode("bet").ids
    (7, [1, 2, 6])
    >>> words = make_vocabulary("words", ["the cat\nthe dog the cat"], 5)
    >>> words.encode("the dog\n").tokens
    ['the', '<unk>', '\n']
    """
    makers = {"bpe": _bpe, "characters": _characters, "words": _words}
    if kind not in makers:
        raise ValueError(f"tokenizer must be one of {', '.join(makers)}; got {kind!r}")
    return makers[kind](pieces, vocab_size)


def marks_of(kind: str) -> str:
    """What stands between two texts: the mark of an end, where the vocabulary has one."""
    return "" if kind == "characters" else END


def _bpe(pieces: Iterable[str], vocab_size: int) -> Tokenizer:
    least = 257  # every byte, and the mark
    if vocab_size < least:
        raise ValueError(f"vocab_size must be at least {least} for bytes; got {vocab_size}")
    vocabulary = Tokenizer(models.BPE())
    vocabulary.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    vocabulary.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    vocabulary.train_from_iterator(pieces, trainer)
    return vocabulary


def _characters(pieces: Iterable[str], _: int) -> Tokenizer:
    seen: set[str] = set()
    for piece in pieces:
        seen.update(piece)
    if not seen:
        raise ValueError("the corpus is empty: there are no characters in it")
    ids = {character: id for id, character in enumerate(sorted(seen))}
    vocabulary = Tokenizer(models.WordLevel(ids))
    vocabulary.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    vocabulary.decoder = decoders.Fuse()
    return vocabulary


def _words(pieces: Iterable[str], vocab_size: int) -> Tokenizer:
    splitter = pre_tokenizers.Split(Regex(_WORD), "isolated")
    counts: Counter[str] = Counter()
    for piece in pieces:
        for text in piece.split(END):
            counts.update(word for word, _ in splitter.pre_tokenize_str(text))
    # Among equals the first in the alphabet, so that the same text always gives the same ids.
    best = sorted(counts, key=lambda word: (-counts[word], word))[: vocab_size - 2]
    ids = {word: id for id, word in enumerate(itertools.chain([UNKNOWN, END], best))}
    vocabulary = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    vocabulary.pre_tokenizer = splitter
    vocabulary.decoder = decoders.Fuse()
    vocabulary.add_special_tokens([END])
    return vocabulary
