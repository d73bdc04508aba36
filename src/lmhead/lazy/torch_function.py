"""What torch's functions do on lazy logits: the table from function to handler.

A function without an entry, or one whose handler raises `NotRecorded`, builds the tensor with a
`PerformanceWarning` and runs on it; the logits are a view of that tensor afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType, GetSetDescriptorType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lmhead.checks import eager
from lmhead.lazy import (
    bitmask,
    handlers,
    in_place,
    indexing,
    positions,
    recording,
    reductions,
    row_functions,
    torch_losses,
    views,
)
from lmhead.lazy import logits as lazy_logits
from lmhead.lazy.column import Column
from lmhead.lazy.dense_calls import dispatch, on_tensors
from lmhead.lazy.logits import LazyLogits, is_tensor_now
from lmhead.lazy.recording import NotRecorded

# Attributes that read entries; all others say how the object looks, or belong to autograd.
_OF_ENTRIES = {"data", "real", "imag", "T", "mT", "H", "mH"}
_PLAIN_METHODS = [
    "dim", "ndimension", "size", "numel", "nelement", "element_size", "is_floating_point",
    "is_complex", "is_signed", "is_conj", "is_neg", "is_inference", "is_contiguous", "stride",
    "storage_offset", "get_device", "__len__", "backward", "_is_view", "is_same_size", "is_set_to",
    "is_pinned", "is_shared", "is_distributed", "register_post_accumulate_grad_hook", "__hash__",
    "__format__",
]  # fmt: skip

# What reads the object itself.
PLAIN: set[Any] = {getattr(Tensor, name) for name in _PLAIN_METHODS} | {
    getattr(member, access)
    for name in dir(Tensor)
    if isinstance(member := getattr(Tensor, name, None), GetSetDescriptorType)
    and name not in _OF_ENTRIES
    for access in ("__get__", "__set__", "__delete__")
}
PLAIN |= {
    torch.is_floating_point, torch.is_complex, torch.numel, torch.is_tensor, torch.result_type,
    torch.autograd.backward, torch.is_signed, torch.is_inference, torch.is_conj, torch.is_neg,
}  # fmt: skip


@eager
def handle(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one of torch's functions where some argument is lazy logits."""
    handler = HANDLERS.get(func)
    reads = handler is None and func in PLAIN
    if reads and args and type(args[0]) is LazyLogits and not args[0]._level:
        if args[0]._stale or args[0]._shared.shared:
            positions.update(args[0])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    for a in args:
        if isinstance(a, LazyLogits):
            lazy_logits.check_transform(a)
            if a._stale or a._shared.shared:
                positions.update(a)
        elif isinstance(a, Column):
            args = tuple([x.plain() if isinstance(x, Column) else x for x in args])
    known = handler is not None or func in recording.POINTWISE
    if kwargs and known and not isinstance(func, FunctionType):
        kwargs = {_NUMPY_NAMES.get(name, name): value for name, value in kwargs.items()}
    if not args and "input" in kwargs and func is not torch.where:
        args = (kwargs.pop("input"),)
    if kwargs and handler in KEYWORDS:
        args, kwargs = _renamed(args, kwargs, KEYWORDS[handler])
    if handler in FIRST_LAZY and not isinstance(args[0], LazyLogits):
        handler = None
    if handler is None and func in PLAIN:
        for a in tree_leaves((args, kwargs)):
            if isinstance(a, LazyLogits):
                positions.update(a)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if kwargs.get("out") is not None:
        return _into(func, args, kwargs)
    kwargs.pop("out", None)
    built = False
    for a in args:
        if isinstance(a, LazyLogits):
            lazy_logits.build_foreign(a)
            built = built or is_tensor_now(a)
    try:
        if built and func not in OF_THE_OBJECT:
            return on_tensors(func, args, kwargs)
        if handler is not None:
            return handler(*args, **kwargs)
        if func in recording.POINTWISE:
            return recording.record(func, args, dict(kwargs))
        name = getattr(func, "__name__", "")
        if args and in_place.is_in_place(name) and isinstance(args[0], LazyLogits):
            return in_place.run(name, args, kwargs)
    except NotRecorded:
        pass
    return on_tensors(func, args, kwargs)


# Keywords of NumPy that torch's compiled functions accept as well.
_NUMPY_NAMES = {"axis": "dim", "keepdims": "keepdim", "x": "input", "a": "input", "x1": "input",
                "x2": "other"}  # fmt: skip


def _renamed(
    args: tuple[Any, ...], kwargs: dict[str, Any], names: dict[str, str | None]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with torch's keywords as our handlers name them."""
    for keyword in [k for k in kwargs if k in names]:
        name, value = names[keyword], kwargs.pop(keyword)
        if name is None:
            args = (*args, value)
        else:
            kwargs[name] = value
    return args, kwargs


def _into(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function with `out=`."""
    out = kwargs.pop("out")
    given = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)]
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        raise RuntimeError(
            f"{func.__name__}(): functions with out=... arguments don't support automatic "
            "differentiation, but one of the arguments requires grad."
        )
    made = func(*args, **kwargs)
    if isinstance(out, Tensor):
        return _put(out, made)
    done = map(_put, out, made)
    return type(made)(*done) if hasattr(made, "_fields") else tuple(done)


def _put(out: Tensor, value: Any) -> Tensor:
    if not torch.can_cast(value.dtype, out.dtype):
        raise RuntimeError(
            f"result type {value.dtype} can't be cast to the desired output type {out.dtype}"
        )
    if not isinstance(out, LazyLogits) and out.shape != value.shape:
        out.resize_(value.shape)
    return out.copy_(value)


HANDLERS: dict[Any, Callable[..., Any]] = {}


def _add(handler: Callable[..., Any], *names: str, modules: Any = (torch, Tensor)) -> None:
    for name in names:
        for module in modules:
            if hasattr(module, name):
                HANDLERS[getattr(module, name)] = handler


for _name in ("sum", "mean", "prod", "amax", "amin", "logsumexp", "any", "all", "count_nonzero",
              "nansum", "nanmean"):  # fmt: skip
    _add(handlers.reduction(_name), _name)
_add(handlers.reduction("logsumexp"), "logsumexp", modules=(torch.special,))
for _name in ("std", "var"):
    _add(handlers.std(_name), _name)
for _name in ("argmax", "argmin"):
    _add(handlers.argmax(_name), _name)
for _name in ("max", "min"):
    _add(partial(reductions.extreme, _name), _name)
_add(handlers.norm, "norm")
_add(handlers.vector_norm, "vector_norm", modules=(torch.linalg,))
_add(handlers.linalg_norm, "norm", modules=(torch.linalg,))
_add(reductions.topk, "topk")
_add(handlers.gather, "gather")
for _name in ("median", "nanmedian", "mode"):
    _add(row_functions.order_statistic(_name), _name)
_add(row_functions.kthvalue, "kthvalue")
for _name in ("quantile", "nanquantile"):
    _add(row_functions.quantile(_name), _name)
_add(row_functions.aminmax, "aminmax")
_add(row_functions.with_mean("std"), "std_mean")
_add(row_functions.with_mean("var"), "var_mean")
_add(row_functions.tile, "tile")
_add(row_functions.vstack, "vstack", "row_stack", modules=(torch,))
_add(row_functions.hstack, "hstack", modules=(torch,))
HANDLERS[F.normalize] = row_functions.normalize
_add(row_functions.cosine_similarity, "cosine_similarity", modules=(torch, F))
HANDLERS[F.dropout] = row_functions.dropout
_add(reductions.take_along_dim, "take_along_dim")
_add(reductions.multinomial, "multinomial")

for _name, _view in (
    ("view", views.view), ("reshape", views.reshape), ("flatten", views.flatten),
    ("unflatten", views.unflatten), ("unsqueeze", views.unsqueeze), ("squeeze", views.squeeze),
    ("permute", views.permute), ("transpose", views.transpose), ("swapaxes", views.transpose),
    ("swapdims", views.transpose), ("movedim", views.movedim), ("moveaxis", views.movedim),
    ("expand", views.expand), ("broadcast_to", views.expand), ("repeat", views.repeat),
    ("repeat_interleave", views.repeat_interleave), ("select", views.select),
    ("narrow", views.narrow), ("index_select", views.index_select), ("flip", views.flip),
    ("roll", views.roll), ("split", views.split), ("split_with_sizes", views.split),
    ("chunk", views.chunk), ("tensor_split", views.tensor_split), ("unbind", views.unbind),
    ("clone", views.copied), ("contiguous", views.contiguous),
    ("detach", views.detach), ("to", views.to),
):  # fmt: skip
    _add(_view, _name)
_add(views.cat, "cat", "concat", "concatenate", modules=(torch,))
_add(views.stack, "stack", modules=(torch,))
_add(handlers.view_as, "view_as")
_add(handlers.reshape_as, "reshape_as")
_add(lambda t, other: t.expand(tuple(other.shape)), "expand_as")
_add(handlers.unchanged, "cpu", "resolve_conj", "resolve_neg")
_add(handlers.type_as, "type_as")
HANDLERS[Tensor.type] = handlers.type_
for _name, _dtype in (
    ("float", torch.float32), ("double", torch.float64), ("half", torch.float16),
    ("bfloat16", torch.bfloat16), ("long", torch.int64), ("int", torch.int32),
    ("bool", torch.bool), ("short", torch.int16),
):  # fmt: skip
    _add(handlers.cast_to(_dtype), _name, modules=(Tensor,))
HANDLERS[Tensor.T.__get__] = lambda z: views.permute(z, list(reversed(range(z.dim()))))  # type: ignore[attr-defined]
HANDLERS[Tensor.mT.__get__] = lambda z: views.transpose(z, -2, -1)  # type: ignore[attr-defined]
HANDLERS[Tensor.__iter__] = lambda z: iter(views.unbind(z))
HANDLERS[Tensor.__getitem__] = indexing.getitem
HANDLERS[Tensor.__setitem__] = in_place.setitem
HANDLERS[Tensor.__bool__] = handlers.truth
HANDLERS[Tensor.__eq__] = handlers.equality("__eq__")
HANDLERS[Tensor.__ne__] = handlers.equality("__ne__")
HANDLERS[Tensor.__deepcopy__] = handlers.deep_copied
HANDLERS[Tensor.requires_grad.__set__] = handlers.requires_grad_  # type: ignore[attr-defined]
HANDLERS[Tensor.requires_grad_] = handlers.requires_grad_
for _name in ("register_hook", "retain_grad"):
    _add(handlers.attached(_name), _name, modules=(Tensor,))
HANDLERS[Tensor.where] = handlers.tensor_where
HANDLERS[Tensor.__pos__] = HANDLERS[torch.positive] = HANDLERS[Tensor.positive] = lambda z: z
HANDLERS[torch.where] = handlers.where
HANDLERS[torch.equal] = HANDLERS[Tensor.equal] = handlers.equal
HANDLERS[torch.allclose] = HANDLERS[Tensor.allclose] = handlers.allclose
HANDLERS[torch.broadcast_tensors] = handlers.broadcast_tensors
HANDLERS[torch.autograd.grad] = handlers.grad
for _name in ("zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like",
              "empty_like"):  # fmt: skip
    _add(handlers.like(_name), _name, modules=(torch,))
for _name in ("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"):
    _add(handlers.new(_name), _name, modules=(Tensor,))

for _name in ("softmax", "log_softmax"):
    _add(partial(handlers.softmax, _name), _name)
    _add(partial(handlers.softmax, _name), _name, modules=(torch.special,))
    HANDLERS[getattr(F, _name)] = partial(handlers.functional_softmax, _name)
HANDLERS[F.softmin] = handlers.softmin

HANDLERS[F.cross_entropy] = torch_losses.cross_entropy
HANDLERS[F.nll_loss] = torch_losses.nll_loss
HANDLERS[F.kl_div] = torch_losses.kl_div
for _name in torch_losses.POINTWISE_LOSSES:
    HANDLERS[getattr(F, _name)] = torch_losses.pointwise_loss(_name)

_add(in_place.scatter, "scatter")
_add(in_place.scatter_add, "scatter_add")
_add(in_place.index_fill, "index_fill")
_add(in_place.by_copy(in_place.scatter), "scatter_", modules=(Tensor,))
_add(in_place.by_copy(in_place.scatter_add), "scatter_add_", modules=(Tensor,))
_add(in_place.by_copy(in_place.index_fill), "index_fill_", modules=(Tensor,))
_add(in_place.masked_fill_in_place, "masked_fill_", modules=(Tensor,))
_add(in_place.fill, "fill_", modules=(Tensor,))
_add(partial(in_place.fill, value=0.0), "zero_", modules=(Tensor,))
_add(in_place.copy, "copy_", modules=(Tensor,))
for _name, _view in (
    ("squeeze_", views.squeeze), ("unsqueeze_", views.unsqueeze), ("transpose_", views.transpose),
    ("swapaxes_", views.transpose), ("swapdims_", views.transpose),
    ("t_", lambda z: views.transpose(z, 0, 1) if z.dim() == 2 else z),
):  # fmt: skip
    _add(in_place.shape_in_place(_view), _name, modules=(Tensor,))
for _name in in_place.REFUSED:
    _add(in_place.refused(_name), _name)
HANDLERS[Tensor.data.__set__] = in_place.set_data  # type: ignore[attr-defined]
HANDLERS[LazyLogits.mask_tokens] = bitmask.mask_tokens


# Keywords of torch's functions that the handlers call otherwise; None for the next position.
KEYWORDS: dict[Any, dict[str, str | None]] = {
    views.permute: {"dims": None}, views.flip: {"dims": None}, views.expand: {"size": None},
    views.repeat: {"repeats": None}, views.view: {"size": None}, views.reshape: {"shape": None},
    views.transpose: {"axis0": "dim0", "axis1": "dim1"}, views.split: {"split_sizes": "split_size",
    "split_size_or_sections": "split_size"}, views.tensor_split: {"sections": "indices",
    "indices_or_sections": "indices"},
}  # fmt: skip

# These handlers are methods of lazy logits; other arguments may be lazy in the rest.
FIRST_LAZY = {
    handler
    for handler in HANDLERS.values()
    if getattr(handler, "__module__", None)
    in {m.__name__ for m in (views, reductions, indexing, row_functions, in_place)}
    and handler
    not in (
        views.cat,
        views.stack,
        row_functions.vstack,
        row_functions.hstack,
        row_functions.cosine_similarity,
        in_place.copy,
        in_place.set_data,
    )
}

# Functions of the object itself, not of its values.
OF_THE_OBJECT = {
    LazyLogits.mask_tokens, Tensor.requires_grad_, Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
    Tensor.data.__set__, Tensor.register_hook, Tensor.retain_grad, torch.autograd.grad,  # type: ignore[attr-defined]
    *(getattr(Tensor, name) for name in (*in_place.REFUSED, "squeeze_", "unsqueeze_", "transpose_",
                                         "swapaxes_", "swapdims_", "t_")),
}  # fmt: skip

lazy_logits.HANDLER.append(handle)
lazy_logits.DISPATCHER.append(dispatch)
