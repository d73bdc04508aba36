"""Certified decisions on adversarial and real heads, against float64 over all tokens.

    PYTHONPATH=tests python -m scripts.reliability.certified --decisions 1000000 [--write]

A decision is one argmax, one top-k or one sample of one hidden state. For every sample two
intervals (its log-probability before and after truncation) are checked, and for some heads the
bounds of all logits. Heads of 8 bits and "4+4", every instruction set of this machine.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import sys
import time
from collections import Counter
from typing import Any

import shared_data
import torch
from safetensors.torch import load_file
from screen import heads
from torch import Tensor

from lmhead import LMHead, Sampler
from lmhead.screen import ScreenedHead
from lmhead.sweep import kernels
from scripts.reliability.record import instruction_sets, keep

K = 5
ROWS, SAMPLES = 1536, 512  # of a head: a sample takes some twenty times as long as an argmax
CHAINS: list[dict[str, Any]] = [
    {},
    {"top_p": 0.9},
    {"top_k": 5, "temperature": 0.8},
    {"min_p": 0.05, "temperature": 1.3},
]


def exact_logits(head: LMHead, hidden: Tensor) -> Tensor:
    """Return the float64 logits (N, V), each sum in the order of the definition."""
    source = head.scores(hidden).source
    token_ids = torch.arange(source.vocab)
    rows = torch.arange(len(hidden)).repeat_interleave(source.vocab)
    return source.pairs(rows, token_ids.repeat(len(hidden))).view(len(hidden), -1)


def decide(
    screened: ScreenedHead,
    hidden: Tensor,
    truth: Tensor,
    chain: dict[str, Any],
    seed: int,
    counts: Counter[str],
) -> None:
    """Count decisions and those that differ: argmax and top-k of all rows, samples of some."""
    k = min(K, truth.shape[1])
    order = truth.sort(dim=1, descending=True, stable=True).indices[:, :k]
    n = len(hidden)
    counts["argmax"] += n
    counts["wrong"] += int((screened.argmax(hidden).token != order[:, 0]).sum())
    counts["top-k"] += n
    counts["wrong"] += int((screened.topk(hidden, k).indices != order).any(1).sum())
    n = min(n, SAMPLES)
    hidden, truth = hidden[:n], truth[:n]
    sampler = Sampler(seed=list(range(seed, seed + n)), **chain)
    answer, want = screened.sample(hidden, sampler), sampler(screened.head(hidden))
    counts["samples"] += n
    counts["wrong"] += int((answer.token != want.token).sum())
    # A draw follows float32 logits, the intervals hold the log-probabilities of float64 ones.
    # Where roundings of float32 decide the token or the cut, float64 has another distribution.
    wide = sampler(truth)
    same = (wide.token == answer.token) & ((wide.log_prob - want.log_prob).abs() < 0.01)
    counts["float64 logits draw or cut otherwise"] += int((~same).sum())
    for interval, true in (
        (answer.log_prob, wide.log_prob),
        (answer.raw_log_prob, wide.raw_log_prob),
    ):
        slack = 1e-9 * (1 + true.abs())
        inside = (interval.low <= true + slack) & (true <= interval.high + slack)
        counts["intervals"] += int(same.sum())
        counts["missed"] += int((~inside & same).sum())
    if seed % 5 == 0 and bool((hidden.double().norm(dim=1) * screened.copy.n_max < 1e29).all()):
        lower, upper = screened.candidates(hidden).bounds()
        inside = (lower.double() <= truth) & (truth <= upper.double())
        counts["intervals"] += inside.numel()
        counts["missed"] += int((~inside).sum())


def adversarial(seed: int, rows: int) -> tuple[LMHead, Tensor]:
    """Return a head that is hard to screen, and hidden states."""
    random = torch.Generator().manual_seed(seed)
    names = sorted(heads.WEIGHTS)
    make = heads.WEIGHTS[names[seed % len(names)]]
    vocab, size = [(257, 64), (300, 65), (700, 33), (256, 130)][seed // len(names) % 4]
    weight = make(vocab, size, random)
    hidden = heads.states(rows, weight, random)
    kind = ("none", "small", "dominating", "ties", "masks")[seed % 5]
    return heads.head_of(weight, heads.bias_of(kind, vocab, random)), hidden


def real_states() -> tuple[LMHead, Tensor] | None:
    """Return SmolLM2's head and hidden states on WikiText-2, if the files are there."""
    files = (shared_data.SMOLLM2_HEAD, shared_data.SMOLLM2_STATES)
    if not all(file.is_file() for file in files):
        return None
    weight, hidden = load_file(files[0])["weight"], load_file(files[1])["hidden"]
    return heads.head_of(weight.float()), hidden.float()


def main() -> int:
    """Return 1 if a decision was wrong or an interval missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--decisions", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first head")
    parser.add_argument("--seconds", type=float, help="stop after this time")
    parser.add_argument("--real", type=int, default=512, help="hidden states of the real head")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    begin, counts = time.monotonic(), Counter[str]()
    sets = instruction_sets()
    assert kernels.core is not None
    real = real_states() if options.real else None
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))  # summarise what there is
    if real is not None:
        copies = [ScreenedHead(real[0], bits=bits) for bits in ("4+4", 8)]
        for chunk in real[1][: options.real].split(16):
            truth = exact_logits(real[0], chunk)
            for name, screened in itertools.product(sets, copies):
                kernels.core.use(name)
                decide(screened, chunk, truth, {"top_p": 0.9}, 1, counts)
                counts["on real states"] += 3 * len(chunk)
    for seed in itertools.count(options.seed):
        done = counts["argmax"] + counts["top-k"] + counts["samples"]
        late = options.seconds is not None and time.monotonic() - begin > options.seconds
        late = late or bool(stopped)
        if done >= options.decisions or late:
            break
        kernels.core.use(sets[seed % len(sets)])
        bits: Any = (8, "4+4")[seed // len(sets) % 2]
        head, hidden = adversarial(seed, ROWS)
        chain = CHAINS[seed // 2 % len(CHAINS)]
        truth = exact_logits(head, hidden)
        decide(ScreenedHead(head, bits=bits), hidden, truth, chain, seed, counts)
        counts["heads"] += 1
    summary = {
        "decisions": done,
        "instruction_sets": sets,
        **dict(counts),
        "wrong": counts["wrong"],
    }
    keep("certified", {**summary, "missed": counts["missed"]}, write=options.write)
    return int(counts["wrong"] + counts["missed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
