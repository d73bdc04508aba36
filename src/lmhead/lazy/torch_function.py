"""What torch's functions do on lazy logits: the table from function to handler.

A function without an entry, or one whose handler raises `NotRecorded`, builds the tensor with a
`PerformanceWarning` and runs on it; the logits are a view of that tensor afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from types import FunctionType, GetSetDescriptorType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_any, tree_leaves, tree_map

from lmhead.checks import check_dim, eager
from lmhead.lazy import (
    bitmask,
    in_place,
    indexing,
    recording,
    reductions,
    routing,
    row_functions,
    torch_losses,
    views,
)
from lmhead.lazy import logits as lazy_logits
from lmhead.lazy.column import Column
from lmhead.lazy.dense_logits import become_dense, note_sharing
from lmhead.lazy.logits import (
    LazyLogits,
    derived,
    is_tensor_now,
    unknown_to_autograd,
)
from lmhead.lazy.memory import share_memory
from lmhead.lazy.program import Call, Dense
from lmhead.lazy.recording import NotRecorded, sign

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
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    for a in args:
        if isinstance(a, LazyLogits):
            lazy_logits.check_transform(a)
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
            return _on_tensors(func, args, kwargs)
        if handler is not None:
            return handler(*args, **kwargs)
        if func in recording.POINTWISE:
            return recording.record(func, args, dict(kwargs))
        name = getattr(func, "__name__", "")
        if in_place.is_in_place(name) and isinstance(args[0], LazyLogits):
            return in_place.run(name, args, kwargs)
    except NotRecorded:
        pass
    return _on_tensors(func, args, kwargs)


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


# What hands out memory, which may be written to without torch's knowledge.
_OUTSIDE = ("numpy", "__array__", "data_ptr", "__dlpack__", "untyped_storage", "storage",
            "_typed_storage")  # fmt: skip
_OUTSIDE_GETTERS = (Tensor.data.__get__,)  # type: ignore[attr-defined]


def _on_tensors(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Build the tensors and run the function on them."""
    name = getattr(func, "__name__", "")
    writes = bool(args) and (in_place.is_in_place(name) or name == "__setitem__")
    outside = name in _OUTSIDE or func in _OUTSIDE_GETTERS
    lazy: dict[int, tuple[LazyLogits, Tensor]] = {}

    def built(x: Any) -> Any:
        if not isinstance(x, LazyLogits):
            return x
        written = writes and x is args[0]
        if outside:
            _check_export(name, x, kwargs)
        if written:
            _check_write(name, x)
        no_graph = written and unknown_to_autograd(x)
        dense = become_dense(x, sign(func), outside=outside or no_graph, attach=attach or written)
        lazy[id(x)] = x, dense
        return dense

    transformed = torch._C._are_functorch_transforms_active()
    random = None if transformed else torch.get_rng_state()
    for attach in (False, True):
        if attach and random is not None:
            torch.set_rng_state(random)  # the same numbers again
        tensors = tree_map(built, args), tree_map(built, kwargs)
        if func in _OUTSIDE_GETTERS:
            return tensors[0][0].detach()  # as .data, and torch counts the changes made through it
        made = func(*tensors[0], **tensors[1])
        if writes and isinstance(args[0], LazyLogits):
            args[0]._shared.version += 1
            args[0]._shared.writes += 1
            return args[0] if isinstance(made, Tensor) else made
        if outside:
            break
        results = [t for t in tree_leaves(made) if type(t) is Tensor]
        shared = [x for x, t in lazy.values() if any(share_memory(r, t) for r in results)]
        again = [x for x in shared if not note_sharing(x)]
        if not again:
            break
    return made


def _check_export(name: str, logits: LazyLogits, kwargs: dict[str, Any]) -> None:
    """Refuse what torch refuses for tensors that require a gradient."""
    if not logits.requires_grad or kwargs.get("force"):
        return
    if name in ("numpy", "__array__") and torch.is_grad_enabled():
        raise RuntimeError(
            "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead."
        )
    if name == "__dlpack__":
        raise BufferError("Can't export tensors that require gradient, use tensor.detach()")


def _check_write(name: str, logits: LazyLogits) -> None:
    base = logits._shared
    if base.memory is not None and not base.constant and torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} is not supported on lazy logits that require a gradient and were exported "
            "(data_ptr, numpy, .data); clone() them first"
        )


def _grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `torch.autograd.grad`; answers must pass through lazy inputs, not by them."""
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


# Softmax -----------------------------------------------------------------------------------------


def _softmax(name: str, input: Any, dim: int | None = None, *rest: Any, dtype: Any = None) -> Any:
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


def _functional_softmax(
    name: str, input: Any, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None
) -> Any:
    return _softmax(name, input, dim, dtype=dtype)


def _softmin(input: Any, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    return _softmax("softmax", -input, dim, dtype=dtype)


# The rest ----------------------------------------------------------------------------------------


def _truth(logits: LazyLogits) -> bool:
    if logits.numel() != 1:
        raise RuntimeError("Boolean value of Tensor with more than one value is ambiguous")
    return bool(become_dense(logits, "bool()"))


def _requires_grad_(logits: LazyLogits, requires_grad: bool = True) -> Any:
    if requires_grad == logits.requires_grad:
        return logits
    raise RuntimeError(
        "lazy logits have no gradient of their own; call requires_grad_() on the hidden states or "
        "the weight, or use .materialize().requires_grad_()"
    )


def _attached(name: str) -> Callable[..., Any]:
    """Return `register_hook` or `retain_grad`: from then on, gradients pass through the object."""
    function = getattr(Tensor, name)

    def attach(logits: LazyLogits, *args: Any, **kwargs: Any) -> Any:
        if logits._passed and routing.can_bypass(logits):
            raise RuntimeError(
                f"{name}() must be called before lazy logits are used: gradients of results "
                "computed before do not pass through them"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return function(logits, *args, **kwargs)

    return attach


def _equal(a: Any, b: Any) -> bool:
    if a.shape != b.shape:
        return False
    return bool(reductions.reduce("all", a == b))


def _allclose(
    a: Any, b: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
) -> bool:
    close = torch.isclose(a, b, rtol=rtol, atol=atol, equal_nan=equal_nan)
    return bool(close.all())


def _broadcast_tensors(*tensors: Any) -> Any:
    if len(tensors) == 1 and not isinstance(tensors[0], Tensor):
        tensors = tuple(tensors[0])
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))  # type: ignore[no-untyped-call]
    return tuple(t.expand(shape) for t in tensors)


def _deepcopy(logits: LazyLogits, memo: dict[int, Any]) -> LazyLogits:
    if logits.requires_grad:
        raise RuntimeError(
            "Only Tensors created explicitly by the user (graph leaves) support the deepcopy "
            "protocol at the moment; detach() the logits first"
        )
    node = Dense.of(deepcopy(become_dense(logits, "deepcopy()"), memo))
    made = derived(logits, node, logits.shape, logits.dtype)
    memo[id(logits)] = made
    return made


def _equality(name: str) -> Callable[..., Any]:
    function = getattr(Tensor, name)

    def compare(a: Any, b: Any) -> Any:
        if not all(isinstance(x, Tensor | int | float | complex) for x in (a, b)):
            return NotImplemented
        return recording.record(function, (a, b), {})

    return compare


def _where(condition: Any, input: Any = None, other: Any = None) -> Any:
    if input is None:
        raise NotRecorded
    return recording.record(torch.where, (condition, input, other), {})


def _tensor_where(self: Any, condition: Any, other: Any) -> Any:
    return recording.record(torch.where, (condition, self, other), {})


def _same_lazy(logits: LazyLogits, **_: Any) -> LazyLogits:
    return logits


def _view_as(logits: Any, other: Any) -> Any:
    return logits.view(tuple(other.shape))


def _reshape_as(logits: Any, other: Any) -> Any:
    return logits.reshape(tuple(other.shape))


def _like(name: str) -> Callable[..., Any]:
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


def _new(name: str) -> Callable[..., Any]:
    """Return the method NAME, such as new_zeros: only dtype and device are used."""

    def made(logits: LazyLogits, *args: Any, **kwargs: Any) -> Any:
        like = torch.empty(0, dtype=logits.dtype, device=logits.device)
        return getattr(like, name)(*args, **kwargs)

    return made


def _cast_to(dtype: torch.dtype) -> Callable[..., Any]:
    def cast(logits: LazyLogits, **_: Any) -> LazyLogits:
        return logits if logits.dtype == dtype else views.cast(logits, dtype)

    return cast


def _type_as(logits: Any, other: Any) -> Any:
    if not isinstance(logits, LazyLogits):
        return logits.to(dtype=other.dtype, device=other.device)
    return views.to(logits, other.dtype)


def _type(logits: LazyLogits, dtype: Any = None, non_blocking: bool = False, **_: Any) -> Any:  # noqa: ARG001
    like = torch.empty(0, dtype=logits.dtype, device=logits.device)
    return like.type() if dtype is None else views.to(logits, like.type(dtype).dtype)


def _norm(
    logits: LazyLogits, p: Any = "fro", dim: Any = None, keepdim: bool = False, **kw: Any
) -> Any:
    kw = {k: v for k, v in kw.items() if v is not None}
    order = 2 if p in ("fro", None) else p
    return reductions.reduce("norm", logits, dim, keepdim, p=order, **kw)


def _linalg_norm(x: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, **kw: Any) -> Any:
    two = x.dim() == 2 if dim is None else isinstance(dim, tuple | list) and len(dim) == 2
    if ord is not None and (two or dim is None):
        raise NotRecorded  # of a matrix
    return _norm(x, 2 if ord is None else ord, dim, keepdim, **kw)


def _vector_norm(x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, **kw: Any) -> Any:
    return _norm(x, ord, dim, keepdim, **kw)


def _gather(logits: Any, dim: int, index: Tensor, **kw: Any) -> Any:
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


def _reduction(name: str) -> Callable[..., Any]:
    def handler(logits: Any, dim: Any = None, keepdim: bool = False, **kw: Any) -> Any:
        if not isinstance(logits, LazyLogits):
            raise NotRecorded
        if isinstance(dim, bool) and name in ("std", "var"):
            kw["unbiased"], dim = dim, None
        if isinstance(keepdim, bool) is False:
            raise NotRecorded
        return reductions.reduce(name, logits, dim, keepdim, **kw)

    return handler


def _argmax(name: str) -> Callable[..., Any]:
    def handler(logits: LazyLogits, dim: Any = None, keepdim: bool = False) -> Any:
        with torch.no_grad():
            return reductions.reduce(name, logits, dim, keepdim)

    return handler


def _std(name: str) -> Callable[..., Any]:
    plain = _reduction(name)

    def handler(logits: LazyLogits, dim: Any = None, *rest: Any, **kw: Any) -> Any:
        if rest:
            kw["unbiased"] = rest[0]
            if len(rest) > 1:
                kw["keepdim"] = rest[1]
        return plain(logits, dim, kw.pop("keepdim", False), **kw)

    return handler


HANDLERS: dict[Any, Callable[..., Any]] = {}


def _add(handler: Callable[..., Any], *names: str, modules: Any = (torch, Tensor)) -> None:
    for name in names:
        for module in modules:
            if hasattr(module, name):
                HANDLERS[getattr(module, name)] = handler


for _name in ("sum", "mean", "prod", "amax", "amin", "logsumexp", "any", "all", "count_nonzero",
              "nansum", "nanmean"):  # fmt: skip
    _add(_reduction(_name), _name)
_add(_reduction("logsumexp"), "logsumexp", modules=(torch.special,))
for _name in ("std", "var"):
    _add(_std(_name), _name)
for _name in ("argmax", "argmin"):
    _add(_argmax(_name), _name)
for _name in ("max", "min"):
    _add(partial(reductions.extreme, _name), _name)
_add(_norm, "norm")
_add(_vector_norm, "vector_norm", modules=(torch.linalg,))
_add(_linalg_norm, "norm", modules=(torch.linalg,))
_add(reductions.topk, "topk")
_add(_gather, "gather")
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
_add(_view_as, "view_as")
_add(_reshape_as, "reshape_as")
_add(lambda t, other: t.expand(tuple(other.shape)), "expand_as")
_add(_same_lazy, "cpu", "resolve_conj", "resolve_neg")
_add(_type_as, "type_as")
HANDLERS[Tensor.type] = _type
for _name, _dtype in (
    ("float", torch.float32), ("double", torch.float64), ("half", torch.float16),
    ("bfloat16", torch.bfloat16), ("long", torch.int64), ("int", torch.int32),
    ("bool", torch.bool), ("short", torch.int16),
):  # fmt: skip
    _add(_cast_to(_dtype), _name, modules=(Tensor,))
HANDLERS[Tensor.T.__get__] = lambda z: views.permute(z, list(reversed(range(z.dim()))))  # type: ignore[attr-defined]
HANDLERS[Tensor.mT.__get__] = lambda z: views.transpose(z, -2, -1)  # type: ignore[attr-defined]
HANDLERS[Tensor.__iter__] = lambda z: iter(views.unbind(z))
HANDLERS[Tensor.__getitem__] = indexing.getitem
HANDLERS[Tensor.__setitem__] = in_place.setitem
HANDLERS[Tensor.__bool__] = _truth
HANDLERS[Tensor.__eq__] = _equality("__eq__")
HANDLERS[Tensor.__ne__] = _equality("__ne__")
HANDLERS[Tensor.__deepcopy__] = _deepcopy
HANDLERS[Tensor.requires_grad.__set__] = _requires_grad_  # type: ignore[attr-defined]
HANDLERS[Tensor.requires_grad_] = _requires_grad_
for _name in ("register_hook", "retain_grad"):
    _add(_attached(_name), _name, modules=(Tensor,))
HANDLERS[Tensor.where] = _tensor_where
HANDLERS[Tensor.__pos__] = HANDLERS[torch.positive] = HANDLERS[Tensor.positive] = lambda z: z
HANDLERS[torch.where] = _where
HANDLERS[torch.equal] = HANDLERS[Tensor.equal] = _equal
HANDLERS[torch.allclose] = HANDLERS[Tensor.allclose] = _allclose
HANDLERS[torch.broadcast_tensors] = _broadcast_tensors
HANDLERS[torch.autograd.grad] = _grad
for _name in ("zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like",
              "empty_like"):  # fmt: skip
    _add(_like(_name), _name, modules=(torch,))
for _name in ("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"):
    _add(_new(_name), _name, modules=(Tensor,))

for _name in ("softmax", "log_softmax"):
    _add(partial(_softmax, _name), _name)
    _add(partial(_softmax, _name), _name, modules=(torch.special,))
    HANDLERS[getattr(F, _name)] = partial(_functional_softmax, _name)
HANDLERS[F.softmin] = _softmin

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
    in (views.__name__, reductions.__name__, indexing.__name__)
    and handler not in (views.cat, views.stack)
}

# Functions of the object itself, not of its values.
OF_THE_OBJECT = {
    LazyLogits.mask_tokens, Tensor.requires_grad_, Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
    Tensor.data.__set__, Tensor.register_hook, Tensor.retain_grad, torch.autograd.grad,  # type: ignore[attr-defined]
    *(getattr(Tensor, name) for name in (*in_place.REFUSED, "squeeze_", "unsqueeze_", "transpose_",
                                         "swapaxes_", "swapdims_", "t_")),
}  # fmt: skip

# Calls that did not come through Python ----------------------------------------------------------

_ALIASES = ("detach", "alias", "clone", "view_as", "lift_fresh")


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator of the C++ core: copies stay lazy, everything else builds the tensor."""
    name = func.overloadpacket.__name__
    first = args[0] if args else None
    if name in in_place.REFUSED and isinstance(first, LazyLogits):
        in_place.refused(name)(first)
    if name in _ALIASES and isinstance(first, LazyLogits) and len(args) == 1:
        with torch.no_grad():
            chain = () if name == "clone" else first._chain
            base = None if name == "clone" else first._shared
            return lazy_logits.wrap(
                first.part if name == "clone" else first.node,
                first.shape,
                first.dtype,
                first.device,
                first.max_bytes,
                vdim=first._vdim,
                strides=first.stride(),
                base=base,
                chain=chain,
            )

    def built(x: Any) -> Any:
        if not isinstance(x, LazyLogits):
            return x
        if x._level:
            raise lazy_logits.left_transform()
        x.check_position()
        with torch._C._DisableFuncTorch(), routing.autograd():
            return become_dense(x, f"{name}()", outside=True).detach()

    if not tree_any(lambda x: isinstance(x, LazyLogits), (args, kwargs)):
        return func(*args, **kwargs)
    return func(*tree_map(built, args), **tree_map(built, kwargs))


lazy_logits.HANDLER.append(handle)
lazy_logits.DISPATCHER.append(dispatch)
