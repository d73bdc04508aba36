"""A sampler's token from the bounds of a screen: the one that the exact logits would give.

    greedy, top_k, top_h    the best tokens, scored exactly
    min_p, top_p, epsilon   the best tokens, as many as the cut may keep; where a cut asks for the
                            mass of all tokens it is made twice, with the least and with the largest
                            that the bounds allow, and both must give the same token
    temperature alone       the noise of a token is known before its logit: only tokens whose upper
                            bound plus noise can win are scored
    penalties, biases       the tokens that they change are scored exactly and taken out of the rest

What this does not decide is left to the exact logits of all tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from lmhead.sampling.distribution import Distribution, TopCandidates, gumbel
from lmhead.sampling.logit_bounds import LogitBounds, Range, log_masses
from lmhead.sampling.run_stages import choose
from lmhead.sampling.stage import Call, Cut, Edit, Stage, Temperature, per_row
from lmhead.sampling.truncation_stages import Epsilon, Eta, MinP, TopH, TopK, TopP
from lmhead.screen.candidates import Candidates, decide

# Tokens scored exactly for the first attempt at a cut, the factor for further ones, the limit.
_FIRST, _MORE, _LAST = 128, 4, 8192
# Cuts that need only the best tokens and the total mass; of these, those that need no mass.
_SUPPORTED = (TopK, TopP, MinP, TopH, Epsilon)
_BY_RANK = (TopK, TopH)


@dataclass(frozen=True)
class TopWithTotal(TopCandidates):
    """The best tokens of a distribution, with the log of the mass of all tokens.

    Attributes:
        total: (B,), log Σ exp z over all tokens.
    """

    total: Tensor

    @property
    def lse(self) -> Tensor:
        """Log Σ exp z over all tokens, (B,)."""
        return self.total


@dataclass(frozen=True)
class Draw:
    """The token of one row.

    Attributes:
        token: the id.
        z: its logit, before any stage.
        log_prob: least and largest, in the distribution that it was drawn from.
        lse: least and largest log of the mass of all tokens, before any stage.
        rescored: how many tokens were scored exactly.
    """

    token: int
    z: float
    log_prob: Range
    lse: Range
    rescored: int


@dataclass(frozen=True)
class _Known:
    """Tokens that have been scored exactly: best ones, and those that edits change.

    Attributes:
        tokens: those that are surely the best after edits, in order.
        ids: all of them, (K,), each once.
        raw: their logits before edits, (K,).
        low: logits after edits of tokens that are not among `best`.
    """

    best: TopCandidates
    ids: Tensor
    raw: Tensor
    low: Tensor


@dataclass
class ScreenedRow:
    """Sampling of one row by the bounds of its logits.

    Attributes:
        found: its candidates.
        stages: those with an effect.
        call: of this row alone.
        greedy: whether the best token is taken.
    """

    found: Candidates
    stages: Sequence[Stage]
    call: Call
    greedy: bool
    scored: set[int] = field(default_factory=set)
    # Edited tokens: logits before, (K,).
    _before: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float64))

    @cached_property
    def _count(self) -> int:
        """Number of tokens that may be drawn."""
        forbidden = self.found.forbidden
        return self.call.vocab - (0 if forbidden is None else int(forbidden.sum()))

    def draw(self) -> Draw | None:
        """Return the token; None where the bounds do not decide."""
        plan, edited = self._plan(), self._edited()
        if plan is None or edited is None:
            return None
        beta, chain = plan
        if self.greedy or chain:
            return self._from_best(beta, chain, edited)
        return self._by_gumbel(beta, edited)

    def _plan(self) -> tuple[float, list[Stage]] | None:
        """Return β before the first cut and the stages after; None for an unsupported cut."""
        beta, chain = 1.0, [s for s in self.stages if not isinstance(s, Edit)]
        while chain and isinstance(chain[0], Temperature):
            beta /= float(per_row("temperature", chain[0].temperature, self.call)[0])
            del chain[0]
        if chain and (not isinstance(chain[0], _SUPPORTED) or isinstance(chain[0], Eta)):
            return None
        if chain and isinstance(chain[0], TopK) and chain[0].ties != "lowest":
            return None
        if chain and self.greedy:
            return None  # the best token after a cut that may remove the best
        return beta, chain

    def _exact(self, ids: Tensor) -> Tensor:
        """Return the float64 logits of some tokens, (K,)."""
        self.scored.update(ids.tolist())
        source = self.found.source
        self.found.bytes_read += len(ids) * source.weights[0][0].nbytes
        return source.pairs(torch.zeros_like(ids), ids)

    def _edited(self) -> TopCandidates | None:
        """Return the tokens that edits change, with their new logits; None if it may be all."""
        edits = [s for s in self.stages if isinstance(s, Edit)]
        touched: set[int] = set()
        for stage in edits:
            changed = stage.touches(self.call)
            if changed is None:
                return None
            touched.update(changed[0])
        ids = torch.tensor(sorted(touched), dtype=torch.int64)
        if self.found.forbidden is not None:
            ids = ids[~self.found.forbidden[0, ids]]
        if len(ids) == 0:
            return TopCandidates(ids[None], torch.empty(1, 0, dtype=torch.float64))
        # Each token is changed by its own logit alone: what the others are does not matter.
        z = torch.zeros(1, self.call.vocab, dtype=torch.float64)
        self._before = self._exact(ids)
        z[0, ids] = self._before
        for stage in edits:
            stage.edit(z, self.call)
        return TopCandidates(ids[None], z[:, ids])

    def _from_best(self, beta: float, chain: list[Stage], edited: TopCandidates) -> Draw | None:
        """Choose among the best tokens: few first, more where a cut may keep more."""
        vocab = self._count
        n, cut = 1, chain[0] if chain else None
        if isinstance(cut, TopK):
            n = int(cut.wanted(self.call)[0])
        elif isinstance(cut, TopH):
            n = cut.MOST
        elif cut is not None:
            n = _FIRST
        while True:
            n = min(n, vocab)
            known = self._best(n, edited)
            if known is None or float(known.best.top) == -math.inf:
                return None
            done = self._choose(known, beta, chain)
            if done is not None or isinstance(cut, _BY_RANK) or n == vocab or n >= _LAST:
                return done
            n *= _MORE

    def _best(self, n: int, edited: TopCandidates) -> _Known | None:
        """Return the n best tokens or more, exact, after edits; None if the bounds are too wide."""
        ids, z = edited.ids[0], edited.z[0]
        wanted = min(n + len(ids), self._count)
        found = decide(self.found, wanted)
        if not bool(found.decided.all()):
            return None
        self.scored.update(found.ids[0].tolist())
        if len(ids) == 0:
            return _Known(TopCandidates(found.ids, found.values), found.ids[0], found.values[0], z)
        plain = ~torch.isin(found.ids[0], ids)
        raw = torch.cat([found.values[0][plain], self._before])
        ids = torch.cat([found.ids[0][plain], ids])
        z = torch.cat([found.values[0][plain], z])
        sure = z >= (-math.inf if wanted == self._count else found.values[0, -1])
        # Below the last token that was found there may be others.
        order = ids[sure].argsort()
        best = TopCandidates.sort(ids[sure][order][None], z[sure][order][None])
        return _Known(best, ids, raw, z[~sure])

    def _choose(self, known: _Known, beta: float, chain: list[Stage]) -> Draw | None:
        """Return the token, if it is the same for every mass that the other tokens may have."""
        best, everything = known.best, len(known.ids) == self._count
        # One pass over the bounds is enough for the cut and the model's own distribution.
        by_mass = not self.greedy and not isinstance(chain[0], _BY_RANK)
        others = self._others(known.ids, {1.0, beta} if by_mass else {1.0})
        lse = _plus(_log_sum(known.raw), others[1.0])
        if self.greedy:
            return self._drawn(int(best.ids[0, 0]), known, (0.0, 0.0), lse)
        scaled = best.scaled(torch.tensor([beta], dtype=torch.float64))
        masses: tuple[float, ...] = (math.nan,)
        if by_mass:
            low = beta * known.low if len(known.low) else known.low
            masses = _plus(_log_add(_log_sum(scaled.z), _log_sum(low)), others[beta])
        done = self._cut(scaled, masses, chain, everything=everything)
        drawn: list[tuple[int, float]] = []
        for left, call in done or ():
            token, z = choose(left, call, greedy=False)
            log_prob = (z - left.lse).clamp_(max=0.0)
            drawn += zip(token.tolist(), log_prob.tolist(), strict=True)
        if len({token for token, _ in drawn}) != 1:
            return None
        log_probs = [log_prob for _, log_prob in drawn]
        return self._drawn(drawn[0][0], known, (min(log_probs), max(log_probs)), lse)

    def _drawn(self, token: int, known: _Known, log_prob: Range, lse: Range) -> Draw:
        z = float(known.raw[known.ids.tolist().index(token)])
        return Draw(token, z, log_prob, lse, len(self.scored))

    def _cut(
        self, best: TopCandidates, masses: Sequence[float], chain: list[Stage], *, everything: bool
    ) -> list[tuple[Distribution, Call]] | None:
        """Apply the chain to the best tokens, for each possible total mass.

        None where it might keep tokens beyond these; `everything` says that there are none.
        """
        first, n = chain[0], best.ids.shape[1]
        if len(chain) == 1 and isinstance(first, TopP):
            # A larger mass keeps more tokens: a token chosen at both ends is always chosen.
            z = best.z[0].tolist()
            counts = {first.count(z, mass, self.call) for mass in masses}
            if n in counts and not everything:
                return None
            return [
                (TopCandidates(best.ids[:, :count], best.z[:, :count]), self.call)
                for count in counts
            ]
        rows = torch.zeros(len(masses), dtype=torch.int64)
        call = self.call.select(rows)
        mass = torch.tensor(masses, dtype=torch.float64)
        left: Distribution = TopWithTotal(best.ids[rows], best.z[rows], mass)
        for number, stage in enumerate(chain):
            left = stage(left, call)
            ends = number > 0 or everything or not isinstance(stage, Cut) or len(masses) == 1
            if not ends and bool((left.n >= n).any()):
                return None
        return [(left, call)]

    def _others(self, ids: Tensor, betas: set[float]) -> dict[float, Range]:
        """Return, per β, the range of the log of the mass of all tokens but these."""
        if len(ids) == self._count:
            return dict.fromkeys(betas, (-math.inf, -math.inf))
        each = sorted(betas)
        return dict(zip(each, log_masses(self.found, ids, each), strict=True))

    def _by_gumbel(self, beta: float, edited: TopCandidates) -> Draw | None:
        """Sample with Gumbel noise, scoring only tokens whose upper bound plus noise can win."""
        keys = self.call.keys
        bounds = LogitBounds.of(self.found).without(edited.ids[0])
        ids, z = edited.ids[0], edited.z[0]
        leader = bounds.gumbel_argmax(beta, keys)
        if int(leader) >= 0:
            ids, z = torch.cat([ids, leader]), torch.cat([z, self._exact(leader)])
        score = float((beta * z + gumbel(keys, ids[None])[0]).max()) if len(ids) else -math.inf
        if score == -math.inf:
            return None
        others = bounds.gumbel_above(beta, keys, score)
        if others is None:
            return None
        others = others[~torch.isin(others, ids)]
        ids, z = torch.cat([ids, others]), torch.cat([z, self._exact(others)])
        ids, order = ids.sort()  # the lowest id first among equals
        z = z[order]
        place = int((beta * z + gumbel(keys, ids[None])[0]).argmax())
        rest = self._others(edited.ids[0], {1.0, beta})
        lse = _plus(_log_sum(self._before), rest[1.0])
        low, high = _plus(_log_sum(beta * edited.z), rest[beta])
        chosen = beta * float(z[place])
        interval = (min(chosen - high, 0.0), min(chosen - low, 0.0))
        raw = torch.cat([self._before, z])[torch.cat([edited.ids[0], ids]) == ids[place]]
        return Draw(int(ids[place]), float(raw[0]), interval, lse, len(self.scored))


def _plus(known: float, others: Range) -> Range:
    """Return the range of log(exp(known) + exp(others))."""
    return _log_add(known, others[0]), _log_add(known, others[1])


def _log_sum(z: Tensor) -> float:
    """Return log Σ exp z of a few numbers."""
    values = z.flatten().tolist()
    top = max(values, default=-math.inf)
    if math.isinf(top):
        return top
    return top + math.log(math.fsum(math.exp(x - top) for x in values))


def _log_add(a: float, b: float) -> float:
    top = max(a, b)
    return top if math.isinf(top) else top + math.log(math.exp(a - top) + math.exp(b - top))
