"""Shapes, selections and copies of lazy logits: the rows change, no logit is computed.

A change of the leading dimensions is a torch function on tensors (*lead, X); it is applied to the
numbers of the rows, and later, if the logits are ever built, to the tensor.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lmhead.checks import check_dim
from lmhead.lazy.logits import LazyLogits, View, derived, lead_layout, like_strided
from lmhead.lazy.program import Dense, Leaf, Node
from lmhead.lazy.recording import NotRecorded, call
from lmhead.lazy.row_nodes import Concat, stamped


def lead_view(
    logits: LazyLogits,
    change: Callable[[Tensor], Tensor],
    *,
    vdim: int | None = None,
    copies: bool = False,
) -> LazyLogits:
    """Return the logits after a change of their leading dimensions.

    Args:
        logits: to take rows of.
        change: a torch function of tensors (*lead, X).
        vdim: the vocabulary's new place; None for the last.
        copies: torch gives the result memory of its own. Otherwise it is a view where torch can
            make one, which for `reshape` depends on the strides.
    """
    lead, node = logits.lead, logits.part
    n = lead.numel()
    rows = change(torch.arange(n).view(*lead, 1))[..., 0]
    index: Tensor | None = rows.reshape(-1)
    if rows.numel() == n and torch.equal(rows.reshape(-1), torch.arange(n)):
        index = None
    place = rows.dim() if vdim is None else vdim
    shape = (*rows.shape[:place], node.width, *rows.shape[place:])
    made = node if index is None else node.take(index)
    view, strides = None, None
    if not copies:
        with torch._C._DisableFuncTorch():
            before, unit = lead_layout(logits)
            after = change(before)
            shared = after.untyped_storage()._cdata == before.untyped_storage()._cdata
        if shared:
            outer = [unit * stride for stride in after.stride()[:-1]]
            strides = (*outer[:place], logits.stride(logits._vdim), *outer[place:])
            view = View(change, rows=index)
    return derived(logits, made, shape, logits.dtype, vdim=place, view=view, strides=strides)


def _last(logits: LazyLogits) -> bool:
    return logits._vdim == logits.dim() - 1


def _sizes(shape: tuple[Any, ...]) -> list[int]:
    given = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    return [int(n) for n in given]


def view(logits: LazyLogits, *shape: Any, **kwargs: Any) -> Any:
    """Reshape leading dimensions, if the strides allow a view."""
    made = reshape(logits, *shape, **kwargs)
    if made._shared is not logits._shared:
        raise RuntimeError(
            "view size is not compatible with input tensor's size and stride (at least one "
            "dimension spans across two contiguous subspaces). Use .reshape(...) instead."
        )
    return made


def reshape(logits: LazyLogits, *shape: Any, **kwargs: Any) -> Any:
    """Reshape leading dimensions; the vocabulary must stay one dimension, the last."""
    if kwargs or (len(shape) == 1 and isinstance(shape[0], torch.dtype)):
        raise NotRecorded
    sizes = _sizes(shape)
    total = logits.numel()
    if -1 in sizes:
        known = math.prod(n for n in sizes if n != -1)
        if not known or total % known:
            raise RuntimeError(f"shape '{sizes}' is invalid for input of size {total}")
        sizes[sizes.index(-1)] = total // known
    if math.prod(sizes) != total:
        raise RuntimeError(f"shape '{sizes}' is invalid for input of size {total}")
    if sizes == list(logits.shape):
        return lead_view(logits, lambda t: t, vdim=logits._vdim)
    if not _last(logits) or not sizes or sizes[-1] != logits.shape[-1]:
        raise NotRecorded
    return lead_view(logits, lambda t: t.reshape(*sizes[:-1], t.shape[-1]))


def flatten(logits: LazyLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    """Flatten leading dimensions."""
    n = logits.dim()
    start, end = check_dim(start_dim, n), check_dim(end_dim, n)
    if start > end:
        raise RuntimeError("flatten() has invalid args: start_dim cannot come after end_dim")
    shape = list(logits.shape)
    joined = math.prod(shape[start : end + 1])
    return reshape(logits, [*shape[:start], joined, *shape[end + 1 :]])


def unflatten(logits: LazyLogits, dim: int, sizes: Any) -> Any:
    """Split one leading dimension."""
    place = check_dim(dim, logits.dim())
    if place == logits._vdim:
        raise NotRecorded
    lead, vdim = _lead_dim(logits, place), logits._vdim
    return lead_view(
        logits,
        lambda t: t.unflatten(lead, sizes),  # type: ignore[no-untyped-call]
        vdim=vdim if place > vdim else vdim + len(sizes) - 1,
    )


def unsqueeze(logits: LazyLogits, dim: int) -> Any:
    """Add a dimension of size 1."""
    place = check_dim(dim, logits.dim() + 1)
    vdim = logits._vdim
    if place <= vdim:
        return lead_view(logits, lambda t: t.unsqueeze(place), vdim=vdim + 1)
    return lead_view(logits, lambda t: t.unsqueeze(place - 1), vdim=vdim)


def squeeze(logits: LazyLogits, dim: Any = None) -> Any:
    """Drop dimensions of size 1."""
    n = logits.dim()
    dims = range(n) if dim is None else _places(dim, n)
    drop = [d for d in dims if logits.shape[d] == 1]
    if logits._vdim in drop:
        raise NotRecorded
    keep = [d for d in range(n) if d not in drop]
    sizes = [logits.shape[d] for d in keep if d != logits._vdim]
    return lead_view(
        logits, lambda t: t.reshape(*sizes, t.shape[-1]), vdim=keep.index(logits._vdim)
    )


def _places(dims: Any, n: int) -> list[int]:
    return [check_dim(d, n) for d in (dims if isinstance(dims, tuple | list) else (dims,))]


def permute(logits: LazyLogits, *dims: Any) -> Any:
    """Reorder dimensions."""
    n, vdim = logits.dim(), logits._vdim
    order = _places(_sizes(dims), n)
    if sorted(order) != list(range(n)):
        raise RuntimeError(f"permute(dims): dims {order} do not fit a tensor of {n} dimensions")
    lead = [d - (d > vdim) for d in order if d != vdim]
    return lead_view(logits, lambda t: t.permute(*lead, len(lead)), vdim=order.index(vdim))


def transpose(logits: LazyLogits, dim0: int, dim1: int) -> Any:
    """Swap two dimensions."""
    order = list(range(logits.dim()))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return permute(logits, order)


def movedim(logits: LazyLogits, source: Any, destination: Any) -> Any:
    """Move dimensions."""
    n = logits.dim()
    src, dst = _places(source, n), _places(destination, n)
    if len(src) != len(dst) or len({*src}) < len(src) or len({*dst}) < len(dst):
        raise RuntimeError(f"movedim: dimensions {source} cannot be moved to {destination}")
    order = [-1] * n
    for s, d in zip(src, dst, strict=True):
        order[d] = s
    rest = iter(d for d in range(n) if d not in src)
    return permute(logits, [next(rest) if d < 0 else d for d in order])


def expand(logits: LazyLogits, *shape: Any) -> Any:
    """Broadcast leading dimensions."""
    sizes = _sizes(shape)
    if not _last(logits) or sizes[-1] not in (-1, logits.shape[-1]):
        raise NotRecorded
    return lead_view(logits, lambda t: t.expand(*sizes[:-1], t.shape[-1]))


def repeat(logits: LazyLogits, *sizes: Any) -> Any:
    """Repeat leading dimensions."""
    times = _sizes(sizes)
    if not _last(logits) or times[-1] != 1:
        raise NotRecorded
    return lead_view(logits, lambda t: t.repeat(*times), copies=True)


def repeat_interleave(logits: LazyLogits, repeats: Any, dim: int | None = None, **kw: Any) -> Any:
    """Repeat entries of a leading dimension."""
    if dim is None or kw or check_dim(dim, logits.dim()) == logits._vdim:
        raise NotRecorded
    place = _lead_dim(logits, dim)
    return lead_view(
        logits, lambda t: t.repeat_interleave(repeats, place), vdim=logits._vdim, copies=True
    )


def _lead_dim(logits: LazyLogits, dim: int) -> int:
    """Return the place of a leading dimension among them."""
    place = check_dim(dim, logits.dim())
    if place == logits._vdim:
        raise NotRecorded
    return place - (place > logits._vdim)


def select(logits: LazyLogits, dim: int, index: int) -> Any:
    """Take one entry of a leading dimension."""
    if check_dim(dim, logits.dim()) == logits._vdim:
        return logits[(slice(None),) * logits._vdim + (index,)]
    place = _lead_dim(logits, dim)
    vdim = logits._vdim - (place < logits._vdim)
    return lead_view(logits, lambda t: t.select(place, index), vdim=vdim)


def narrow(logits: LazyLogits, dim: int, start: int, length: int) -> Any:
    """Take a range of a dimension."""
    place = check_dim(dim, logits.dim())
    size, start, length = logits.shape[place], int(start), int(length)
    first = start + size if start < 0 else start
    if not 0 <= first <= size or length < 0 or first + length > size:
        raise RuntimeError(f"start ({start}) + length ({length}) exceeds dimension size ({size}).")
    return logits[(slice(None),) * place + (slice(first, first + length),)]


def index_select(logits: LazyLogits, dim: int, index: Tensor) -> Any:
    """Choose entries of a leading dimension; tokens are computed."""
    index = index.reshape(-1)
    if check_dim(dim, logits.dim()) == logits._vdim:
        return logits[(slice(None),) * logits._vdim + (index,)]
    place = _lead_dim(logits, dim)
    return lead_view(logits, lambda t: t.index_select(place, index), vdim=logits._vdim, copies=True)


def flip(logits: LazyLogits, *dims: Any) -> Any:
    """Reverse leading dimensions."""
    places = [_lead_dim(logits, d) for d in _sizes(dims)]
    return lead_view(logits, lambda t: t.flip(places), vdim=logits._vdim, copies=True)


def roll(logits: LazyLogits, shifts: Any, dims: Any = None) -> Any:
    """Shift leading dimensions around."""
    if dims is None:
        raise NotRecorded
    places = [_lead_dim(logits, d) for d in ((dims,) if isinstance(dims, int) else dims)]
    return lead_view(logits, lambda t: t.roll(shifts, places), vdim=logits._vdim, copies=True)


def split(logits: LazyLogits, split_size: Any, dim: int = 0) -> Any:
    """Split a dimension into parts."""
    n = logits.shape[dim]
    if not isinstance(split_size, tuple | list):
        split_size = operator.index(split_size)
        if split_size < 0 or (split_size == 0 and n > 0):
            raise RuntimeError(f"split_size must be at least {min(n, 1)}; got {split_size}")
        step = max(1, split_size)
        sizes = [min(step, n - i) for i in range(0, n, step)] or [0]
    else:
        sizes = list(split_size)
        if sum(sizes) != n:
            raise RuntimeError(
                f"split_with_sizes expects split_sizes to sum exactly to {n}; got {sizes}"
            )
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(narrow(logits, dim, a, size) for a, size in zip(starts, sizes, strict=True))


def chunk(logits: LazyLogits, chunks: int, dim: int = 0) -> Any:
    """Split a dimension into about equal parts."""
    n, chunks = logits.shape[dim], operator.index(chunks)
    if chunks < 1:
        raise RuntimeError(f"chunk expects chunks to be greater than 0; got {chunks}")
    return split(logits, -(-n // chunks) if n else [0] * chunks, dim)


def tensor_split(logits: LazyLogits, indices: Any, dim: int = 0) -> Any:
    """Split a dimension at given places."""
    sizes = [len(t) for t in torch.arange(logits.shape[dim]).tensor_split(indices)]
    return split(logits, sizes, dim)


def unbind(logits: LazyLogits, dim: int = 0) -> Any:
    """Return the entries of a leading dimension."""
    return tuple(select(logits, dim, i) for i in range(logits.shape[dim]))


def cat(tensors: Any, dim: int = 0) -> Any:
    """Join lazy logits, or lazy logits and tensors, along any dimension."""
    parts = [t for t in tensors if t.numel() or t.dim() > 1]
    first = next((t for t in parts if isinstance(t, LazyLogits)), None)
    if first is None:
        raise NotRecorded
    n, vdim = first.dim(), first._vdim
    place = check_dim(dim, n)
    if any(t.dim() != n for t in parts):
        raise NotRecorded
    if any(isinstance(t, LazyLogits) and t._vdim != vdim for t in parts):
        raise NotRecorded
    dtype = first.dtype
    for t in tensors:
        dtype = torch.promote_types(dtype, t.dtype)
    if place == vdim:
        return _more_tokens(first, parts, dtype)
    nodes: list[Node] = []
    numbers, start = [], 0
    for t in parts:
        canonical = t.lead if isinstance(t, LazyLogits) else t.movedim(vdim, -1).shape[:-1]
        if isinstance(t, LazyLogits):
            nodes.append(t.part if t.dtype == dtype else _cast(t.part, dtype))
        else:
            nodes.append(_given(t, vdim, dtype))
        numbers.append(torch.arange(canonical.numel()).view(canonical) + start)
        start += canonical.numel()
    rows = torch.cat(numbers, place - (place > vdim))
    node = _joined(nodes)
    if not torch.equal(rows.reshape(-1), torch.arange(start)):
        node = node.take(rows.reshape(-1))
    shape = (*rows.shape[:vdim], node.width, *rows.shape[vdim:])
    # If it is built, the vocabulary is contiguous: torch makes a copy to flatten that, not a view.
    outer = [node.width * stride for stride in rows.contiguous().stride()]
    strides = (*outer[:vdim], 1, *outer[vdim:])
    return derived(first, node, shape, dtype, vdim=vdim, strides=strides)


def _more_tokens(first: LazyLogits, parts: list[Any], dtype: torch.dtype) -> Any:
    """Join along the vocabulary: further classes beside the tokens."""
    vdim, nodes = first._vdim, []
    for t in parts:
        lead = t.lead if isinstance(t, LazyLogits) else t.movedim(vdim, -1).shape[:-1]
        if lead != first.lead:
            raise NotRecorded
        if t.shape[vdim] == 0:
            continue
        node = t.part if isinstance(t, LazyLogits) else _given(t, vdim, dtype)
        nodes.append(_cast(node, dtype) if isinstance(t, LazyLogits) else node)
    if not nodes:
        raise NotRecorded
    width = sum(node.width for node in nodes)
    node = call(_beside, tuple(nodes), {}, first.lead.numel(), width)
    shape = (*first.lead[:vdim], width, *first.lead[vdim:])
    return derived(first, node, shape, dtype, vdim=vdim)


def _beside(*tiles: Tensor) -> Tensor:
    return torch.cat(tiles, 1)


def _joined(nodes: list[Node]) -> Node:
    """Join rows; rows of the same head become one selection of its rows."""
    first = nodes[0]
    if isinstance(first, Leaf) and all(n.key() == first.key() for n in nodes):
        return first.take(torch.arange(first.n_rows).repeat(len(nodes)))
    return Concat(tuple(nodes))


def _given(t: Tensor, vdim: int, dtype: torch.dtype) -> Node:
    return stamped(Dense.of(t.movedim(vdim, -1).to(dtype)))


def _widens(dtype: torch.dtype, to: torch.dtype) -> bool:
    return to.is_floating_point and torch.promote_types(dtype, to) == to


def _cast(node: Node, dtype: torch.dtype) -> Node:
    # A leaf computes in float32 or more: a wider dtype loses nothing, another must round.
    if isinstance(node, Leaf) and _widens(node.dtype, dtype):
        return node.cast(dtype)
    return call(Tensor.to, (node, dtype), {}, node.n_rows, node.width)


def stack(tensors: Any, dim: int = 0) -> Any:
    """Stack lazy logits along a new leading dimension."""
    parts = [t.unsqueeze(dim) for t in tensors]
    return cat(parts, check_dim(dim, parts[0].dim()))


def copied(
    logits: LazyLogits, *, memory_format: torch.memory_format = torch.preserve_format
) -> LazyLogits:
    """Return the same values with memory of their own."""
    strides = None
    if not logits.is_contiguous():
        strides = like_strided(torch.empty_like, logits, memory_format=memory_format)
    node, vdim = logits.part, logits._vdim
    return derived(logits, node, logits.shape, logits.dtype, vdim=vdim, strides=strides)


def contiguous(
    logits: LazyLogits, memory_format: torch.memory_format = torch.contiguous_format
) -> LazyLogits:
    """Return the logits, or a copy if their memory is not in order."""
    if memory_format is not torch.contiguous_format:
        raise NotRecorded
    if logits.is_contiguous():
        return logits
    return copied(logits, memory_format=memory_format)


def detach(logits: LazyLogits) -> LazyLogits:
    """Return the same values, cut from the graph."""
    with torch.no_grad():
        return derived(
            logits,
            logits.part,
            logits.shape,
            logits.dtype,
            vdim=logits._vdim,
            view=View(lambda t: t),
            strides=logits.stride(),
        )


def to(logits: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    """Convert to another dtype; another device builds the tensor."""
    probe = torch.empty(0, dtype=logits.dtype, device=logits.device)
    flags = [a for a in args if isinstance(a, bool)]  # non_blocking, copy
    copy = kwargs.get("copy", False) or (len(flags) > 1 and flags[1])
    clean = {k: v for k, v in kwargs.items() if k != "memory_format"}
    wanted = probe.to(*args, **clean)
    if wanted.device != logits.device:
        raise NotRecorded
    if wanted.dtype == logits.dtype:
        return copied(logits) if copy else logits
    return cast(logits, wanted.dtype)


def cast(logits: LazyLogits, dtype: torch.dtype) -> LazyLogits:
    """Convert to another dtype."""
    strides = None if logits.is_contiguous() else like_strided(torch.empty_like, logits)
    node, vdim = _cast(logits.part, dtype), logits._vdim
    return derived(logits, node, logits.shape, dtype, vdim=vdim, strides=strides)
