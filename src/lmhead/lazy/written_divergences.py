"""Divergences written out by recorded operations, recognised where they are summed.

    Σ p (log p - log q)                 KL(p ‖ q)
    Σ p (log p - log m), m = β p + (1-β) q    one half of a JSD
    F.kl_div(..., reduction="none")     the same two
    Σ |p - q|                           twice the total variation

and sums and multiples of them go to the sweep of `divergence`. The halves of a JSD are often summed
one by one: one sweep gives both, and the second waits until it is asked for.
"""

from __future__ import annotations

import math
import threading
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lmhead.lazy import routing
from lmhead.lazy.program import Call, Env, Leaf, Node, Operand, check_unchanged
from lmhead.lazy.row_nodes import Concat, LeadingReduction
from lmhead.sweep import SweptScores
from lmhead.sweep.divergence_terms import dense_jsd_parts

if TYPE_CHECKING:
    from lmhead.lazy.logits import LazyLogits

_LARGEST = 200  # parts of a program in which divergences are looked for


class DivergenceTerm(NamedTuple):
    """factor · (D + shift): D is KL(p ‖ m), or TVD(p, q) for "tvd".

    m = weights[0] p + weights[1] q, normalised.
    """

    p: Leaf
    q: Leaf
    weights: tuple[float, float] = (0.0, 1.0)
    shift: float = 0.0
    factor: float = 1.0
    kind: str = "kl"


def rows(logits: LazyLogits) -> Tensor | None:
    """Return the sum of each row, (N,), if it is a divergence of two heads; None if not."""
    node = logits.part
    if not isinstance(node, Call) or torch._C._are_functorch_transforms_active():
        return None
    if len(list(islice(node.walk(), _LARGEST))) == _LARGEST:
        return None
    terms = _terms(node)
    if terms is None or not all(_swept(t) for t in terms):
        return None
    total: Tensor | None = None
    for term in terms:
        value = _mixture(term, logits.max_bytes) if term.weights[0] else _plain(term)
        part = (value + term.shift) * term.factor
        total = part if total is None else total + part
    return None if total is None else total.to(logits.dtype)


def _swept(term: DivergenceTerm) -> bool:
    with torch.no_grad():
        p, q = term.p.scores(Env()), term.q.scores(Env())
    alike = isinstance(p, SweptScores) and isinstance(q, SweptScores) and p.dtype == q.dtype
    return alike and p is not None and q is not None and p.n_rows == q.n_rows


def _plain(term: DivergenceTerm) -> Tensor:
    def of(env: Env) -> tuple[Tensor, ...]:
        return (term.p.bound(env).divergence(term.q.bound(env), term.kind),)

    return routing.answer(of, [term.p, term.q])[0]


# The halves of a JSD -----------------------------------------------------------------------------


class _Waiting(threading.local):
    """The other half of the last JSD of which one half was asked for."""

    key: Any = None
    leaves: Any = None  # kept, since the key has their ids
    half: Tensor | None = None

    def forget(self) -> None:
        """Drop the half."""
        self.half = None


_WAITING = _Waiting()


def _mixture(term: DivergenceTerm, max_bytes: int | None) -> Tensor:
    """Return KL(p ‖ m) of each row."""
    first, second, swapped = term.p, term.q, _identity(term.p) > _identity(term.q)
    weights = term.weights
    if swapped:  # one order for both halves
        first, second, weights = second, first, (weights[1], weights[0])
    beta = weights[0] / sum(weights)
    share = 1 - beta if swapped else beta
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    key = (_identity(first), _identity(second), beta, int(swapped), modes)
    waiting, _WAITING.half = _WAITING.half, None
    if waiting is not None and _WAITING.key == key:
        check_unchanged([first, second])
        return waiting / share

    def of(env: Env) -> tuple[Tensor, ...]:
        mine, theirs = first.bound(env), second.bound(env)
        found = None
        if isinstance(mine, SweptScores):
            found = mine.limited(max_bytes).jsd_parts(theirs, beta)
        if found is None:  # one of them was built, for a hook for example
            found = dense_jsd_parts(mine.dense().double(), theirs.dense().double(), beta)
        return found[0], found[1]

    halves = routing.answer(of, [first, second])
    _WAITING.key = (*key[:3], int(not swapped), key[4])
    _WAITING.half, _WAITING.leaves = halves[int(not swapped)], (first, second)
    if halves[0].grad_fn is not None:  # after a backward pass it could not be differentiated
        halves[0].grad_fn.register_prehook(lambda _: _WAITING.forget())
    return halves[int(swapped)] / share


def _identity(leaf: Leaf) -> Any:
    root, _, steps = leaf.key()
    return root, str(steps)


# Recognition -------------------------------------------------------------------------------------


def _name(node: Any) -> str:
    return node.name.strip("_") if isinstance(node, Call) and not node.kwargs else ""


def _terms(node: Node) -> list[DivergenceTerm] | None:
    """Return what a program is a sum of; None if one of it is no divergence."""
    name = _name(node)
    if not isinstance(node, Call):
        return None
    if name in ("neg", "negative"):
        return _scaled(_terms(node.args[0]), -1.0)
    if name in ("mul", "multiply", "rmul", "div", "truediv", "divide", "true_divide"):
        numbers = [_number(a) for a in node.args]
        if numbers[1] is not None and isinstance(node.args[0], Node):
            by = numbers[1] if "mul" in name else 1.0 / numbers[1] if numbers[1] else math.nan
            return _scaled(_terms(node.args[0]), by)
        if numbers[0] is not None and "mul" in name and isinstance(node.args[1], Node):
            return _scaled(_terms(node.args[1]), numbers[0])
    if name in ("add", "sub", "subtract") and all(isinstance(a, Node) for a in node.args):
        parts = [_terms(a) for a in node.args]
        second = _scaled(parts[1], 1.0 if name == "add" else -1.0)
        return None if parts[0] is None or second is None else parts[0] + second
    one = _kl(node) or _total_variation(node)
    return None if one is None else [one]


def _scaled(terms: list[DivergenceTerm] | None, factor: float) -> list[DivergenceTerm] | None:
    if terms is None or not math.isfinite(factor):
        return None
    return [t._replace(factor=t.factor * factor) for t in terms]


def _kl(node: Call) -> DivergenceTerm | None:
    """Recognise p (log p - log q), and F.kl_div without a reduction."""
    name = _name(node)
    if name == "kl_terms":
        log_q, target, log_target = node.args
        if not isinstance(target, Node) or not isinstance(log_q, Node):
            return None
        p = _leaf(target, "log_probs" if log_target else "probs")
        return None if p is None else _against(p, log_q)
    if name not in ("mul", "multiply") or not all(isinstance(a, Node) for a in node.args):
        return None
    for probs, ratio in (node.args, node.args[::-1]):
        p = _leaf(probs, "probs")
        if p is None or _name(ratio) not in ("sub", "subtract"):
            continue
        own, other = ratio.args
        if not isinstance(own, Node) or not isinstance(other, Node):
            continue
        same = _leaf(own, "log_probs")
        if same is not None and _identity(same) == _identity(p):
            return _against(p, other)
    return None


def _against(p: Leaf, log_q: Node) -> DivergenceTerm | None:
    """Return KL(p ‖ ·) for the log-probabilities of another head, or of a mixture with it."""
    q = _leaf(log_q, "log_probs")
    if q is not None:
        return DivergenceTerm(p, q)
    found = _log_mixture(log_q)
    if found is None:
        return None
    places = [i for i, leaf in enumerate(found) if _identity(leaf) == _identity(p)]
    if len(found) != 2 or len(places) != 1:
        return None
    (mine, theirs) = list(found)[:: 1 if places[0] == 0 else -1]
    weights = (found[mine], found[theirs])
    if not all(w > 0 and math.isfinite(w) for w in weights):
        return None
    return DivergenceTerm(mine, theirs, weights, shift=-math.log(sum(weights)))


def _total_variation(node: Call) -> DivergenceTerm | None:
    if _name(node) not in ("abs", "absolute") or _name(node.args[0]) not in ("sub", "subtract"):
        return None
    p, q = (_leaf(a, "probs") if isinstance(a, Node) else None for a in node.args[0].args)
    return None if p is None or q is None else DivergenceTerm(p, q, factor=2.0, kind="tvd")


def _log_mixture(node: Node) -> dict[Leaf, float] | None:
    """Return the weights of a mixture, given the program of its logarithm."""
    if isinstance(node, LeadingReduction):  # torch.stack([...]).logsumexp(0)
        pair = node.base.nodes if isinstance(node.base, Concat) else ()
        n = node.n_rows
        stacked = torch.arange(2 * n).view(2, n).T
        if (
            node.function.__name__ != "logsumexp"
            or len(pair) != 2
            or not torch.equal(node.index, stacked)
        ):
            return None
        return _together([_log_weighted(a) for a in pair])
    name = _name(node)
    if not isinstance(node, Call):
        return None
    if name in ("add", "sub", "subtract") and isinstance(node.args[0], Node):
        number = _number(node.args[1])
        inner = None if number is None else _log_mixture(node.args[0])
        if inner is None or number is None:
            return None
        factor = math.exp(number if name == "add" else -number)
        return {leaf: w * factor for leaf, w in inner.items()}
    if name == "logaddexp" and all(isinstance(a, Node) for a in node.args):
        return _together([_log_weighted(a) for a in node.args])
    if name == "log" and isinstance(node.args[0], Node):
        return _weighted(node.args[0])
    return None


def _together(parts: list[dict[Leaf, float] | None]) -> dict[Leaf, float] | None:
    made: dict[Leaf, float] = {}
    for part in parts:
        if part is None:
            return None
        made |= part
    return made if len(made) == sum(len(p) for p in parts if p is not None) else None


def _log_weighted(node: Node) -> dict[Leaf, float] | None:
    """Return {leaf: w} for log p + log w."""
    leaf = _leaf(node, "log_probs")
    if leaf is not None:
        return {leaf: 1.0}
    name = _name(node)
    if not isinstance(node, Call) or name not in ("add", "sub", "subtract"):
        return None
    number = _number(node.args[1])
    leaf = _leaf(node.args[0], "log_probs") if isinstance(node.args[0], Node) else None
    if leaf is None or number is None:
        return None
    return {leaf: math.exp(number if name == "add" else -number)}


def _weighted(node: Node) -> dict[Leaf, float] | None:
    """Return {leaf: w, ...} for w p + ... of probabilities."""
    leaf = _leaf(node, "probs")
    if leaf is not None:
        return {leaf: 1.0}
    name = _name(node)
    if not isinstance(node, Call):
        return None
    if name == "add" and all(isinstance(a, Node) for a in node.args):
        return _together([_weighted(a) for a in node.args])
    if name in ("mul", "multiply", "rmul", "div", "truediv", "divide", "true_divide"):
        first, second = node.args
        if isinstance(second, Node) and "mul" in name:
            first, second = second, first
        number = _number(second)
        inner = _weighted(first) if isinstance(first, Node) else None
        if inner is None or number is None or number == 0:
            return None
        by = number if "mul" in name else 1.0 / number
        return {leaf: w * by for leaf, w in inner.items()}
    return None


def _leaf(node: Node, kind: str) -> Leaf | None:
    """Return the head's logits whose log-probabilities or probabilities a program is."""
    found = routing.form(node)
    if found is None or found.kind != kind or found.terms or not isinstance(found.leaf, Leaf):
        return None
    return found.leaf


def _number(value: Any) -> float | None:
    """Return a number, or that of a constant scalar."""
    if isinstance(value, Operand):
        t = value.tensor
        return float(t) if t.numel() == 1 and not t.requires_grad and not value.per_row else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)
