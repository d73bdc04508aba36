"""Arithmetic that keeps logits lazy: numbers, a factor or a term per row, a bias per word.

Each function returns `NotImplemented` where the result could not be streamed; the caller then
builds the tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lmhead.logits.lazy import LazyLogits


def times(logits: LazyLogits, factor: Any) -> Any:
    """Logits · factor, for a number, a scalar tensor, a row factor (..., 1), or probabilities."""
    if isinstance(factor, LazyLogits):
        return _expectation(logits, factor)
    if logits._kind == "probs":
        return NotImplemented
    logits = shifted(logits)
    if not isinstance(factor, Tensor):
        if isinstance(factor, bool) or not isinstance(factor, int | float):
            return NotImplemented
        shift = None if logits._row_shift is None else logits._row_shift * factor
        return logits._with(pointwise=logits._pointwise.times(factor), row_shift=shift)
    if factor.numel() == 1 and not factor.requires_grad and factor.dim() <= logits.ndim:
        return times(logits, float(factor))
    return _times_tensor(logits, factor)


def _times_tensor(logits: LazyLogits, factor: Tensor) -> Any:
    """A factor that differs by row, or is trained, goes into the hidden states."""
    pointwise, bias = logits._pointwise, logits._bias
    per_row = factor.dim() > 0 and factor.shape[-1] == 1 and factor.dim() <= logits.ndim
    fits = not pointwise.bounded and pointwise.shift == 0.0 and (per_row or factor.dim() == 0)
    if not fits or (bias is not None and factor.dim() > 0):
        return NotImplemented
    dtype = logits._hiddens[0].dtype
    scaled = logits.map_rows(lambda t: t * factor.to(dtype))
    return scaled if bias is None else scaled._with(bias=bias * factor)


def plus(logits: LazyLogits, term: Any) -> Any:
    """Logits + term, for a number, a row term (..., 1), or a bias (V,)."""
    if logits._kind == "probs" or isinstance(term, LazyLogits):
        return NotImplemented
    logits = shifted(logits)
    if not isinstance(term, Tensor):
        if isinstance(term, bool) or not isinstance(term, int | float) or not math.isfinite(term):
            return NotImplemented
        return logits._with(pointwise=logits._pointwise.plus(term))
    lead = logits.shape[:-1]
    if term.dim() == 0 or (term.shape[-1] == 1 and logits.shape[-1] != 1):
        if term.dim() > logits.ndim:
            return NotImplemented
        row = term.expand(*lead, 1).double()
        old = logits._row_shift
        return logits._with(row_shift=-row if old is None else old - row)
    pointwise = logits._pointwise
    if term.shape == logits.shape[-1:] and not pointwise.bounded and pointwise.scale != 0:
        added = term / pointwise.scale
        return logits._with(bias=added if logits._bias is None else logits._bias + added)
    return NotImplemented


def divided(logits: LazyLogits, divisor: Any) -> Any:
    """Logits / divisor."""
    if isinstance(divisor, LazyLogits):
        return NotImplemented
    if isinstance(divisor, Tensor):
        return times(logits, divisor.reciprocal() if divisor.is_floating_point() else 1.0 / divisor)
    return times(logits, 1.0 / divisor) if divisor != 0 else NotImplemented


def tanh(logits: LazyLogits) -> Any:
    """Soft-capping written out: (logits / cap).tanh() * cap."""
    if logits._kind != "logits" or logits._row_shift is not None:
        return NotImplemented
    bounded = logits._pointwise.tanh()
    return NotImplemented if bounded is None else logits._with(pointwise=bounded)


def mask_words(logits: LazyLogits, mask: Tensor, value: Any) -> Any:
    """masked_fill with -inf and a mask (V,): those words have probability 0."""
    word_mask = mask.dim() >= 1 and mask.numel() == mask.shape[-1] == logits.shape[-1]
    if logits._kind != "logits" or not word_mask or float(value) != -math.inf:
        return NotImplemented
    if logits._pointwise.lipschitz == 0 or logits._pointwise.scale * logits._pointwise.outer < 0:
        return NotImplemented
    like = logits._hiddens[0]
    bias = like.new_zeros(logits.shape[-1]) if logits._bias is None else logits._bias
    return logits._with(bias=bias.masked_fill(mask.reshape(-1), -math.inf))


def clamp(logits: LazyLogits, min: Any = None, max: Any = None) -> Any:
    """A lower limit at the smallest number of the type changes only -inf, in nothing we answer."""
    if max is None and min == torch.finfo(logits.dtype).min:
        return logits
    return NotImplemented


def shifted(logits: LazyLogits) -> LazyLogits:
    """Log-probabilities as logits with a row shift, for arithmetic on them."""
    if logits._kind != "log_probs":
        return logits
    return logits._with(kind="logits", row_shift=logits._raw_lse(keepdim=True))


@dataclass(frozen=True)
class Expectation:
    """softmax(z) · (z - shift), before its sum over the words: what an entropy is written with."""

    logits: LazyLogits
    sign: float = 1.0

    def sum(self, dim: int) -> Tensor:
        """Σ_v p_v (z_v - shift), (...)."""
        if dim not in (-1, self.logits.ndim - 1):
            raise ValueError(f"dim must be the last, the vocabulary; got {dim}")
        answers = self.logits._with(dtype=torch.float64).ask(entropy=True, logsumexp=True)
        assert answers.entropy is not None
        assert answers.logsumexp is not None
        # Σ p log p = -entropy, and z = log p + lse.
        mean = -answers.entropy
        if self.logits._kind == "logits":
            mean = self.logits._shift(mean + answers.logsumexp)
        return (self.sign * mean).to(self.logits.dtype)

    def __neg__(self) -> Expectation:
        return Expectation(self.logits, -self.sign)


def _expectation(left: LazyLogits, right: LazyLogits) -> Any:
    logits, probs = (right, left) if left._kind == "probs" else (left, right)
    same = all(a is b for a, b in zip(logits._hiddens, probs._hiddens, strict=True))
    same = same and all(a is b for a, b in zip(logits._weights, probs._weights, strict=True))
    same = same and logits._bias is probs._bias and logits._pointwise == probs._pointwise
    if probs._kind == "probs" and logits._kind != "probs" and same:
        return Expectation(logits)
    return NotImplemented
