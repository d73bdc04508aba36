"""Handlers of torch's functions that need a few lines: softmax, norms, comparisons, casts, ...

Those of one kind are in `views`, `reductions`, `row_functions`, `in_place` and others; the table is
in `torch_function`.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from lmhead.checks import check_dim
from lmhead.lazy import positions, recording, reductions, routing, row_functions, views
from lmhead.lazy.dense_logits import become_dense
from lmhead.lazy.logits import Base, LazyLogits, derived, wrap
from lmhead.lazy.program import Call, Dense, Node
from lmhead.lazy.recording import NotRecorded


def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `torch.autograd.grad`; answers must pass through lazy inputs, not by them."""
    for z in tree_leaves((outputs, args, kwargs)):
        if isinstance(z, LazyLogits):
            positions.update(z)
    for z in [inputs] if isinstance(inputs, Tensor) else inputs:
        if isinstance(z, LazyLogits) and kwargs.get("create_graph"):
            raise RuntimeError(
                "torch.autograd.grad(..., create_graph=True) with respect to lazy logits is not "
                "supported; use dense logits: logits.materialize()"
            )
        if isinstance(z, LazyLogits) and routing.can_bypass(z):
            raise RuntimeError(
                "torch.autograd.grad with respect to lazy logits needs logits.retain_grad() before "
                "the loss is computed, or dense logits: logits.materialize()"
            )
    with torch._C.DisableTorchFunctionSubclass():
        return torch.autograd.grad(outputs, inputs, *args, **kwargs)


def softmax(name: str, input: Any, dim: int | None = None, *rest: Any, dtype: Any = None) -> Any:
    """Return torch.softmax or log_softmax over the vocabulary, recorded."""
    dtype = rest[-1] if rest and isinstance(rest[-1], torch.dtype) else dtype
    if dim is None:
        dim = F._get_softmax_dim(name, input.dim(), 3)  # type: ignore[attr-defined]
    if not reductions.dims_of(input, dim).vocab:
        raise NotRecorded
    node = input.part
    # Autocast decides by the function.
    result = getattr(torch, name)(torch.ones(1, dtype=input.dtype), 0, dtype=dtype).dtype
    known = routing.form(node)
    if known is not None and known.kind == "log_probs" and name == "log_softmax":
        node = views._cast(known.leaf, result)
    elif result != input.dtype:
        node = views._cast(node, result)
    made = Call(getattr(torch, name), (node,), {"dim": -1}, node.n_rows, node.width)
    return derived(input, made, input.shape, result, vdim=input._vdim)


def functional_softmax(
    name: str, input: Any, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None
) -> Any:
    """Return F.softmax or F.log_softmax."""
    return softmax(name, input, dim, dtype=dtype)


def softmin(input: Any, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    """Return F.softmin."""
    return softmax("softmax", -input, dim, dtype=dtype)


def truth(logits: LazyLogits) -> bool:
    """Return bool(logits) of one entry."""
    if logits.numel() != 1:
        raise RuntimeError("Boolean value of Tensor with more than one value is ambiguous")
    return bool(become_dense(logits, "bool()"))


def requires_grad_(logits: LazyLogits, requires_grad: bool = True) -> Any:
    """Make constants a leaf of the graph: what is computed from them is built."""
    if requires_grad == logits.requires_grad:
        return logits
    if not requires_grad or routing.differentiable([logits.node]):
        raise RuntimeError(
            "lazy logits require a gradient if what is behind them does; call requires_grad_() on "
            "the hidden states or the weight, or use .materialize().requires_grad_()"
        )
    logits._live = None
    with torch._C.DisableTorchFunctionSubclass():
        return logits.requires_grad_()


def attached(name: str) -> Callable[..., Any]:
    """Return `register_hook` or `retain_grad`: from then on, gradients pass through the object."""
    function = getattr(Tensor, name)

    def attach(logits: LazyLogits, *args: Any, **kwargs: Any) -> Any:
        positions.before_hooks(logits, name)
        with torch._C.DisableTorchFunctionSubclass():
            made = function(logits, *args, **kwargs)
        positions.after_hooks(logits)
        return made

    return attach


def equal(a: Any, b: Any) -> bool:
    """Return torch.equal."""
    if a.shape != b.shape:
        return False
    return bool(reductions.reduce("all", a == b))


def allclose(
    a: Any, b: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
) -> bool:
    """Return torch.allclose."""
    close = torch.isclose(a, b, rtol=rtol, atol=atol, equal_nan=equal_nan)
    return bool(close.all())


def broadcast_tensors(*tensors: Any) -> Any:
    """Return torch.broadcast_tensors."""
    if len(tensors) == 1 and not isinstance(tensors[0], Tensor):
        tensors = tuple(tensors[0])
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))  # type: ignore[no-untyped-call]
    return tuple(t.expand(shape) for t in tensors)


def deep_copied(logits: LazyLogits, memo: dict[int, Any]) -> LazyLogits:
    """Return a copy of constants; builds them."""
    if logits.requires_grad:
        raise RuntimeError(
            "Only Tensors created explicitly by the user (graph leaves) support the deepcopy "
            "protocol at the moment; detach() the logits first"
        )
    base, dense = logits._shared, become_dense(logits, "deepcopy()")
    if base.memory is None:  # inside a transform of torch.func
        node: Node = Dense.of(deepcopy(dense, memo).movedim(logits._vdim, -1))
        made = derived(logits, node, logits.shape, logits.dtype, vdim=logits._vdim)
    else:
        # Of the rows that were built; each view in a copied list may add some.
        node = base.memory.read(base.program.frozen(), None, constant=True, copy=True)
        copy = memo.setdefault(id(base), Base(node, base.lead))
        copy.program, copy.version = node, copy.version + 1
        for view in logits._chain:
            node = view.of(node)
        made = wrap(
            node,
            logits.shape,
            logits.dtype,
            logits.device,
            logits.max_bytes,
            vdim=logits._vdim,
            strides=logits.stride(),
            base=copy,
            chain=logits._chain,
        )
    memo[id(logits)] = made
    return made


def equality(name: str) -> Callable[..., Any]:
    """Return == or !=; other objects are compared by Python."""
    function = getattr(Tensor, name)

    def compare(a: Any, b: Any) -> Any:
        if not all(isinstance(x, Tensor | int | float | complex) for x in (a, b)):
            return NotImplemented
        return recording.record(function, (a, b), {})

    return compare


def where(condition: Any, input: Any = None, other: Any = None) -> Any:
    """Return torch.where of three arguments."""
    if input is None:
        raise NotRecorded
    return recording.record(torch.where, (condition, input, other), {})


def tensor_where(self: Any, condition: Any, other: Any) -> Any:
    """Return Tensor.where."""
    return recording.record(torch.where, (condition, self, other), {})


def unchanged(logits: LazyLogits, **_: Any) -> LazyLogits:
    """Return the logits themselves."""
    return logits


def view_as(logits: Any, other: Any) -> Any:
    """Return Tensor.view_as."""
    return logits.view(tuple(other.shape))


def reshape_as(logits: Any, other: Any) -> Any:
    """Return Tensor.reshape_as."""
    return logits.reshape(tuple(other.shape))


def like(name: str) -> Callable[..., Any]:
    """Return `torch.NAME`, such as zeros_like, for lazy logits: only their shape is used."""
    function = getattr(torch, name)

    def made(logits: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(logits, LazyLogits):
            raise NotRecorded
        kwargs.setdefault("dtype", logits.dtype)
        kwargs.setdefault("device", logits.device)
        with torch._C.DisableTorchFunctionSubclass(), _disable_current_modes():
            shape = torch.empty_strided(logits.shape, logits.stride(), device="meta")
        return function(shape, *args, **kwargs)

    return made


def new(name: str) -> Callable[..., Any]:
    """Return the method NAME, such as new_zeros: only dtype and device are used."""

    def made(logits: LazyLogits, *args: Any, **kwargs: Any) -> Any:
        like = torch.empty(0, dtype=logits.dtype, device=logits.device)
        return getattr(like, name)(*args, **kwargs)

    return made


def cast_to(dtype: torch.dtype) -> Callable[..., Any]:
    """Return the method that converts to a dtype, such as float."""

    def cast(logits: LazyLogits, **_: Any) -> LazyLogits:
        return logits if logits.dtype == dtype else views.cast(logits, dtype)

    return cast


def type_as(logits: Any, other: Any) -> Any:
    """Return Tensor.type_as."""
    if not isinstance(logits, LazyLogits):
        return logits.to(dtype=other.dtype, device=other.device)
    return views.to(logits, other.dtype)


def type_(logits: LazyLogits, dtype: Any = None, non_blocking: bool = False, **_: Any) -> Any:  # noqa: ARG001
    """Return the name of the type, or the logits in another."""
    like = torch.empty(0, dtype=logits.dtype, device=logits.device)
    return like.type() if dtype is None else views.to(logits, like.type(dtype).dtype)


def norm(
    logits: LazyLogits, p: Any = "fro", dim: Any = None, keepdim: bool = False, **kw: Any
) -> Any:
    """Return torch.norm."""
    kw = {k: v for k, v in kw.items() if v is not None}
    order = 2 if p in ("fro", None) else p
    return reductions.reduce("norm", logits, dim, keepdim, p=order, **kw)


def linalg_norm(x: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, **kw: Any) -> Any:
    """Return torch.linalg.norm of vectors."""
    two = x.dim() == 2 if dim is None else isinstance(dim, tuple | list) and len(dim) == 2
    if ord is not None and (two or dim is None):
        raise NotRecorded  # of a matrix
    return norm(x, 2 if ord is None else ord, dim, keepdim, **kw)


def vector_norm(x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, **kw: Any) -> Any:
    """Return torch.linalg.vector_norm."""
    return norm(x, ord, dim, keepdim, **kw)


def gather(logits: Any, dim: int, index: Tensor, **kw: Any) -> Any:
    """Return torch.gather, over the vocabulary or over leading dimensions."""
    if not isinstance(logits, LazyLogits):
        raise NotRecorded
    if check_dim(dim, logits.dim()) != logits._vdim:
        return row_functions.gather_rows(logits, dim, index)
    if index.dim() == logits.dim() and any(
        index.shape[d] < logits.shape[d] for d in range(logits.dim()) if d != logits._vdim
    ):
        within = (slice(0, n) for n in index.shape)
        part = tuple(slice(None) if d == logits._vdim else s for d, s in enumerate(within))
        logits = logits[part]
    return reductions.gather(logits, dim, index, **kw)


def reduction(name: str) -> Callable[..., Any]:
    """Return torch.NAME, such as sum, for lazy logits."""

    def handler(logits: Any, dim: Any = None, keepdim: bool = False, **kw: Any) -> Any:
        if not isinstance(logits, LazyLogits):
            raise NotRecorded
        if isinstance(dim, bool) and name in ("std", "var"):
            kw["unbiased"], dim = dim, None
        if isinstance(keepdim, bool) is False:
            raise NotRecorded
        return reductions.reduce(name, logits, dim, keepdim, **kw)

    return handler


def argmax(name: str) -> Callable[..., Any]:
    """Return torch.argmax or argmin, without gradients."""

    def handler(logits: LazyLogits, dim: Any = None, keepdim: bool = False) -> Any:
        with torch.no_grad():
            return reductions.reduce(name, logits, dim, keepdim)

    return handler


def std(name: str) -> Callable[..., Any]:
    """Return torch.std or var, whose second argument by position may be `unbiased`."""
    plain = reduction(name)

    def handler(logits: LazyLogits, dim: Any = None, *rest: Any, **kw: Any) -> Any:
        if rest:
            kw["unbiased"] = rest[0]
            if len(rest) > 1:
                kw["keepdim"] = rest[1]
        return plain(logits, dim, kw.pop("keepdim", False), **kw)

    return handler
