"""How a sweep is cut into tiles: the one place that knows about memory.

A tile holds the logits of `words` vocabulary entries for `tokens` rows of the hidden state, laid
out vocabulary first, `(words, tokens)`: the product that makes it and the one that turns it into
the weight gradient are both faster this way round, and one word's row is contiguous.

    streamed    one tile at a time; a backward pass makes each tile a second time.
    retained    all tiles of a chunk of tokens are kept until its gradients are done: 3 products
                instead of 4, for a buffer of tokens x vocabulary with few tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

DEFAULT_MAX_BYTES = 128 * 2**20
# Beyond these sizes the products do not get faster; below, they do.
_WORDS = 8192
_TOKENS = 1024
# Tokens of a chunk under the gradient filter: fewer keep fewer words, more make better products.
_FILTERED_TOKENS = 256
# With fewer tokens in a chunk, reading and writing the weight gradient for each chunk costs more
# than a fourth product, and more than the filter saves.
_MIN_RETAINED = 32
# Up to so many logits (1 MiB), the operations on a sweep's tiles cost more than what is in them:
# see `few`. Beyond, its tiles no longer stay in the cache.
_FEW = 2**18
# Tiles of scratch space that a step on a tile may use beside the tile.
_SCRATCH = 3


@dataclass(frozen=True)
class Plan:
    """The cut of an N x V sweep: chunks of `tokens`, tiles of `words`."""

    rows: int
    vocab: int
    tokens: int
    words: int
    retained: bool
    bytes: int
    filtered: bool = False

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Token ranges [start, stop)."""
        return ((i, min(i + self.tokens, self.rows)) for i in range(0, self.rows, self.tokens))

    def tiles(self) -> Iterator[tuple[int, int]]:
        """Vocabulary ranges [start, stop)."""
        return ((j, min(j + self.words, self.vocab)) for j in range(0, self.vocab, self.words))

    @property
    def n_chunks(self) -> int:
        """How many chunks of tokens there are."""
        return -(-self.rows // self.tokens)

    @property
    def n_tiles(self) -> int:
        """How many tiles the vocabulary is cut into."""
        return -(-self.vocab // self.words)


def make_plan(
    rows: int,
    vocab: int,
    hidden_size: int,
    *,
    itemsize: int,
    converts: bool,
    max_bytes: int | None = None,
    retain: bool = False,
    sources: int = 1,
    filtered: bool = False,
) -> Plan:
    """The fastest plan whose temporary memory is at most `max_bytes`.

    Args:
        rows: N, the number of tokens.
        vocab: V, the number of words.
        hidden_size: D, all terms of the linear layer together.
        itemsize: bytes of a number in which products are made (4 or 8).
        converts: whether weight and hidden state must be converted to that type, tile by tile.
        max_bytes: the bound; None means `DEFAULT_MAX_BYTES`. It cannot go under a tile of 8 words
            and 1 token.
        retain: whether keeping a chunk's tiles would save a product.
        sources: how many heads are swept side by side.
        filtered: whether the gradient filter wants all tiles of a chunk as one matrix.

    >>> make_plan(2048, 49152, 576, itemsize=4, converts=False, retain=True).retained
    True
    >>> make_plan(2048, 4_000_000, 576, itemsize=4, converts=False, retain=True).retained
    False
    """
    budget = (DEFAULT_MAX_BYTES if max_bytes is None else max_bytes) // itemsize
    # No tile is as large as the logits, however few they are.
    most_words = max(1, min(_WORDS, -(-vocab // 2)))
    # What a tile needs beside the logits: the converted rows of the weight, for every source.
    word_cost = hidden_size * sources if converts else 0
    # What a token needs: its hidden state, gathered and converted, and a gradient for it.
    token_cost = 3 * hidden_size * sources + 16

    def cost(tokens: int, words: int, kept_words: int) -> int:
        tiles = (kept_words + (_SCRATCH + sources - 1) * words) * tokens
        return tiles + words * word_cost + tokens * token_cost

    def fit_tokens(words: int, kept_words: int, most: int) -> int:
        per_token = cost(1, words, kept_words) - words * word_cost
        return max(1, min(most, (budget - words * word_cost) // per_token))

    def fit_words(tokens: int) -> int:
        words = most_words
        while words > min(8, most_words) and cost(tokens, words, words) > budget:
            words = max(min(8, most_words), words // 2)
        return words

    rows_or_one = max(1, rows)
    if filtered and rows > 1:
        # Beside the chunk: rows of the weight, of its gradient and of the chunk that are kept, and
        # the sums over tokens.
        words = most_words
        while words > 512 and words * (2 * hidden_size + word_cost) > budget // 4:
            words //= 2
        fixed = words * (2 * hidden_size + word_cost) + 12 * vocab
        per_token = vocab + 4 * words + token_cost
        tokens = max(1, min(_FILTERED_TOKENS, -(-rows // 2), (budget - fixed) // per_token))
        if tokens >= min(_MIN_RETAINED, -(-rows // 2)):
            tokens = _balanced(rows, tokens)
            used = (fixed + tokens * per_token) * itemsize
            return Plan(rows, vocab, tokens, words, retained=True, bytes=used, filtered=True)
    if retain:
        words = most_words
        while words > 512 and words * word_cost > budget // 4:
            words //= 2
        tokens = fit_tokens(words, vocab, rows_or_one)
        if tokens >= min(_MIN_RETAINED, rows_or_one) and cost(tokens, words, vocab) <= budget:
            tokens = _balanced(rows_or_one, tokens)
            used = cost(tokens, words, vocab) * itemsize
            return Plan(rows, vocab, tokens, words, retained=True, bytes=used)
    tokens = min(_TOKENS, rows_or_one)
    words = fit_words(tokens)
    if cost(tokens, words, words) > budget:
        tokens = fit_tokens(words, words, tokens)
    tokens = _balanced(rows_or_one, tokens)
    used = cost(tokens, words, words) * itemsize
    return Plan(rows, vocab, tokens, words, retained=False, bytes=used)


def make_small_plan(
    rows: int, vocab: int, hidden_size: int, itemsize: int, max_bytes: int | None
) -> Plan | None:
    """Two chunks of tokens, each with all words as one tile: for `few`.

    None where the logits are not few, or do not fit `max_bytes`. As ever, no tile is as large as
    the logits.

    >>> make_small_plan(768, 65, 128, 4, None).n_chunks
    2
    >>> make_small_plan(2048, 49152, 576, 4, None) is None
    True
    """
    tokens = -(-rows // 2)
    used = (2 * tokens * vocab + rows * (hidden_size + 32)) * itemsize
    fits = used <= (DEFAULT_MAX_BYTES if max_bytes is None else max_bytes)
    if not fits or tokens < 1 or rows * vocab > _FEW or vocab > _WORDS:
        return None
    return Plan(rows, vocab, tokens, vocab, retained=True, bytes=used)


def _balanced(rows: int, tokens: int) -> int:
    """Chunks of equal size, a multiple of 16 where that fits: no small last chunk."""
    n_chunks = -(-rows // tokens)
    even = -(-rows // n_chunks)
    return min(tokens, -(-even // 16) * 16)
