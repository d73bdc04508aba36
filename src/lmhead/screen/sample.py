"""A sampler's token from the bounds of a screen: the one that the exact logits would give.

    greedy, top_k, top_h    the best words, scored exactly
    min_p, top_p, epsilon   the best words, as many as the cut may keep; where a cut asks for the
                            mass of all words it is made twice, with the least and with the largest
                            that the bounds allow, and both must give the same token
    temperature alone       the noise of a word is known before its logit: only words whose upper
                            bound plus noise can win are scored
    penalties, biases       the words that they change are scored exactly and taken out of the rest

What this does not decide is left to the exact logits of all words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lmhead.sampling.cuts import Epsilon, Eta, MinP, TopH, TopK, TopP
from lmhead.sampling.distribution import Distribution, Few, Top
from lmhead.sampling.noise import gumbel
from lmhead.sampling.run import choose
from lmhead.sampling.stage import Call, Cut, Edit, Stage, per_row
from lmhead.sampling.temperature import Temperature
from lmhead.screen.candidates import Candidates
from lmhead.screen.decide import decide
from lmhead.screen.masses import Range, log_masses
from lmhead.screen.sketch import Sketch

# Words scored exactly before a cut is tried, by how many times more it is tried again, and the end.
_FIRST, _MORE, _LAST = 128, 4, 8192
# Cuts that need no more than the best words and the mass of all; of these, those that need no mass.
_SERVED = (TopK, TopP, MinP, TopH, Epsilon)
_BY_PLACE = (TopK, TopH)
_MAX_BYTES = 1 << 26


@dataclass(frozen=True)
class Draw:
    """The token of one row.

    Attributes:
        token: the id.
        z: its logit, before any stage.
        log_prob: least and largest, in the distribution that it was drawn from.
        lse: least and largest log of the mass of all words, before any stage.
        rescored: how many words were scored exactly.
    """

    token: int
    z: float
    log_prob: Range
    lse: Range
    rescored: int


@dataclass(frozen=True)
class _Known:
    """Words that have been scored exactly: best ones, and those that edits change.

    Attributes:
        words: those that are surely the best after edits, in order.
        ids: all of them, (K,), each once.
        raw: their logits before edits, (K,).
        low: logits after edits of words that are not among `words`.
    """

    words: Few
    ids: Tensor
    raw: Tensor
    low: Tensor


@dataclass
class Row:
    """One hidden state on its way to a token.

    Attributes:
        found: its candidates.
        stages: those that count.
        call: of this row alone.
        greedy: whether the best word is taken.
    """

    found: Candidates
    stages: Sequence[Stage]
    call: Call
    greedy: bool
    scored: set[int] = field(default_factory=set)
    # Edited words: logits before, (K,).
    _before: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float64))

    def draw(self) -> Draw | None:
        """The token; None where the bounds do not decide."""
        plan, edited = self._plan(), self._edited()
        if plan is None or edited is None:
            return None
        beta, chain = plan
        if self.greedy or chain:
            return self._from_best(beta, chain, edited)
        return self._by_race(beta, edited)

    def _plan(self) -> tuple[float, list[Stage]] | None:
        """β before the first cut, and the stages from there on; None if that cut is not served."""
        beta, chain = 1.0, [s for s in self.stages if not isinstance(s, Edit)]
        while chain and isinstance(chain[0], Temperature):
            beta /= float(per_row("temperature", chain[0].temperature, self.call)[0])
            del chain[0]
        if chain and (not isinstance(chain[0], _SERVED) or isinstance(chain[0], Eta)):
            return None
        if chain and isinstance(chain[0], TopK) and chain[0].ties != "lowest":
            return None
        if chain and self.greedy:
            return None  # the best word after a cut that may strike out the best
        return beta, chain

    def _exact(self, ids: Tensor) -> Tensor:
        """Float64 logits of some words, (K,)."""
        self.scored.update(ids.tolist())
        source = self.found.source
        self.found.bytes_read += len(ids) * source.weights[0][0].nbytes
        return source.pairs(torch.zeros_like(ids), ids, max_bytes=_MAX_BYTES)

    def _edited(self) -> Few | None:
        """The words that edits change, with their logits after that; None if it may be all."""
        edits = [s for s in self.stages if isinstance(s, Edit)]
        touched: set[int] = set()
        for stage in edits:
            words = stage.touches(self.call)
            if words is None:
                return None
            touched.update(words[0])
        ids = torch.tensor(sorted(touched), dtype=torch.int64)
        if not touched:
            return Few(ids[None], torch.empty(1, 0, dtype=torch.float64))
        # Each word is changed by its own logit alone: what the others are does not matter.
        z = torch.zeros(1, self.call.vocab, dtype=torch.float64)
        self._before = self._exact(ids)
        z[0, ids] = self._before
        for stage in edits:
            stage.edit(z, self.call)
        return Few(ids[None], z[:, ids])

    def _from_best(self, beta: float, chain: list[Stage], edited: Few) -> Draw | None:
        """From the best words: few first, more where a cut may want more."""
        vocab = self.call.vocab
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
            if known is None or float(known.words.top) == -math.inf:
                return None
            done = self._choose(known, beta, chain)
            if done is not None or isinstance(cut, _BY_PLACE) or n == vocab or n >= _LAST:
                return done
            n *= _MORE

    def _best(self, n: int, edited: Few) -> _Known | None:
        """The n best words or more, after edits, exact; None where the bounds are too wide."""
        ids, z = edited.ids[0], edited.z[0]
        wanted = min(n + len(ids), self.call.vocab)
        found = decide(self.found, wanted)
        if not bool(found.decided.all()):
            return None
        self.scored.update(found.ids[0].tolist())
        if len(ids) == 0:
            return _Known(Few(found.ids, found.values), found.ids[0], found.values[0], z)
        plain = ~torch.isin(found.ids[0], ids)
        raw = torch.cat([found.values[0][plain], self._before])
        ids = torch.cat([found.ids[0][plain], ids])
        z = torch.cat([found.values[0][plain], z])
        sure = z >= (-math.inf if wanted == self.call.vocab else found.values[0, -1])
        # Below the last word that was found there may be others.
        order = ids[sure].argsort()
        words = Few.sort(ids[sure][order][None], z[sure][order][None])
        return _Known(words, ids, raw, z[~sure])

    def _choose(self, known: _Known, beta: float, chain: list[Stage]) -> Draw | None:
        """The token, if it is the same for every mass that the other words may have."""
        best, everything = known.words, len(known.ids) == self.call.vocab
        # One pass over the bounds serves the cut and the model's own distribution.
        by_mass = not self.greedy and not isinstance(chain[0], _BY_PLACE)
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
        for words, call in done or ():
            token, z = choose(words, call, greedy=False)
            log_prob = (z - words.lse).clamp_(max=0.0)
            drawn += zip(token.tolist(), log_prob.tolist(), strict=True)
        if len({token for token, _ in drawn}) != 1:
            return None
        log_probs = [log_prob for _, log_prob in drawn]
        return self._drawn(drawn[0][0], known, (min(log_probs), max(log_probs)), lse)

    def _drawn(self, token: int, known: _Known, log_prob: Range, lse: Range) -> Draw:
        z = float(known.raw[known.ids.tolist().index(token)])
        return Draw(token, z, log_prob, lse, len(self.scored))

    def _cut(
        self, words: Few, masses: Sequence[float], chain: list[Stage], *, everything: bool
    ) -> list[tuple[Distribution, Call]] | None:
        """What the chain leaves of the best words, for the masses that all may have.

        None where it might keep words beyond these; `everything` says that there are none.
        """
        first, n = chain[0], words.ids.shape[1]
        if len(chain) == 1 and isinstance(first, TopP):
            # The best words, more of them the larger the mass: what wins at both ends always wins.
            z = words.z[0].tolist()
            counts = {first.count(z, mass, self.call) for mass in masses}
            if n in counts and not everything:
                return None
            return [(Few(words.ids[:, :count], words.z[:, :count]), self.call) for count in counts]
        rows = torch.zeros(len(masses), dtype=torch.int64)
        call = self.call.select(rows)
        mass = torch.tensor(masses, dtype=torch.float64)
        left: Distribution = Top(words.ids[rows], words.z[rows], mass)
        for number, stage in enumerate(chain):
            left = stage(left, call)
            ends = number > 0 or everything or not isinstance(stage, Cut) or len(masses) == 1
            if not ends and bool((left.n >= n).any()):
                return None
        return [(left, call)]

    def _others(self, ids: Tensor, betas: set[float]) -> dict[float, Range]:
        """Per β the range of the log of the mass of all words but these."""
        if len(ids) == self.call.vocab:
            return dict.fromkeys(betas, (-math.inf, -math.inf))
        each = sorted(betas)
        return dict(zip(each, log_masses(self.found, ids, each), strict=True))

    def _by_race(self, beta: float, edited: Few) -> Draw | None:
        """Only words whose upper bound plus noise can win are scored."""
        keys = self.call.keys
        sketch = Sketch.of(self.found).without(edited.ids[0])
        words, z = edited.ids[0], edited.z[0]
        favourite = sketch.favourite(beta, keys)
        if int(favourite) >= 0:
            words, z = torch.cat([words, favourite]), torch.cat([z, self._exact(favourite)])
        score = float((beta * z + gumbel(keys, words[None])[0]).max()) if len(words) else -math.inf
        if score == -math.inf:
            return None
        others = sketch.contenders(beta, keys, score)
        if others is None:
            return None
        others = others[~torch.isin(others, words)]
        words, z = torch.cat([words, others]), torch.cat([z, self._exact(others)])
        words, order = words.sort()  # the lowest id first among equals
        z = z[order]
        place = int((beta * z + gumbel(keys, words[None])[0]).argmax())
        rest = self._others(edited.ids[0], {1.0, beta})
        lse = _plus(_log_sum(self._before), rest[1.0])
        low, high = _plus(_log_sum(beta * edited.z), rest[beta])
        chosen = beta * float(z[place])
        bounds = (min(chosen - high, 0.0), min(chosen - low, 0.0))
        raw = torch.cat([self._before, z])[torch.cat([edited.ids[0], words]) == words[place]]
        return Draw(int(words[place]), float(raw[0]), bounds, lse, len(self.scored))


def _plus(known: float, others: Range) -> Range:
    """The log of a sum, from the log of what is known and a range of the log of the rest."""
    return _log_add(known, others[0]), _log_add(known, others[1])


def _log_sum(z: Tensor) -> float:
    """Log Σ exp z of a few numbers."""
    values = z.flatten().tolist()
    top = max(values, default=-math.inf)
    if math.isinf(top):
        return top
    return top + math.log(math.fsum(math.exp(x - top) for x in values))


def _log_add(a: float, b: float) -> float:
    top = max(a, b)
    return top if math.isinf(top) else top + math.log(math.exp(a - top) + math.exp(b - top))
