"""Run the stages of a sampler on rows of logits, and choose a token.

In:  logits as a tensor or as `Scores`, the stages, the call.
Out: `Sampled`: one token per row and its log-probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from lmhead.html_table import SHOWN, html_table
from lmhead.sampling.distribution import (
    Distribution,
    FullDistribution,
    TopCandidates,
    gumbel,
    gumbel_argmax,
    sample_candidates,
)
from lmhead.sampling.mirostat_stage import Mirostat2
from lmhead.sampling.stage import Call, Edit, Stage, Temperature
from lmhead.sampling.truncation_stages import TopK
from lmhead.scores import Scores


class _KeptRow(NamedTuple):
    """Ids of one row, ascending: the kept ones, or those that were cut."""

    ids: Tensor
    is_cut: bool = False


class Kept(Sequence[Tensor]):
    """Per row the ids that were kept, ascending: `kept[i]` is an int64 vector.

    Where most tokens were kept, only the others are stored.
    """

    def __init__(self, vocab: int, rows: Sequence[_KeptRow] | TopCandidates) -> None:
        self._vocab, self._given = vocab, rows

    @cached_property
    def _rows(self) -> Sequence[_KeptRow]:
        """The stored ids, computed on first use: nothing may ask for them."""
        given = self._given
        if not isinstance(given, TopCandidates):
            return given
        ids = given.ids.masked_fill(given.z == -math.inf, self._vocab).sort(1).values
        return [_KeptRow(ids[i, :n]) for i, n in enumerate(given.n.int().tolist())]

    @classmethod
    def of(cls, distribution: Distribution, vocab: int) -> Kept:
        """Return the kept tokens of a distribution."""
        if isinstance(distribution, TopCandidates):
            return cls(vocab, distribution)
        n = distribution.n.long()
        if bool((n == vocab).all()):
            return cls(vocab, [_KeptRow(torch.arange(0), is_cut=True)] * len(n))
        # Store the shorter list of each row: kept or cut ids.
        masked = distribution.z == -math.inf
        mostly_kept = n * 2 >= vocab
        listed = torch.where(mostly_kept[:, None], masked, ~masked)
        sizes = torch.where(mostly_kept, vocab - n, n).tolist()
        lists = torch.split_with_sizes(listed.nonzero()[:, 1], sizes)
        return cls(vocab, list(map(_KeptRow, lists, mostly_kept.tolist())))

    @classmethod
    def join(cls, parts: Sequence[Kept], rows: Sequence[Tensor]) -> Kept:
        """Join the parts of a batch in the order of its rows."""
        numbers = torch.cat(list(rows)).tolist()
        joined = dict(zip(numbers, (row for part in parts for row in part._rows), strict=True))
        return cls(parts[0]._vocab, [joined[number] for number in range(len(numbers))])

    def __len__(self) -> int:
        return len(self._given.z if isinstance(self._given, TopCandidates) else self._given)

    @overload
    def __getitem__(self, i: int) -> Tensor: ...
    @overload
    def __getitem__(self, i: slice) -> list[Tensor]: ...
    def __getitem__(self, i: int | slice) -> Tensor | list[Tensor]:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        ids, is_cut = self._rows[i]
        if not is_cut:
            return ids
        is_kept = torch.ones(self._vocab, dtype=torch.bool, device=ids.device)
        is_kept[ids] = False
        return is_kept.nonzero()[:, 0]

    def counts(self) -> list[int]:
        """Return the number of kept tokens per row, without building the lists."""
        return [self._vocab - len(ids) if is_cut else len(ids) for ids, is_cut in self._rows]

    def __repr__(self) -> str:
        return f"Kept({self.counts()} of {self._vocab} tokens)"


@dataclass(frozen=True)
class Sampled:
    """One token per row, (...) as the logits (..., V) have it.

    Attributes:
        token: the id, int64.
        log_prob: of the token in the distribution that it was drawn from, float64.
        raw_log_prob: of the token in softmax(logits), before any stage, float64.
        log_kept_mass: log of the mass that the kept tokens have in softmax(logits), float64.
        kept: per row the ids that could have been drawn, ascending.
        state: to pass to the next call (mirostat), or None.
    """

    token: Tensor
    log_prob: Tensor
    raw_log_prob: Tensor
    log_kept_mass: Tensor
    kept: Kept
    state: Tensor | None = None

    def _repr_html_(self) -> str:
        figures = (self.token, self.log_prob, self.raw_log_prob, self.log_kept_mass.exp())
        columns = [figure.flatten()[:SHOWN].tolist() for figure in figures]
        rows = zip(range(SHOWN), *columns, self.kept.counts()[:SHOWN], strict=False)
        heads = ["row", "token", "log_prob", "raw_log_prob", "kept mass", "kept tokens"]
        n = self.token.numel()
        title = f"Sampled, {n:,} row{'s' * (n != 1)}"
        return html_table(title + (f", the first {SHOWN}" if n > SHOWN else ""), heads, rows)


class ScreenedSampled(Sampled):
    """Result for a screened head: the token; exact log-probabilities are computed when read."""

    def __init__(
        self,
        token: Tensor,
        ranges: Sequence[tuple[Tensor, Tensor]],
        exact: Callable[[], Sampled],
    ) -> None:
        for name, value in (("token", token), ("_ranges", ranges), ("_exact", exact)):
            object.__setattr__(self, name, value)

    @property
    def estimate(self) -> tuple[Tensor, Tensor]:
        """log_prob and raw_log_prob in the middle of certified intervals, from the copy alone."""
        log_prob, raw_log_prob = ((low + high) / 2 for low, high in self._ranges)
        return log_prob, raw_log_prob

    @property
    def estimate_error(self) -> float:
        """Error bound of the estimates."""
        widths = (float((high - low).max()) for low, high in self._ranges if low.numel())
        return max(widths, default=0.0) / 2

    def __getattr__(self, name: str) -> Any:
        if name not in ("log_prob", "raw_log_prob", "log_kept_mass", "kept"):
            raise AttributeError(f"'Sampled' object has no attribute {name!r}")
        exact = self._exact()
        for field in ("log_prob", "raw_log_prob", "log_kept_mass", "kept"):
            object.__setattr__(self, field, getattr(exact, field))
        return getattr(self, name)


# Rows whose logits are in memory at a time.
_BLOCK = 64


def run_stages(
    logits: Tensor | Scores, stages: Sequence[Stage], call: Call, greedy: Tensor
) -> Sampled:
    """Return one token per row; `greedy` (B,) is True for rows that take the best token.

    Greedy and sampled rows are processed separately.
    """
    if not bool(greedy.any()) and isinstance(logits, Tensor):
        return _RowGroup(list(stages), call, greedy=False).dense(logits)
    parts: list[tuple[Tensor, Sampled]] = []
    for take_best in (True, False):
        rows = (greedy == take_best).nonzero()[:, 0]
        if len(rows) == 0 and (take_best or parts):
            continue
        full = len(rows) == len(greedy)
        group = _RowGroup(
            active(stages, greedy=take_best), call if full else call.select(rows), take_best
        )
        if isinstance(logits, Tensor):
            sampled = group.dense(logits if full else logits[rows])
        else:
            sampled = group.lazy(logits, rows)
        parts.append((rows, sampled))
    return _join(parts)


def active(stages: Sequence[Stage], *, greedy: bool) -> list[Stage]:
    """Return the stages that affect the token: for greedy rows, those that can change the argmax.

    At temperature 0, a cut that may remove the best token (typical_p, XTC) has an effect if it
    comes before the temperature, as in llama.cpp; then all stages before it have one, too.
    """
    if not greedy:
        return list(stages)
    temperature = next((i for i, s in enumerate(stages) if isinstance(s, Temperature)), 0)
    cuts = [i for i in range(temperature) if not isinstance(stages[i], Edit)]
    last = max((i for i in cuts if not stages[i].keeps_argmax), default=-1)
    return [s for i, s in enumerate(stages) if isinstance(s, Edit) or i <= last]


def start(z: Tensor, rows: Tensor | None = None) -> FullDistribution:
    """Validate rows of logits (B, V), at temperature 1; `rows` (B,) are their indices."""
    full = FullDistribution.of(z, is_raw=True)
    top = full.largest
    if _finite(top):
        return full
    row = int((~top.isfinite()).nonzero()[0])
    value = float(top[row])
    row = row if rows is None else int(rows[row])
    if value == -math.inf:
        raise ValueError(f"logits must have a token that is not masked; row {row} is all -inf")
    raise ValueError(f"logits must be finite or -inf; got {value} in row {row}")


def choose(distribution: Distribution, call: Call, *, greedy: bool) -> tuple[Tensor, Tensor]:
    """Choose the token of each row; return it and its logit after all stages: (B,) each."""
    if isinstance(distribution, FullDistribution):
        if not greedy:
            token = gumbel_argmax(distribution.z, distribution.beta, call.keys)
            z = distribution.z.gather(1, token[:, None])[:, 0]
            return token, z.double() * distribution.beta
        distribution = distribution.above(distribution.largest)
    if greedy:
        return distribution.ids[:, 0], distribution.z[:, 0]
    index = (distribution.z + gumbel(call.keys, distribution.ids)).argmax(1, keepdim=True)
    return distribution.ids.gather(1, index)[:, 0], distribution.z.gather(1, index)[:, 0]


def _finite(x: Tensor) -> bool:
    """Return whether all entries are finite; fast for one entry."""
    return math.isfinite(x.item()) if x.numel() == 1 else bool(x.isfinite().all())


@dataclass(frozen=True)
class _Raw:
    """The model's own distribution, before any stage."""

    lse: Tensor  # (B,)
    n: Tensor  # (B,), number of unmasked tokens
    at: Callable[[Tensor], Tensor]  # logits at given ids: (B, K) to (B, K), float64


@dataclass(frozen=True)
class _RowGroup:
    """Rows that are all greedy or all sampled."""

    stages: list[Stage]
    call: Call
    greedy: bool

    def dense(self, z: Tensor) -> Sampled:
        """Sample from all logits, (B, V)."""
        full = start(z, self.call.rows)
        distribution: Distribution = full
        for stage in self.stages:
            distribution = stage(distribution, self.call)
        self._check_not_empty(full, distribution)
        if type(distribution) is TopCandidates and not self.greedy:
            drawn = sample_candidates(z, full.lse, distribution.ids, distribution.z, self.call.keys)
            if drawn is not None:
                return self._sampled(distribution, *drawn)
        raw = _Raw(full.lse, full.n, lambda ids: z.gather(1, ids).double())
        return self._finish(distribution, raw)

    def lazy(self, scores: Scores, rows: Tensor) -> Sampled:
        """Sample by one sweep if the top tokens suffice, else from blocks of dense rows."""
        if len(rows) != scores.n_rows:
            scores = scores.select(rows)
        k = self._top()
        if k is not None:
            return self._from_top(scores, rows, min(k, self.call.vocab))
        parts = []
        for block in torch.arange(len(rows)).split(_BLOCK):  # type: ignore[no-untyped-call]
            group = _RowGroup(self.stages, self.call.select(block), self.greedy)
            parts.append((block, group.dense(scores.select(block).row_logits())))
        return _join(parts)

    def _top(self) -> int | None:
        """Return the number of top tokens that suffice; None if all may be needed."""
        if self.greedy and not self.stages:
            return 1
        first = next((s for s in self.stages if not isinstance(s, Temperature)), None)
        if not isinstance(first, TopK) or first.ties != "lowest":
            return None
        k = torch.as_tensor(first.k)
        return None if bool((k < 1).any()) else int(k.max())

    def _from_top(self, scores: Scores, rows: Tensor, k: int) -> Sampled:
        values, ids, lse = scores.top(k)
        valid = lse.isfinite() & values[:, 0].isfinite()
        if not bool(valid.all()):
            row = int(rows[(~valid).nonzero()[0]])
            raise ValueError(
                f"logits must be finite or -inf, and not all -inf; got other logits in row {row}"
            )
        distribution: Distribution = TopCandidates(ids, values)
        for stage in self.stages:
            distribution = stage(distribution, self.call)
        return self._finish(
            distribution, _Raw(lse, torch.full_like(lse, self.call.vocab), scores.at)
        )

    def _finish(self, distribution: Distribution, raw: _Raw) -> Sampled:
        call = self.call
        token, chosen = choose(distribution, call, greedy=self.greedy)
        raw_log_prob = (raw.at(token[:, None])[:, 0] - raw.lse).clamp(max=0.0)
        if self.greedy:
            chosen_token = TopCandidates(token[:, None], torch.zeros_like(raw_log_prob)[:, None])
            kept = Kept.of(chosen_token, call.vocab)
            zero = torch.zeros_like(raw_log_prob)
            return Sampled(token, zero, raw_log_prob, raw_log_prob, kept, call.surprise)
        # Rounding may give a log-probability slightly above 0.
        log_prob = (chosen - distribution.lse).clamp(max=0.0)
        mass = self._kept_mass(distribution, raw).clamp(max=0.0)
        return self._sampled(distribution, token, log_prob, raw_log_prob, mass)

    def _sampled(
        self, distribution: Distribution, token: Tensor, log_prob: Tensor, raw: Tensor, mass: Tensor
    ) -> Sampled:
        call, state = self.call, self.call.surprise
        for stage in self.stages:
            if isinstance(stage, Mirostat2):
                state = stage.update(call, log_prob)
        return Sampled(token, log_prob, raw, mass, Kept.of(distribution, call.vocab), state)

    def _kept_mass(self, distribution: Distribution, raw: _Raw) -> Tensor:
        """Return the log of the mass of the kept tokens in the model's distribution."""
        if isinstance(distribution, TopCandidates):
            kept = raw.at(distribution.ids).masked_fill(distribution.z == -math.inf, -math.inf)
        elif bool((distribution.n == raw.n).all()):
            return torch.zeros_like(raw.lse)
        else:
            ids = torch.arange(self.call.vocab)[None].expand(len(distribution.z), -1)
            kept = raw.at(ids).masked_fill(distribution.z == -math.inf, -math.inf)
        return kept.logsumexp(1) - raw.lse

    def _check_not_empty(self, full: FullDistribution, distribution: Distribution) -> None:
        """Raise if a row has no token left, naming the stage that removed the last one."""
        if _finite(distribution.top):
            return
        distribution = full
        for stage in self.stages:  # again, checking after each
            distribution = stage(distribution, self.call)
            top = distribution.top
            if not bool(top.isfinite().all()):
                first = int((~top.isfinite()).nonzero()[0])
                problem = (
                    "removed the last token of"
                    if float(top[first]) == -math.inf
                    else "gave NaN or inf in"
                )
                raise ValueError(f"{stage.name} {problem} row {int(self.call.rows[first])}")


def _join(parts: Sequence[tuple[Tensor, Sampled]]) -> Sampled:
    """Join the rows of several parts of a batch."""
    if len(parts) == 1:
        return parts[0][1]
    order = torch.cat([rows for rows, _ in parts]).argsort()
    samples = [sampled for _, sampled in parts]
    states = [s.state for s in samples if s.state is not None]
    return Sampled(
        token=torch.cat([s.token for s in samples])[order],
        log_prob=torch.cat([s.log_prob for s in samples])[order],
        raw_log_prob=torch.cat([s.raw_log_prob for s in samples])[order],
        log_kept_mass=torch.cat([s.log_kept_mass for s in samples])[order],
        kept=Kept.join([s.kept for s in samples], [rows for rows, _ in parts]),
        state=torch.cat(states)[order] if states else None,
    )
