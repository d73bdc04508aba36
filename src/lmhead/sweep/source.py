"""The source of logits: hidden states, weights, a bias, an elementwise map; and its products.

float32 and float64 tensors are multiplied as they are. Half precisions are converted tile by tile
and multiplied in float32: on a CPU without instructions for them that is several times faster than
torch's own half-precision product, and neither sums nor gradients are rounded to half precision.
The core's product on a tile unit multiplies converted bfloat16 numbers as fast as the unit can.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch
from torch import Tensor

from lmhead.scores import Rows
from lmhead.sweep import kernels
from lmhead.sweep.kernels import Pointwise
from lmhead.sweep.wide_gradients import converted

# Smaller products, or narrower ones, are as fast in torch.
_MIN_SIZE, _MIN_WIDTH = 2**25, 64


def product_(out: Tensor, a: Tensor, b: Tensor, *, add: bool = False) -> Tensor:
    """Set `out` to a @ b, or add a @ b to it: (M, K) and (K, N) give (M, N).

    Equivalent to: torch.addmm(out, a, b, beta=int(add), out=out)
    """
    if not _by_core(out, a, b):
        return out.addmm_(a, b) if add else torch.mm(a, b, out=out)
    transposed = not a.is_contiguous()
    stored = a.T if transposed else a
    kernels.compiled().product(stored, b, out, transposed, add, kernels.threads())
    return out


def add_selected_(out: Tensor, a: Tensor, b: Tensor, ids: Tensor) -> None:
    """Add a[ids].T @ b[ids] to out, without a copy of these rows where the core multiplies."""
    if _by_core(out, a.T, b):
        kernels.compiled().product(a, b, out, True, True, kernels.threads(), ids)
    else:
        product_(out, a.index_select(0, ids).T, b.index_select(0, ids), add=True)


def add_to_selected_(out: Tensor, a: Tensor, b: Tensor, ids: Tensor) -> None:
    """Add a[ids] @ b to out[ids], for distinct ids, without a copy where the core multiplies."""
    if _by_core(out, a, b):
        kernels.compiled().product(a, b, out, False, True, kernels.threads(), ids)
    else:
        part = out.new_empty(len(ids), out.shape[1])
        kernels.scatter_add_(out, ids, product_(part, a.index_select(0, ids), b))


def _by_core(out: Tensor, a: Tensor, b: Tensor) -> bool:
    """Return whether the core computes this product, and faster than torch."""
    if min(out.shape) < _MIN_WIDTH or out.numel() * len(b) < _MIN_SIZE:
        return False
    if not core_is_faster() or torch.get_float32_matmul_precision() != "highest":
        return False
    if not (a.is_contiguous() or a.T.is_contiguous()) or not b.is_contiguous():
        return False
    floats = all(t.dtype == torch.float32 for t in (out, a, b))
    return floats and out.is_contiguous() and kernels.readable(out, a, b)


@cache
def core_is_faster() -> bool:
    """Return whether large float32 products are computed by the core: `LMHEAD_PRODUCTS` decides.

    "core" and "torch" choose one. By default it is the core on AMD processors, where torch's
    library reaches five sixths of their speed and the core nine tenths, and on processors with a
    tile unit (Intel AMX), which multiplies parts of float32 numbers faster than vectors do.
    """
    core = kernels.core_with("product")
    choice = os.environ.get("LMHEAD_PRODUCTS", "")
    if choice not in ("", "core", "torch"):
        raise ValueError(f'LMHEAD_PRODUCTS must be "core" or "torch"; got {choice!r}')
    return core is not None and (choice == "core" or (choice == "" and core.fast_product()))


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type of products and sums: float32 for half precisions."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def unit_roundoff(stored: torch.dtype) -> float:
    """Return the relative error of one operation of a product of tensors stored in this type."""
    if stored == torch.float64:
        return math.ldexp(1.0, -53)
    if stored != torch.bfloat16 and torch.get_float32_matmul_precision() != "highest":
        return 2.0**-9  # the user allows products in bfloat16 or TF32
    return math.ldexp(1.0, -24)


def check_numbers(device: torch.device) -> None:
    """Validate that tensors of a device hold numbers: those on "meta" have a shape only."""
    if device.type == "meta":
        raise ValueError(
            "hidden and weight must hold numbers to ask about their logits; got meta tensors"
        )


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Disable autocast on a device, which must hold numbers."""
    check_numbers(device)
    return torch.autocast(device.type, enabled=False)


PAIR_BYTES = 2**26
"""Default bound on the temporary memory of single dot products."""
_LARGE = 1e30  # above this, a partial sum may overflow float32


@dataclass(frozen=True)
class Source:
    """z = pointwise(Σ_i hiddens[i] @ weights[i].T + bias), of shape (N, V), never built in full.

    More than one term means a low-rank delta: W + B·A is the terms (h, W) and (h @ A.T, B).

    Attributes:
        hiddens: (N, D_i) each.
        weights: (V, D_i) each.
        bias: (V,) or None; -inf masks a token.
        pointwise: the map from the linear layer to the logits.
        row_scale: (N,), positive: a last factor of each row, without a gradient; None for 1.
    """

    hiddens: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    bias: Tensor | None
    pointwise: Pointwise
    row_scale: Tensor | None = None

    def keep_masked(self) -> Source:
        """Return a source of the same logits whose map leaves a bias of -inf at -inf.

        A scale below 0 would turn it into +inf, one of 0 into a NaN: the sign, or the 0, goes to
        the hidden states and to the other entries of the bias.
        """
        if self.bias is None or self.pointwise.scale > 0:
            return self
        sign = -1.0 if self.pointwise.scale < 0 else 0.0
        scale = -self.pointwise.scale if sign else 1.0
        return Source(
            tuple(h * sign for h in self.hiddens),
            self.weights,
            torch.where(self.bias == -math.inf, -math.inf, self.bias * sign),
            replace(self.pointwise, scale=scale),
        )

    @property
    def rows(self) -> int:
        """N, the number of rows."""
        return self.hiddens[0].shape[0]

    @property
    def vocab(self) -> int:
        """V, the number of tokens."""
        return self.weights[0].shape[0]

    @property
    def hidden_size(self) -> int:
        """D, over all terms."""
        return sum(h.shape[1] for h in self.hiddens)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the products: float32 for half precisions."""
        return accumulation_dtype(self.hiddens[0].dtype)

    @property
    def device(self) -> torch.device:
        """The device of all tensors of the source."""
        return self.hiddens[0].device

    @property
    def converts(self) -> bool:
        """Whether tensors are stored in another type than that of the products."""
        return any(t.dtype != self.dtype for t in (*self.hiddens, *self.weights))

    def products(self) -> AbstractContextManager[None]:
        """Return the context for products of this source: without autocast."""
        return without_autocast(self.device)

    def take(self, rows: Rows) -> tuple[Tensor, ...]:
        """Return the hidden states of some rows, ready for products: (B, D_i) each."""
        return tuple(h[rows].detach().to(self.dtype) for h in self.hiddens)

    def select(self, rows: Rows) -> Source:
        """Return the source of some rows."""
        scale = None if self.row_scale is None else self.row_scale[rows]
        return replace(self, hiddens=tuple(h[rows] for h in self.hiddens), row_scale=scale)

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return hidden states, weights and bias, in the order of `with_tensors`."""
        return (*self.hiddens, *self.weights, self.bias)

    def without_tensors(self) -> Source:
        """Return the source without differentiable tensors, which autograd saves separately."""
        return self.with_tensors((None,) * (2 * len(self.hiddens) + 1))

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> Source:
        """Return the same source on other hidden states, weights and bias, in this order."""
        n = len(self.hiddens)
        hiddens, weights, bias = tuple(tensors[:n]), tuple(tensors[n : 2 * n]), tensors[2 * n]
        return Source(hiddens, weights, bias, self.pointwise, self.row_scale)  # type: ignore[arg-type]

    def weight_tile(self, term: int, lo: int, hi: int) -> Tensor:
        """Return rows [lo, hi) of a term's weight, ready for products: (hi - lo, D_i).

        Half precisions are converted into one buffer: the next call overwrites the tile.
        """
        return self._ready(self.weights[term][lo:hi])

    def weight_rows(self, term: int, ids: Tensor) -> Tensor:
        """Return chosen rows of a term's weight, ready for products: (K, D_i)."""
        return self._ready(self.weights[term].index_select(0, ids))

    def _ready(self, tile: Tensor) -> Tensor:
        if tile.dtype == self.dtype:
            return tile
        buffer = self.__dict__.get("_buffer")
        if buffer is None or buffer.numel() < tile.numel():
            buffer = torch.empty(tile.numel(), dtype=self.dtype, device=self.device)
            self.__dict__["_buffer"] = buffer  # reused for the life of the source, one sweep
        converted: Tensor = buffer[: tile.numel()].view(tile.shape)
        return converted.copy_(tile)

    def bias_tile(self, lo: int, hi: int) -> Tensor | None:
        """Return entries [lo, hi) of the bias, as a column: (hi - lo, 1)."""
        return None if self.bias is None else self.bias[lo:hi, None].to(self.dtype)

    def linear_tile(self, transposed: tuple[Tensor, ...], lo: int, hi: int, out: Tensor) -> Tensor:
        """Compute W[lo:hi] @ hidden.T, without bias and map, into `out` of shape (hi - lo, B).

        `transposed` are the hidden states as (D_i, B), contiguous, for a faster product.
        """
        for term, inputs in enumerate(transposed):
            product_(out, self.weight_tile(term, lo, hi), inputs, add=term > 0)
        return out

    def weight_ranges(self) -> list[tuple[int, int]]:
        """Return vocabulary ranges whose rows of the weight may be converted at once."""
        step = max(1, 2**22 // self.hidden_size) if self.converts else max(1, self.vocab)
        return [(lo, min(lo + step, self.vocab)) for lo in range(0, self.vocab, step)]

    def linear_rows(self, rows: Rows) -> Tensor:
        """Return hidden[rows] @ weight.T without bias and map, (B, V); no gradients."""
        hiddens = self.take(rows)
        x = hiddens[0].new_empty(hiddens[0].shape[0], self.vocab)
        with torch.no_grad(), self.products():
            for lo, hi in self.weight_ranges():
                full = hi - lo == self.vocab
                out = x if full else x.new_empty(x.shape[0], hi - lo)
                torch.mm(hiddens[0], self.weight_tile(0, lo, hi).T, out=out)
                for term in range(1, len(hiddens)):
                    out.addmm_(hiddens[term], self.weight_tile(term, lo, hi).T)
                if not full:
                    x[:, lo:hi] = out
        return x

    def dense(self) -> Tensor:
        """Return all logits, (N, V), with plain differentiable operations: the definition."""
        x = sum(
            (converted(h, self.dtype) @ converted(w, self.dtype).T)
            for h, w in zip(self.hiddens, self.weights, strict=True)
        )
        assert isinstance(x, Tensor)
        if self.bias is not None:
            x = x + converted(self.bias, self.dtype)
        z = self.pointwise(x)
        if self.bias is not None:
            z = z.masked_fill(self.bias == -math.inf, -math.inf)  # no gradient there
        return z if self.row_scale is None else z * self.row_scale[:, None]

    def pairs(self, rows: Tensor, ids: Tensor, *, max_bytes: int = PAIR_BYTES) -> Tensor:
        """Return the logits of single (row, token) pairs in float64: (M,) and (M,) give (M,).

        The sum runs in one order whatever the batch, so that equal rows of the weight tie.
        """
        x = torch.zeros(rows.shape, dtype=torch.float64, device=self.device)
        for hidden, weight in zip(self.hiddens, self.weights, strict=True):
            x += kernels.pair_products(hidden, weight, rows, ids, max_bytes)
        if self.bias is not None:
            x += self.bias[ids].double()
        self.pointwise.apply_(x)
        return x if self.row_scale is None else x.mul_(self.row_scale[rows])

    def float64_row(self) -> Tensor:
        """Return the float64 logits of all tokens of the only row, (V,), as `pairs` gives them."""
        x = self._row_products(torch.float64)
        if x is None or self.row_scale is not None:
            tokens = torch.arange(self.vocab, device=self.device)
            return self.pairs(torch.zeros_like(tokens), tokens)
        return self.finished(x)[0]

    def at(self, ids: Tensor) -> Tensor:
        """Return the logits of token ids (N, K) of each row, in float64: (N, K)."""
        rows = torch.arange(len(ids), device=ids.device)[:, None].expand_as(ids)
        return self.pairs(rows.reshape(-1), ids.reshape(-1)).reshape(ids.shape)

    @torch.no_grad()
    def row_logits(self) -> Tensor:
        """Return all logits (N, V), each row the same whatever other rows are present.

        The compiled core reads the weight once for all rows; otherwise it is read once per row.
        """
        z = self._row_products(torch.float32)
        if z is None:
            with self.products():
                rows = [self._row(row) for row in range(self.rows)]
            return torch.stack(rows) if rows else torch.empty(0, self.vocab, dtype=self.dtype)
        # Infinite, or so large that a partial sum may have overflowed; NaN fails the test.
        if z.numel() and not all(abs(float(end)) < _LARGE for end in z.aminmax()):
            large = (~(z.abs() < _LARGE).all(1)).nonzero()[:, 0]
            if (exact := self.select(large)._row_products(torch.float64)) is not None:
                z = z.double().index_copy_(0, large, exact)
        if self.bias is None and self.pointwise.is_identity and self.row_scale is None:
            return z.to(self.dtype)
        z = self.finished(z.double())
        return (z if self.row_scale is None else z.mul_(self.row_scale[:, None])).to(self.dtype)

    def finished(self, x: Tensor) -> Tensor:
        """Return float64 products (N, V) with bias and map, in place."""
        if self.bias is not None:
            x += self.bias.detach()
        return self.pointwise.apply_(x)

    def _row_products(self, dtype: torch.dtype) -> Tensor | None:
        """Return the products of all terms, (N, V), summed in a dtype; None without the core."""
        if self.dtype != torch.float32:
            return None
        pairs = zip(self.hiddens, self.weights, strict=True)
        terms = [kernels.row_logits(h, w, dtype=dtype) for h, w in pairs]
        products = [term for term in terms if term is not None]
        if len(products) != len(terms):
            return None
        if len(products) == 1:
            return products[0]
        return sum((term.double() for term in products[1:]), products[0].double())

    def _row(self, row: int) -> Tensor:
        transposed = tuple(h.T.contiguous() for h in self.take(slice(row, row + 1)))
        z = transposed[0].new_empty(self.vocab, 1)
        for lo, hi in self.weight_ranges():
            out = self.linear_tile(transposed, lo, hi, z[lo:hi])
            kernels.finish_(out, self.bias_tile(lo, hi), self.pointwise)
        return z[:, 0]

    @cached_property
    def has_nan(self) -> bool:
        """Whether a weight or the bias holds a NaN; hidden states are not checked."""
        tensors = (*self.weights, *(() if self.bias is None else (self.bias,)))
        return any(bool(part.detach().isnan().any()) for t in tensors for part in t.split(4096))

    @cached_property
    def token_norms(self) -> Tensor:
        """|w_v| summed over the terms, (V,), for the bounds below."""
        norms = torch.zeros(self.vocab, dtype=self.dtype, device=self.device)
        for lo in range(0, self.vocab, 4096):
            hi = min(lo + 4096, self.vocab)
            for term in range(len(self.weights)):
                norms[lo:hi] += kernels.row_norms(self.weights[term][lo:hi])
        return norms

    def error_bounds(self, hiddens: tuple[Tensor, ...], rows: Rows) -> tuple[Tensor, float, float]:
        """Return (b, c, d): a computed logit z errs by at most b[n] · |w_v| + c · |z| + d.

        `hiddens` are those of `rows`.

        A dot product of D terms, in any order, errs by at most γ |h| |w|, γ = D u / (1 - D u), with
        u the unit roundoff (Cauchy-Schwarz on Σ |h_i w_i|). The map stretches that by at most its
        Lipschitz constant and adds a few roundings of its own.
        """
        u = unit_roundoff(self.hiddens[0].dtype)
        d = self.hidden_size + 4
        gamma = d * u / max(1 - d * u, 0.5)
        # 1 % covers the rounding of the norms. Squares of small numbers need float64.
        norms = sum(torch.linalg.vector_norm(h, dim=1, dtype=torch.float64) for h in hiddens)
        assert isinstance(norms, Tensor)
        per_row = (norms * (1.01 * gamma * self.pointwise.lipschitz)).to(self.dtype)
        size = abs(self.pointwise.outer) if self.pointwise.bounded else abs(self.pointwise.shift)
        # Products, sums and bounds below the smallest normal number may underflow to 0; there are
        # six products for each on a tile unit.
        tiny = 16 * d * torch.finfo(self.dtype).tiny * max(1.0, self.pointwise.lipschitz)
        absolute = 8 * u * size + tiny
        if self.row_scale is not None:
            scale = self.row_scale[rows]
            per_row, absolute = per_row * scale, absolute * float(scale.max())
        return per_row, 10 * u, absolute
