"""Sample all rows of a batch: by the bounds where they decide, else by all logits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lmhead.sampling.logit_bounds import Range
from lmhead.sampling.run_stages import active, run_stages
from lmhead.sampling.screened_row import Draw, ScreenedRow
from lmhead.sampling.stage import Call, Stage
from lmhead.screen.candidates import Candidates
from lmhead.screen.screened_head import Certificate, Interval, ScreenedHead, ScreenedSample
from lmhead.screen.states import TOGETHER, usable
from lmhead.sweep import Questions, Source, row_answers


def sample_rows(
    screened: ScreenedHead,
    source: Source,
    stages: Sequence[Stage],
    call: Call,
    greedy: Tensor,
    *,
    exact: bool,
    allowed: Tensor | None = None,
) -> ScreenedSample:
    """Sample one token per row of the source, (N,).

    `greedy` rows (N,) take the best token; tokens that are not `allowed`, (N, V), are never scored.
    """
    batch = _Batch(source, stages, call, greedy, allowed)
    if screened.fits(source):
        good = usable(screened.copy, source.hiddens[0]).nonzero()[:, 0]
        for some in torch.split(good, TOGETHER) if len(good) else ():
            part = source if len(some) == source.rows else source.select(some)
            bias = screened.bias64(source.bias)
            found = Candidates(screened.copy, part, bias)
            if allowed is not None:
                found.forbid(~allowed[some])
            batch.screen(found, some)
    batch.dense()
    answer = batch.answer(exact=exact)
    screened.report.add(answer.certificate, source.weights[0].nbytes)
    return answer


class _Batch:
    """The results so far of every row."""

    def __init__(
        self,
        source: Source,
        stages: Sequence[Stage],
        call: Call,
        greedy: Tensor,
        allowed: Tensor | None,
    ) -> None:
        self.source, self.stages, self.call, self.allowed = source, stages, call, allowed
        self.greedy = greedy.tolist()
        self.draws: list[Draw | None] = [None] * source.rows
        self.fallback = [True] * source.rows
        self.read = 0

    def screen(self, found: Candidates, rows: Tensor) -> None:
        """Decide rows by the bounds of one pass over the quantized copy."""
        alone = found.rows == len(self.draws) == 1
        self.read += 0 if alone else found.bytes_read
        for i, row in enumerate(rows.tolist()):
            one = found if alone else found.row(i)
            call = self.call if alone else self.call.select(torch.tensor([row]))
            stages = active(self.stages, greedy=self.greedy[row])
            self.draws[row] = draw = ScreenedRow(one, stages, call, self.greedy[row]).draw()
            self.fallback[row] = draw is None
            self.read += one.bytes_read

    def dense(self) -> None:
        """Decide the remaining rows by float64 logits of all tokens, one row at a time."""
        for row, draw in enumerate(self.draws):
            if draw is None:
                self.draws[row] = found = self._by_all_logits(row)
                self.read += found.rescored * self.source.weights[0][0].nbytes

    def _by_all_logits(self, row: int) -> Draw:
        """Sample from the float64 logits of a row, of all allowed tokens."""
        every = torch.arange(self.source.vocab)
        if self.allowed is None:
            z = self.source.pairs(torch.full_like(every, row), every)
        else:
            every = every[self.allowed[row]]
            z = torch.full((self.source.vocab,), -math.inf, dtype=torch.float64)
            z[every] = self.source.pairs(torch.full_like(every, row), every)
        one = torch.tensor([row])
        greedy = torch.tensor([self.greedy[row]])
        sampled = run_stages(z[None], self.stages, self.call.select(one), greedy)
        token, log_prob, lse = int(sampled.token), float(sampled.log_prob), float(z.logsumexp(0))
        return Draw(token, float(z[token]), (log_prob,) * 2, (lse,) * 2, len(every))

    def answer(self, *, exact: bool) -> ScreenedSample:
        """Return the tokens, with intervals for their log-probabilities, or exact ones."""
        draws = [draw for draw in self.draws if draw is not None]
        assert len(draws) == len(self.draws)
        log_prob = _ends([draw.log_prob for draw in draws])
        lse = _ends([draw.lse for draw in draws])
        if exact:
            answers, _ = row_answers(Questions(self.source))
            lse = answers.lse.expand(2, -1)
            for row in (log_prob[0] != log_prob[1]).nonzero()[:, 0].tolist():
                log_prob[:, row] = self._by_all_logits(row).log_prob[0]
        z = torch.tensor([draw.z for draw in draws], dtype=torch.float64)
        raw = Interval((z - lse[1]).clamp(max=0.0), (z - lse[0]).clamp(max=0.0))
        rescored = torch.tensor([draw.rescored for draw in draws], dtype=torch.int64)
        certificate = Certificate(
            rescored, torch.tensor(self.fallback, dtype=torch.bool), self.read
        )
        token = torch.tensor([draw.token for draw in draws], dtype=torch.int64)
        return ScreenedSample(token, Interval(*log_prob), raw, certificate)


def _ends(ranges: list[Range]) -> Tensor:
    """Return the least and the largest numbers, (2, N)."""
    return torch.tensor(ranges, dtype=torch.float64).view(-1, 2).T
