"""From the gradient of the logits to those of hidden state, weight and bias.

With G = dL/dx, (V, N) as tiles:  dL/dhidden = Gᵀ W,  dL/dweight = G hidden,  dL/dbias = Σ_n G.
What is not wanted costs nothing; what is wanted is summed in the type of the products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lmhead.sweep.kernels import Coefficients
from lmhead.sweep.questions import RowAnswers
from lmhead.sweep.source import Rows, Source


@dataclass(frozen=True)
class Needs:
    """Which tensors of a source want a gradient."""

    hiddens: tuple[bool, ...]
    weights: tuple[bool, ...]
    bias: bool

    @classmethod
    def of(cls, source: Source, flags: tuple[bool, ...]) -> Needs:
        """From one flag per tensor, in the order hiddens, weights, bias."""
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
        self.wanted = needs.any
        self._hiddens = _zeros(source.hiddens, needs.hiddens, source.dtype)
        self._weights = _zeros(source.weights, needs.weights, source.dtype)
        self._bias = _zeros((source.bias,), (needs.bias,), source.dtype)[0]

    def start(self, rows: Rows, hiddens: tuple[Tensor, ...]) -> None:
        """Begin a chunk of tokens."""
        self._rows, self._inputs = rows, hiddens
        self._sums = [
            None if g is None else torch.zeros_like(h)
            for g, h in zip(self._hiddens, hiddens, strict=True)
        ]

    def add(self, lo: int, hi: int, grad: Tensor) -> None:
        """Take in a tile of G: (words, tokens)."""
        for term, hidden in enumerate(self._inputs):
            into_hidden, into_weight = self._sums[term], self._weights[term]
            if into_hidden is not None:
                into_hidden.addmm_(grad.T, self.source.weight_tile(term, lo, hi))
            if into_weight is not None:
                into_weight[lo:hi].addmm_(grad, hidden)
        if self._bias is not None:
            self._bias[lo:hi] += grad.sum(1)

    def finish(self) -> None:
        """End the chunk."""
        for total, chunk in zip(self._hiddens, self._sums, strict=True):
            if total is not None and chunk is not None:
                total[self._rows] = chunk

    def result(self) -> tuple[Tensor | None, ...]:
        """The gradients in the types of their tensors: hiddens, weights, bias."""
        source = self.source
        tensors = (*source.hiddens, *source.weights, source.bias)
        sums = (*self._hiddens, *self._weights, self._bias)
        return tuple(
            None if s is None or t is None else s.to(t.dtype)
            for s, t in zip(sums, tensors, strict=True)
        )


def _zeros(
    tensors: tuple[Tensor | None, ...], wanted: tuple[bool, ...], dtype: torch.dtype
) -> list[Tensor | None]:
    return [
        t.new_zeros(t.shape, dtype=dtype) if w and t is not None else None
        for t, w in zip(tensors, wanted, strict=True)
    ]


def coefficients(answers: RowAnswers, upstream: RowAnswers, dtype: torch.dtype) -> Coefficients:
    """The gradient of a loss with respect to z, from its gradients with respect to the answers.

    d lse     / dz_v = p_v
    d entropy / dz_v = -p_v (log p_v + entropy)
    d kl      / dz_v = p_v (log p_v - log q_v - kl)
    """
    a, b, c = upstream.lse, None, None
    if upstream.entropy is not None:
        assert answers.entropy is not None
        a = _plus(a, -upstream.entropy * answers.entropy)
        b = -upstream.entropy
    if upstream.kl is not None:
        assert answers.kl is not None
        a = _plus(a, -upstream.kl * answers.kl)
        b, c = _plus(b, upstream.kl), -upstream.kl
    sums = (a, b, c, upstream.mixed, upstream.softened)
    return Coefficients(*(None if x is None else x.to(dtype) for x in sums))


def other_coefficients(upstream_kl: Tensor, dtype: torch.dtype) -> Coefficients:
    """D kl / dz_q = q - p, with p given as soft targets."""
    upstream_kl = upstream_kl.to(dtype)
    return Coefficients(a=upstream_kl, softened=-upstream_kl)


def _plus(x: Tensor | None, y: Tensor) -> Tensor:
    return y if x is None else x + y
