"""Questions of a sweep, and the plan that cuts it into tiles within a memory budget.

The sums asked for are those of `RowSums`; all are differentiable, and their gradients with respect
to the logits are in `chunk.coefficients`. Losses are weighted sums of them, see `scores.row_loss`.

A tile holds the logits of `tile_tokens` tokens for `chunk_rows` rows, laid out vocabulary first,
`(tokens, rows)`: the product that computes it and the one that computes the weight gradient are
both faster this way, and the logits of one token are contiguous.

    streamed    one tile at a time; a backward pass computes each tile a second time.
    retained    all tiles of a chunk of rows are kept until its gradients are done: 3 products
                instead of 4, for a buffer of rows x vocabulary with few rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from lmhead import checks
from lmhead.scores.protocol import DEFAULT_MAX_BYTES as DEFAULT_MAX_BYTES
from lmhead.scores.row_loss import RowSums
from lmhead.sweep.equal_rows import EqualRows
from lmhead.sweep.source import Source

# Beyond these sizes the products do not get faster; below, they do.
_TILE_TOKENS = 8192
_CHUNK_ROWS = 1024
# Rows of a chunk with the gradient filter: fewer rows keep fewer tokens, more rows multiply faster.
_FILTERED_ROWS = 256
# With fewer rows in a chunk, reading and writing the weight gradient per chunk costs more
# than a fourth product, and more than the filter saves.
_MIN_RETAINED = 64
# Tiles of scratch space that a step on a tile may use besides the tile.
_SCRATCH = 3


@dataclass(frozen=True)
class Plan:
    """How an N x V sweep is divided: chunks of `chunk_rows`, tiles of `tile_tokens`."""

    rows: int
    vocab: int
    chunk_rows: int
    tile_tokens: int
    retained: bool
    bytes: int
    filtered: bool = False

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Yield row ranges [start, stop)."""
        return (
            (i, min(i + self.chunk_rows, self.rows)) for i in range(0, self.rows, self.chunk_rows)
        )

    def tiles(self) -> Iterator[tuple[int, int]]:
        """Yield vocabulary ranges [start, stop)."""
        return (
            (j, min(j + self.tile_tokens, self.vocab))
            for j in range(0, self.vocab, self.tile_tokens)
        )

    @property
    def n_chunks(self) -> int:
        """Number of chunks of rows."""
        return -(-self.rows // self.chunk_rows)

    @property
    def n_tiles(self) -> int:
        """Number of tiles of the vocabulary."""
        return -(-self.vocab // self.tile_tokens)


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
    """Return the fastest plan whose temporary memory is at most `max_bytes`.

    Args:
        rows: N, the number of rows.
        vocab: V, the number of tokens.
        hidden_size: D, all terms of the linear layer together.
        itemsize: bytes per number of the products (4 or 8).
        converts: whether weight and hidden state must be converted to that type, tile by tile.
        max_bytes: the bound; None means `DEFAULT_MAX_BYTES`. The smallest tile has 8 tokens
            and 1 row.
        retain: whether keeping a chunk's tiles saves a product.
        sources: number of heads in one sweep.
        filtered: whether the gradient filter needs all tiles of a chunk as one matrix.

    >>> make_plan(2048, 49152, 576, itemsize=4, converts=False, retain=True).retained
    True
    >>> make_plan(2048, 4_000_000, 576, itemsize=4, converts=False, retain=True).retained
    False
    """
    budget = (DEFAULT_MAX_BYTES if max_bytes is None else max_bytes) // itemsize
    # A tile has at most half of the logits, even of a small vocabulary.
    most_tokens = max(1, min(_TILE_TOKENS, -(-vocab // 2)))
    # Numbers per token besides the logits: the converted rows of the weight, for every source.
    token_cost = hidden_size * sources if converts else 0
    # Numbers per row: its hidden state, gathered and converted, and its gradient.
    row_cost = 3 * hidden_size * sources + 16

    def cost(chunk_rows: int, tile_tokens: int, kept_tokens: int) -> int:
        tiles = (kept_tokens + (_SCRATCH + sources - 1) * tile_tokens) * chunk_rows
        return tiles + tile_tokens * token_cost + chunk_rows * row_cost

    def fit_rows(tile_tokens: int, kept_tokens: int, most: int) -> int:
        per_row = cost(1, tile_tokens, kept_tokens) - tile_tokens * token_cost
        return max(1, min(most, (budget - tile_tokens * token_cost) // per_row))

    def fit_tokens(chunk_rows: int) -> int:
        tile_tokens = most_tokens
        while (
            tile_tokens > min(8, most_tokens)
            and cost(chunk_rows, tile_tokens, tile_tokens) > budget
        ):
            tile_tokens = max(min(8, most_tokens), tile_tokens // 2)
        return tile_tokens

    rows_or_one = max(1, rows)
    if filtered and rows > 1:
        # Beside the chunk: the kept rows of the weight, of its gradient and of the chunk, and
        # the sums over rows.
        tile_tokens = most_tokens
        while tile_tokens > 512 and tile_tokens * (2 * hidden_size + token_cost) > budget // 4:
            tile_tokens //= 2
        fixed = tile_tokens * (2 * hidden_size + token_cost) + 12 * vocab
        per_row = vocab + 4 * tile_tokens + row_cost
        chunk_rows = max(1, min(_FILTERED_ROWS, -(-rows // 2), (budget - fixed) // per_row))
        if chunk_rows >= min(_MIN_RETAINED, -(-rows // 2)):
            chunk_rows = balanced(rows, chunk_rows)
            used = (fixed + chunk_rows * per_row) * itemsize
            return Plan(
                rows, vocab, chunk_rows, tile_tokens, retained=True, bytes=used, filtered=True
            )
    if retain:
        tile_tokens = most_tokens
        while tile_tokens > 512 and tile_tokens * token_cost > budget // 4:
            tile_tokens //= 2
        chunk_rows = fit_rows(tile_tokens, vocab, rows_or_one)
        if (
            chunk_rows >= min(_MIN_RETAINED, rows_or_one)
            and cost(chunk_rows, tile_tokens, vocab) <= budget
        ):
            chunk_rows = balanced(rows_or_one, chunk_rows)
            used = cost(chunk_rows, tile_tokens, vocab) * itemsize
            return Plan(rows, vocab, chunk_rows, tile_tokens, retained=True, bytes=used)
    chunk_rows = min(_CHUNK_ROWS, rows_or_one)
    tile_tokens = fit_tokens(chunk_rows)
    if cost(chunk_rows, tile_tokens, tile_tokens) > budget:
        chunk_rows = fit_rows(tile_tokens, tile_tokens, chunk_rows)
    chunk_rows = balanced(rows_or_one, chunk_rows)
    used = cost(chunk_rows, tile_tokens, tile_tokens) * itemsize
    return Plan(rows, vocab, chunk_rows, tile_tokens, retained=False, bytes=used)


def balanced(rows: int, chunk_rows: int) -> int:
    """Return chunks of equal size, a multiple of 16 where that fits: no small last chunk.

    Products with another number of rows take up to 1.5 times as long per row.

    >>> balanced(512, 270), balanced(512, 93), balanced(93, 93), balanced(100, 50)
    (256, 80, 93, 50)
    """
    n_chunks = -(-rows // chunk_rows)
    even = -(-rows // n_chunks)
    up, down = -(-even // 16) * 16, chunk_rows // 16 * 16
    if up <= chunk_rows:
        return up
    small_last = down < 32 or 0 < rows % down < 16
    return min(chunk_rows, even) if n_chunks == 1 or small_last else down


@dataclass(frozen=True)
class FilterReport:
    """What the filter did to one chunk of rows.

    Attributes:
        tokens: number of rows (target tokens) of the chunk.
        kept: share of the vocabulary with exact gradients; 1.0 if the filter removed nothing.
        hidden_error: relative error of the hidden gradient (Frobenius).
        weight_error: relative error of the weight gradient (Frobenius).
    """

    tokens: int
    kept: float
    hidden_error: float
    weight_error: float


@dataclass
class GradFilter:
    """A gradient filter that can measure its error.

    Args:
        tail_mass: τ, the share of the probability mass that is set aside, in [0, 1).
        report_every: measure the error of every n-th chunk (0 for none). A measured chunk
            costs two more products.

    >>> import torch, lmhead
    >>> watched = GradFilter(0.02, report_every=4)
    >>> hidden = torch.randn(64, 16, requires_grad=True)
    >>> weight = torch.randn(1000, 16, requires_grad=True)
    >>> targets = torch.randint(1000, (64,))
    >>> lmhead.linear_cross_entropy(hidden, weight, targets, grad_filter=watched).backward()
    >>> watched.reports[0].hidden_error < 0.05
    True
    """

    tail_mass: float
    report_every: int = 0
    reports: list[FilterReport] = field(default_factory=list)
    chunks: int = 0

    def count(
        self, tokens: int, kept: float = 1.0, error: Callable[[], tuple[float, float]] | None = None
    ) -> None:
        """Count a chunk, and record its error every `report_every` chunks; 0 for an exact chunk."""
        self.chunks += 1
        if self.report_every and (self.chunks - 1) % self.report_every == 0:
            hidden, weight = (0.0, 0.0) if error is None else error()
            self.reports.append(FilterReport(tokens, kept, hidden, weight))

    def __str__(self) -> str:
        if not self.reports:
            return f"GradFilter(tail_mass={self.tail_mass:g}): no chunk measured"
        n = len(self.reports)
        kept = sum(r.kept for r in self.reports) / n
        hidden = sum(r.hidden_error for r in self.reports) / n
        weight = sum(r.weight_error for r in self.reports) / n
        return (
            f"GradFilter(tail_mass={self.tail_mass:g}): {kept:.1%} of the tokens kept, error of "
            f"the hidden gradient {hidden:.2%}, of the weight gradient {weight:.2%} "
            f"(mean of {n} chunks)"
        )


def as_filter(grad_filter: float | GradFilter | None) -> GradFilter | None:
    """Return a gradient filter from its tail mass; None for exact gradients."""
    tail_mass = grad_filter.tail_mass if isinstance(grad_filter, GradFilter) else grad_filter
    if tail_mass is None:
        return None
    checks.check_number("grad_filter", tail_mass, low=0.0, high=1.0)
    if tail_mass == 1.0:
        raise ValueError("grad_filter must be below 1; got 1.0, which would keep no token")
    if tail_mass == 0.0:
        return None
    return grad_filter if isinstance(grad_filter, GradFilter) else GradFilter(tail_mass)


class Decisions(NamedTuple):
    """Exact integer answers, decided in float64 where float32 cannot; None if not asked for."""

    top_values: Any = None  # (N, k)
    top_ids: Any = None  # (N, k)
    ranks: Any = None  # (N, K)


class Shard(Protocol):
    """A slice of the vocabulary; other processes hold the other slices."""

    @property
    def most(self) -> int:
        """Tokens of the largest slice: all processes must use the same chunks."""
        ...

    def combine(
        self, sums: RowSums, decisions: Decisions | None = None, top_k: int = 0
    ) -> tuple[RowSums, Decisions]:
        """Return the answers about the whole vocabulary, from those about each slice."""
        ...


@dataclass(frozen=True)
class Questions:
    """A source and the questions about it.

    `active` (N,) leaves rows out: their answers are 0, their gradients 0, at no cost.

    With a `shard` the source has the tokens of one slice; ids are counted from its first token, and
    those of other slices are outside of [0, V).
    """

    source: Source
    other: Source | None = None
    entropy: bool = False
    log_sum_sq: bool = False
    top_k: int = 0
    grad_filter: GradFilter | None = None
    max_bytes: int | None = None
    ids: Tensor | None = None  # (N, K)
    mix: Tensor | None = None  # (V,)
    soft: Tensor | None = None  # (N, V)
    soft_weight: Tensor | None = None  # (V,)
    rank_ids: Tensor | None = None  # (N, K)
    rank_values: Tensor | None = None  # (N, K), float64 logits at `rank_ids`, if known
    active: Tensor | None = None  # (N,) bool
    shard: Shard | None = None
    equal_rows: EqualRows | None = None  # expect that log-probabilities are summed

    @property
    def rows(self) -> int:
        """Number of active rows."""
        return self.source.rows if self.active is None else int(self.active.sum())

    def plan(
        self, *, rows: int | None = None, retain: bool = False, filtered: bool = False
    ) -> Plan:
        """Return the plan of the sweep: for answers, or for gradients, filtered or not.

        `rows` is the number of remaining rows; None for all.
        """
        source = self.source
        plan = make_plan(
            self.rows if rows is None else rows,
            source.vocab if self.shard is None else self.shard.most,
            source.hidden_size,
            itemsize=source.dtype.itemsize,
            converts=source.converts,
            max_bytes=self.max_bytes,
            retain=retain and self.other is None,
            sources=1 if self.other is None else 2,
            filtered=filtered and self.filters,
        )
        return replace(plan, vocab=source.vocab)

    @property
    def filters(self) -> bool:
        """Whether the gradient filter applies.

        With soft-capping, label smoothing and soft targets have no rank-one tail: exact then.
        """
        spread = self.mix is not None or self.soft is not None
        plain = self.source.row_scale is None and not self.log_sum_sq
        bounded = self.source.pointwise.bounded
        return self.grad_filter is not None and plain and not (bounded and spread)

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return all tensors in a fixed order: first those of the sources, which have gradients."""
        return (
            *self.source.tensors(),
            *(() if self.other is None else self.other.tensors()),
            self.ids,
            self.mix,
            self.soft,
            self.soft_weight,
            self.rank_ids,
            self.rank_values,
            self.active,
            self.source.row_scale,
            None if self.other is None else self.other.row_scale,
        )

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> Questions:
        """Return the same questions about other tensors, in the order of `tensors()`."""
        *tensors, scale, other_scale = tensors
        source, rest = _rebuild(self.source, tensors, scale)
        other = None
        if self.other is not None:
            other, rest = _rebuild(self.other, rest, other_scale)
        ids, mix, soft, soft_weight, rank_ids, rank_values, active = rest
        return replace(
            self,
            source=source,
            other=other,
            ids=ids,
            mix=mix,
            soft=soft,
            soft_weight=soft_weight,
            rank_ids=rank_ids,
            rank_values=rank_values,
            active=active,
        )

    def without_tensors(self) -> Questions:
        """Return the questions without tensors, which autograd saves separately."""
        return self.with_tensors((None,) * len(self.tensors()))

    @property
    def n_differentiable(self) -> int:
        """Number of leading entries of `tensors()` that have gradients."""
        return sum(2 * len(s.hiddens) + 1 for s in (self.source, self.other) if s is not None)


def _rebuild(
    source: Source, tensors: Sequence[Tensor | None], row_scale: Tensor | None
) -> tuple[Source, Sequence[Tensor | None]]:
    end = 2 * len(source.hiddens) + 1
    return replace(source.with_tensors(tensors[:end]), row_scale=row_scale), tensors[end:]
