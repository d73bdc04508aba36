"""A call of a sampler, row by row or all at once: through the stages, to a token.

In:  logits as a tensor or as rows that are not built, the stages, the call.
Out: `Sampled`, one entry per row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmhead.logits import Rows
from lmhead.sampling import rows
from lmhead.sampling.cuts import TopK
from lmhead.sampling.distribution import Distribution, Few, Whole
from lmhead.sampling.mirostat import Mirostat2
from lmhead.sampling.noise import gumbel
from lmhead.sampling.sampled import Kept, Sampled
from lmhead.sampling.stage import Call, Edit, Stage
from lmhead.sampling.temperature import Temperature


def run(logits: Tensor | Rows, stages: Sequence[Stage], call: Call, greedy: Tensor) -> Sampled:
    """One token per row. `greedy` (B,) says which rows take the best word.

    A greedy row and a drawn one go their own ways.
    """
    if not bool(greedy.any()) and isinstance(logits, Tensor):
        return _Job(list(stages), call, greedy=False).dense(logits)
    parts: list[tuple[Tensor, Sampled]] = []
    for cold in (True, False):
        which = (greedy == cold).nonzero()[:, 0]
        if len(which) == 0 and (cold or parts):
            continue
        whole = len(which) == len(greedy)
        job = _Job(active(stages, greedy=cold), call if whole else call.select(which), cold)
        if isinstance(logits, Tensor):
            some = job.dense(logits if whole else logits[which])
        else:
            some = job.lazy(logits, which)
        parts.append((which, some))
    return _join(parts)


def active(stages: Sequence[Stage], *, greedy: bool) -> list[Stage]:
    """The stages that count: for a greedy choice, those that can change which word is best.

    A temperature of 0 leaves one word. A cut that may strike out the best word (typical_p, XTC)
    counts if it comes before, as in llama.cpp, and with it all that comes before itself.
    """
    if not greedy:
        return list(stages)
    cold = next((i for i, s in enumerate(stages) if isinstance(s, Temperature)), 0)
    cuts = [i for i in range(cold) if not isinstance(stages[i], Edit)]
    last = max((i for i in cuts if not stages[i].keeps_argmax), default=-1)
    return [s for i, s in enumerate(stages) if isinstance(s, Edit) or i <= last]


def start(z: Tensor, rows: Tensor | None = None) -> Whole:
    """Rows of logits (B, V), checked, at temperature 1; `rows` (B,) are their numbers."""
    whole = Whole.of(z, own=True)
    top = whole.largest
    if _finite(top):
        return whole
    row = int((~top.isfinite()).nonzero()[0])
    value = float(top[row])
    row = row if rows is None else int(rows[row])
    if value == -math.inf:
        raise ValueError(f"logits must have a word that is not masked; row {row} is all -inf")
    raise ValueError(f"logits must be finite or -inf; got {value} in row {row}")


def choose(words: Distribution, call: Call, *, greedy: bool) -> tuple[Tensor, Tensor]:
    """The token of each row, and its logit among the words that are left: (B,) each."""
    if isinstance(words, Whole):
        if not greedy:
            token = rows.race(words.z, words.beta, call.keys)
            return token, words.z.gather(1, token[:, None])[:, 0].double() * words.beta
        words = words.above(words.largest)
    if greedy:
        return words.ids[:, 0], words.z[:, 0]
    place = (words.z + gumbel(call.keys, words.ids)).argmax(1, keepdim=True)
    return words.ids.gather(1, place)[:, 0], words.z.gather(1, place)[:, 0]


def _finite(x: Tensor) -> bool:
    """Whether all entries are; quickly for one."""
    return math.isfinite(x.item()) if x.numel() == 1 else bool(x.isfinite().all())


@dataclass(frozen=True)
class _Raw:
    """The model's own distribution, before any stage."""

    lse: Tensor  # (B,)
    n: Tensor  # (B,), how many words are not masked
    at: Callable[[Tensor], Tensor]  # logits at given ids: (B, K) to (B, K), float64


@dataclass(frozen=True)
class _Job:
    """Some rows that are all greedy or all drawn."""

    stages: list[Stage]
    call: Call
    greedy: bool

    def dense(self, z: Tensor) -> Sampled:
        """From all logits, (B, V)."""
        whole = start(z, self.call.rows)
        words: Distribution = whole
        for stage in self.stages:
            words = stage(words, self.call)
        self._check_left(whole, words)
        if type(words) is Few and not self.greedy:
            settled = rows.settle(z, whole.lse, words.ids, words.z, self.call.keys)
            if settled is not None:
                return self._sampled(words, *settled)
        raw = _Raw(whole.lse, whole.n, lambda ids: z.gather(1, ids).double())
        return self._finish(words, raw)

    def lazy(self, given: Rows, which: Tensor) -> Sampled:
        """By one sweep where the top is enough, else with one row at a time."""
        k = self._top()
        if k is not None:
            return self._from_top(given, which, min(k, self.call.vocab))
        parts = []
        for i, row in enumerate(which.tolist()):
            here = torch.tensor([i])
            job = _Job(self.stages, self.call.select(here), self.greedy)
            parts.append((here, job.dense(given.whole(row)[None])))
        if not parts:
            return self.dense(torch.empty(0, self.call.vocab))
        return _join(parts)

    def _top(self) -> int | None:
        """How many of the best words decide everything; None if it may take all of them."""
        if self.greedy and not self.stages:
            return 1
        first = next((s for s in self.stages if not isinstance(s, Temperature)), None)
        if not isinstance(first, TopK) or first.ties != "lowest":
            return None
        k = torch.as_tensor(first.k)
        return None if bool((k < 1).any()) else int(k.max())

    def _from_top(self, given: Rows, which: Tensor, k: int) -> Sampled:
        if len(which) != len(given):
            given = given.select(which)
        values, ids, lse = given.top(k)
        fine = lse.isfinite() & values[:, 0].isfinite()
        if not bool(fine.all()):
            row = int(which[(~fine).nonzero()[0]])
            raise ValueError(
                f"logits must be finite or -inf, and not all -inf; row {row} is not so"
            )
        words: Distribution = Few(ids, values)
        for stage in self.stages:
            words = stage(words, self.call)
        return self._finish(words, _Raw(lse, torch.full_like(lse, self.call.vocab), given.at))

    def _finish(self, words: Distribution, raw: _Raw) -> Sampled:
        call = self.call
        token, chosen = choose(words, call, greedy=self.greedy)
        raw_log_prob = (raw.at(token[:, None])[:, 0] - raw.lse).clamp(max=0.0)
        if self.greedy:
            only = Few(token[:, None], torch.zeros_like(raw_log_prob)[:, None])
            kept = Kept.of(only, call.vocab)
            none = torch.zeros_like(raw_log_prob)
            return Sampled(token, none, raw_log_prob, raw_log_prob, kept, call.surprise)
        # What rounding leaves above 0 is not a probability above 1.
        log_prob = (chosen - words.lse).clamp(max=0.0)
        mass = self._kept_mass(words, raw).clamp(max=0.0)
        return self._sampled(words, token, log_prob, raw_log_prob, mass)

    def _sampled(
        self, words: Distribution, token: Tensor, log_prob: Tensor, raw: Tensor, mass: Tensor
    ) -> Sampled:
        call, state = self.call, self.call.surprise
        for stage in self.stages:
            if isinstance(stage, Mirostat2):
                state = stage.learn(call, log_prob)
        return Sampled(token, log_prob, raw, mass, Kept.of(words, call.vocab), state)

    def _kept_mass(self, words: Distribution, raw: _Raw) -> Tensor:
        """The log of what the words that are left have in the model's distribution."""
        if isinstance(words, Few):
            left = raw.at(words.ids).masked_fill(words.z == -math.inf, -math.inf)
        elif bool((words.n == raw.n).all()):
            return torch.zeros_like(raw.lse)
        else:
            ids = torch.arange(self.call.vocab)[None].expand(len(words.z), -1)
            left = raw.at(ids).masked_fill(words.z == -math.inf, -math.inf)
        return left.logsumexp(1) - raw.lse

    def _check_left(self, whole: Whole, words: Distribution) -> None:
        """Raise where no word is left, naming the stage that took the last one."""
        if _finite(words.top):
            return
        words = whole
        for stage in self.stages:  # again, now looking after each
            words = stage(words, self.call)
            top = words.top
            if not bool(top.isfinite().all()):
                first = int((~top.isfinite()).nonzero()[0])
                lost = float(top[first]) == -math.inf
                raise ValueError(
                    f"{stage.name} {'removed the last word' if lost else 'made a NaN or inf'} of "
                    f"row {int(self.call.rows[first])}: there is nothing to choose from"
                )


def _join(parts: Sequence[tuple[Tensor, Sampled]]) -> Sampled:
    """The rows of a batch from those of its parts."""
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
