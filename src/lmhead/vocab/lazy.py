"""`FactoredLogits`: what a factored head returns. The manners of `LazyLogits`, another way inside.

In:  hidden states (..., D), the `Factors` of a head.
Out: the answers of `LazyLogits`: a loss, log-probabilities, an argmax, a top-k, a sample.

A factored distribution is normalised as it stands, so its log-probabilities serve as logits: their
logsumexp is 0, and log_softmax changes nothing. What would unbalance them (a temperature, soft
capping) needs all words: the tensor is built then, with a `PerformanceWarning`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from lmhead import checks
from lmhead.functional import Answers, TopK, check_loss, id_rows
from lmhead.logits import LazyLogits
from lmhead.logits.arithmetic import Expectation, clamp
from lmhead.logits.unbuilt import Kind
from lmhead.sweep import Pointwise
from lmhead.sweep.eager import eager
from lmhead.vocab.factors import Factors, Uniform, again

if TYPE_CHECKING:
    from typing_extensions import Self


class FactoredLogits(LazyLogits):
    """Log-probabilities of shape (..., V) of a factored head, never built unless all are asked for.

    >>> from lmhead.vocab import AdaptiveHead
    >>> logits = AdaptiveHead(16, 1000, cutoffs=[100])(torch.randn(4, 16))
    >>> logits
    FactoredLogits(shape=(4, 1000), dtype=torch.float32, not computed)
    >>> logits.logsumexp(-1)
    tensor([0., 0., 0., 0.])
    """

    def __init__(
        self,
        hiddens: tuple[Tensor, ...],
        factors: Factors,
        *,
        dtype: torch.dtype,
        kind: Kind = "logits",
        row_shift: Tensor | None = None,
    ) -> None:
        super().__init__(
            hiddens,
            (),
            None,
            Pointwise(),
            dtype=dtype,
            kind=kind,
            row_shift=row_shift,
            max_bytes=factors.max_bytes,
        )
        self.factors = factors

    def _fields(self) -> dict[str, Any]:
        return {
            "hiddens": self._hiddens,
            "factors": self.factors,
            "dtype": self._dtype,
            "kind": self._kind,
            "row_shift": self._row_shift,
        }

    # What it looks like -------------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        """(..., V)."""
        return torch.Size((*self._hiddens[0].shape[:-1], self.factors.vocab))

    @property
    def requires_grad(self) -> bool:
        """Whether any tensor behind the logits wants a gradient."""
        shift = self._row_shift is not None and self._row_shift.requires_grad
        return self.factors.wants_grad(self._hiddens[0]) or (torch.is_grad_enabled() and shift)

    def explain(self) -> str:
        """What a question will cost, before it is asked."""
        size = self.numel() * self.dtype.itemsize
        lines = self.factors.explain(self._lead.numel())
        built = f"  building it             {size:,} bytes that stay"
        return "\n".join([f"{self!r} of {self.factors.name}", *lines, built])

    # What is behind it --------------------------------------------------------------------------

    def source(self) -> NoReturn:
        """Not possible: there is no one weight with a row per word."""
        raise TypeError(
            f"the logits of {self.factors.name} are not one product of hidden states and a weight; "
            "ask them (ask(kl_to=...), log_prob, topk), or use .materialize()"
        )

    def rows(self) -> FactoredRows:
        """The logits as rows (N, V), for decoding."""
        return FactoredRows(self.factors.map(Tensor.detach), self._flat().detach())

    def _flat(self) -> Tensor:
        """The hidden states as rows, (N, D)."""
        hidden = self._hiddens[0]
        return hidden.reshape(-1, hidden.shape[-1])

    def _whole(self) -> Tensor:
        return self._as_kind(self.factors.log_probs(self._flat()).reshape(self.shape))

    def _as_kind(self, log_p: Tensor) -> Tensor:
        """Log-probabilities (..., K) as entries of these logits."""
        if self._kind == "probs":
            return log_p.exp()
        return self._shift(log_p) if self._kind == "logits" else log_p

    def _map_all(self, change: Callable[[Tensor], Tensor]) -> Self:
        return self.map_rows(change)._with(factors=self.factors.map(change))

    def _combine(self, name: str, *args: Any) -> Any:
        """Arithmetic that stays lazy: a term per row, a limit that changes nothing, an entropy."""
        result: Any = NotImplemented
        if name == "+" and not isinstance(args[0], LazyLogits):
            result = self._plus(args[0])
        elif name == "*" and isinstance(args[0], FactoredLogits):
            result = _expectation(self, args[0])
        elif name == "clamp":
            result = clamp(self, *args)
        if result is not NotImplemented:
            return result
        dense = {"*": "mul", "+": "add", "/": "div"}.get(name, name)
        built = [a._build(name) if isinstance(a, LazyLogits) else a for a in args]
        return getattr(self._build(name), dense)(*built)

    def _plus(self, term: Any) -> Any:
        number = isinstance(term, int | float) and not isinstance(term, bool)
        if self._kind == "probs" or (number and not math.isfinite(term)):
            return NotImplemented
        if not number:
            per_row = isinstance(term, Tensor) and term.dim() <= self.ndim
            if not per_row or (term.dim() > 0 and term.shape[-1] != 1) or self.shape[-1] == 1:
                return NotImplemented
        row = torch.as_tensor(term, device=self.device).double().expand(*self._lead, 1)
        old = self._row_shift if self._kind == "logits" else None
        return self._with(kind="logits", row_shift=-row if old is None else old - row)

    # Questions ----------------------------------------------------------------------------------

    @eager
    def ask(  # type: ignore[override]
        self,
        *,
        log_prob: Tensor | None = None,
        rank: Tensor | None = None,
        entropy: bool = False,
        logsumexp: bool = False,
        argmax: bool = False,
        top_k: int = 0,
        kl_to: LazyLogits | None = None,
        max_bytes: int | None = None,
    ) -> Answers:
        """The questions of `lmhead.query`, and its answers.

        Those that the factors do not shorten (rank, kl_to, perhaps entropy) read all words of a
        few rows at a time.
        """
        factors = self.factors if max_bytes is None else self.factors.bounded(max_bytes)
        flat, lead = self._flat(), self._lead
        checks.check_whole("top_k", top_k, low=0, high=self.shape[-1])
        ids = id_rows("log_prob", log_prob, lead, self.shape[-1], flat)
        rank_ids = id_rows("rank", rank, lead, self.shape[-1], flat)
        log_probs = ranks = spread = best = top = None
        if log_prob is not None and ids is not None:
            log_probs = factors.log_prob(flat, ids).reshape(log_prob.shape).to(self.dtype)
        if rank is not None and rank_ids is not None:
            ranks = _ranks(factors, flat, rank_ids).reshape(rank.shape)
        if entropy:
            spread = factors.entropy(flat).reshape(lead).to(self.dtype)
        if argmax or top_k:
            values, found = factors.top(flat, max(top_k, int(argmax)))
            best = found[:, 0].reshape(lead) if argmax else None
            if top_k:
                shape = (*lead, top_k)
                top = TopK(values.reshape(shape).to(self.dtype), found.reshape(shape))
        return Answers(
            log_prob=log_probs,
            rank=ranks,
            entropy=spread,
            logsumexp=self._raw_lse().to(self.dtype) if logsumexp else None,
            argmax=best,
            top_k=top,
            kl=None if kl_to is None else self._with(factors=factors)._kl(kl_to),
        )

    def _kl(self, other: Any) -> Tensor:
        """KL(self ‖ other), a few rows at a time: (...)."""
        if not isinstance(other, LazyLogits):
            raise TypeError(f"kl_to must be lazy logits; got {type(other).__name__}")
        if other.shape != self.shape:
            raise ValueError(
                f"kl_to must have logits of shape {tuple(self.shape)}; got {tuple(other.shape)}"
            )
        q = other.reshape(-1, self.shape[-1]).log_softmax(-1)
        parts, start = [], 0
        for rows in self.factors.blocks(self._flat()):
            theirs = q[start : start + len(rows)]
            parts.append(again(self._kl_rows, rows, theirs))
            start += len(rows)
        kl = torch.cat(parts) if parts else self._flat().sum(1)
        return kl.reshape(self._lead).to(self.dtype)

    def _kl_rows(self, hidden: Tensor, other: LazyLogits) -> Tensor:
        log_p, log_q = self.factors.log_probs(hidden), other._whole()
        p = log_p.exp()
        terms = p * (log_p - log_q.to(log_p.dtype))
        return terms.masked_fill(p == 0, 0.0).sum(1)

    @eager
    def cross_entropy(self, targets: Tensor, **options: Any) -> Tensor:
        """`F.cross_entropy` of these logits, which must be (N, V) or (V,)."""
        flat, vocab = self._flat(), self.shape[-1]
        check_loss(self._lead, vocab, flat, targets, **options)
        soft = targets.is_floating_point()
        rows = targets.reshape(-1, vocab) if soft else targets.reshape(-1).long()
        loss = self.factors.cross_entropy(flat, rows, **options)
        return loss.reshape(self._lead) if options["reduction"] == "none" else loss

    def _raw_lse(self, *, keepdim: bool = False) -> Tensor:
        """Log of the sum of all probabilities: 0, or NaN where the hidden state holds one."""
        fine = self._hiddens[0].detach().isfinite().all(-1, keepdim=keepdim)
        return torch.where(fine, 0.0, math.nan).double()

    @eager
    def _gather(self, index: Tensor) -> Tensor:
        checks.check_ids("index", index, self.shape[-1])
        ids = index.reshape(-1, index.shape[-1]).long()
        log_p = self.factors.log_prob(self._flat(), ids).reshape(index.shape)
        return self._as_kind(log_p).to(self.dtype)

    @eager
    def columns(self, ids: Tensor) -> Tensor:
        """Only the words `ids` (K,): (..., K)."""
        if 2 * len(ids) > self.shape[-1]:
            log_p = self.factors.by_blocks(
                lambda h: self.factors.log_probs(h)[:, ids], self._flat()
            )
        else:
            every = ids[None].expand(self._lead.numel(), -1)
            log_p = self.factors.log_prob(self._flat(), every)
        return self._as_kind(log_p.reshape(*self._lead, len(ids))).to(self.dtype)

    def take_words(self, words: slice) -> Tensor:
        """A range of words, computed."""
        return self.columns(torch.arange(self.shape[-1], device=self.device)[words])

    def _draw(self, num_samples: int, generator: torch.Generator | None) -> Tensor:
        n = self._lead.numel() * num_samples

        def uniform(_: int) -> Tensor:
            made = torch.rand(n, dtype=torch.float64, device=self.device, generator=generator)
            return made.clamp_(min=2.0**-53)

        many = self.unsqueeze(-2).expand(*self._lead, num_samples, -1)
        drawn: Tensor = many.draw(uniform)
        return drawn

    @eager
    def draw(self, uniform: Uniform) -> Tensor:
        """A word for each row, (...), from the random numbers of its decisions."""
        if bool(self._raw_lse().isnan().any()):
            raise ValueError("hidden must be finite to draw a word; got NaN or inf")
        with torch.no_grad():
            return self.factors.draw(self._flat(), uniform).reshape(self._lead)


@dataclass(frozen=True)
class FactoredRows:
    """Rows of a factored head, for decoding: see `logits.rows`."""

    factors: Factors
    hidden: Tensor  # (N, D)

    def __len__(self) -> int:
        return len(self.hidden)

    def select(self, which: Tensor) -> FactoredRows:
        """Some of the rows, (M,)."""
        return FactoredRows(self.factors, self.hidden[which])

    def top(self, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """The k largest log-probabilities, their ids, and log Σ exp of all, which is 0."""
        values, ids = self.factors.top(self.hidden, k)
        return values, ids, torch.where(ids[:, 0] < 0, math.nan, 0.0).double()

    def at(self, ids: Tensor) -> Tensor:
        """The log-probabilities of words (N, K), each row made alone."""
        pairs = zip(self.hidden, ids, strict=True)
        rows = [self.factors.log_prob(h[None], i[None]) for h, i in pairs]
        return torch.cat(rows).double() if rows else ids.double()

    def whole(self, row: int) -> Tensor:
        """All log-probabilities of one row, (V,)."""
        return self.factors.log_probs(self.hidden[row : row + 1])[0]


def _ranks(factors: Factors, hidden: Tensor, ids: Tensor) -> Tensor:
    """How many words come before each of `ids` (N, K): by exact log-probability, then by id."""
    out = torch.empty_like(ids)
    start = 0
    words = torch.arange(factors.vocab, device=ids.device)
    with torch.no_grad():
        for rows in factors.blocks(hidden):
            part = slice(start, start + len(rows))
            log_p = factors.log_probs(rows, exact=True)
            mine = log_p.gather(1, ids[part])
            for k in range(ids.shape[1]):
                own, id = mine[:, k : k + 1], ids[part][:, k : k + 1]
                before = (log_p > own) | ((log_p == own) & (words < id))
                out[part][:, k] = before.sum(1)
            out[part] = out[part].masked_fill(log_p.isnan().any(1, keepdim=True), -1)
            start += len(rows)
    return out


def _expectation(left: FactoredLogits, right: FactoredLogits) -> Any:
    """Softmax(z) · z, the way to write an entropy."""
    logits, probs = (right, left) if left._kind == "probs" else (left, right)
    same = logits.factors is probs.factors and logits._hiddens[0] is probs._hiddens[0]
    if probs._kind == "probs" and logits._kind != "probs" and same:
        return Expectation(logits)
    return NotImplemented
