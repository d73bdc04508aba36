"""All rows of a batch through a sampler: by the bounds where they decide, else by all logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lmhead.sampling.run import active, run
from lmhead.sampling.sampled import Sampled
from lmhead.sampling.sampler import Sampler
from lmhead.sampling.stage import Call
from lmhead.screen.answers import Certificate, Interval, ScreenedSample
from lmhead.screen.candidates import Candidates
from lmhead.screen.sample import Row
from lmhead.screen.states import usable
from lmhead.sweep import Questions, Source, row_answers

if TYPE_CHECKING:
    from lmhead.screen.head import ScreenedHead

TOGETHER = 64  # hidden states that one pass over the copy serves
_MAX_BYTES = 1 << 26


def sample_rows(
    screened: ScreenedHead, source: Source, sampler: Sampler, call: Call, *, exact: bool
) -> ScreenedSample:
    """One token per row of the source, (N,)."""
    batch = _Batch(source, sampler, call)
    if screened.fits(source):
        good = usable(screened.copy, source.hiddens[0]).nonzero()[:, 0]
        for some in torch.split(good, TOGETHER) if len(good) else ():
            part = source if len(some) == source.rows else source.select(some)
            bias = screened.bias64(source.bias)
            batch.screen(Candidates(screened.copy, part, bias), some)
    batch.dense(batch.fell.nonzero()[:, 0])
    return batch.answer(exact=exact)


class _Batch:
    """What is known so far of every row."""

    def __init__(self, source: Source, sampler: Sampler, call: Call) -> None:
        self.source, self.sampler, self.call = source, sampler, call
        self.greedy = sampler.greedy_rows(call)
        n = source.rows
        self.token = torch.zeros(n, dtype=torch.int64)
        self.log_prob = torch.zeros(2, n, dtype=torch.float64)
        self.lse = torch.zeros(2, n, dtype=torch.float64)  # of the model's own distribution
        self.rescored = torch.full((n,), source.vocab)
        self.fell = torch.ones(n, dtype=torch.bool)
        self.read = 0

    def screen(self, found: Candidates, rows: Tensor) -> None:
        """Rows of one pass over the copy."""
        self.read += found.bytes_read
        for i, row in enumerate(rows.tolist()):
            greedy = bool(self.greedy[row])
            one = found.row(i)
            stages = active(self.sampler.stages, greedy=greedy)
            draw = Row(one, stages, self.call.select(torch.tensor([row])), greedy).draw()
            self.read += one.bytes_read
            if draw is None:
                continue
            self.token[row], self.fell[row] = draw.token, False
            self.log_prob[:, row] = torch.tensor(draw.log_prob, dtype=torch.float64)
            self.lse[:, row] = torch.tensor(draw.lse, dtype=torch.float64)
            self.rescored[row] = draw.rescored

    def dense(self, rows: Tensor) -> None:
        """Rows that the bounds did not decide: float64 logits of all words, one row at a time."""
        for row in rows.tolist():
            sampled, self.lse[:, row] = self._by_all_words(row)
            self.token[row], self.log_prob[:, row] = sampled.token[0], sampled.log_prob[0]
            self.read += self.source.weights[0].nbytes

    def _by_all_words(self, row: int) -> tuple[Sampled, Tensor]:
        """What the sampler gives for the float64 logits of a row, and the log of their mass."""
        every = torch.arange(self.source.vocab)
        z = self.source.pairs(torch.full_like(every, row), every, max_bytes=_MAX_BYTES)
        one = torch.tensor([row])
        sampled = run(z[None], self.sampler.stages, self.call.select(one), self.greedy[one])
        return sampled, z.logsumexp(0)

    def answer(self, *, exact: bool) -> ScreenedSample:
        """The tokens, with intervals for their log-probabilities, or exact ones."""
        rows = torch.arange(self.source.rows)
        if exact:
            answers, _ = row_answers(Questions(self.source))
            assert answers.lse is not None
            self.lse = answers.lse.expand(2, -1)
            for row in (self.log_prob[0] != self.log_prob[1]).nonzero()[:, 0].tolist():
                self.log_prob[:, row] = self._by_all_words(row)[0].log_prob[0]
        z = self.source.pairs(rows, self.token, max_bytes=_MAX_BYTES)
        raw = Interval((z - self.lse[1]).clamp(max=0.0), (z - self.lse[0]).clamp(max=0.0))
        certificate = Certificate(self.rescored, self.fell, self.read)
        return ScreenedSample(self.token, Interval(*self.log_prob), raw, certificate)
