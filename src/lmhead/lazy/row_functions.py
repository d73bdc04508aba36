"""Functions of whole rows of lazy logits that torch has beside the usual reductions.

Order statistics, norms and similarities over the vocabulary, a few rows at a time; and other names
of what `views` and `reductions` do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmhead.checks import check_dim
from lmhead.lazy import views
from lmhead.lazy.logits import LazyLogits
from lmhead.lazy.recording import NotRecorded
from lmhead.lazy.reductions import TopK, dims_of, over_tiles, reduce, shaped


class Extremes(NamedTuple):
    """Smallest and largest entries, as torch.aminmax returns them."""

    min: Tensor
    max: Tensor


def _check_rows(logits: Any, dim: Any) -> None:
    """Refuse what is not a function of single rows."""
    if not isinstance(logits, LazyLogits) or dim is None:
        raise NotRecorded
    dims = dims_of(logits, dim)
    if not dims.vocab or dims.lead:
        raise NotRecorded


def order_statistic(name: str) -> Callable[..., Any]:
    """Return torch.NAME over the vocabulary: median, nanmedian or mode, with its place."""
    function = getattr(torch, name)

    def handler(logits: Any, dim: Any = None, keepdim: bool = False) -> Any:
        dim = -1 if dim is None and name == "mode" else dim
        _check_rows(logits, dim)
        # torch reads memory of its own where equal values share theirs.
        found = over_tiles(logits, lambda tile: function(tile.contiguous(), -1))
        return TopK(*(shaped(logits, t, keepdim=keepdim) for t in found))

    return handler


def kthvalue(logits: Any, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    """Return the k-th smallest entry of each row and its place."""
    _check_rows(logits, dim)
    found = over_tiles(logits, lambda tile: torch.kthvalue(tile, k, -1))
    return TopK(*(shaped(logits, t, keepdim=keepdim) for t in found))


def quantile(name: str) -> Callable[..., Any]:
    """Return torch.NAME over the vocabulary: quantile or nanquantile."""
    function = getattr(torch, name)

    def handler(logits: Any, q: Any, dim: Any = None, keepdim: bool = False, **kw: Any) -> Any:
        _check_rows(logits, dim)
        if isinstance(q, Tensor) and q.requires_grad:
            raise NotRecorded
        # A copy: the backward pass needs it even if the caller reuses the tensor.
        q = q.clone() if isinstance(q, Tensor) else q
        (rows,) = over_tiles(logits, lambda tile: (function(tile, q, -1, **kw).movedim(-1, 0),))
        if rows.dim() == 1:
            return shaped(logits, rows, keepdim=keepdim)
        several = [shaped(logits, rows[:, i], keepdim=keepdim) for i in range(rows.shape[1])]
        return torch.stack(several)

    return handler


def aminmax(logits: Any, *, dim: Any = None, keepdim: bool = False) -> Any:
    """Return the smallest and the largest entries."""
    return Extremes(
        reduce("amin", logits, dim, keepdim=keepdim), reduce("amax", logits, dim, keepdim=keepdim)
    )


def with_mean(name: str) -> Callable[..., Any]:
    """Return torch.std_mean or torch.var_mean."""

    def handler(logits: Any, dim: Any = None, *given: Any, keepdim: bool = False, **kw: Any) -> Any:
        if given or isinstance(dim, bool):
            raise NotRecorded  # the older form, with `unbiased` by position
        spread = reduce(name, logits, dim, keepdim=keepdim, **kw)
        return spread, reduce("mean", logits, dim, keepdim=keepdim)

    return handler


def normalize(input: Any, p: float = 2.0, dim: Any = 1, eps: float = 1e-12) -> Any:
    """Return F.normalize, by its definition."""
    _check_rows(input, dim)
    length: Any = torch.linalg.vector_norm(input, p, dim, keepdim=True)
    return input / length.clamp_min(eps)


def cosine_similarity(x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    """Return F.cosine_similarity, by its definition."""
    lazy = x1 if isinstance(x1, LazyLogits) else x2
    _check_rows(lazy, dim)
    if x1.shape != x2.shape:
        raise NotRecorded
    lengths = [torch.linalg.vector_norm(x, 2, dim).clamp_min(eps) for x in (x1, x2)]
    return (x1 * x2).sum(dim) / (lengths[0] * lengths[1])


def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:  # noqa: ARG001
    """Return the logits themselves where nothing is dropped."""
    if not 0 <= p <= 1 or (training and p > 0):
        raise NotRecorded
    return input


def vstack(tensors: Any) -> Any:
    """Join along the first dimension."""
    if any(t.dim() < 2 for t in tensors):
        raise NotRecorded
    return views.cat(tensors, 0)


def hstack(tensors: Any) -> Any:
    """Join along the second dimension."""
    if any(t.dim() < 3 for t in tensors):
        raise NotRecorded
    return views.cat(tensors, 1)


def tile(input: Any, *dims: Any) -> Any:
    """Repeat leading dimensions."""
    sizes = dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims
    missing = input.dim() - len(sizes)
    return views.repeat(input, *((1,) * missing), *sizes)


def gather_rows(logits: LazyLogits, dim: int, index: Tensor) -> Any:
    """Return `gather` along a leading dimension, if the index is the same for all tokens.

    `logits.gather(1, last.view(-1, 1, 1).expand(-1, 1, V))`: the last position of each sequence.
    """
    vdim = logits._vdim
    if index.dim() != logits.dim() or index.shape[vdim] != logits.shape[vdim]:
        raise NotRecorded
    if logits.shape[vdim] > 1 and index.stride(vdim) != 0:
        raise NotRecorded
    rows = index.movedim(vdim, -1)[..., :1]
    place = check_dim(dim, logits.dim())
    lead = place - (place > vdim)
    return views.lead_view(
        logits, lambda t: t.gather(lead, rows.to(t.device)), vdim=vdim, copies=True
    )
