r"""Make a vocabulary from text: byte-level BPE, characters, or words.

bpe         256 bytes and the most frequent merges; every text can be encoded and comes back
characters  the characters of the text, in the order of their code points
words       " the", "cat", "\n": separated by white space, with the space before them; the most
            frequent ones, and <unk> for all others
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"  # between two files, except with "characters"
UNKNOWN = "<unk>"
_WORD = r" ?[^\s]+|\s"


def make_vocabulary(kind: str, pieces: Iterable[str], vocab_size: int) -> Tokenizer:
    r"""Return a tokenizer of at most `vocab_size` tokens; "characters" takes all of the text.

    >>> tokenizer = make_vocabulary("characters", ["to be ", "or not"], 0)
    >>> tokenizer.get_vocab_size(), tokenizer.encode("bet").ids
    (7, [1, 2, 6])
    >>> words = make_vocabulary("words", ["the cat\nthe dog the cat"], 5)
    >>> words.encode("the dog\n").tokens
    ['the', '<unk>', '\n']
    """
    if kind == "bpe":
        return make_bpe(pieces, vocab_size, [END_OF_TEXT])
    if kind == "characters":
        return _characters(pieces)
    if kind == "words":
        return _words(pieces, vocab_size)
    raise ValueError(f"tokenizer must be one of bpe, characters, words; got {kind!r}")


def make_bpe(
    texts: Iterable[str], vocab_size: int, special_tokens: list[str], *, min_frequency: int = 0
) -> Tokenizer:
    """Return a byte-level BPE tokenizer; the special tokens have the first ids.

    >>> tokenizer = make_bpe(["low lower", "猫猫狗"], 300, ["<pad>", "<s>"])
    >>> tokenizer.decode(tokenizer.encode("slow 猫 🐈").ids), tokenizer.token_to_id("<s>")
    ('slow 猫 🐈', 1)
    """
    minimum = 256 + len(special_tokens)
    if vocab_size < minimum:
        raise ValueError(f"vocab_size must be at least {minimum} for bpe; got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=special_tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _characters(pieces: Iterable[str]) -> Tokenizer:
    characters: set[str] = set()
    for piece in pieces:
        characters.update(piece)
    ids = {character: id for id, character in enumerate(sorted(characters))}
    tokenizer = Tokenizer(models.WordLevel(ids))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def _words(pieces: Iterable[str], vocab_size: int) -> Tokenizer:
    splitter = pre_tokenizers.Split(Regex(_WORD), "isolated")
    counts: Counter[str] = Counter()
    for piece in pieces:
        for text in piece.split(END_OF_TEXT):
            counts.update(word for word, _ in splitter.pre_tokenize_str(text))
    # Ties in alphabetical order, so that the same text always gives the same ids.
    best = sorted(counts, key=lambda word: (-counts[word], word))[: vocab_size - 2]
    ids = {word: id for id, word in enumerate(itertools.chain([UNKNOWN, END_OF_TEXT], best))}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer
