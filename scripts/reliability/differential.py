"""Random losses, queries, divergences and lazy programs, against a more precise reference.

    python -m scripts.reliability.differential --cases 100000 [--write]

The reference of float32 and bfloat16 is plain torch in float64, that of float64 is in long double.
The tolerance is twice the error of plain torch in the same dtype on the same input, plus what a
change of the inputs by one rounding changes, times 16, plus a few roundings of the result and of
the logits. Argmax, top-k and rank must be those of float64.
`--seed N --cases 1` repeats a case.
"""

from __future__ import annotations

import argparse
import math
import random
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import lmhead
from lmhead.sweep import kernels
from scripts.reliability import long_double
from scripts.reliability.long_double import LongDouble
from scripts.reliability.record import instruction_sets, keep

Results = dict[str, Any]  # tensors, or LongDouble
Dtype = torch.dtype | type[LongDouble]
Draw = random.Random


class Problem:
    """A head and hidden states of random sizes, drawn from a seed."""

    def __init__(self, draw: Draw) -> None:
        made = torch.Generator().manual_seed(draw.getrandbits(32))
        self.rows = draw.choice([1, 2, 3, 9, 17])
        self.vocab = draw.choice([1, 2, 5, 31, 33, 64, 200, 515])
        size = draw.choice([1, 3, 8, 17, 40])
        self.dtype = draw.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16])
        peak = draw.choice([0.3, 1.0, 5.0])
        self.hidden = (torch.randn(self.rows, size, generator=made) * peak).to(self.dtype)
        self.weight = torch.randn(self.vocab, size, generator=made).to(self.dtype)
        self.bias = None
        if draw.random() < 0.5:
            self.bias = torch.randn(self.vocab, generator=made).to(self.dtype)
            if draw.random() < 0.4:
                masked = torch.rand(self.vocab, generator=made) < 0.3
                masked[draw.randrange(self.vocab)] = False
                self.bias[masked] = -torch.inf
        self.softcap = draw.choice([None, None, 5.0, 30.0])
        self.scale = draw.choice([1.0, 1.0, 0.3, -0.5])
        self.max_bytes = draw.choice([None, None, 1, 4096])
        if self.max_bytes is not None and self.vocab > 64 and draw.random() < 0.95:
            self.max_bytes = 24 * self.vocab  # tiles of one token take 50 times as long
        self.targets = torch.randint(self.vocab, (self.rows,), generator=made)
        if self.bias is not None:  # a masked target costs inf in both
            allowed = (self.bias > -torch.inf).nonzero()[:, 0]
            self.targets = allowed[self.targets % len(allowed)]
        self.draw, self.made, self.nudge = draw, made, 0.0

    def logits(self, hidden: Any, weight: Any, dtype: Dtype) -> Any:
        """Return the definition, in a dtype: a bias of -inf masks, whatever the map."""
        x = cast(hidden, dtype) @ cast(weight, dtype).T
        if self.bias is not None:
            x = x + cast(torch.where(self.bias == -torch.inf, 0.0, self.bias), dtype)
        z = x * self.scale
        if self.softcap is not None:
            z = (z / self.softcap).tanh() * self.softcap
        return z if self.bias is None else z.masked_fill(self.bias == -torch.inf, -torch.inf)

    @property
    def head(self) -> dict[str, Any]:
        """The options of the head."""
        return {"bias": self.bias, "softcap": self.softcap, "scale": self.scale}


def cast(x: Any, dtype: Dtype) -> Any:
    """Return a tensor in a dtype; a `LongDouble` as it is."""
    if isinstance(dtype, torch.dtype):
        return x.to(dtype)
    return x if isinstance(x, LongDouble) else LongDouble(x)


def differentiate(values: Results, leaves: Results) -> Results:
    """Return the values and the gradients of their sum."""
    if all(isinstance(leaf, LongDouble) for leaf in leaves.values()):
        found = long_double.gradients(list(values.values()), list(leaves.values()))
        return values | {f"gradient of {name}": g for name, g in zip(leaves, found, strict=True)}
    total = sum(v.double().sum() for v in values.values() if v.requires_grad)
    grads: Results = {}
    if isinstance(total, Tensor):
        made = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        grads = {
            f"gradient of {name}": g for name, g in zip(leaves, made, strict=True) if g is not None
        }
    return {name: v.detach() for name, v in values.items()} | grads


def leaves_of(p: Problem, dtype: Dtype) -> Results:
    """Return hidden states and weight as leaves, changed by a relative `p.nudge`."""
    made = {"hidden": cast(p.hidden, dtype), "weight": cast(p.weight, dtype)}
    if p.nudge:
        signs = torch.Generator().manual_seed(1)
        for name, given in (("hidden", p.hidden), ("weight", p.weight)):
            sign = torch.randint(0, 2, given.shape, generator=signs) * 2 - 1
            made[name] = made[name] * (cast(sign, dtype) * p.nudge + 1)
    if not isinstance(dtype, torch.dtype):
        return {name: LongDouble(t.value) for name, t in made.items()}
    return {name: t.detach().requires_grad_() for name, t in made.items()}


REDUCTIONS: list[Literal["mean", "sum", "none"]] = ["mean", "sum", "none"]


def loss_case(p: Problem) -> tuple[Results, Callable[[Dtype], Results]]:
    """Compute a cross-entropy with random options, and its gradients."""
    draw = p.draw
    smoothing = draw.choice([0.0, 0.0, 0.1])
    if p.bias is not None and bool((p.bias == -torch.inf).any()):
        smoothing = 0.0  # where torch gives inf
    reduction = draw.choice(REDUCTIONS)
    weight = torch.rand(p.vocab, generator=p.made) + 0.5 if draw.random() < 0.3 else None
    targets = p.targets.clone()
    if p.rows > 2 and draw.random() < 0.5:
        targets[draw.randrange(p.rows)] = -100
    leaves = leaves_of(p, p.dtype)
    ours = lmhead.linear_cross_entropy(
        leaves["hidden"],
        leaves["weight"],
        targets,
        class_weight=weight,
        reduction=reduction,
        label_smoothing=smoothing,
        max_bytes=p.max_bytes,
        **p.head,
    )

    def plain(dtype: Dtype) -> Results:
        given = leaves_of(p, dtype)
        z = p.logits(given["hidden"], given["weight"], dtype)
        z = z.float() if dtype == torch.bfloat16 else z
        if isinstance(z, LongDouble):
            loss: Any = _cross_entropy(z, targets, weight, reduction, smoothing)
        else:
            loss = F.cross_entropy(
                z,
                targets,
                weight=None if weight is None else weight.to(z.dtype),
                reduction=reduction,
                label_smoothing=smoothing,
            )
        return differentiate({"loss": loss}, given)

    return differentiate({"loss": ours}, leaves), plain


def _cross_entropy(
    z: LongDouble, targets: Tensor, weight: Tensor | None, reduction: str, smoothing: float
) -> LongDouble:
    """Compute torch's cross-entropy by its definition."""
    log_p, vocab = z.log_softmax(-1), z.value.shape[1]
    kept = targets != -100
    ids = torch.where(kept, targets, targets[kept][0])  # of the others any finite entry will do
    of_class = (torch.ones(vocab) if weight is None else weight).double()
    of_row = of_class[ids] * kept
    loss = log_p.gather(-1, ids[:, None]).squeeze(-1) * of_row * (smoothing - 1)
    if smoothing:
        loss = loss - (log_p * of_class).sum(-1) * kept.double() * (smoothing / vocab)
    if reduction == "none":
        return loss
    return loss.sum(-1) / (of_row.sum() if reduction == "mean" else 1)


def query_case(p: Problem) -> tuple[Results, Callable[[Dtype], Results]]:
    """Compute log-probability, entropy and log-sum-exp with gradients; argmax, top-k and rank."""
    k = p.draw.randint(
        1, min(4, int((p.logits(p.hidden, p.weight, torch.float64)[0] > -torch.inf).sum()))
    )
    leaves = leaves_of(p, p.dtype)
    found = lmhead.query(
        leaves["hidden"],
        leaves["weight"],
        log_prob=p.targets,
        rank=p.targets,
        entropy=True,
        logsumexp=True,
        argmax=True,
        top_k=k,
        max_bytes=p.max_bytes,
        **p.head,
    )
    ours = {"log_prob": found.log_prob, "entropy": found.entropy, "logsumexp": found.logsumexp}
    decided = {"argmax": found.argmax, "top-k": found.top_k.indices, "rank": found.rank}

    def plain(dtype: Dtype) -> Results:
        given = leaves_of(p, dtype)
        z = p.logits(given["hidden"], given["weight"], dtype)
        z = z.float() if dtype == torch.bfloat16 else z
        log_p = z.log_softmax(-1)
        safe = log_p.masked_fill(log_p == -torch.inf, 0.0)
        values = {
            "log_prob": log_p.gather(-1, p.targets[:, None]).squeeze(-1),
            "entropy": -(safe.exp() * safe).masked_fill(log_p == -torch.inf, 0.0).sum(-1),
            "logsumexp": z.logsumexp(-1),
        }
        made = differentiate(values, given)
        if dtype == torch.float64:
            exact = z.detach()
            order = exact.sort(dim=1, descending=True, stable=True).indices
            made |= {"argmax": order[:, 0], "top-k": order[:, :k]}
            made["rank"] = (order == p.targets[:, None]).int().argmax(1)
        return made

    return differentiate(ours, leaves) | decided, plain


def divergence_case(p: Problem) -> tuple[Results, Callable[[Dtype], Results]]:
    """Compute a divergence of two heads, with gradients of the first."""
    other = torch.randn(p.rows, 6, generator=p.made).to(p.dtype)
    q_weight = torch.randn(p.vocab, 6, generator=p.made).to(p.dtype)
    kind = p.draw.choice(["kl_to", "kl", "reverse_kl", "jsd", "tvd"])
    if kind != "kl_to":
        p.bias, p.softcap, p.scale = None, None, 1.0
    leaves = leaves_of(p, p.dtype)
    if kind != "kl_to":
        pair = (leaves["hidden"], leaves["weight"])
        made = lmhead.divergence(pair, (other, q_weight), kind=kind)
        return differentiate({kind: made}, leaves), lambda dtype: _dense_divergence(
            p, kind, other, q_weight, dtype
        )
    found = lmhead.query(
        leaves["hidden"], leaves["weight"], kl_to=(other, q_weight), max_bytes=p.max_bytes, **p.head
    )

    def plain(dtype: Dtype) -> Results:
        given = leaves_of(p, dtype)
        z = p.logits(given["hidden"], given["weight"], dtype)
        z = z.float() if dtype == torch.bfloat16 else z
        log_p = z.log_softmax(-1)
        log_q = _logits_of(other, q_weight, dtype).log_softmax(-1)
        safe = log_p.masked_fill(log_p == -torch.inf, 0.0)
        terms = (safe.exp() * (safe - log_q)).masked_fill(log_p == -torch.inf, 0.0)
        return differentiate({"kl": terms.sum(-1)}, given)

    return differentiate({"kl": found.kl}, leaves), plain


def _logits_of(hidden: Any, weight: Any, dtype: Dtype) -> Any:
    """Return plain logits; bfloat16 is summed in it, and float32 from there on."""
    z = cast(hidden, dtype) @ cast(weight, dtype).T
    return z.float() if dtype == torch.bfloat16 else z


def _dense_divergence(
    p: Problem, kind: str, other: Tensor, q_weight: Tensor, dtype: Dtype
) -> Results:
    """Compute the divergence by its definition."""
    given = leaves_of(p, dtype)
    log_p = _logits_of(given["hidden"], given["weight"], dtype).log_softmax(-1)
    log_q = _logits_of(other, q_weight, dtype).log_softmax(-1)
    log_m = log_p.logaddexp(log_q) - math.log(2)

    def kl(a: Any, b: Any) -> Any:
        return (a.exp() * (a - b)).sum(-1)

    value = {
        "kl": lambda: kl(log_p, log_q),
        "reverse_kl": lambda: kl(log_q, log_p),
        "jsd": lambda: 0.5 * (kl(log_p, log_m) + kl(log_q, log_m)),
        "tvd": lambda: (log_p.exp() - log_q.exp()).abs().sum(-1) / 2,
    }[kind]()
    return differentiate({kind: value}, given)


STEPS: list[Callable[[Tensor], Tensor]] = [
    lambda z: z * 0.7,
    lambda z: z / 1.3 + 0.2,
    lambda z: -z.abs().neg().exp() * 2,
    lambda z: (z / 4).tanh() * 4,
    lambda z: z.clamp(-3.0, 2.5),
    lambda z: z.log_softmax(-1),
    lambda z: z - z.logsumexp(-1, keepdim=True),
    lambda z: torch.where(z > 0, z, 0.1 * z),
    lambda z: z.sigmoid(),
]
ENDS: list[Callable[[Tensor], Tensor]] = [
    lambda z: z.logsumexp(-1),
    lambda z: z.sum(-1),
    lambda z: z.mean(-1),
    lambda z: z.amax(-1),
    lambda z: (z.softmax(-1) * z).sum(-1),
    lambda z: z.norm(dim=-1),
]


def lazy_case(p: Problem) -> tuple[Results, Callable[[Dtype], Results]]:
    """Run recorded operations on lazy logits, then a reduction over the vocabulary."""
    p.bias, p.softcap, p.scale = None, None, 1.0
    steps = [p.draw.choice(STEPS) for _ in range(p.draw.randint(1, 3))]
    end = p.draw.choice(ENDS)

    def program(z: Tensor) -> Tensor:
        for step in steps:
            z = step(z)
        return end(z)

    head = lmhead.LMHead(p.weight.shape[1], p.vocab, dtype=p.dtype)
    head.max_bytes = p.max_bytes
    leaves = leaves_of(p, p.dtype)
    logits = torch.func.functional_call(head, {"weight": leaves["weight"]}, (leaves["hidden"],))
    value = program(logits.float() if p.dtype == torch.bfloat16 else logits)

    def plain(dtype: Dtype) -> Results:
        given = leaves_of(p, dtype)
        z = p.logits(given["hidden"], given["weight"], dtype)
        return differentiate({"value": program(z.float() if dtype == torch.bfloat16 else z)}, given)

    return differentiate({"value": value}, leaves), plain


CASES = {"loss": loss_case, "query": query_case, "divergence": divergence_case, "lazy": lazy_case}


# Unit roundoff of the arithmetic, and of a gradient as it is stored.
ROUNDING = {torch.float64: 2**-53, torch.float32: 2**-24, torch.bfloat16: 2**-24}
STORED = {torch.float64: 2**-53, torch.float32: 2**-24, torch.bfloat16: 2**-9}


def beyond(p: Problem, ours: Results, plain: Callable[[Dtype], Results]) -> str | None:
    """Return what lies beyond the tolerance, or None."""
    exact: Dtype = LongDouble if p.dtype == torch.float64 else torch.float64
    torchs, u = plain(p.dtype), ROUNDING[p.dtype]
    truth = plain(torch.float64) | plain(exact)  # decisions are those of float64
    p.nudge = u
    nudged = plain(exact)
    p.nudge = 0.0
    logits = p.logits(p.hidden, p.weight, torch.float64)
    largest = float(logits.nan_to_num(0.0, neginf=0.0).abs().max())
    for name, wanted in truth.items():
        given = ours.get(name)
        if isinstance(wanted, Tensor) and not wanted.is_floating_point():
            if given is None or not torch.equal(given, wanted):
                return f"{name}: {given} for {wanted}"
            continue
        want = long_double.array(wanted)
        if given is None:  # of a constant: logsumexp(log_softmax(z)), for example
            given = torch.zeros(want.shape)
        got, other, moved = (long_double.array(t) for t in (given, torchs[name], nudged[name]))
        with np.errstate(invalid="ignore"):  # inf - inf
            off, torch_off, change = np.abs(got - want), np.abs(other - want), np.abs(moved - want)
        same = (got == want) | (np.isnan(got) & np.isnan(want))
        stored = STORED[p.dtype] if name.startswith("gradient") else u
        allowed = 2 * _largest(torch_off) + 16 * _largest(change)
        allowed += 16 * stored * _largest(want) + 64 * u * (1.0 + largest)
        if got.shape != want.shape or not bool((same | (off <= allowed)).all()):
            worst = float(np.where(same, 0, np.where(np.isnan(off), np.inf, off)).max())
            return (
                f"{name}: off by {worst:.3g}, torch by {_largest(torch_off):.3g}, "
                f"allowed {allowed:.3g}"
            )
    return None


def _largest(values: long_double.Array) -> float:
    """Return the largest finite magnitude."""
    return float(np.abs(np.where(np.isfinite(values), values, 0)).max(initial=0))


def main() -> int:
    """Return 1 if a case lies beyond the tolerance."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--seconds", type=float, help="stop after this time")
    parser.add_argument("--kinds", default=",".join(CASES), help="skip cases of other kinds")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    if not long_double.available():
        raise SystemExit("long doubles of this machine are no more precise than float64")
    warnings.simplefilter("ignore")
    sets = instruction_sets()
    assert kernels.core is not None
    begin, found, failures = time.monotonic(), Counter[str](), []
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))  # summarise what there is
    for seed in range(given.seed, given.seed + given.cases):
        if stopped:
            break
        if given.seconds is not None and time.monotonic() - begin > given.seconds:
            break
        draw = random.Random(seed)
        kernels.core.use(draw.choice(sets))
        name = draw.choice(sorted(CASES))
        if name not in given.kinds.split(","):
            continue
        if sum(found.values()) % 5000 == 4999:
            print(f"{sum(found.values()) + 1} cases, to seed {seed}", file=sys.stderr, flush=True)
        p = Problem(draw)
        ours, plain = CASES[name](p)
        wrong = beyond(p, ours, plain)
        found[name] += 1
        if wrong is not None:
            failures.append(seed)
            print(f"seed {seed}, {name}: {wrong}", file=sys.stderr)
    summary = {
        "cases": sum(found.values()),
        "instruction_sets": sets,
        "by_kind": dict(sorted(found.items())),
        "beyond_tolerance": len(failures),
        "seeds": failures[:20],
    }
    keep("differential", summary, write=given.write)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
