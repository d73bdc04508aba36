"""What lazy logits are made of, what they look like, and the tensor when it has to be built.

In:  hidden states (..., D), the rows of a weight (V, D), a bias, an elementwise map.
Out: shape and type as of a tensor; a `Source` for sweeps; all of (..., V), with a warning.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from lmhead import checks
from lmhead.errors import PerformanceWarning
from lmhead.logits.rows import Rows, SweptRows
from lmhead.sweep import GradFilter, Pointwise, Questions, Source
from lmhead.sweep.explain import explain

if TYPE_CHECKING:
    from typing_extensions import Self

Kind = Literal["logits", "log_probs", "probs"]


class Screen(Protocol):
    """Something that finds the best words without reading all of the weight: see `screen`."""

    def decide(self, source: Source, k: int) -> tuple[Tensor, Tensor] | None:
        """Values (N, k) in float64 and ids (N, k), the same as a sweep; None if it cannot."""


class Unbuilt:
    """Logits (..., V) as the tensors behind them; see `LazyLogits`."""

    def __init__(
        self,
        hiddens: tuple[Tensor, ...],
        weights: tuple[Tensor, ...],
        bias: Tensor | None,
        pointwise: Pointwise,
        *,
        dtype: torch.dtype,
        kind: Kind = "logits",
        row_shift: Tensor | None = None,
        grad_filter: GradFilter | None = None,
        max_bytes: int | None = None,
        screen: Screen | None = None,
    ) -> None:
        self._hiddens, self._weights, self._bias = hiddens, weights, bias
        self._screen = screen
        self._pointwise, self._dtype, self._kind = pointwise, dtype, kind
        self._row_shift, self._grad_filter, self._max_bytes = row_shift, grad_filter, max_bytes
        self._dense: Tensor | None = None

    def _fields(self) -> dict[str, Any]:
        """What it is made of, as the constructor takes it."""
        return {
            "hiddens": self._hiddens,
            "weights": self._weights,
            "bias": self._bias,
            "pointwise": self._pointwise,
            "dtype": self._dtype,
            "kind": self._kind,
            "row_shift": self._row_shift,
            "grad_filter": self._grad_filter,
            "max_bytes": self._max_bytes,
            "screen": self._screen,
        }

    def _with(self, **changes: Any) -> Self:
        """The same logits but for some of the fields."""
        return type(self)(**(self._fields() | changes))

    # What it looks like --------------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        """(..., V)."""
        return torch.Size((*self._hiddens[0].shape[:-1], self._weights[0].shape[0]))

    @property
    def dtype(self) -> torch.dtype:
        """The type that the logits would have; products of half types are made in float32."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Where the hidden states are."""
        return self._hiddens[0].device

    @property
    def requires_grad(self) -> bool:
        """Whether any tensor behind the logits wants a gradient."""
        behind = (*self._hiddens, *self._weights, self._bias, self._row_shift)
        return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in behind)

    @property
    def ndim(self) -> int:
        """Number of dimensions, V included."""
        return len(self.shape)

    def dim(self) -> int:
        """Number of dimensions, V included."""
        return self.ndim

    ndimension = dim

    def size(self, dim: int | None = None) -> Any:
        """The shape, or one entry of it."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """How many logits there would be."""
        return self.shape.numel()

    def is_floating_point(self) -> bool:
        """True."""
        return True

    @property
    def is_cuda(self) -> bool:
        """Whether the hidden states are on a CUDA device."""
        return self.device.type == "cuda"

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        name = {"logits": "", "log_probs": ", log_softmax", "probs": ", softmax"}[self._kind]
        shape = tuple(self.shape)
        return f"{type(self).__name__}(shape={shape}, dtype={self.dtype}{name}, not computed)"

    def explain(self) -> str:
        """What a question will cost, before it is asked: products, tiles, bytes."""
        questions = Questions(self.source(), max_bytes=self._max_bytes)
        return explain(repr(self), questions, self.dtype.itemsize)

    # What is behind it ---------------------------------------------------------------------------

    def source(self) -> Source:
        """The logits as rows (N, V), for a sweep; the row shift is left out."""
        flat = tuple(h.reshape(-1, h.shape[-1]) for h in self._hiddens)
        return Source(flat, self._weights, self._bias, self._pointwise)

    def rows(self) -> Rows:
        """The logits as rows (N, V), for decoding: no gradients; the row shift is left out."""
        return SweptRows(self._map_all(Tensor.detach).source())

    @property
    def _lead(self) -> torch.Size:
        return self.shape[:-1]

    def _shift(self, rows: Tensor) -> Tensor:
        """Row values (...) or (..., K) of logits, after the row shift."""
        if self._row_shift is None:
            return rows
        return rows - (self._row_shift if rows.dim() == self.ndim else self._row_shift[..., 0])

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Change the leading dimensions; `change` is applied to (..., D) and (..., 1) tensors."""
        shift = None if self._row_shift is None else change(self._row_shift)
        return self._with(hiddens=tuple(change(h) for h in self._hiddens), row_shift=shift)

    def _map_all(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Apply `change` to every tensor behind the logits."""
        return self.map_rows(change)._with(
            weights=tuple(map(change, self._weights)),
            bias=None if self._bias is None else change(self._bias),
        )

    # Building it ---------------------------------------------------------------------------------

    def materialize(self) -> Tensor:
        """Build the whole tensor, (..., V). Warns once with its size."""
        return self._build("materialize()")

    def _build(self, what: str) -> Tensor:
        if self._dense is None:
            size = self.numel() * self.dtype.itemsize
            warnings.warn(
                f"{what} builds all logits: {tuple(self.shape)} {self.dtype}, "
                f"{size / 2**20:,.1f} MiB",
                PerformanceWarning,
                stacklevel=_frames_to_the_caller(),
            )
            self._dense = self._whole().to(self.dtype)
        return self._dense

    def _whole(self) -> Tensor:
        """All entries, (..., V), with plain differentiable operations."""
        z = self.source().dense().reshape(self.shape)
        if self._kind == "log_probs":
            return z.log_softmax(-1)
        if self._kind == "probs":
            return z.softmax(-1)
        return z if self._row_shift is None else z - self._row_shift


def _frames_to_the_caller() -> int:
    """How many frames up the first line is that belongs neither to lmhead nor to torch."""
    ours = tuple(str(Path(module.__file__ or "").parent) for module in (torch, checks))
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(ours):
        level, frame = level + 1, frame.f_back
    return level
