"""From the gradient of the logits to those of hidden state, weight and bias.

With G = dL/dx, (V, N) as tiles:  dL/dhidden = Gᵀ W,  dL/dweight = G hidden,  dL/dbias = Σ_n G.
Gradients that are not needed cost nothing; the others are summed in the type of the products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lmhead.scores import Rows
from lmhead.scores.row_loss import RowSums
from lmhead.sweep.kernels import Coefficients, scatter_add_
from lmhead.sweep.source import Source

# Rank-one terms collected before they are multiplied out.
_PENDING = 8


@dataclass(frozen=True)
class Needs:
    """Which tensors of a source need a gradient."""

    hiddens: tuple[bool, ...]
    weights: tuple[bool, ...]
    bias: bool

    @classmethod
    def of(cls, source: Source, flags: tuple[bool, ...]) -> Needs:
        """Make it from one flag per tensor, in the order hiddens, weights, bias."""
        n = len(source.hiddens)
        return cls(flags[:n], flags[n : 2 * n], flags[2 * n] and source.bias is not None)

    @property
    def any(self) -> bool:
        """Whether there is anything to do."""
        return any(self.hiddens) or any(self.weights) or self.bias


class Gradients:
    """The sums, over tiles and chunks, of the gradients of one source."""

    def __init__(self, source: Source, needs: Needs) -> None:
        self.source = source
        self._pending: list[_RankOne] = []
        self.wanted = needs.any
        self._hiddens = _zeros(source.hiddens, needs.hiddens, source.dtype)
        self._weights = [
            w.new_empty(w.shape, dtype=source.dtype) if n else None
            for w, n in zip(source.weights, needs.weights, strict=True)
        ]
        self._written = False  # whether the weights' sums hold anything yet
        self._bias = _zeros((source.bias,), (needs.bias,), source.dtype)[0]

    def start(self, rows: Rows, hiddens: tuple[Tensor, ...], *, whole: bool = True) -> None:
        """Begin a chunk of rows; `whole` promises that `add` will see every token of it once."""
        if not whole:
            self._clear()
        self._rows, self._inputs = rows, hiddens
        # (D_i, B): turned, since the product is faster so.
        self._sums = [
            None if g is None else h.new_zeros(h.shape[1], h.shape[0])
            for g, h in zip(self._hiddens, hiddens, strict=True)
        ]

    def add(self, lo: int, hi: int, grad: Tensor) -> None:
        """Add a tile of G: (tokens, rows)."""
        for term, hidden in enumerate(self._inputs):
            into_hidden, into_weight = self._sums[term], self._weights[term]
            if into_hidden is not None:
                into_hidden.addmm_(self.source.weight_tile(term, lo, hi).T, grad)
            if into_weight is not None:
                into_weight[lo:hi].addmm_(grad, hidden, beta=1 if self._written else 0)
        if self._bias is not None:
            self._bias[lo:hi] += grad.sum(1)

    def add_tokens(self, tokens: Tensor, grad: Tensor) -> None:
        """Add G for some tokens only: (K,) and (K, rows)."""
        self._clear()
        for term, hidden in enumerate(self._inputs):
            into_hidden, into_weight = self._sums[term], self._weights[term]
            if into_hidden is not None:
                into_hidden.addmm_(self.source.weight_rows(term, tokens).T, grad)
            if into_weight is not None:
                scatter_add_(into_weight, tokens, grad @ hidden)
        if self._bias is not None:
            self._bias.index_add_(0, tokens, grad.sum(1))

    def _clear(self) -> None:
        """Set the weights' sums to 0, unless something is in them."""
        if not self._written:
            for total in self._weights:
                if total is not None:
                    total.zero_()
            self._written = True

    def add_rank_one(self, rows: Rows, hiddens: tuple[Tensor, ...], c: Tensor, d: Tensor) -> None:
        """Add d cᵀ for some rows, whether or not their chunk has begun: (V,), (rows,)."""
        self._pending.append(_RankOne(rows, d, c, tuple(d @ h for h in hiddens)))
        if len(self._pending) >= _PENDING:
            self._flush()

    def _flush(self) -> None:
        """Multiply out the rank-one terms together: dW += C U, dH += d (Cᵀ W), db += C Σd."""
        terms, self._pending = self._pending, []
        if not terms:
            return
        columns = torch.stack([t.c for t in terms], 1)  # (V, m)
        for number in range(len(self.source.hiddens)):
            inputs = torch.stack([t.inputs[number] for t in terms])  # (m, D)
            back = self._add_low_rank(number, columns, inputs)
            into = self._hiddens[number]
            if into is not None:
                for t, row in zip(terms, back, strict=True):
                    into[t.rows] += torch.outer(t.d, row)
        if self._bias is not None:
            self._bias.addmv_(columns, torch.stack([t.d.sum() for t in terms]))

    def _add_low_rank(self, term: int, columns: Tensor, inputs: Tensor) -> Tensor:
        """Add columns (V, m) @ inputs (m, D) to dW; return columnsᵀ W (m, D), or 0 if unwanted."""
        self._clear()
        back = torch.zeros_like(inputs)
        into = self._weights[term]
        for lo in range(0, self.source.vocab, 4096):
            hi = min(lo + 4096, self.source.vocab)
            if into is not None:
                into[lo:hi].addmm_(columns[lo:hi], inputs)
            if self._hiddens[term] is not None:
                back.addmm_(columns[lo:hi].T, self.source.weight_tile(term, lo, hi))
        return back

    def finish(self) -> None:
        """End the chunk, which has been over all tokens or has cleared the sums before."""
        self._written = True
        for total, chunk in zip(self._hiddens, self._sums, strict=True):
            if total is not None and chunk is not None:
                total[self._rows] += chunk.T  # rank-one terms may have come before

    def result(self) -> tuple[Tensor | None, ...]:
        """Return the gradients, in the type of the products: hiddens, weights, bias."""
        self._flush()
        self._clear()  # only where there was no row at all
        return (*self._hiddens, *self._weights, self._bias)


@dataclass(frozen=True)
class _RankOne:
    """A term d cᵀ of G (rows x tokens) that is multiplied out later, together with others."""

    rows: Rows  # which rows
    d: Tensor  # (rows,)
    c: Tensor  # (V,)
    inputs: tuple[Tensor, ...]  # Σ_n d_n h_n, (D_i,) each


def _zeros(
    tensors: tuple[Tensor | None, ...], wanted: tuple[bool, ...], dtype: torch.dtype
) -> list[Tensor | None]:
    return [
        t.new_zeros(t.shape, dtype=dtype) if w and t is not None else None
        for t, w in zip(tensors, wanted, strict=True)
    ]


def coefficients(answers: RowSums, upstream: RowSums, dtype: torch.dtype) -> Coefficients:
    """Return the gradient with respect to z, from the gradients with respect to the answers.

    d lse     / dz_v = p_v
    d entropy / dz_v = -p_v (log p_v + entropy)
    d kl      / dz_v = p_v (log p_v - log q_v - kl)
    """
    a, b, c = upstream.lse, None, None
    if upstream.entropy is not None:
        a = _plus(a, -upstream.entropy * answers.entropy)
        b = -upstream.entropy
    if upstream.kl is not None:
        a = _plus(a, -upstream.kl * answers.kl)
        b, c = _plus(b, upstream.kl), -upstream.kl
    sums = (a, b, c, upstream.mixed, upstream.softened)
    return Coefficients(*(None if x is None else x.to(dtype) for x in sums))


def other_coefficients(upstream_kl: Tensor, dtype: torch.dtype) -> Coefficients:
    """Return d kl / dz_q = q - p, with p given as soft targets."""
    upstream_kl = upstream_kl.to(dtype)
    return Coefficients(a=upstream_kl, softened=-upstream_kl)


def _plus(x: Tensor | None, y: Tensor) -> Tensor:
    return y if x is None else x + y
