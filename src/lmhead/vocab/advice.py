"""Which head for this vocabulary? Costs on this machine, modelled or measured, then a word.

In:  V, D, the tokens of a training step, perhaps how often words occur.
Out: `Advice`: a row per head, a recommendation with its reasons; prints as a table, or as JSON.

The model counts multiplications and bytes, and divides by what this machine does in a second,
which a tenth of a second of trial finds out:

    head           step, multiplications          step, bytes           one word, bytes
    full, tied     3 N V D                        8 V D                 4 V D
    adaptive       3 (N (S+C) D + Σ N p_c …)      8 (weights)           4 (head and, at times, tail)
    hierarchical   3 N L D                        48 N L D + 8 V D      4 L D
    sampled        3 N (K+1) D                    8 V D                 4 V D

with L the decisions on a path of a Huffman tree, about the entropy of the words in bits; rows that
are gathered one by one come at a quarter of the speed. Every call costs a little besides.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lmhead import checks
from lmhead.head import LMHead
from lmhead.tying import advise_tying
from lmhead.vocab.adaptive import AdaptiveHead
from lmhead.vocab.cutoffs import choose_cutoffs, training_cost, widths
from lmhead.vocab.frequencies import check_frequencies, zipf
from lmhead.vocab.hierarchical import HierarchicalHead
from lmhead.vocab.sampled import SampledLoss

_DIV_VALUE = 4.0
# A head that takes less of a training step than this is not worth a factored softmax.
_SMALL_SHARE = 0.4
# A factored head must be faster than the full one by this much to be worth what it costs.
_WORTH = 2.0
# What a call costs however small it is, in seconds: a step, a question.
_STEP, _QUESTION = 2e-3, 3e-4
# Weight, gradient and Adam's two moments, in float32.
_TRAINING_BYTES = 16


@dataclass(frozen=True)
class HeadCost:
    """What one kind of head costs.

    Attributes:
        kind: "full", "tied", "adaptive", "hierarchical" or "sampled".
        parameters: of the head alone; 0 where it shares the embedding's.
        training_bytes: of its weights, their gradients and Adam's moments, in float32.
        step_seconds: loss and gradients of one training step.
        log_prob_seconds: the log-probability of one word.
        argmax_seconds: the best word of one state.
        note: what to know of it.
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
    """Costs of all heads, and which to take.

    Attributes:
        vocab_size: V.
        hidden_size: D.
        tokens: N, of a training step.
        measured: whether the seconds were measured, or modelled.
        heads: a `HeadCost` each.
        recommendation: the kind to take.
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
        how = "measured" if self.measured else "modelled"
        lines = [
            f"V {self.vocab_size:,}, D {self.hidden_size:,}, N {self.tokens:,}; {how} on this "
            "machine, one head alone",
            f"  {'head':13s} {'parameters':>12s} {'training':>11s} {'step':>10s} {'one word':>10s} "
            f"{'best word':>10s}",
        ]
        lines += [
            f"  {h.kind:13s} {h.parameters:12,} {h.training_bytes / 2**20:7,.0f} MiB "
            f"{_time(h.step_seconds):>10s} {_time(h.log_prob_seconds):>10s} "
            f"{_time(h.argmax_seconds):>10s}"
            for h in self.heads
        ]
        lines += [f"Take: {self.recommendation}", *(f"  - {reason}" for reason in self.reasons)]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)

    def to_json(self) -> str:
        """For programs."""
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
    """Costs of full, tied, adaptive, hierarchical and sampled heads here, and a recommendation.

    Args:
        vocab_size: V.
        hidden_size: D.
        tokens: N, of a training step.
        frequencies: (V,), how often words occur; Zipf's law if not given.
        layers: Transformer blocks under the head, of about 12 D² parameters: whether the head is
            what a step waits for. None judges the head alone.
        num_samples: K, of the sampled loss.
        measure: make every head and time it, instead of the model: takes the time and the memory
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
        checks.check_whole(name, value, low=1)
    checks.check_whole("tokens", tokens, low=1)
    checks.check_whole("num_samples", num_samples, low=1)
    if layers is not None:
        checks.check_whole("layers", layers, low=0)
    shares = zipf(vocab_size)
    if frequencies is not None:
        shares = check_frequencies(frequencies, vocab_size).sort(descending=True).values
    cutoffs = choose_cutoffs(
        vocab_size, hidden_size, frequencies=shares, div_value=_DIV_VALUE, tokens=tokens
    )
    case = _Case(vocab_size, hidden_size, tokens, shares, cutoffs, num_samples)
    speed = _Speed.of_this_machine()
    heads = tuple((_measured if measure else _modelled)(case, speed))
    choice, reasons = _choose(case, heads, layers, speed)
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
        """Decisions on the path of a word, on average: a little more than the entropy in bits."""
        p = self.shares[self.shares > 0]
        return max(1.0, float(-(p * p.log2()).sum()) + 0.03)

    @property
    def adaptive_sizes(self) -> tuple[int, int]:
        """Parameters of the head that is always read, and of the clusters."""
        ends = [*self.cutoffs, self.vocab]
        head = (ends[0] + len(self.cutoffs)) * self.width
        sizes = widths(self.width, len(self.cutoffs), _DIV_VALUE)
        pairs = zip(ends[1:], ends[:-1], sizes, strict=True)
        return head, sum((b - a + self.width) * d for b, a, d in pairs)


@dataclass(frozen=True)
class _Speed:
    """Of this machine: multiplications and bytes a second."""

    products: float
    bytes: float

    @classmethod
    def of_this_machine(cls) -> _Speed:
        a, b = torch.randn(512, 512), torch.randn(512, 512)
        block = torch.randn(2**22)
        products = 512**3 / _best(lambda: a @ b)
        return cls(products, block.numel() * 4 / _best(lambda: block.sum()))

    def seconds(self, products: float, bytes: float) -> float:
        return products / self.products + bytes / self.bytes


_NOTES = {
    "full": "the softmax itself; `grad_filter` makes its gradients cheaper",
    "tied": "full, on the embedding's weight",
    "adaptive": "nearly the perplexity of full where words follow Zipf's law; exact distribution",
    "hierarchical": "the cheapest step and word, for some perplexity; exact distribution",
    "sampled": "trains a full head; evaluation and decoding cost what full costs",
}


def _cost(kind: str, parameters: int, *seconds: float) -> HeadCost:
    step, word, best = seconds
    return HeadCost(kind, parameters, _TRAINING_BYTES * parameters, step, word, best, _NOTES[kind])


def _modelled(case: _Case, speed: _Speed) -> list[HeadCost]:
    n, d = case.tokens, case.width
    every = case.vocab * d
    word = speed.seconds(0, 4 * every)
    # Finding the best word reads the rows' norms beside the rows.
    full = (speed.seconds(3 * n * every, 8 * every), word, 2 * word)
    head, tail = case.adaptive_sizes
    products = training_cost(
        case.cutoffs, case.vocab, d, shares=case.shares, div_value=_DIV_VALUE, tokens=n
    )
    rare = float(case.shares[case.cutoffs[0] :].sum()) if case.cutoffs else 0.0
    read = 4 * (head + rare * tail)
    adaptive = (
        speed.seconds(3 * products, 8 * (head + tail)),
        speed.seconds(0, read),
        2 * speed.seconds(0, read),
    )
    path = case.path * d
    # A best-first search opens several paths before it can stop.
    tree = (
        speed.seconds(3 * n * path, 48 * n * path + 8 * every),
        speed.seconds(0, 4 * path),
        speed.seconds(0, 32 * path),
    )
    sampled = (speed.seconds(3 * n * (case.samples + 1) * d, 8 * every), word, 2 * word)
    sizes = {
        "full": (every, full),
        "tied": (0, full),
        "adaptive": (head + tail, adaptive),
        "hierarchical": ((case.vocab - 1) * (d + 1), tree),
        "sampled": (every, sampled),
    }
    return [
        _cost(kind, size, step + _STEP, one + _QUESTION, best + _QUESTION)
        for kind, (size, (step, one, best)) in sizes.items()
    ]


def _measured(case: _Case, speed: _Speed) -> list[HeadCost]:
    del speed
    heads: dict[str, Any] = {
        "full": lambda: LMHead(case.width, case.vocab),
        "adaptive": lambda: AdaptiveHead(
            case.width, case.vocab, cutoffs=case.cutoffs, div_value=_DIV_VALUE
        ),
        "hierarchical": lambda: HierarchicalHead(case.width, case.vocab, frequencies=case.shares),
        "sampled": lambda: LMHead(case.width, case.vocab),
    }
    hidden = torch.randn(case.tokens, case.width)
    targets = case.shares.multinomial(case.tokens, replacement=True)
    made = []
    for kind, make in heads.items():
        head = make()
        parameters = sum(p.numel() for p in head.parameters())
        made.append(_cost(kind, parameters, *_timed(case, kind, head, hidden, targets)))
        if kind == "full":
            same = (made[0].step_seconds, made[0].log_prob_seconds, made[0].argmax_seconds)
            made.append(_cost("tied", 0, *same))
    return made


def _timed(
    case: _Case, kind: str, head: Any, hidden: Tensor, targets: Tensor
) -> tuple[float, float, float]:
    loss: Any = None
    if kind == "sampled":
        loss = SampledLoss(head, num_samples=case.samples, seed=0)

    def step() -> None:
        leaf = hidden.detach().requires_grad_()
        head.zero_grad()
        made = F.cross_entropy(head(leaf), targets) if loss is None else loss(leaf, targets)
        made.backward()

    with torch.no_grad():
        word = _best(lambda: head(hidden[:1]).ask(log_prob=targets[:1]))
        best = _best(lambda: head(hidden[:1]).argmax(-1))
    return _best(step, rounds=2), word, best


def _choose(
    case: _Case, heads: tuple[HeadCost, ...], layers: int | None, speed: _Speed
) -> tuple[str, list[str]]:
    by_kind = {h.kind: h for h in heads}
    full, adaptive = by_kind["full"], by_kind["adaptive"]
    tree = by_kind["hierarchical"]
    plain, reasons = "full", []
    if layers is not None:
        body = speed.seconds(3 * case.tokens * 12 * layers * case.width**2, 0)
        share = full.step_seconds / (full.step_seconds + body)
        if advise_tying(case.vocab, case.width, layers).tie:
            plain = "tied"
        reasons.append(f"a full head would take {share:.0%} of a training step's time")
        if share < _SMALL_SHARE:
            return plain, [*reasons, "the exact softmax is affordable: nothing to give up for it"]
    gain = full.step_seconds / adaptive.step_seconds
    if gain < _WORTH:
        reasons.append(
            f"an adaptive head would be {gain:.1f} times as fast: too little for a second softmax"
        )
        return plain, reasons
    short = case.cutoffs[0] if case.cutoffs else case.vocab
    covered = float(case.shares[:short].sum())
    reasons.append(
        f"adaptive: {gain:.1f} times as fast as full, with {short:,} words, {covered:.0%} of all "
        "tokens, in full width"
    )
    further = adaptive.step_seconds / tree.step_seconds
    if further > 1:
        reasons.append(
            f"hierarchical is {further:.1f} times as fast again, but expect a perplexity that is "
            "some 10 % worse: take it where the log-probability of one word is all that is asked"
        )
    reasons.append("sampled trains fast, but every evaluation and every token costs a full softmax")
    return "adaptive", reasons


def _best(call: Callable[[], object], rounds: int = 5) -> float:
    """The least time of a few calls, after a first one."""
    call()
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return max(min(taken), 1e-9)


def _time(seconds: float) -> str:
    exponent = 0 if seconds >= 1 else 3 if seconds >= 1e-3 else 6
    unit = {0: "s", 3: "ms", 6: "µs"}[exponent]
    digits = max(0, 2 - int(math.log10(max(seconds * 10**exponent, 1))))
    return f"{seconds * 10**exponent:,.{digits}f} {unit}"
