"""Recommend a head for a vocabulary, by costs on this machine, modelled or measured.

In:  V, D, the number of tokens of a training step, perhaps token frequencies.
Out: `Advice`: a row per head, a recommendation with its reasons; prints as a table, or as JSON.

The model counts operations, and multiplies them by the rates that `calibration` measures:

    head           step: pairs of a width                      one token: entries read
    full, tied     N V of D                                    V D
    adaptive       N (S+C) of D, N p_c V_c of D_c              (S+C) D, and p_c V_c D_c
    hierarchical   N L of D                                    a call
    sampled        N (K+1) of D                                V D

with L the mean path length in a Huffman tree, about the entropy of the tokens in bits. Dense
gradients cost per entry: V D entries for full and sampled, all weights for adaptive.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from itertools import pairwise
from textwrap import wrap
from typing import Any

from torch import Tensor

from lmhead import checks
from lmhead.head import LMHead
from lmhead.tying import advise_tying
from lmhead.vocab import calibration
from lmhead.vocab.adaptive_head import AdaptiveHead
from lmhead.vocab.calibration import Rates, best_of
from lmhead.vocab.cutoffs import choose_cutoffs, widths
from lmhead.vocab.frequencies import check_frequencies, zipf
from lmhead.vocab.hierarchical_head import HierarchicalHead
from lmhead.vocab.sampled_loss import SampledLoss

_DIV_VALUE = 4.0
# A head that takes less of a training step than this is not worth a factored softmax.
_SMALL_SHARE = 0.4
# A factored head is recommended if it is faster than the full one by this factor.
_MIN_SPEEDUP = 2.0
# Weight, gradient and Adam's two moments, in float32.
_TRAINING_BYTES = 16


@dataclass(frozen=True)
class HeadCost:
    """Costs of one kind of head.

    Attributes:
        kind: "full", "tied", "adaptive", "hierarchical" or "sampled".
        parameters: of the head alone; 0 if it shares those of the embedding.
        training_bytes: of its weights, their gradients and Adam's moments, in float32.
        step_seconds: loss and gradients of one training step.
        log_prob_seconds: the log-probability of one token.
        argmax_seconds: the best token of one state.
        note: advantages and disadvantages.
    """

    kind: str
    parameters: int
    training_bytes: int
    step_seconds: float
    log_prob_seconds: float
    argmax_seconds: float
    note: str


@dataclass(frozen=True)
class Advice:
    """Costs of all heads, and a recommendation.

    Attributes:
        vocab_size: V.
        hidden_size: D.
        tokens: N, of a training step.
        measured: whether the seconds were measured, or modelled.
        heads: a `HeadCost` each.
        recommendation: the recommended kind.
        reasons: why.
        cutoffs: those of the adaptive head.
    """

    vocab_size: int
    hidden_size: int
    tokens: int
    measured: bool
    heads: tuple[HeadCost, ...]
    recommendation: str
    reasons: tuple[str, ...]
    cutoffs: tuple[int, ...]

    def __str__(self) -> str:
        how = "measured" if self.measured else "estimated"
        how += " on this machine"
        lines = [
            f"Heads for V {self.vocab_size:,}, D {self.hidden_size:,}, {self.tokens:,} tokens "
            f"a step; {how}:",
            f"  {'head':13s} {'parameters':>12s} {'training':>11s} {'step':>10s} "
            f"{'one token':>10s} {'best token':>10s}",
        ]
        lines += [
            f"  {h.kind:13s} {h.parameters:12,} {h.training_bytes / 2**20:7,.0f} MiB "
            f"{_time(h.step_seconds):>10s} {_time(h.log_prob_seconds):>10s} "
            f"{_time(h.argmax_seconds):>10s}"
            for h in self.heads
        ]
        lines.append(f"Recommended: {self.recommendation}")
        for reason in self.reasons:
            lines += wrap(reason, 94, initial_indent="  - ", subsequent_indent="    ")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as a dict."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Advice:
        """Make it from the result of `to_dict`."""
        heads = tuple(HeadCost(**head) for head in content["heads"])
        rest = {name: tuple(content[name]) for name in ("reasons", "cutoffs")}
        return cls(**(content | rest | {"heads": heads}))

    def to_json(self) -> str:
        """Return all fields as JSON."""
        return json.dumps(self.to_dict(), indent=2)


def advise(
    vocab_size: int,
    hidden_size: int,
    tokens: int = 1024,
    *,
    frequencies: Any = None,
    layers: int | None = None,
    num_samples: int = 1024,
    measure: bool = False,
) -> Advice:
    """Return the costs of full, tied, adaptive, hierarchical and sampled heads, and a choice.

    Args:
        vocab_size: V.
        hidden_size: D.
        tokens: N, of a training step.
        frequencies: (V,), how often tokens occur; Zipf's law if not given.
        layers: Transformer blocks of the model, of about 12 D² parameters each, to estimate the
            head's share of a step. None considers the head alone.
        num_samples: K, of the sampled loss.
        measure: build every head and time it, instead of modelling: takes the time and the memory
            of a few training steps of a full head.

    >>> advice = advise(33278, 256, layers=2)
    >>> advice.recommendation
    'adaptive'
    >>> [head.kind for head in advice.heads]
    ['full', 'tied', 'adaptive', 'hierarchical', 'sampled']
    >>> advise(8000, 512, layers=8).recommendation
    'tied'
    """
    for name, value in (("vocab_size", vocab_size), ("hidden_size", hidden_size)):
        checks.check_integer(name, value, low=1)
    checks.check_integer("tokens", tokens, low=1)
    checks.check_integer("num_samples", num_samples, low=1)
    if layers is not None:
        checks.check_integer("layers", layers, low=0)
    shares = zipf(vocab_size)
    if frequencies is not None:
        shares = check_frequencies(frequencies, vocab_size).sort(descending=True).values
    cutoffs = choose_cutoffs(
        vocab_size, hidden_size, frequencies=shares, div_value=_DIV_VALUE, tokens=tokens
    )
    case = _Case(vocab_size, hidden_size, tokens, shares, cutoffs, num_samples)
    heads = tuple(_measured(case) if measure else _modelled(case, calibration.rates()))
    choice, reasons = _choose(case, heads, layers)
    return Advice(vocab_size, hidden_size, tokens, measure, heads, choice, tuple(reasons), cutoffs)


@dataclass(frozen=True)
class _Case:
    vocab: int
    width: int
    tokens: int
    shares: Tensor  # (V,), most frequent first
    cutoffs: tuple[int, ...]
    samples: int

    @property
    def path(self) -> float:
        """Decisions on the path of a token, on average: a little more than the entropy in bits."""
        p = self.shares[self.shares > 0]
        return max(1.0, float(-(p * p.log2()).sum()) + 0.03)

    @property
    def clusters(self) -> list[tuple[int, int, float]]:
        """Of the adaptive head: tokens, width and share of all tokens of each cluster."""
        ends = [*self.cutoffs, self.vocab]
        sizes = widths(self.width, len(self.cutoffs), _DIV_VALUE)
        pairs = zip(pairwise(ends), sizes, strict=True)
        return [(b - a, d, float(self.shares[a:b].sum())) for (a, b), d in pairs]

    @property
    def shortlist(self) -> int:
        """Rows of the head that every token reads: frequent tokens and clusters."""
        return (self.cutoffs[0] if self.cutoffs else self.vocab) + len(self.cutoffs)


_NOTES = {
    "full": "the softmax itself; `grad_filter` makes its gradients cheaper",
    "tied": "full, on the embedding's weight",
    "adaptive": "nearly the perplexity of full where tokens follow Zipf's law; exact distribution",
    "hierarchical": "the cheapest step and token, at a higher perplexity; exact distribution",
    "sampled": "trains a full head; evaluation and decoding cost what full costs",
}


def _cost(kind: str, parameters: int, *seconds: float) -> HeadCost:
    step, log_prob, best = seconds
    return HeadCost(
        kind, parameters, _TRAINING_BYTES * parameters, step, log_prob, best, _NOTES[kind]
    )


def _modelled(case: _Case, rates: Rates) -> list[HeadCost]:
    n, d = case.tokens, case.width
    entries = case.vocab * d
    log_prob = rates.question["full"] + rates.read * entries
    argmax = rates.search["full"] + rates.compare * entries
    full = (rates.sweep.seconds(n * case.vocab, d) + rates.gradient * entries, log_prob, argmax)
    sampled = rates.samples.seconds(n * (case.samples + 1), d) + rates.gradient * entries
    tree = (
        rates.paths.seconds(n * case.path, d),
        rates.question["hierarchical"],
        rates.search["hierarchical"] * case.path,
    )
    sizes = {
        "full": (entries, full),
        "tied": (0, full),
        "adaptive": _adaptive(case, rates),
        "hierarchical": ((case.vocab - 1) * (d + 1), tree),
        "sampled": (entries, (sampled, log_prob, argmax)),
    }
    return [_cost(kind, size, *seconds) for kind, (size, seconds) in sizes.items()]


def _adaptive(case: _Case, rates: Rates) -> tuple[int, tuple[float, float, float]]:
    """Return the number of entries, and seconds of a step, a log-probability, an argmax."""
    n, d = case.tokens, case.width
    entries = case.shortlist * d
    step = rates.sweep.seconds(n * case.shortlist, d)
    kind = "adaptive" if case.cutoffs else "full"
    # A log-probability reads one cluster; the argmax may be in any.
    read, compared = float(entries), entries
    for count, width, share in case.clusters:
        step += rates.clusters + rates.sweep.seconds(n * share * count, width)
        step += 3 * n * share * d * width * rates.product
        size = (count + d) * width
        entries, compared, read = entries + size, compared + size, read + share * size
    step += rates.gradient * entries
    log_prob = rates.question[kind] + rates.read * read
    return entries, (step, log_prob, rates.search[kind] + rates.compare * compared)


def _measured(case: _Case) -> list[HeadCost]:
    heads: dict[str, Any] = {
        "full": lambda: LMHead(case.width, case.vocab),
        "adaptive": lambda: AdaptiveHead(
            case.width, case.vocab, cutoffs=case.cutoffs, div_value=_DIV_VALUE
        ),
        "hierarchical": lambda: HierarchicalHead(case.width, case.vocab, frequencies=case.shares),
        "sampled": lambda: LMHead(case.width, case.vocab),
    }
    targets = case.shares.multinomial(case.tokens, replacement=True)
    costs = []
    for kind, make in heads.items():
        head = make()
        trained = SampledLoss(head, num_samples=case.samples) if kind == "sampled" else head
        seconds = (
            best_of(calibration.step(trained, case.tokens, targets), rounds=2),
            best_of(calibration.log_prob(head)),
            best_of(calibration.argmax(head)),
        )
        costs.append(_cost(kind, sum(p.numel() for p in head.parameters()), *seconds))
        if kind == "full":
            costs.append(_cost("tied", 0, *seconds))
    return costs


def _choose(case: _Case, heads: tuple[HeadCost, ...], layers: int | None) -> tuple[str, list[str]]:
    by_kind = {h.kind: h for h in heads}
    full, adaptive = by_kind["full"], by_kind["adaptive"]
    tree = by_kind["hierarchical"]
    plain, reasons = "full", []
    if layers is not None:
        # By number of multiplications: a sweep is about as fast per multiplication as a block.
        share = case.vocab / (case.vocab + 12 * layers * case.width)
        if advise_tying(case.vocab, case.width, layers).tie:
            plain = "tied"
        reasons.append(f"a full head would be {share:.0%} of a training step's multiplications")
        if share < _SMALL_SHARE:
            return plain, [*reasons, "the exact softmax is affordable: no need to approximate it"]
    gain = full.step_seconds / adaptive.step_seconds
    if gain < _MIN_SPEEDUP:
        reasons.append(
            f"an adaptive head would be {gain:.1f} times as fast: too little for a second softmax"
        )
        return plain, reasons
    short = case.cutoffs[0] if case.cutoffs else case.vocab
    covered = float(case.shares[:short].sum())
    reasons.append(
        f"adaptive: {gain:.1f} times as fast as full, with {short:,} tokens, {covered:.0%} of all "
        "tokens, in full width"
    )
    further = adaptive.step_seconds / tree.step_seconds
    if further > 1:
        reasons.append(
            f"hierarchical is {further:.1f} times as fast again, but may predict worse (Grave et "
            "al., 2017: perplexity 166, full 144): use it where only the log-probability of "
            "single tokens is needed"
        )
    reasons.append("sampled trains fast, but every evaluation and every token costs a full softmax")
    return "adaptive", reasons


def _time(seconds: float) -> str:
    exponent = 0 if seconds >= 1 else 3 if seconds >= 1e-3 else 6
    unit = {0: "s", 3: "ms", 6: "µs"}[exponent]
    digits = max(0, 2 - int(math.log10(max(seconds * 10**exponent, 1))))
    return f"{seconds * 10**exponent:,.{digits}f} {unit}"
