"""Run the stages of a sampler on rows of logits, and choose a token.

In:  logits as a tensor or as `Scores`, the stages, the call.
Out: `Sampled`, one entry per row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmhead.sampling import row_kernels
from lmhead.sampling.distribution import Distribution, FullDistribution, TopCandidates
from lmhead.sampling.mirostat_stage import Mirostat2
from lmhead.sampling.noise import gumbel
from lmhead.sampling.sampled import Kept, Sampled
from lmhead.sampling.stage import Call, Edit, Stage
from lmhead.sampling.temperature import Temperature
from lmhead.sampling.truncation_stages import TopK
from lmhead.scores import Scores

# Rows whose logits are held at a time.
_BLOCK = 64


def run_stages(
    logits: Tensor | Scores, stages: Sequence[Stage], call: Call, greedy: Tensor
) -> Sampled:
    """Return one token per row; `greedy` (B,) is True for rows that take the best token.

    Greedy and sampled rows are processed separately.
    """
    if not bool(greedy.any()) and isinstance(logits, Tensor):
        return _Job(list(stages), call, greedy=False).dense(logits)
    parts: list[tuple[Tensor, Sampled]] = []
    for cold in (True, False):
        which = (greedy == cold).nonzero()[:, 0]
        if len(which) == 0 and (cold or parts):
            continue
        full = len(which) == len(greedy)
        job = _Job(active(stages, greedy=cold), call if full else call.select(which), cold)
        if isinstance(logits, Tensor):
            some = job.dense(logits if full else logits[which])
        else:
            some = job.lazy(logits, which)
        parts.append((which, some))
    return _join(parts)


def active(stages: Sequence[Stage], *, greedy: bool) -> list[Stage]:
    """Return the stages with an effect: for a greedy choice, those that can change the best token.

    A temperature of 0 leaves one token. A cut that may remove the best token (typical_p, XTC)
    counts if it comes before, as in llama.cpp, and with it all that comes before itself.
    """
    if not greedy:
        return list(stages)
    cold = next((i for i, s in enumerate(stages) if isinstance(s, Temperature)), 0)
    cuts = [i for i in range(cold) if not isinstance(stages[i], Edit)]
    last = max((i for i in cuts if not stages[i].keeps_argmax), default=-1)
    return [s for i, s in enumerate(stages) if isinstance(s, Edit) or i <= last]


def start(z: Tensor, rows: Tensor | None = None) -> FullDistribution:
    """Validate rows of logits (B, V), at temperature 1; `rows` (B,) are their indices."""
    full = FullDistribution.of(z, own=True)
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
    """Choose the token of each row; return it and its logit among the tokens left: (B,) each."""
    if isinstance(distribution, FullDistribution):
        if not greedy:
            token = row_kernels.gumbel_argmax(distribution.z, distribution.beta, call.keys)
            return token, distribution.z.gather(1, token[:, None])[
                :, 0
            ].double() * distribution.beta
        distribution = distribution.above(distribution.largest)
    if greedy:
        return distribution.ids[:, 0], distribution.z[:, 0]
    place = (distribution.z + gumbel(call.keys, distribution.ids)).argmax(1, keepdim=True)
    return distribution.ids.gather(1, place)[:, 0], distribution.z.gather(1, place)[:, 0]


def _finite(x: Tensor) -> bool:
    """Return whether all entries are finite; fast for one entry."""
    return math.isfinite(x.item()) if x.numel() == 1 else bool(x.isfinite().all())


@dataclass(frozen=True)
class _Raw:
    """The model's own distribution, before any stage."""

    lse: Tensor  # (B,)
    n: Tensor  # (B,), how many tokens are not masked
    at: Callable[[Tensor], Tensor]  # logits at given ids: (B, K) to (B, K), float64


@dataclass(frozen=True)
class _Job:
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
        self._check_left(full, distribution)
        if type(distribution) is TopCandidates and not self.greedy:
            drawn = row_kernels.sample_candidates(
                z, full.lse, distribution.ids, distribution.z, self.call.keys
            )
            if drawn is not None:
                return self._sampled(distribution, *drawn)
        raw = _Raw(full.lse, full.n, lambda ids: z.gather(1, ids).double())
        return self._finish(distribution, raw)

    def lazy(self, given: Scores, which: Tensor) -> Sampled:
        """Sample by one sweep where the top is enough, else from blocks of dense rows."""
        if len(which) != given.n_rows:
            given = given.select(which)
        k = self._top()
        if k is not None:
            return self._from_top(given, which, min(k, self.call.vocab))
        parts = []
        for here in torch.arange(len(which)).split(_BLOCK):  # type: ignore[no-untyped-call]
            job = _Job(self.stages, self.call.select(here), self.greedy)
            parts.append((here, job.dense(given.select(here).row_logits())))
        return _join(parts)

    def _top(self) -> int | None:
        """Return how many of the best tokens are enough; None if all may be needed."""
        if self.greedy and not self.stages:
            return 1
        first = next((s for s in self.stages if not isinstance(s, Temperature)), None)
        if not isinstance(first, TopK) or first.ties != "lowest":
            return None
        k = torch.as_tensor(first.k)
        return None if bool((k < 1).any()) else int(k.max())

    def _from_top(self, given: Scores, which: Tensor, k: int) -> Sampled:
        values, ids, lse = given.top(k)
        fine = lse.isfinite() & values[:, 0].isfinite()
        if not bool(fine.all()):
            row = int(which[(~fine).nonzero()[0]])
            raise ValueError(
                f"logits must be finite or -inf, and not all -inf; got other logits in row {row}"
            )
        distribution: Distribution = TopCandidates(ids, values)
        for stage in self.stages:
            distribution = stage(distribution, self.call)
        return self._finish(
            distribution, _Raw(lse, torch.full_like(lse, self.call.vocab), given.at)
        )

    def _finish(self, distribution: Distribution, raw: _Raw) -> Sampled:
        call = self.call
        token, chosen = choose(distribution, call, greedy=self.greedy)
        raw_log_prob = (raw.at(token[:, None])[:, 0] - raw.lse).clamp(max=0.0)
        if self.greedy:
            only = TopCandidates(token[:, None], torch.zeros_like(raw_log_prob)[:, None])
            kept = Kept.of(only, call.vocab)
            none = torch.zeros_like(raw_log_prob)
            return Sampled(token, none, raw_log_prob, raw_log_prob, kept, call.surprise)
        # What rounding leaves above 0 is not a probability above 1.
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
        """Return the log of the mass that the tokens left have in the model's distribution."""
        if isinstance(distribution, TopCandidates):
            left = raw.at(distribution.ids).masked_fill(distribution.z == -math.inf, -math.inf)
        elif bool((distribution.n == raw.n).all()):
            return torch.zeros_like(raw.lse)
        else:
            ids = torch.arange(self.call.vocab)[None].expand(len(distribution.z), -1)
            left = raw.at(ids).masked_fill(distribution.z == -math.inf, -math.inf)
        return left.logsumexp(1) - raw.lse

    def _check_left(self, full: FullDistribution, distribution: Distribution) -> None:
        """Raise where no token is left, naming the stage that removed the last one."""
        if _finite(distribution.top):
            return
        distribution = full
        for stage in self.stages:  # again, checking after each
            distribution = stage(distribution, self.call)
            top = distribution.top
            if not bool(top.isfinite().all()):
                first = int((~top.isfinite()).nonzero()[0])
                lost = float(top[first]) == -math.inf
                raise ValueError(
                    f"{stage.name} {'removed the last token' if lost else 'made a NaN or inf'} of "
                    f"row {int(self.call.rows[first])}: there is nothing to choose from"
                )


def _join(parts: Sequence[tuple[Tensor, Sampled]]) -> Sampled:
    """Join the rows of several parts of a batch."""
    if len(parts) == 1:
        return parts[0][1]
    order = torch.cat([which for which, _ in parts]).argsort()
    some = [sampled for _, sampled in parts]
    states = [s.state for s in some if s.state is not None]
    return Sampled(
        token=torch.cat([s.token for s in some])[order],
        log_prob=torch.cat([s.log_prob for s in some])[order],
        raw_log_prob=torch.cat([s.raw_log_prob for s in some])[order],
        log_kept_mass=torch.cat([s.log_kept_mass for s in some])[order],
        kept=Kept.join([s.kept for s in some], [which for which, _ in parts]),
        state=torch.cat(states)[order] if states else None,
    )
