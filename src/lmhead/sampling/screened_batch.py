"""Sample all rows of a batch from a quantized copy of the weight; all logits only where needed.

The compiled core decides a batch in one call: `native/screen_sample.hpp` has the steps. A row that
the bounds do not decide, or a chain that the core does not support, is sampled as without a copy.
So the token is always that of `sampler(head(hidden))`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lmhead.sampling.run_stages import Sampled, active
from lmhead.sampling.stage import Call, Edit, Stage, Temperature, per_row
from lmhead.sampling.truncation_stages import Epsilon, MinP, TopH, TopK, TopP
from lmhead.screen.candidates import Candidates, check_sound
from lmhead.screen.screened_head import Certificate, Interval, ScreenedHead, ScreenedSample
from lmhead.screen.states import STATES_PER_PASS, usable
from lmhead.sweep import Source, kernels

# In the order of SampleStep in native/screen_sample.hpp.
_STEPS: tuple[type[Stage], ...] = (Temperature, TopK, TopP, MinP, Epsilon, TopH)

Integers = NDArray[np.int64]
Numbers = NDArray[np.float64]
"""NumPy arrays as arguments of the core: small ones are made several times as fast as tensors."""

Dense = Callable[[Tensor], Sampled]
"""Sample some rows, (K,) numbers, from the logits of all tokens."""


def sample_rows(
    screened: ScreenedHead,
    source: Source,
    stages: Sequence[Stage],
    call: Call,
    greedy: Tensor,
    dense: Dense,
    *,
    exact: bool = False,
    allowed: Tensor | None = None,
) -> ScreenedSample:
    """Sample one token per row of the source, (N,).

    `greedy` rows (N,) take the best token. `allowed`, (N or 1, W) int32, has a bit per token:
    tokens without one cannot be drawn, and those that no row allows are not read. With `exact`,
    log-probabilities are those of all logits.
    """
    n = source.rows
    whole = torch.zeros(3, n, dtype=torch.int64)
    numbers = torch.zeros(5, n, dtype=torch.float64)
    read = 0
    chain = Chain.of(stages, call, greedy)
    if chain is not None and screened.fits(source) and _supports(source):
        good = usable(screened.copy, source.hiddens[0]).nonzero()[:, 0]
        for some in torch.split(good, STATES_PER_PASS) if len(good) else ():
            full = len(some) == n
            part = source if full else source.select(some)
            mask = None if allowed is None else allowed.expand(n, -1)[some].contiguous()
            found = Candidates(screened.copy, part, screened.bias64(source.bias), mask)
            edits = _edit(stages, part, call if full else call.select(some), mask)
            if edits is None:
                break
            drawn = _sample(found, chain if full else chain.select(some), edits, mask)
            read += found.bytes_read
            if full:
                whole, numbers = drawn
            else:
                whole[:, some], numbers[:, some] = drawn
    token, rescored, state = whole
    _, scored, states = whole.tolist()
    check_sound(_UNSOUND not in states)
    read += sum(scored) * source.weights[0].nbytes // source.vocab
    log_prob, raw = numbers[1:3], (numbers[0] - numbers[3:5].flip(0)).clamp_(max=0.0)
    fell = state != _DECIDED
    if undecided := [row for row in range(n) if exact or states[row] != _DECIDED]:
        again = torch.tensor(undecided)
        sampled = dense(again)
        off = torch.zeros(2, len(again), dtype=torch.float64)
        if not exact:
            off[1] = _float_error(screened, source.select(again))
            off[0] = off[1] * _steepness(stages, call)[again]
        off = torch.stack([-2 * off, 2 * off], 1)  # of the logit, and of the log of all of them
        token[again] = sampled.token
        log_prob[:, again] = (sampled.log_prob + off[0]).clamp_(max=0.0)
        raw[:, again] = (sampled.raw_log_prob + off[1]).clamp_(max=0.0)
        rescored[fell] = source.vocab
        read += source.weights[0].nbytes
    certificate = Certificate(rescored, fell, read)
    screened.report.add(certificate, source.weights[0].nbytes)
    return ScreenedSample(token, Interval(*log_prob), Interval(*raw), certificate)


_DECIDED, _UNSOUND = 1, 2


def _float_error(screened: ScreenedHead, source: Source) -> Tensor:
    """Return how far float32 logits of each row may be from float64 ones: (B,)."""
    if source.dtype == torch.float64:
        return torch.zeros(source.rows, dtype=torch.float64)
    copy, map_ = screened.copy, source.pointwise
    longest = copy.mean_norm + 2 * copy.n_max
    error: Tensor = 2.0**-17 * longest * source.hiddens[0].double().norm(dim=1)
    if source.bias is not None:
        largest = source.bias.double().abs().masked_fill(source.bias.isinf(), 0.0).max()
        error = error + 2.0**-21 * largest
    return error * map_.lipschitz + 2.0**-21 * (abs(map_.shift) + abs(map_.outer) + 1.0)


def _steepness(stages: Sequence[Stage], call: Call) -> Tensor:
    """Return by how much the temperatures of a chain multiply differences of logits: (B,)."""
    steep = torch.ones(len(call.keys), dtype=torch.float64)
    for stage in stages:
        if isinstance(stage, Temperature):
            steep = steep * _value(stage, call)
    return steep


def _supports(source: Source) -> bool:
    hidden, weight = source.hiddens[0], source.weights[0]
    return kernels.for_pairs(hidden, weight) is not None and source.row_scale is None


@dataclass(frozen=True)
class Chain:
    """A sampler's stages as the core takes them; S steps, B rows."""

    kinds: Integers  # (S,), places in `_STEPS`
    least: Integers  # (S,), tokens that a cut keeps at least
    values: Numbers  # (S, B); of a temperature its inverse
    flags: Integers  # (2, B): greedy, and whether float64 sums decide, as they do without a copy
    keys: Integers  # (B, 2)

    @classmethod
    def of(cls, stages: Sequence[Stage], call: Call, greedy: Tensor) -> Chain | None:
        """Return the stages after the edits; None if the core does not support them."""
        edits = next((i for i, s in enumerate(stages) if not isinstance(s, Edit)), len(stages))
        chain = stages[edits:]
        take_best: list[bool] = greedy.tolist()
        if any(take_best) and len(active(stages, greedy=True)) != edits:
            return None
        if all(take_best):
            chain = []
        if any(type(s) not in _STEPS or getattr(s, "ties", "lowest") != "lowest" for s in chain):
            return None
        kinds = [_STEPS.index(type(s)) for s in chain]
        least = [getattr(s, "min_tokens_to_keep", 1) for s in chain]
        values = [_value(s, call).numpy() for s in chain]
        first = next((s for s in chain if not isinstance(s, Temperature)), None)
        ranked = isinstance(first, TopK) and bool((torch.as_tensor(first.k) >= 1).all())
        wide = [edits == 0 and (ranked or best) for best in take_best]
        return cls(
            np.array(kinds, np.int64),
            np.array(least, np.int64),
            np.stack(values) if values else np.empty((0, len(take_best))),
            np.array([take_best, wide], np.int64),
            call.keys.contiguous().numpy(),
        )

    def select(self, rows: Tensor) -> Chain:
        """Return the chain of some rows."""
        some = rows.numpy()
        values, flags = self.values[:, some].copy("C"), self.flags[:, some].copy("C")
        return replace(self, values=values, flags=flags, keys=self.keys[some])


def _value(stage: Stage, call: Call) -> Tensor:
    if isinstance(stage, TopK):
        return stage.wanted(call)
    if isinstance(stage, Temperature):
        return 1 / per_row(stage.name, stage.temperature, call)
    names = {TopP: "p", MinP: "min_p", Epsilon: "epsilon", TopH: "top_h"}
    return per_row(stage.name, getattr(stage, names[type(stage)]), call)


class _Edits(NamedTuple):
    """Tokens whose logits edits change, row after row: M of them."""

    starts: Integers  # (B + 1,)
    ids: Integers  # (M,)
    logits: Numbers  # (2, M), before and after


def _edit(
    stages: Sequence[Stage], source: Source, call: Call, allowed: Tensor | None
) -> _Edits | None:
    """Apply the edits to the allowed tokens they may change; None if that may be all."""
    edits = [s for s in stages if isinstance(s, Edit)]
    none = _Edits(np.zeros(source.rows + 1, np.int64), np.empty(0, np.int64), np.empty((2, 0)))
    if not edits:
        return none
    touched = [s.touches(call) for s in edits]
    if any(tokens is None for tokens in touched):
        return None
    rows = [
        sorted({t for tokens in touched if tokens for t in tokens[row]})
        for row in range(source.rows)
    ]
    if allowed is not None:
        masks: list[list[int]] = allowed.tolist()
        rows = [
            [t for t in ids if bits[t // 32] >> t % 32 & 1]
            for ids, bits in zip(rows, masks, strict=True)
        ]
    if not any(rows):
        return none
    starts = torch.tensor([0, *(len(ids) for ids in rows)]).cumsum(0)
    ids = torch.tensor([t for tokens in rows for t in tokens])
    row = torch.arange(source.rows).repeat_interleave(starts.diff())
    every, place = ids.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    bias = None if source.bias is None else source.bias[every]
    some = replace(source, weights=(source.weights[0][every],), bias=bias)
    before = some.row_logits()[row, place]
    # Each token is changed by its own logit alone: what the others are does not matter.
    z = before.new_zeros(source.rows, call.vocab)
    z[row, ids] = before
    for stage in edits:
        stage.edit(z, call)
    logits = torch.stack([before, z[row, ids]]).double()
    return _Edits(*kernels.arrays(starts, ids, logits))


def _sample(
    found: Candidates, chain: Chain, edits: _Edits, allowed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return token, tokens scored and state, (3, B), and five numbers, (5, B), of each row."""
    source = found.source
    rows = found.rows
    whole = torch.zeros(3, rows, dtype=torch.int64)
    numbers = torch.empty(5, rows, dtype=torch.float64)
    copy, states, arrays = found.copy.arrays, found.states, kernels.arrays
    kernels.compiled().screen_sample(
        *arrays(found.approx, found.block_top),
        *(copy.first_e, copy.n, copy.block_e, copy.block_n),
        *arrays(states.e, states.n, states.base),
        *(copy.low, copy.e, copy.scales),
        *arrays(states.main, states.scales),
        allowed,
        source.hiddens[0].float(),
        *(source.weights[0], found.bias, kernels.map_tuple(source.pointwise)),
        found.copy.mean_norm,
        *(chain.kinds, chain.least, chain.values, chain.flags, chain.keys, *edits),
        *arrays(whole, numbers),
        kernels.threads(),
    )
    return whole, numbers
