"""Changes of shape, type and place: the hidden states change, no logit is computed.

In:  logits (..., V), another shape, type or device.
Out: lazy logits; where the words would not stay last and whole, the tensor, with a warning.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from lmhead.logits.transposed import TransposedLogits
from lmhead.logits.unbuilt import Unbuilt

if TYPE_CHECKING:
    from typing_extensions import Self


class Shaped(Unbuilt):
    """The part of `LazyLogits` that has a tensor's ways with dimensions, types and devices."""

    # Leading dimensions --------------------------------------------------------------------------

    def view(self, *shape: Any) -> Any:
        """Reshape the leading dimensions; the last must stay V."""
        if len(shape) == 1 and isinstance(shape[0], torch.dtype):
            return self._build("view(dtype)").view(shape[0])
        return self.reshape(*shape)

    def reshape(self, *shape: Any) -> Any:
        """Reshape the leading dimensions; the last must stay V."""
        sizes = list(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
        vocab = self.shape[-1]
        if -1 in sizes:
            known = math.prod(s for s in sizes if s != -1)
            if known and self.numel() % known == 0:
                sizes[sizes.index(-1)] = self.numel() // known
        if math.prod(sizes) != self.numel():
            raise RuntimeError(f"shape {list(sizes)} is invalid for logits {tuple(self.shape)}")
        if not sizes or sizes[-1] != vocab:
            return self._build(f"reshape{tuple(shape)}").reshape(*shape)
        return self.map_rows(lambda h: h.reshape(*sizes[:-1], h.shape[-1]))

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        """Flatten leading dimensions."""
        start, end = start_dim % self.ndim, end_dim % self.ndim
        if end == self.ndim - 1 and start != end:
            return self._build("flatten() into the vocabulary").flatten(start_dim, end_dim)
        return self.map_rows(lambda h: h.flatten(start, end)) if start != end else self

    def unsqueeze(self, dim: int) -> Any:
        """A new leading dimension of size 1."""
        place = dim % (self.ndim + 1)
        if place == self.ndim:
            return self._build(f"unsqueeze({dim})").unsqueeze(dim)
        return self.map_rows(lambda h: h.unsqueeze(place))

    def squeeze(self, dim: int | None = None) -> Any:
        """Drop a leading dimension of size 1, or all of them."""
        if dim is None:
            lead = tuple(n for n in self._lead if n != 1)
            keeps_words = self.shape[-1] != 1
            return self.reshape(*lead, -1) if keeps_words else self._build("squeeze()").squeeze()
        place = dim % self.ndim
        if place == self.ndim - 1:
            return self._build(f"squeeze({dim})").squeeze(dim)
        return self.map_rows(lambda h: h.squeeze(place))

    def transpose(self, dim0: int, dim1: int) -> Any:
        """Swap leading dimensions, or (N, L, V) to (N, V, L) for `F.cross_entropy`."""
        places = list(range(self.ndim))
        places[dim0], places[dim1] = places[dim1], places[dim0]
        return self.permute(places)

    def permute(self, *dims: Any) -> Any:
        """Reorder leading dimensions, or (N, L, V) to (N, V, L) for `F.cross_entropy`."""
        given = dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims
        places = [d % self.ndim for d in given]
        if places == [0, 2, 1]:
            return TransposedLogits(self)
        if places[-1] != self.ndim - 1:
            return self._build("permute()").permute(places)
        return self.map_rows(lambda h: h.permute(places))

    def expand(self, *shape: Any) -> Any:
        """Broadcast leading dimensions."""
        sizes = tuple(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
        if sizes[-1] not in (-1, self.shape[-1]):
            return self._build(f"expand{sizes}").expand(sizes)
        return self.map_rows(lambda h: h.expand(*sizes[:-1], h.shape[-1]))

    # Types and places ----------------------------------------------------------------------------

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Another type, or another device (which moves the hidden states and the weight)."""
        wanted = torch.empty(0, dtype=self.dtype, device=self.device).to(*args, **kwargs)
        if wanted.device == self.device:
            return self if wanted.dtype == self.dtype else self._with(dtype=wanted.dtype)
        return self._map_all(lambda t: t.to(wanted.device))._with(dtype=wanted.dtype)

    def float(self) -> Self:
        """As float32."""
        return self.to(torch.float32)

    def double(self) -> Self:
        """As float64."""
        return self.to(torch.float64)

    def half(self) -> Self:
        """As float16."""
        return self.to(torch.float16)

    def bfloat16(self) -> Self:
        """As bfloat16."""
        return self.to(torch.bfloat16)

    def cpu(self) -> Self:
        """On the CPU."""
        return self.to("cpu")

    def requires_grad_(self, requires_grad: bool = True) -> NoReturn:  # noqa: ARG002
        """Not possible: logits are a result. Set it on the hidden states or the weight."""
        raise TypeError(
            "LazyLogits have no gradient of their own; call requires_grad_() on the hidden states "
            "or the weight, or use .materialize().requires_grad_()"
        )

    def contiguous(self, **_: Any) -> Self:
        """Itself."""
        return self

    def clone(self, **_: Any) -> Self:
        """Itself: nothing can write to it."""
        return self

    def detach(self) -> Self:
        """The same logits, cut from the graph."""
        return self._map_all(Tensor.detach)
