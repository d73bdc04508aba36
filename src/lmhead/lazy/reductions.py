"""Reductions of lazy logits: over the vocabulary a few rows at a time, or recorded over rows.

What the compiled sweep can answer (log-sum-exp, argmax, top-k, log-probabilities, entropy) is
recognised and goes there.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmhead import checks
from lmhead.lazy import routing, written_divergences
from lmhead.lazy.logits import LazyLogits, derived
from lmhead.lazy.memory import values_of
from lmhead.lazy.program import Call, Env, Leaf, Node, Operand, check_unchanged, current
from lmhead.lazy.recording import NotRecorded, record
from lmhead.lazy.replay import replay
from lmhead.lazy.row_nodes import LeadingReduction
from lmhead.scores import Scores

# Probabilities of up to this many bytes are drawn from by one call, with torch's own numbers.
_AT_ONCE = 2**25


def over_rows(
    logits: Sequence[LazyLogits],
    function: Callable[..., tuple[Tensor, ...]],
    *,
    operands: Sequence[Operand] = (),
) -> tuple[Tensor, ...]:
    """Return `function(env, tiles, first, last)` of a few rows at a time."""
    nodes, max_bytes = [z.part for z in logits], logits[0].max_bytes
    carriers: list[Node] = list(nodes)
    if operands:
        first = nodes[0]
        carriers.append(Call(_nothing, tuple(operands), {}, first.n_rows, first.width))

    def run(env: Env) -> tuple[Tensor, ...]:
        def rows(tiles: Sequence[Tensor], first: int, last: int) -> tuple[Tensor, ...]:
            return function(env, tiles, first, last)

        return replay(nodes, rows, env, max_bytes=max_bytes, extra=operands)

    return routing.answer(run, carriers)


def over_tiles(
    logits: LazyLogits, function: Callable[[Tensor], Sequence[Tensor]]
) -> tuple[Tensor, ...]:
    """Return `function(rows)`, such as values and ids, of a few rows (B, V) at a time."""
    return over_rows([logits], lambda env, tiles, first, last: tuple(function(tiles[0])))  # noqa: ARG005


def _nothing(*_: Any) -> Tensor:
    raise AssertionError("carries operands; never computed")


# Over the vocabulary -----------------------------------------------------------------------------


class Dims(NamedTuple):
    """Which dimensions a reduction takes: the vocabulary, leading ones, or both."""

    vocab: bool
    lead: list[int]  # places among the leading dimensions
    all: bool


def dims_of(logits: LazyLogits, dim: Any) -> Dims:
    """Return the dimensions of a reduction; None and () are all."""
    n = logits.dim()
    if dim is None or (isinstance(dim, tuple | list) and len(dim) == 0):
        return Dims(True, list(range(n - 1)), True)
    given = dim if isinstance(dim, tuple | list) else [dim]
    places = {checks.check_dim(d, n) for d in given}
    if len(places) < len(given):
        raise RuntimeError(f"a dimension appears multiple times in the list of dims {given}")
    lead = [p - (p > logits._vdim) for p in sorted(places) if p != logits._vdim]
    return Dims(logits._vdim in places, lead, len(places) == n)


def shaped(logits: LazyLogits, rows: Tensor, *, keepdim: bool) -> Tensor:
    """Return row values (N,) in the shape of the logits without the vocabulary."""
    made = rows.reshape(logits.lead)
    return made.unsqueeze(logits._vdim) if keepdim else made


def reduce(name: str, logits: LazyLogits, dim: Any = None, keepdim: bool = False, **kw: Any) -> Any:
    """Reduce with a torch function that gives one value: sum, mean, amax, logsumexp, ..."""
    function = getattr(torch, name)
    dims = dims_of(logits, dim)
    if not dims.vocab:
        return _over_lead(logits, name, dims, keepdim=keepdim, **kw)
    if name in _PAIRED and dims.lead:
        if name in ("argmax", "argmin") and dims.all and not keepdim:
            return _place_of_extreme(name, logits)
        raise NotRecorded
    if name in ("std", "var", "norm", "vector_norm") and dims.lead:
        if name in ("std", "var"):
            return _spread(name, logits, dim, keepdim=keepdim, **kw)
        order = kw.get("p", 2)
        if order in (math.inf, -math.inf) and _has_gradient(logits) and set(kw) == {"p"}:
            return reduce("amax" if order > 0 else "amin", logits.abs(), dim, keepdim)  # type: ignore[arg-type]
        order = 2 if order in ("fro", None) else order
        if isinstance(order, str) or not order or set(kw) - {"p"}:
            raise NotRecorded
        norms = shaped(logits, _rows(name, logits, function, p=order), keepdim=keepdim)
        lead = [p + (p >= logits._vdim) for p in dims.lead] if keepdim else dims.lead
        return torch.linalg.vector_norm(norms, order, dim=lead, keepdim=keepdim)
    if name in ("amax", "amin") and dims.lead and _has_gradient(logits):
        return _shared_extreme(name, logits, dim, keepdim=keepdim, nan=True)
    if name == "nanmean" and dims.lead:
        # Rows differ in how many entries they count.
        total = reduce("nansum", logits, dim, keepdim, **kw)
        return total / reduce("sum", ~logits.isnan(), dim, keepdim)  # type: ignore[arg-type]
    made = shaped(logits, _rows(name, logits, function, **kw), keepdim=keepdim)
    if not dims.lead:
        return made
    lead = [p + (p >= logits._vdim) for p in dims.lead] if keepdim else dims.lead
    combine = torch.sum if name in ("count_nonzero", "nansum") else function
    given = {} if combine is not function or name in ("amax", "amin", "any", "all") else kw
    if name == "prod":
        for place in sorted(lead, reverse=True):
            made = made.prod(place, keepdim=keepdim)
        return made
    return combine(made, dim=tuple(lead), keepdim=keepdim, **given)


_PAIRED = {"argmax", "argmin", "median", "mode"}


def _rows(name: str, logits: LazyLogits, function: Callable[..., Any], **kw: Any) -> Tensor:
    """Reduce over the vocabulary: (N,)."""
    known = _RECOGNISED.get(name)
    if known is not None and not kw:
        found = known(logits)
        if found is not None:
            return found
    if name == "sum" and (entropy := _entropy_sum(logits, **kw)) is not None:
        return entropy
    if name == "sum" and not kw and (found := written_divergences.rows(logits)) is not None:
        return found

    return _of_rows(logits, function, **kw)


def _of_rows(logits: LazyLogits, function: Callable[..., Any], **kw: Any) -> Tensor:
    """Reduce over the vocabulary by torch's function, a few rows at a time: (N,)."""
    return over_tiles(logits, lambda tile: (function(tile, dim=-1, **kw),))[0]


def _spread(name: str, logits: LazyLogits, dim: Any, *, keepdim: bool, **kw: Any) -> Tensor:
    """Return std or var over the vocabulary and other dimensions, in two passes."""
    correction = kw.get("correction")
    if correction is None:
        correction = 1 if kw.get("unbiased", True) else 0
    mean = reduce("mean", logits, dim, keepdim=True)
    n = logits.numel() // max(1, mean.numel())
    squares = reduce("sum", (logits - mean).square(), dim, keepdim)
    variance = squares / max(n - correction, 0)
    if name == "var":
        return variance  # type: ignore[no-any-return]
    zero = variance == 0  # torch.std has a gradient of 0 there
    return torch.where(zero, variance.detach(), torch.where(zero, 1.0, variance).sqrt())


def _has_gradient(logits: LazyLogits) -> bool:
    recorded = logits.requires_grad and torch.is_grad_enabled()
    return recorded and not torch._C._are_functorch_transforms_active()


def _shared_extreme(
    name: str, logits: LazyLogits, dim: Any, *, keepdim: bool, nan: bool = False
) -> Tensor:
    """Return the largest or smallest entry, with a gradient shared by all entries equal to it.

    If the result is NaN, no entry equals it: the gradient is 0, or NaN everywhere with `nan`, as
    torch.max and torch.amax have it.
    """
    function = getattr(torch, name)

    def share(values: Tensor, counts: Tensor | int, dims: list[int]) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            best = function(values, dim=dims, keepdim=True)
            equal = values == best
            count = (equal * counts).sum(dims, keepdim=True)
            part = (equal * counts).to(values.dtype) / (count if nan else count.clamp(min=1))
        held = values if nan else torch.where(equal, values, 0.0)
        return values_of(best, (held * part).sum(dims, keepdim=True)), count

    dims, found = dims_of(logits, dim), over_tiles(logits, lambda tile: share(tile, 1, [1]))
    rows, counts = (shaped(logits, t, keepdim=True) for t in found)
    made, _ = share(rows, counts, [p + (p >= logits._vdim) for p in dims.lead])
    with torch.no_grad():  # the exact value, which comparisons find again
        exact = reduce(name, logits.detach(), dim, keepdim=True)  # type: ignore[arg-type]
    made = values_of(exact.reshape(made.shape), made)
    if keepdim:
        return made
    return made.squeeze(tuple(range(logits.dim())) if dims.all else dim)


def _place_of_extreme(name: str, logits: LazyLogits) -> Tensor:
    """Return the place of the largest or smallest entry among all, in the order of memory."""
    if logits._vdim != logits.dim() - 1 or logits.numel() == 0:
        raise NotRecorded
    extreme = torch.max if name == "argmax" else torch.min

    with torch.no_grad():
        values, ids = over_tiles(logits, lambda tile: extreme(tile, -1))
        row = values.argmax() if name == "argmax" else values.argmin()
        return row * logits.shape[-1] + ids[row]


def _over_lead(logits: LazyLogits, name: str, dims: Dims, *, keepdim: bool, **kw: Any) -> Any:
    """Record a reduction over leading dimensions: pointwise in the vocabulary."""
    if name in ("norm", "vector_norm") or (name in _PAIRED and len(dims.lead) != 1):
        raise NotRecorded
    function = _MAX_VALUES.get(name) or getattr(torch, name)
    lead = logits.lead
    kept = [p for p in range(len(lead)) if p not in dims.lead]
    numbers = torch.arange(lead.numel()).view(lead).permute(*kept, *dims.lead)
    shape = torch.Size(lead[p] for p in kept)
    index = numbers.reshape(shape.numel(), math.prod(lead[p] for p in dims.lead))

    def reduced(tile: Tensor) -> Tensor:
        made: Tensor = function(tile, dim=1, **kw)
        return made

    reduced.__name__ = "" if kw else name
    probe = function(torch.ones(1, index.shape[1], 1, dtype=logits.dtype), dim=1, **kw)
    node = LeadingReduction(logits.part, index, reduced)
    if keepdim:
        full = [1 if p in dims.lead else n for p, n in enumerate(lead)]
        vdim = logits._vdim
    else:
        full = list(shape)
        vdim = logits._vdim - sum(p < logits._vdim for p in dims.lead)
    out = (*full[:vdim], node.width, *full[vdim:])
    return derived(logits, node, out, probe.dtype, vdim=vdim)


# The values of torch.max over a dimension: unlike amax's, equal entries do not share a gradient.
_MAX_VALUES: dict[str, Callable[..., Tensor]] = {
    "max": lambda tile, dim: tile.max(dim).values,
    "min": lambda tile, dim: tile.min(dim).values,
}


# What the sweep answers --------------------------------------------------------------------------


def _of_scores(
    logits: LazyLogits, found: routing.Form, function: Callable[[Scores], Tensor]
) -> Tensor:
    """Return a function of recognised scores, (N,) or (N, K), plus the term of each row."""
    dtype = logits.dtype

    def of(env: Env) -> tuple[Tensor, ...]:
        made, shift = function(found.leaf.bound(env)), found.shift(env)
        if isinstance(shift, Tensor) and made.dim() == 1:
            shift = shift.reshape(-1)
        return ((made + shift).to(dtype),)

    return routing.answer(of, [logits.part])[0]


def logsumexp_rows(logits: LazyLogits) -> Tensor | None:
    """Return log Σ exp of each row (N,), if the sweep can."""
    found = routing.form(logits.part)
    if found is None or found.kind == "probs":
        return None

    def of(scores: Scores) -> Tensor:
        lse = scores.answer(logsumexp=True).lse
        if found.kind == "log_probs":
            lse = torch.where(lse.isfinite(), lse * 0.0, lse)  # 0, with a gradient of 0
            lse = torch.where(lse.isinf(), 0.0, lse)
        return lse

    return _of_scores(logits, found, of)


def argmax_rows(logits: LazyLogits) -> Tensor | None:
    """Return the id of the largest entry of each row, if the sweep can."""
    found = routing.form(logits.part)
    if found is None:
        return None
    with torch.no_grad():
        check_unchanged([logits.node])
        scores = found.leaf.bound(current([found.leaf]))
        return scores.top(1, lse=False).ids[:, 0]


_RECOGNISED: dict[str, Callable[[LazyLogits], Tensor | None]] = {
    "logsumexp": logsumexp_rows,
    "argmax": argmax_rows,
    "amax": lambda z: _largest(z),
}


def _largest(logits: LazyLogits) -> Tensor | None:
    if routing.form(logits.part) is None:
        return None
    if _has_gradient(logits):  # which equal entries share
        with torch.no_grad():
            exact = _largest(logits.detach())  # type: ignore[arg-type]
        return None if exact is None else values_of(exact, _of_rows(logits, torch.amax))
    return topk(logits, 1, logits._vdim).values.movedim(logits._vdim, -1).reshape(-1)  # type: ignore[no-any-return]


def _entropy_sum(logits: LazyLogits, **kw: Any) -> Tensor | None:
    """Recognise Σ p log p and Σ p z, the ways to write an entropy: (N,)."""
    node = logits.part
    negative = isinstance(node, Call) and node.name.strip("_") in ("neg", "negative")
    if negative and isinstance(node, Call):
        node = node.args[0]
    if kw or not isinstance(node, Call) or node.name.strip("_") not in ("mul", "multiply"):
        return None
    forms = [routing.form(_unclamped(a)) for a in node.args if isinstance(a, Node)]
    if len(forms) != 2 or forms[0] is None or forms[1] is None:
        return None
    probs = next((f for f in forms if f and f.kind == "probs" and not f.terms), None)
    other = next((f for f in forms if f and f.kind != "probs"), None)
    if probs is None or other is None or not isinstance(probs.leaf, Leaf):
        return None
    if not isinstance(other.leaf, Leaf) or probs.leaf.key()[::2] != other.leaf.key()[::2]:
        return None

    def of(scores: Scores) -> Tensor:
        found = scores.answer(entropy=True, logsumexp=True)
        # Σ p log p = -entropy, and z = log p + lse.
        return found.lse - found.entropy if other.kind == "logits" else -found.entropy  # type: ignore[no-any-return]

    mean = _of_scores(logits, other, of)
    return -mean if negative else mean


def _unclamped(node: Node) -> Node:
    """Return log-probabilities without a lower limit that changes only -inf, where p is 0."""
    if isinstance(node, Call) and node.name == "clamp" and isinstance(node.args[0], Node):
        limits = [*node.args[1:], *node.kwargs.values()]
        lowest = [torch.finfo(d).min for d in (torch.float32, torch.float64, torch.bfloat16)]
        if len(limits) == 1 and "max" not in node.kwargs and limits[0] in lowest:
            return node.args[0]
    return node


class TopK(NamedTuple):
    """Values and ids, as torch.topk, torch.max and torch.min return them."""

    values: Tensor
    indices: Tensor


def topk(
    logits: LazyLogits, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> Any:
    """Return the k largest entries and their ids."""
    dims = dims_of(logits, dim)
    if not dims.vocab or dims.lead:
        raise NotRecorded
    k = operator.index(k)  # of NumPy or a tensor, as torch takes it
    checks.check_integer("top_k", k, low=0, high=logits.shape[logits._vdim])
    found = routing.form(logits.part) if largest else None
    if found is None:
        values, ids = over_tiles(logits, lambda tile: torch.topk(tile, k, -1, largest, sorted))
    else:
        values, ids = _top_rows(logits, found, k)
    shape = (*logits.lead, k)
    place = logits._vdim
    return TopK(values.reshape(shape).movedim(-1, place), ids.reshape(shape).movedim(-1, place))


def _top_rows(logits: LazyLogits, found: routing.Form, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest entries of recognised rows, and their ids: exact in order."""
    n = found.leaf.n_rows
    if k == 0:
        empty = torch.empty(n, 0, dtype=logits.dtype)
        return empty, empty.long()
    with torch.no_grad():
        check_unchanged([logits.node])
        scores = found.leaf.bound(current([found.leaf]))
        top = scores.top(k, lse=logits.requires_grad)
    if not logits.requires_grad and found.kind == "logits":
        return (top.values + found.shift(Env())).to(logits.dtype), top.ids
    # A row without an order has ids of -1: gather must not see them.
    values = _gathered(logits, found, top.ids.clamp(min=0))
    return torch.where(top.ids < 0, top.values.to(values.dtype), values), top.ids


def gather(logits: LazyLogits, dim: int, index: Tensor, **_: Any) -> Any:
    """Return the entries at given ids."""
    dims = dims_of(logits, dim)
    if not dims.vocab or index.dim() != logits.dim():
        raise NotRecorded
    checks.check_id_type("index", index)
    ids = index.movedim(logits._vdim, -1)
    if ids.shape[:-1] != logits.lead:
        raise NotRecorded
    vocab = logits.shape[logits._vdim]
    if ids.numel() and bool(((ids < 0) | (ids >= vocab)).any()):
        wrong = int(ids[(ids < 0) | (ids >= vocab)][0])
        raise ValueError(f"index must be in [0, {vocab}); got {wrong}")
    # A copy: the backward pass needs these ids even if the caller reuses their tensor.
    flat = ids.reshape(logits.lead.numel(), ids.shape[-1]).to(torch.int64, copy=True)
    found = routing.form(logits.part)
    values = _gathered_any(logits, flat) if found is None else _gathered(logits, found, flat)
    return values.reshape(ids.shape).movedim(-1, logits._vdim)


def _gathered(logits: LazyLogits, found: routing.Form, ids: Tensor) -> Tensor:
    """Return recognised entries at ids (N, K)."""

    def of(scores: Scores) -> Tensor:
        answer = scores.answer(picked=ids)
        z = answer.picked
        if found.kind != "logits":
            z = z - answer.lse[:, None]
        elif not scores.normalised:
            # The exact logit, so that it equals what topk, max and comparisons find.
            exact = scores.at(ids)
            z = torch.where(exact.isfinite(), z + (exact - z).detach(), exact)
        return z.exp() if found.kind == "probs" else z  # type: ignore[no-any-return]

    return _of_scores(logits, found, of)


def _gathered_any(logits: LazyLogits, ids: Tensor) -> Tensor:
    def of(_: Env, tiles: Sequence[Tensor], first: int, last: int) -> tuple[Tensor, ...]:
        return (tiles[0].gather(1, ids[first:last]),)

    return over_rows([logits], of)[0]


def columns(logits: LazyLogits, ids: Tensor) -> Tensor:
    """Return the entries of token ids (K,) in every row: (*lead, K)."""
    found = routing.form(logits.part)

    def of(scores: Scores) -> Tensor:
        z = scores.columns(ids)
        if found is not None and found.kind != "logits":
            z = z - scores.answer(logsumexp=True).lse[:, None].to(z.dtype)
        return z.exp() if found is not None and found.kind == "probs" else z

    if found is None:
        (values,) = over_tiles(logits, lambda tile: (tile[:, ids],))
    else:
        values = _of_scores(logits, found, of)
    return values.reshape(*logits.lead, len(ids))


def extreme(name: str, logits: LazyLogits, *args: Any, **kw: Any) -> Any:
    """Compute torch.max and torch.min: of everything, over a dimension, or of two tensors."""
    other = args[0] if args else kw.get("other")
    if isinstance(other, Tensor):
        return record(torch.maximum if name == "max" else torch.minimum, (logits, other), {})
    dim = kw.pop("dim", args[0] if args else None)
    keepdim = kw.pop("keepdim", args[1] if len(args) > 1 else False)
    if dim is None:
        if _has_gradient(logits):
            return _shared_extreme(f"a{name}", logits, None, keepdim=False)
        return reduce(f"a{name}", logits)
    dims = dims_of(logits, dim)
    if not dims.vocab:
        places = reduce(f"arg{name}", logits, dim, keepdim)
        return TopK(_over_lead(logits, name, dims, keepdim=keepdim), places)
    if routing.form(logits.part) is None:
        found = over_tiles(logits, lambda tile: getattr(torch, name)(tile, -1))
        return TopK(*(shaped(logits, t, keepdim=keepdim) for t in found))
    if name == "max":
        values, ids = topk(logits, 1, dim)
    else:  # a NaN is the largest of top-k and the smallest of min
        values, ids = topk(record(torch.neg, (logits,), {}), 1, dim)
        values = values.neg()
    place = logits._vdim
    return TopK(values, ids) if keepdim else TopK(values.squeeze(place), ids.squeeze(place))


def take_along_dim(logits: LazyLogits, indices: Tensor, dim: int | None = None) -> Any:
    """Return the entries at given ids; leading dimensions broadcast."""
    if dim is None or not dims_of(logits, dim).vocab:
        raise NotRecorded
    if not isinstance(logits, LazyLogits) or indices.dim() != logits.dim():
        raise NotRecorded
    place = logits._vdim
    within, chosen = [list(t.shape) for t in (logits, indices)]
    within[place], chosen[place] = 1, 1
    shape = list(torch.broadcast_shapes(within, chosen))  # type: ignore[no-untyped-call]
    if shape != within:
        shape[place] = logits.shape[place]
        return torch.take_along_dim(logits.expand(shape), indices, dim)
    shape[place] = indices.shape[place]
    indices = torch.where(indices < 0, indices + logits.shape[place], indices)
    return gather(logits, dim, indices.expand(shape))


def multinomial(
    logits: LazyLogits,
    num_samples: int,
    replacement: bool = False,
    *,
    generator: torch.Generator | None = None,
) -> Any:
    """Draw ids from rows of probabilities, with the random numbers torch would use."""
    if logits.dim() > 2 or logits._vdim != logits.dim() - 1:
        raise NotRecorded

    def draw(rows: Tensor) -> tuple[Tensor]:
        return (torch.multinomial(rows, num_samples, replacement, generator=generator),)

    with torch.no_grad():
        constant: Any = logits.detach()
        if constant.numel() * 4 <= _AT_ONCE:
            # One call for all rows draws the numbers that it would for a tensor.
            (drawn,) = draw(over_tiles(constant, lambda tile: (tile,))[0])
        else:
            (drawn,) = over_tiles(constant, draw)
    return drawn.reshape(*logits.lead, num_samples)
