"""Calls that run on the tensor: functions without a handler, and operators of the C++ core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_any, tree_leaves, tree_map

from lmhead.lazy import in_place, positions, routing
from lmhead.lazy import logits as lazy_logits
from lmhead.lazy.assignment import learned_while_detached, unknown_to_autograd
from lmhead.lazy.dense_logits import become_dense, build_with_graph, note_sharing
from lmhead.lazy.logits import LazyLogits
from lmhead.lazy.memory import share_memory
from lmhead.lazy.recording import sign

# What hands out memory, which may be written to without torch's knowledge.
_OUTSIDE = ("numpy", "__array__", "data_ptr", "__dlpack__", "untyped_storage", "storage",
            "_typed_storage")  # fmt: skip
_OUTSIDE_GETTERS = (Tensor.data.__get__,)  # type: ignore[attr-defined]


def on_tensors(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Build the tensors and run the function on them."""
    name = getattr(func, "__name__", "")
    writes = bool(args) and (in_place.is_in_place(name) or name == "__setitem__")
    learned = writes and torch.is_grad_enabled() and tree_any(_requires_grad, (args[1:], kwargs))
    silent = writes and isinstance(args[0], LazyLogits) and unknown_to_autograd(args[0])
    outside = name in _OUTSIDE or func in _OUTSIDE_GETTERS
    lazy: dict[int, tuple[LazyLogits, Tensor]] = {}

    def built(x: Any) -> Any:
        if not isinstance(x, LazyLogits):
            return x
        written = writes and x is args[0]
        if outside:
            _check_export(name, x, kwargs)
        if written:
            _check_write(name, x, learned=learned, silent=silent)
        if written and learned and not x.requires_grad:
            dense = build_with_graph(x, sign(func))
        else:
            no_graph = outside or (written and silent)
            dense = become_dense(x, sign(func), outside=no_graph, attach=attach or written)
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
            if not silent:
                positions.take_dense(args[0])
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


def _requires_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _check_write(name: str, logits: LazyLogits, *, learned: bool, silent: bool) -> None:
    """Refuse writes whose gradients would be lost."""
    if learned and silent:
        raise learned_while_detached()
    base = logits._shared
    attached = torch.is_grad_enabled() and logits.requires_grad
    if attached:
        positions.check_hooks(base, name)
    if (base.memory is not None and not base.constant and attached) or (learned and base.exposed):
        raise RuntimeError(
            f"{name} is not supported on lazy logits that require a gradient and were exported "
            "(data_ptr, numpy, .data); clone() them first"
        )


# For `dispatch`: copies, and views of everything.
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
            copied = first.part if first.requires_grad else first.part.frozen()
            made = lazy_logits.wrap(
                copied if name == "clone" else first.node,
                first.shape,
                first.dtype,
                first.device,
                first.max_bytes,
                vdim=first._vdim,
                strides=first.stride(),
                base=base,
                chain=chain,
            )
            made._shared.objects.pop(id(made))  # what it is in the graph, the caller decides
            return made

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
