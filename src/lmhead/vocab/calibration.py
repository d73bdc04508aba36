"""Measure the rates of the inner loops of heads on this machine.

In:  nothing; uses torch's number of threads.
Out: `Rates`, seconds per unit of work, measured once per process and number of threads.

Every rate is the difference of two calls of real heads, or a call so small that it measures the
overhead of a call. The heads are small: all measurements take well under a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmhead.head import LMHead
from lmhead.vocab.adaptive_head import AdaptiveHead
from lmhead.vocab.frequencies import zipf
from lmhead.vocab.hierarchical_head import HierarchicalHead
from lmhead.vocab.sampled_loss import SampledLoss

# Rows, tokens and the two widths of a measurement; tokens of a tree; entries of a large weight.
_ROWS, _TOKENS, _NARROW, _WIDE = 256, 1024, 16, 256
_TREE = 2048
_ENTRIES = 2**23
_FEW = 8  # rows or tokens: measures the overhead of a call


@dataclass(frozen=True)
class Loop:
    """Seconds of a loop over pairs of a row and a token, or a decision."""

    call: float  # overhead of a call
    pair: float  # per pair, beside its multiplications
    product: float  # per multiplication

    def seconds(self, pairs: float, width: float) -> float:
        """Return the time of a number of pairs of `width` multiplications each."""
        return self.call + pairs * (self.pair + self.product * width)


@dataclass(frozen=True)
class Rates:
    """Seconds of this machine."""

    sweep: Loop  # loss and gradients of a softmax over tokens, a sweep
    clusters: float  # overhead of a cluster beside its sweep
    paths: Loop  # loss and gradients of decisions on paths of a tree
    samples: Loop  # loss and gradients against sampled tokens
    gradient: float  # per entry of a weight whose gradient is dense
    question: dict[str, float]  # overhead of one token's log-probability, for each kind of head
    search: dict[str, float]  # overhead of an argmax; for hierarchical, per decision on a path
    read: float  # per entry of a weight, for one token's log-probability
    compare: float  # per entry of a weight, for the best token
    product: float  # per multiplication of plain products, as in a Transformer block


def rates() -> Rates:
    """Measure the rates of this machine, with torch's number of threads."""
    return _rates(torch.get_num_threads())


@cache
def _rates(threads: int) -> Rates:
    del threads  # key of the cache
    state = torch.random.get_rng_state()
    try:
        return _measure()
    finally:
        torch.random.set_rng_state(state)


def _measure() -> Rates:
    small = {
        "full": LMHead(_NARROW, _FEW),
        "adaptive": AdaptiveHead(_NARROW, 3 * _FEW, cutoffs=[_FEW]),
        "hierarchical": HierarchicalHead(_NARROW, _FEW, tree="balanced"),
    }
    sweep = _loop(lambda d, v: LMHead(d, v), _TOKENS)
    cluster = max(0.0, best_of(step(small["adaptive"], _FEW)) - 2 * sweep.call)
    trees = {d: HierarchicalHead(d, _TREE, frequencies=zipf(_TREE)) for d in (_NARROW, _WIDE)}
    paths = _loop(lambda d, _: trees[d], trees[_NARROW].expected_path)
    samples = _loop(
        lambda d, v: SampledLoss(LMHead(d, 4 * _TOKENS), num_samples=v, seed=0), _TOKENS
    )
    # A weight that does not fit into a cache.
    large = LMHead(_WIDE, _ENTRIES // _WIDE, device="meta")
    large.weight = nn.Parameter(torch.rand(_ENTRIES // _WIDE, _WIDE))
    question = {kind: best_of(log_prob(head)) for kind, head in small.items()}
    search = {kind: best_of(argmax(head)) for kind, head in small.items()}
    tree = trees[_WIDE]
    search["hierarchical"] = best_of(argmax(tree)) / tree.expected_path

    def per_entry(call: Callable[[], object], fixed: float) -> float:
        return max(0.0, best_of(call) - fixed) / _ENTRIES

    a = torch.randn(_ROWS, _WIDE)
    b = torch.randn(_WIDE, 4 * _WIDE)
    return Rates(
        sweep=sweep,
        clusters=cluster,
        paths=paths,
        samples=samples,
        gradient=per_entry(step(large, 1), sweep.call),
        question=question,
        search=search,
        read=per_entry(log_prob(large), question["full"]),
        compare=per_entry(argmax(large), search["full"]),
        product=best_of(lambda: a @ b) / (_ROWS * 4 * _WIDE**2),
    )


def _loop(make: Callable[[int, int], nn.Module], pairs: float) -> Loop:
    """Fit three measured steps: tiny, narrow, wide; `pairs` is the number per row."""
    call = best_of(step(make(_NARROW, _FEW), 1))
    narrow = best_of(step(make(_NARROW, _TOKENS), _ROWS)) - call
    wide = best_of(step(make(_WIDE, _TOKENS), _ROWS)) - call
    n = _ROWS * pairs
    product = max(0.0, wide - narrow) / (n * (_WIDE - _NARROW))
    return Loop(call, max(0.0, narrow / n - product * _NARROW), product)


def step(module: nn.Module, tokens: int, targets: Tensor | None = None) -> Callable[[], None]:
    """Return a function that computes a loss and gradients of random states."""
    head: Any = module.head if isinstance(module, SampledLoss) else module
    hidden = torch.randn(tokens, head.hidden_size)
    if targets is None:
        targets = zipf(head.vocab_size).multinomial(tokens, replacement=True)

    def call() -> None:
        leaf = hidden.detach().requires_grad_()
        module.zero_grad()
        if isinstance(module, SampledLoss):
            loss = module(leaf, targets)
        else:
            loss = F.cross_entropy(module(leaf), targets)
        torch.autograd.backward(loss)

    return call


def log_prob(head: Any) -> Callable[[], object]:
    """Return a function that computes the log-probability of one token."""
    hidden, token = torch.randn(1, head.hidden_size), torch.zeros(1, dtype=torch.int64)
    return torch.no_grad()(lambda: head(hidden).ask(log_prob=token))


def argmax(head: Any) -> Callable[[], object]:
    """Return a function that computes the best token of one state."""
    hidden = torch.randn(1, head.hidden_size)
    return torch.no_grad()(lambda: head(hidden).argmax(-1))


def best_of(call: Callable[[], object], rounds: int = 4) -> float:
    """Return the shortest time of a few calls, after one warm-up call."""
    call()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return max(min(seconds), 1e-9)
