"""Random losses, queries, divergences and lazy programs, against plain torch in float64.

    python -m scripts.reliability.differential --cases 100000 [--write]

The tolerance is twice the error of plain torch in the same dtype on the same input, plus what a
change of the inputs by one rounding changes, times 16, plus a few roundings of the result and of
the logits; for float64 those of the reference, which is float64 itself. Argmax, top-k and rank
must be those of float64.
`--seed N --cases 1` repeats a case.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import lmhead
from lmhead.sweep import kernels
from scripts.reliability.record import instruction_sets, keep

Results = dict[str, Tensor]
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

    def logits(self, hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the definition, in a dtype: a bias of -inf masks, whatever the map."""
        x = hidden.to(dtype) @ weight.to(dtype).T
        if self.bias is not None:
            x = x + torch.where(self.bias == -torch.inf, 0.0, self.bias).to(dtype)
        z = x * self.scale
        if self.softcap is not None:
            z = self.softcap * torch.tanh(z / self.softcap)
        return z if self.bias is None else z.masked_fill(self.bias == -torch.inf, -torch.inf)

    @property
    def head(self) -> dict[str, Any]:
        """The options of the head."""
        return {"bias": self.bias, "softcap": self.softcap, "scale": self.scale}


def differentiate(values: Results, leaves: Results) -> Results:
    """Return the values and the gradients of their sum."""
    total = sum(v.double().sum() for v in values.values() if v.requires_grad)
    grads: Results = {}
    if isinstance(total, Tensor):
        made = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        grads = {
            f"gradient of {name}": g for name, g in zip(leaves, made, strict=True) if g is not None
        }
    return {name: v.detach() for name, v in values.items()} | grads


def leaves_of(p: Problem, dtype: torch.dtype) -> Results:
    """Return hidden states and weight as leaves, changed by a relative `p.nudge`."""
    made = {"hidden": p.hidden.to(dtype), "weight": p.weight.to(dtype)}
    if p.nudge:
        signs = torch.Generator().manual_seed(1)
        for name, t in made.items():
            sign = torch.randint(0, 2, t.shape, generator=signs) * 2 - 1
            made[name] = t * (1 + p.nudge * sign)
    return {name: t.detach().requires_grad_() for name, t in made.items()}


def loss_case(p: Problem) -> tuple[Results, Callable[[torch.dtype], Results]]:
    """Compute a cross-entropy with random options, and its gradients."""
    draw = p.draw
    smoothing = draw.choice([0.0, 0.0, 0.1])
    if p.bias is not None and bool((p.bias == -torch.inf).any()):
        smoothing = 0.0  # where torch gives inf
    reduction = draw.choice(["mean", "sum", "none"])
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

    def plain(dtype: torch.dtype) -> Results:
        given = leaves_of(p, dtype)
        z = p.logits(given["hidden"], given["weight"], dtype)
        z = z.float() if dtype == torch.bfloat16 else z
        loss = F.cross_entropy(
            z,
            targets,
            weight=None if weight is None else weight.to(z.dtype),
            reduction=reduction,
            label_smoothing=smoothing,
        )
        return differentiate({"loss": loss}, given)

    return differentiate({"loss": ours}, leaves), plain


def query_case(p: Problem) -> tuple[Results, Callable[[torch.dtype], Results]]:
    """Log-probability, entropy and log-sum-exp with gradients; argmax, top-k and rank."""
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

    def plain(dtype: torch.dtype) -> Results:
        given = leaves_of(p, dtype)
        z = p.logits(given["hidden"], given["weight"], dtype)
        z = z.float() if dtype == torch.bfloat16 else z
        log_p = z.log_softmax(-1)
        safe = log_p.masked_fill(log_p == -torch.inf, 0.0)
        values = {
            "log_prob": log_p.gather(-1, p.targets[:, None])[:, 0],
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


def divergence_case(p: Problem) -> tuple[Results, Callable[[torch.dtype], Results]]:
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

    def plain(dtype: torch.dtype) -> Results:
        given = leaves_of(p, dtype)
        z = p.logits(given["hidden"], given["weight"], dtype)
        z = z.float() if dtype == torch.bfloat16 else z
        log_p = z.log_softmax(-1)
        log_q = (other.to(dtype) @ q_weight.to(dtype).T).to(z.dtype).log_softmax(-1)
        safe = log_p.masked_fill(log_p == -torch.inf, 0.0)
        terms = (safe.exp() * (safe - log_q)).masked_fill(log_p == -torch.inf, 0.0)
        return differentiate({"kl": terms.sum(-1)}, given)

    return differentiate({"kl": found.kl}, leaves), plain


def _dense_divergence(
    p: Problem, kind: str, other: Tensor, q_weight: Tensor, dtype: torch.dtype
) -> Results:
    """Compute the divergence by its definition."""
    given = leaves_of(p, dtype)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    log_p = (given["hidden"] @ given["weight"].T).to(compute).log_softmax(-1)
    log_q = (other.to(dtype) @ q_weight.to(dtype).T).to(compute).log_softmax(-1)
    log_m = torch.logaddexp(log_p, log_q) - 0.6931471805599453

    def kl(a: Tensor, b: Tensor) -> Tensor:
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


def lazy_case(p: Problem) -> tuple[Results, Callable[[torch.dtype], Results]]:
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

    def plain(dtype: torch.dtype) -> Results:
        given = leaves_of(p, dtype)
        z = p.logits(given["hidden"], given["weight"], dtype)
        return differentiate({"value": program(z.float() if dtype == torch.bfloat16 else z)}, given)

    return differentiate({"value": value}, leaves), plain


CASES = {"loss": loss_case, "query": query_case, "divergence": divergence_case, "lazy": lazy_case}


# Unit roundoff of the arithmetic, and of a gradient as it is stored.
ROUNDING = {torch.float64: 2**-53, torch.float32: 2**-24, torch.bfloat16: 2**-24}
STORED = {torch.float64: 2**-53, torch.float32: 2**-24, torch.bfloat16: 2**-9}


def beyond(p: Problem, ours: Results, plain: Callable[[torch.dtype], Results]) -> str | None:
    """Return what lies beyond the tolerance, or None."""
    truth, torchs, u = plain(torch.float64), plain(p.dtype), ROUNDING[p.dtype]
    p.nudge = u
    nudged = plain(torch.float64)
    p.nudge = 0.0
    logits = p.logits(p.hidden, p.weight, torch.float64)
    largest = float(logits.nan_to_num(0.0, neginf=0.0).abs().max())
    for name, want in truth.items():
        got = ours.get(name)
        if got is None:  # of a constant: logsumexp(log_softmax(z)), for example
            got = torch.zeros_like(want)
        if not want.is_floating_point():
            if not torch.equal(got, want):
                return f"{name}: {got.tolist()} for {want.tolist()}"
            continue
        got, want, other, moved = (t.double() for t in (got, want, torchs[name], nudged[name]))
        same = (got == want) | (got.isnan() & want.isnan())
        size = float(want.nan_to_num(0.0, posinf=0.0, neginf=0.0).abs().max())
        stored = STORED[p.dtype] if name.startswith("gradient") else u
        allowed = 2 * (other - want).abs().nan_to_num(0.0).max()
        allowed += 16 * (moved - want).abs().nan_to_num(0.0).max()
        allowed += 16 * stored * size + 64 * u * (1.0 + largest)
        if p.dtype == torch.float64:  # exp(z - logsumexp) of the reference is rounded, too
            allowed += 4 * u * largest * size
        if not bool((same | ((got - want).abs() <= allowed)).all()):
            worst = float((got - want).abs().nan_to_num(torch.inf).max())
            return f"{name}: off by {worst:.3g}, allowed {float(allowed):.3g}"
    return None


def main() -> int:
    """Return 1 if a case lies beyond the tolerance."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--seconds", type=float, help="stop after this time")
    parser.add_argument("--kinds", default=",".join(CASES), help="skip cases of other kinds")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
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
