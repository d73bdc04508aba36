"""Argument checks shared by all public functions, and `eager`, which disables `torch.compile`.

Each message names the argument, what it must be and what it was.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import wraps
from operator import index
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

# Torch can neither compare nor index with uint16, uint32 and uint64.
_ID_TYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

P = ParamSpec("P")
R = TypeVar("R")


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function excluded from compilation: see `torch.compiler.disable`.

    Does not import the compiler if it is not in use.
    """
    disabled: list[Any] = []

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not disabled:
            # A compiled function must not read `sys.modules`: all its keys would become guards.
            if not torch.compiler.is_compiling() and "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            disabled.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return disabled[0](*args, **kwargs)  # type: ignore[no-any-return]

    return call


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is plain strided memory whose numbers are its values.

    A subclass (DTensor, FakeTensor), a functorch wrapper, a lazily negated, conjugated or zero
    tensor and a sparse one are not.
    """
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor())
        and not is_functorch_wrapped_tensor(tensor)
    )


def is_dtensor(tensor: Any) -> bool:
    """Return whether a tensor is distributed over a device mesh."""
    module = sys.modules.get("torch.distributed.tensor")  # no DTensor exists before it is imported
    return module is not None and isinstance(tensor, module.DTensor)


def _is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor belongs to a FakeTensorMode: it has a shape, but no numbers."""
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and isinstance(tensor, module.FakeTensor)


def check_not_distributed(name: str, tensor: Tensor) -> None:
    """Validate that a tensor is not a `DTensor`."""
    if is_dtensor(tensor):
        raise TypeError(
            f"{name} must be a plain tensor, the same on every rank; got a DTensor: pass "
            f"{name}.full_tensor()"
        )


def check_memory(name: str, tensor: Tensor) -> None:
    """Validate that the storage of a tensor holds all of its entries.

    It does not after `untyped_storage().resize_(0)`, with which sharded training frees a weight.
    Torch's own operations may crash on such a tensor.
    """
    if tensor.is_nested or tensor.layout is not torch.strided:
        kind = "a nested tensor" if tensor.is_nested else str(tensor.layout)
        raise TypeError(f"{name} must be a dense tensor; got {kind}")
    if _is_fake(tensor):
        raise TypeError(f"{name} must hold numbers; got a FakeTensor, which has a shape only")
    if tensor._is_zerotensor():
        raise ValueError(f"{name} must have memory; it is a ZeroTensor, which has none")
    if not is_plain(tensor) or tensor.device.type == "meta":
        return
    if not has_memory(tensor):
        held, needed = tensor.untyped_storage().nbytes(), _bytes_needed(tensor)
        raise ValueError(
            f"{name} must have memory for its shape {tuple(tensor.shape)}, {needed} bytes; its "
            f"storage was freed, shrunk (to {held} bytes) or never allocated"
        )


def has_memory(tensor: Tensor) -> bool:
    """Return whether the storage of a plain tensor holds all of its entries."""
    needed = _bytes_needed(tensor)
    held = tensor.untyped_storage().nbytes() >= needed and tensor.data_ptr() != 0
    return held or needed == 0


def _bytes_needed(tensor: Tensor) -> int:
    """Return the size of a storage that holds all entries of a tensor."""
    if 0 in tensor.shape:
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in steps)
    return int((last + 1) * tensor.element_size())


def check_hidden_and_weight(
    hidden: Tensor, weight: Tensor, *, names: tuple[str, str] = ("hidden", "weight")
) -> None:
    """Validate hidden (..., D) and weight (V, D): floating, one dtype, one device."""
    hidden_name, weight_name = names
    for name, tensor in ((hidden_name, hidden), (weight_name, weight)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor; got {type(tensor).__name__}")
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must be of a floating type; got {tensor.dtype}")
        check_memory(name, tensor)
    if weight.dim() != 2 or 0 in weight.shape:
        raise ValueError(
            f"{weight_name} must have shape (V, D) with V > 0 and D > 0; got {tuple(weight.shape)}"
        )
    if hidden.dim() == 0 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{hidden_name} must have shape (..., {weight.shape[1]}), the hidden size of "
            f"{weight_name} {tuple(weight.shape)}; got {tuple(hidden.shape)}"
        )
    if hidden.dtype != weight.dtype:
        raise TypeError(
            f"{hidden_name} and {weight_name} must have the same dtype; "
            f"got {hidden.dtype} and {weight.dtype}"
        )
    check_device(hidden_name, hidden, weight_name, weight)


def check_hidden(hidden: Tensor, hidden_size: int, like: Tensor | None) -> None:
    """Validate hidden (..., D): floating, with the dtype and device of the head."""
    if not isinstance(hidden, Tensor):
        raise TypeError(f"hidden must be a torch.Tensor; got {type(hidden).__name__}")
    if not hidden.is_floating_point():
        raise TypeError(f"hidden must be of a floating type; got {hidden.dtype}")
    if hidden.dim() == 0 or hidden.shape[-1] != hidden_size:
        raise ValueError(f"hidden must have shape (..., {hidden_size}); got {tuple(hidden.shape)}")
    check_memory("hidden", hidden)
    if like is None:
        return
    check_memory("the head's weight", like)
    if hidden.dtype != like.dtype:
        raise TypeError(
            f"hidden and the head's weights must have the same dtype; "
            f"got {hidden.dtype} and {like.dtype}"
        )
    check_device("hidden", hidden, "the head's weights", like)


def check_device(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Validate that two tensors are on one device, and both a `DTensor` if the first is."""
    if is_dtensor(tensor) and not is_dtensor(other):
        raise TypeError(
            f"{name} must be a plain tensor, as {other_name} is; got a DTensor: distribute both, "
            f"or pass {name}.full_tensor()"
        )
    if tensor.device != other.device:
        raise ValueError(
            f"{name} and {other_name} must be on the same device; "
            f"got {tensor.device} and {other.device}"
        )


def check_vector(name: str, vector: Tensor | None, weight: Tensor) -> None:
    """Validate a bias or class weight: floating, (V,)."""
    check_entries(name, vector, weight.shape[0], weight)


def check_entries(name: str, vector: Tensor | None, size: int, like: Tensor) -> None:
    """Validate a floating vector with one entry per token, or None."""
    if vector is None:
        return
    if not isinstance(vector, Tensor) or not vector.is_floating_point():
        kind = vector.dtype if isinstance(vector, Tensor) else type(vector).__name__
        raise TypeError(f"{name} must be a floating tensor; got {kind}")
    if vector.shape != (size,):
        raise ValueError(
            f"{name} must have shape ({size},), one entry per token; got {tuple(vector.shape)}"
        )
    check_memory(name, vector)
    if name != "bias":  # a bias may be sharded like the weight
        check_not_distributed(name, vector)
    check_device(name, vector, "weight", like)


def check_ids(name: str, ids: Tensor, vocab: int, *, ignore_index: int | None = None) -> None:
    """Validate token ids: integers in [0, V), or `ignore_index`."""
    check_id_type(name, ids)
    if ids.numel() == 0 or ids.device.type == "meta" or torch._C._are_functorch_transforms_active():
        return
    smallest, largest = (int(end) for end in ids.aminmax())
    if smallest >= 0 and largest < vocab:
        return
    wrong = (ids < 0) | (ids >= vocab)
    if ignore_index is not None:
        wrong &= ids != ignore_index
    if bool(wrong.any()):
        where = wrong.nonzero()[0].tolist()
        value = int(ids[tuple(where)])
        index = where[0] if len(where) == 1 else tuple(where)
        allowed = "" if ignore_index is None else " or ignore_index"
        raise ValueError(f"{name} must be in [0, {vocab}){allowed}; got {value} at index {index}")


def check_id_type(name: str, ids: Tensor) -> None:
    """Validate that a tensor holds integers."""
    if not isinstance(ids, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor of ids; got {type(ids).__name__}")
    check_not_distributed(name, ids)
    if ids.dtype not in _ID_TYPES:
        raise TypeError(f"{name} must be integers (torch.int64); got {ids.dtype}")
    if ids.is_neg():  # torch's own indexing ignores the sign of such views
        raise ValueError(f"{name} must not be a lazily negated view; call resolve_neg() on it")
    check_memory(name, ids)


def check_number(
    name: str,
    value: Any,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    above: bool = False,
) -> None:
    """Validate a finite number in [low, high], or (low, high] if `above`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number; got {type(value).__name__}")
    inside = (low < value if above else low <= value) and value <= high and math.isfinite(value)
    if not inside:
        if high < math.inf:
            wanted = f"in {'(' if above else '['}{low:g}, {high:g}]"
        elif low > -math.inf:
            wanted = f"{'above' if above else 'at least'} {low:g}"
        else:
            wanted = "finite"
        raise ValueError(f"{name} must be {wanted}; got {value}")


def check_integer(name: str, value: Any, *, low: int, high: int | None = None) -> None:
    """Validate an integer in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer; got {type(value).__name__}")
    if value < low or (high is not None and value > high):
        wanted = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"{name} must be {wanted}; got {value}")


def check_dim(dim: Any, n: int) -> int:
    """Return the place of a dimension among n, counted from the end if negative, or raise."""
    place: int = index(dim)
    low, high = min(-n, -1), max(n - 1, 0)
    if not low <= place <= high:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{low}, {high}], but got {place})"
        )
    return place % max(n, 1)


def check_num_items(value: Any) -> None:
    """Validate the divisor of a mean: None, or a finite number >= 0, or a tensor with one."""
    if value is None:
        return
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex() or value.dtype == torch.bool:
            raise ValueError(
                f"num_items must be one number; got {value.dtype}, shape {tuple(value.shape)}"
            )
        if value.device.type != "cpu" or torch._C._are_functorch_transforms_active():
            return  # reading it would wait for the device
        value = value.item()
    check_number("num_items", value, low=0)


def check_map(softcap: float | None, scale: float) -> None:
    """Validate the softcap and scale of a head."""
    if softcap is not None:
        check_number("softcap", softcap, low=0.0, above=True)
    check_number("scale", scale)


def check_max_bytes(max_bytes: int | None) -> None:
    """Validate the bound on temporary memory."""
    if max_bytes is not None:
        check_integer("max_bytes", max_bytes, low=1)
