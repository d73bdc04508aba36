"""`divergence`: KL, Jensen-Shannon or total variation between two heads, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lmhead import checks
from lmhead.checks import eager
from lmhead.lazy import LazyLogits
from lmhead.lazy.program import Env, Node
from lmhead.lazy.replay import replay
from lmhead.lazy.routing import answer
from lmhead.parallel.linear_layer import linear_scores
from lmhead.scores import DenseScores
from lmhead.scores.protocol import divergence_of
from lmhead.sweep import Pointwise, accumulation_dtype

KINDS = ("kl", "reverse_kl", "jsd", "tvd")
_MASK_VALUE = -1e30

Distribution: TypeAlias = "LazyLogits | tuple[Tensor, Tensor]"


@eager
def divergence(
    p: Distribution,
    q: Distribution,
    *,
    kind: str = "kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    top_k: int | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Return a divergence between two next-token distributions, one value per row.

    Equivalent to: p, q = (z / temperature).log_softmax(-1) of both logits, then
    (p.exp() * (p - q)).sum(-1) for "kl", and so on.

    Args:
        p: usually the teacher: `LazyLogits` (..., V), or a pair of hidden (..., D) and weight
            (V, D).
        q: usually the student: likewise, of the same rows and vocabulary; D may differ.
        kind: "kl" is KL(p ‖ q), "reverse_kl" is KL(q ‖ p), "jsd" is β KL(p ‖ m) + (1-β) KL(q ‖ m)
            with the mixture m = β p + (1-β) q, "tvd" is Σ |p - q| / 2.
        beta: β of "jsd", strictly between 0 and 1.
        temperature: divides both logits. The result is not multiplied by temperature².
        top_k: compare only the k most probable tokens of p, and all others as one outcome.
        mask: bool (...); rows where it is False give 0 and cost nothing.

    Returns:
        (...), in nats, differentiable in both; a side that needs no gradient costs none. Infinite
        where p allows a token that q masks ("kl"), or the reverse ("reverse_kl").

    Raises:
        ValueError, TypeError: an argument of the wrong shape, type or range.

    >>> from lmhead import LMHead
    >>> teacher, student = LMHead(64, 500), LMHead(16, 500)
    >>> p, q = teacher(torch.randn(2, 5, 64)), student(torch.randn(2, 5, 16))
    >>> divergence(p, q, kind="jsd").shape
    torch.Size([2, 5])
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}; got {kind!r}")
    checks.check_number("temperature", temperature, low=0.0, above=True)
    if not 0 < beta < 1:
        raise ValueError(
            f"beta must be above 0 and below 1; got {beta} (its limits are kind='kl' and "
            "kind='reverse_kl', divided by beta and 1 - beta)"
        )
    sides: list[Any] = [_lazy("p", p), _lazy("q", q)]
    shape = sides[0].shape
    if sides[1].shape != shape:
        raise ValueError(
            f"q must have logits of the shape of p, {tuple(shape)}; got {tuple(sides[1].shape)}"
        )
    if top_k is not None:
        checks.check_integer("top_k", top_k, low=1, high=shape[-1])
    lead, rows = shape[:-1], None
    if mask is not None:
        rows = _rows(mask, lead)
    sides = [z.float() if z.dtype.itemsize == 2 else z for z in sides]
    if temperature != 1.0:
        sides = [z / temperature for z in sides]
    nodes = [z.part if rows is None else z.part.take(rows) for z in sides]
    max_bytes = sides[0].max_bytes
    ids = None if top_k is None else _top_ids(nodes[0], top_k, max_bytes)

    def by_scores(env: Env) -> tuple[Tensor, ...]:
        mine, theirs = (node.bound(env).limited(max_bytes) for node in nodes)
        return (mine.divergence(theirs, kind, beta),)

    def by_rows(env: Env) -> tuple[Tensor, ...]:
        def rows_of_tiles(tiles: Sequence[Tensor], first: int, last: int) -> tuple[Tensor, ...]:
            both = tiles if ids is None else [_with_rest(z, ids[first:last]) for z in tiles]
            return (divergence_of(both[0].double(), both[1].double(), kind, beta),)

        return replay(nodes, rows_of_tiles, env, max_bytes=max_bytes)

    swept = top_k is None and all(node.is_scores for node in nodes)
    compute = by_scores if swept else by_rows
    (values,) = answer(compute, nodes)
    values = values.to(sides[0].dtype)
    if rows is not None:
        values = values.new_zeros(lead.numel()).index_copy(0, rows, values)
    return values.reshape(lead)


@torch.no_grad()
def _top_ids(p: Node, k: int, max_bytes: int | None) -> Tensor:
    """Return the k most probable tokens of each row: (N, k)."""

    def top_of_tile(tiles: Sequence[Tensor], *_: int) -> tuple[Tensor, ...]:
        return (DenseScores(tiles[0]).answer(top_k=k).top_ids,)

    def find(env: Env) -> tuple[Tensor, ...]:
        if p.is_scores:
            return (p.bound(env).limited(max_bytes).answer(top_k=k).top_ids,)
        return replay([p], top_of_tile, env, max_bytes=max_bytes)

    return answer(find, [p])[0].clamp(min=0)


def _with_rest(z: Tensor, ids: Tensor) -> Tensor:
    """Return the logits of the given tokens, and of all others as one outcome: (N, k + 1)."""
    kept = z.gather(1, ids)
    if ids.shape[1] == z.shape[1]:
        return kept
    # Not -inf: where all others are masked, the gradient of logsumexp would be NaN.
    rest = z.scatter(1, ids, _MASK_VALUE).logsumexp(1, keepdim=True)
    return torch.cat([kept, rest.masked_fill(rest < _MASK_VALUE / 2, -torch.inf)], 1)


def _lazy(name: str, given: Any) -> Any:
    """Return the lazy logits of a distribution: as given, or of a pair (hidden, weight)."""
    if isinstance(given, LazyLogits):
        if given._vdim != given.dim() - 1:
            raise ValueError(f"{name} must have the vocabulary as its last dimension")
        return given
    if not isinstance(given, tuple) or len(given) != 2:
        kind = f"{len(given)} entries" if isinstance(given, tuple) else type(given).__name__
        raise TypeError(f"{name} must be LazyLogits or a pair (hidden, weight); got {kind}")
    hidden, weight = given
    names = (f"{name} hidden", f"{name} weight")
    scores, hidden = linear_scores(hidden, weight, None, Pointwise(), names=names)
    return LazyLogits.of(scores, hidden.shape[:-1], accumulation_dtype(hidden.dtype))


def _rows(mask: Tensor, lead: torch.Size) -> Tensor:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != lead:
        got = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask)
        raise ValueError(f"mask must be bool of shape {tuple(lead)}; got {got}")
    return mask.reshape(-1).nonzero()[:, 0]
