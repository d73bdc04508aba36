"""The door: what every public function checks of its arguments, once.

Each message names the argument, what it must be and what it was.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def check_hidden_and_weight(
    hidden: Tensor, weight: Tensor, *, names: tuple[str, str] = ("hidden", "weight")
) -> None:
    """hidden (..., D) and weight (V, D), floating, of one type and on one device."""
    hidden_name, weight_name = names
    for name, tensor in ((hidden_name, hidden), (weight_name, weight)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor; got {type(tensor).__name__}")
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must be of a floating type; got {tensor.dtype}")
    if weight.dim() != 2 or weight.shape[0] == 0:
        raise ValueError(
            f"{weight_name} must have shape (V, D) with V > 0; got {tuple(weight.shape)}"
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
    """hidden (..., D), floating; of the type and on the device of a head's parameter."""
    if not isinstance(hidden, Tensor):
        raise TypeError(f"hidden must be a torch.Tensor; got {type(hidden).__name__}")
    if not hidden.is_floating_point():
        raise TypeError(f"hidden must be of a floating type; got {hidden.dtype}")
    if hidden.dim() == 0 or hidden.shape[-1] != hidden_size:
        raise ValueError(f"hidden must have shape (..., {hidden_size}); got {tuple(hidden.shape)}")
    if like is None:
        return
    if hidden.dtype != like.dtype:
        raise TypeError(
            f"hidden and the head's weights must have the same dtype; "
            f"got {hidden.dtype} and {like.dtype}"
        )
    check_device("hidden", hidden, "the head's weights", like)


def check_device(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Two tensors on one device."""
    if tensor.device != other.device:
        raise ValueError(
            f"{name} and {other_name} must be on the same device; "
            f"got {tensor.device} and {other.device}"
        )


def check_vector(name: str, vector: Tensor | None, weight: Tensor) -> None:
    """A bias or a class weight: floating, (V,)."""
    check_entries(name, vector, weight.shape[0], weight)


def check_entries(name: str, vector: Tensor | None, size: int, like: Tensor) -> None:
    """A floating vector with one entry per word, or None."""
    if vector is None:
        return
    if not isinstance(vector, Tensor) or not vector.is_floating_point():
        kind = vector.dtype if isinstance(vector, Tensor) else type(vector).__name__
        raise TypeError(f"{name} must be a floating tensor; got {kind}")
    if vector.shape != (size,):
        raise ValueError(
            f"{name} must have shape ({size},), one entry per word; got {tuple(vector.shape)}"
        )
    check_device(name, vector, "weight", like)


def check_ids(name: str, ids: Tensor, vocab: int, *, ignore_index: int | None = None) -> None:
    """Word numbers: whole numbers in [0, V), or `ignore_index`."""
    check_id_type(name, ids)
    if ids.numel() == 0 or ids.device.type == "meta" or torch._C._are_functorch_transforms_active():
        return
    least, most = (int(end) for end in ids.aminmax())
    if least >= 0 and most < vocab:
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
    """Whole numbers."""
    if not isinstance(ids, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor of ids; got {type(ids).__name__}")
    if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
        raise TypeError(f"{name} must be whole numbers (torch.int64); got {ids.dtype}")


def check_number(
    name: str,
    value: Any,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    above: bool = False,
) -> None:
    """A finite number in [low, high], or (low, high] if `above`."""
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


def check_whole(name: str, value: Any, *, low: int, high: int | None = None) -> None:
    """A whole number in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number; got {type(value).__name__}")
    if value < low or (high is not None and value > high):
        wanted = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"{name} must be {wanted}; got {value}")


def check_map(softcap: float | None, scale: float) -> None:
    """The elementwise map of a head."""
    if softcap is not None:
        check_number("softcap", softcap, low=0.0, above=True)
    check_number("scale", scale)


def check_max_bytes(max_bytes: int | None) -> None:
    """The bound on temporary memory."""
    if max_bytes is not None:
        check_whole("max_bytes", max_bytes, low=1)
