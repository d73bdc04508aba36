"""The steps on a tile of logits: in the compiled core where possible, else as torch operations.

A tile `z` is (tokens, rows), see `questions.Plan`. Quantities per row (maximum, sum) are vectors
over rows. Masked tokens have z = -inf; `FLOOR` replaces -inf where 0 · -inf would make a NaN:
exp(FLOOR) is 0 in every type.

`LMHEAD_NATIVE=off` disables the compiled core, `LMHEAD_NATIVE=require` makes its absence an error.
The torch operations give the same answers, slower. The core works on pointers: every call goes
through `core`, which refuses a tensor that is not plain memory; callers test `readable` first, and
use torch operations if it is False.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import wraps
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lmhead.checks import check_memory, is_plain
from lmhead.sweep.cache_size import cache_bytes


def readable(*tensors: Tensor | None) -> bool:
    """Return whether the core can read each tensor by a pointer: see `checks.is_plain`.

    Raises:
        ValueError: a tensor's storage is smaller than its shape: see `checks.check_memory`.
    """
    for t in tensors:
        if t is None:
            continue
        if not (t.is_cpu and is_plain(t)):
            return False
        pointer, size = t.data_ptr(), t.element_size()
        if pointer % size:
            return False
        # Called for each tensor of every call of the core: the usual case must be fast.
        if (
            t.is_nested
            or not t.is_contiguous()
            or pointer == 0
            or t.untyped_storage().nbytes() < t.storage_offset() * size + t.nbytes
        ):
            check_memory("a tensor", t)
    return True


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of the core: raise TypeError for tensors that are not plain memory."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            for t in value if isinstance(value, list | tuple) else (value,):
                if isinstance(t, Tensor) and not readable(t):
                    raise TypeError(
                        f"the compiled core reads plain CPU tensors; got {type(t).__name__}, "
                        f"layout {t.layout}, device {t.device}"
                    )
        return function(*args, **kwargs)

    return call


def _load() -> ModuleType | None:
    choice = os.environ.get("LMHEAD_NATIVE", "")
    if choice == "off":
        return None
    try:
        from lmhead import _native
    except ImportError:
        if choice == "require":
            raise
        return None
    checked = ModuleType("lmhead.sweep.kernels.core", _native.__doc__)
    for name in dir(_native):
        if not name.startswith("_"):
            value = getattr(_native, name)
            setattr(checked, name, _checked(value) if callable(value) else value)
    return checked


core: ModuleType | None = _load()
# The kernels work on vectors of rows; with fewer rows than lanes torch is as fast.
MIN_ROWS = 8
_STORED = (torch.float32, torch.bfloat16, torch.float16)


def compiled() -> ModuleType:
    """Return the core; raise if it is missing."""
    if core is None:
        raise RuntimeError("this needs the compiled core")
    return core


def core_with(name: str) -> ModuleType | None:
    """Return the core if it has this function; a core built from older sources may not."""
    return core if hasattr(core, name) else None


def for_tile(z: Tensor, *others: Tensor | None) -> ModuleType | None:
    """Return the core if it can work on this tile, and read the other tensors."""
    fits = z.dtype == torch.float32 and z.shape[1] >= MIN_ROWS and readable(z, *others)
    return core if fits else None


def for_pairs(hidden: Tensor, weight: Tensor) -> ModuleType | None:
    """Return the core if it can compute single dot products of these tensors."""
    fits = (
        hidden.dtype == weight.dtype
        and hidden.dtype in _STORED
        and readable(hidden, weight)
        and hidden.is_contiguous()
        and weight.is_contiguous()
    )
    return core if fits else None


def row_logits(
    hidden: Tensor,
    weight: Tensor,
    *,
    dtype: torch.dtype = torch.float64,
    square: Tensor | None = None,
) -> Tensor | None:
    """Return hidden @ weight.T of (B, D) and (V, D).

    The weight is read once, whatever B is; every entry is the same to the last bit for any batch,
    number of threads and instruction set. None if the core cannot do it.

    Args:
        hidden: float32, bfloat16 or float16.
        weight: likewise, not necessarily of the same type.
        dtype: of the sums and the result: float64, in the order of `pairs`, or float32, twice as
            fast for 8 rows; their error is at most 2^-17 |w| |h|, usually half that of torch.mm.
        square: (1,), receives the largest |w|² to within 2^-17 of it; only with float32.
    """
    if core is None or hidden.dtype not in _STORED or weight.dtype not in _STORED:
        return None
    if not readable(hidden, weight) or not weight.is_contiguous():
        return None
    out = torch.empty(len(hidden), len(weight), dtype=dtype, device=hidden.device)
    rows = hidden.detach().float().contiguous()
    core.row_logits(rows, weight.detach(), out, threads(), square)
    return out


_several_threads = False  # whether the core has run on more than one thread


def threads() -> int:
    """Return the number of threads that torch uses."""
    global _several_threads
    n = torch.get_num_threads()
    _several_threads = _several_threads or n > 1
    return n


def _after_fork() -> None:
    """Use one thread in a forked process: OpenMP would wait for threads of the parent."""
    if _several_threads:
        torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def map_tuple(p: Pointwise) -> tuple[float, float, bool, float, float]:
    """Return an elementwise map as the tuple that the core expects."""
    return p.scale, p.shift, p.bounded, p.outer, p.outer_shift


def views(*tensors: Tensor) -> tuple[Any, ...]:
    """Return NumPy arrays on the tensors' memory (on a copy if not contiguous).

    The bindings of the core accept these faster than tensors.

    Raises:
        TypeError: a tensor is not plain memory: see `readable`.
    """
    if not readable(*tensors):
        raise TypeError("the compiled core reads plain CPU tensors")
    return arrays(*tensors)


def arrays(*tensors: Tensor) -> tuple[Any, ...]:
    """Return what `views` does, of tensors that are known to be plain memory."""
    return tuple(t.contiguous().numpy() for t in tensors)


@dataclass(frozen=True)
class Pointwise:
    """The elementwise map from the linear layer x = hidden @ weight.T + bias to the logits z.

    z = scale · x + shift, or z = outer · tanh(scale · x + shift) + outer_shift if `bounded`. That
    covers what models do (a scale, a temperature, soft-capping) and composes:
    `(logits / 30).tanh() * 30 / temperature` is one map.

    A masked token (x = -inf) remains masked under tanh.

    >>> Pointwise.of(softcap=30.0, scale=0.5)(torch.tensor([0.0, 1000.0, -math.inf]))
    tensor([ 0., 30., -inf])
    """

    scale: float = 1.0
    shift: float = 0.0
    bounded: bool = False
    outer: float = 1.0
    outer_shift: float = 0.0

    @classmethod
    def of(cls, *, softcap: float | None = None, scale: float = 1.0) -> Pointwise:
        """Return the map of a head: z = softcap · tanh(scale · x / softcap), or scale · x."""
        if softcap is None:
            return IDENTITY if scale == 1.0 else cls(scale=scale)
        return cls(scale=scale / softcap, bounded=True, outer=softcap)

    @property
    def is_identity(self) -> bool:
        """Whether z = x."""
        return self is IDENTITY or self == IDENTITY

    @property
    def lipschitz(self) -> float:
        """The largest |dz/dx|."""
        return abs(self.scale * self.outer)

    def times(self, factor: float) -> Pointwise:
        """Return the map followed by a multiplication."""
        if self.bounded and factor == 0.0:
            return Pointwise(scale=0.0)
        if self.bounded:
            return replace(self, outer=self.outer * factor, outer_shift=self.outer_shift * factor)
        return replace(self, scale=self.scale * factor, shift=self.shift * factor)

    def plus(self, term: float) -> Pointwise:
        """Return the map followed by an addition."""
        if self.bounded:
            return replace(self, outer_shift=self.outer_shift + term)
        return replace(self, shift=self.shift + term)

    def tanh(self) -> Pointwise | None:
        """Return the map followed by tanh, or None: a map can hold one tanh only."""
        return None if self.bounded else replace(self, bounded=True)

    def __call__(self, x: Tensor) -> Tensor:
        """Return z for x, as a new tensor, differentiable."""
        if self.is_identity:
            return x
        z = x * self.scale + self.shift
        if self.bounded:
            z = (self.outer * z.tanh() + self.outer_shift).masked_fill(x == -math.inf, -math.inf)
        return z

    def apply_(self, x: Tensor) -> Tensor:
        """Compute z from x in place. With soft-capping it needs one mask of x's shape."""
        if self.is_identity:
            return x
        masked = x == -math.inf if self.bounded else None
        if self.scale != 1.0:
            x.mul_(self.scale)
        if self.shift != 0.0:
            x.add_(self.shift)
        if masked is not None:
            x.tanh_().mul_(self.outer)
            if self.outer_shift != 0.0:
                x.add_(self.outer_shift)
            x.masked_fill_(masked, -math.inf)
        return x

    def slope(self, z: Tensor, out: Tensor) -> Tensor:
        """Compute dz/dx of a bounded map from z into `out`; 0 for masked tokens."""
        torch.sub(z, self.outer_shift, out=out)
        # 1 - tanh², with tanh = (z - outer_shift) / outer; -inf gives 0.
        out.div_(self.outer).square_().neg_().add_(1.0).clamp_(min=0.0)
        return out.mul_(self.scale * self.outer)


IDENTITY = Pointwise()
FLOOR = -1.0e4


class Softmax(NamedTuple):
    """The running softmax of each row: maximum m, s = Σ exp(z - m), t = Σ exp(z - m)(z - m).

    The sums are in float64: a long tail of small terms would be lost in float32.
    """

    m: Tensor
    s: Tensor
    t: Any  # None where the entropy is not asked for

    @classmethod
    def start(cls, n_rows: int, *, entropy: bool, like: Tensor) -> Softmax:
        """Return the state before the first tile."""
        m = like.new_full((n_rows,), -math.inf)
        s, t = torch.zeros(2, n_rows, dtype=torch.float64, device=like.device)
        return cls(m, s, t if entropy else None)

    @property
    def lse(self) -> Tensor:
        """Log Σ exp z in float64, so that lse - z is accurate for a token with p near 1."""
        return self.m.double() + self.s.log()

    @property
    def lse_parts(self) -> Tensor:
        """The lse and its rounding error, (2, rows): for log p of float64 logits."""
        m, log_s, lse = self.m.double(), self.s.log(), self.lse
        part = lse - m
        return torch.stack([lse, ((m - (lse - part)) + (log_s - part)).nan_to_num_(0.0, 0.0, 0.0)])

    @property
    def entropy(self) -> Tensor:
        """Log s - t / s in float64: no cancellation of large numbers."""
        entropy: Tensor = self.s.log() - self.t / self.s
        return entropy


class DivergenceKind(Protocol):
    """A kind of divergence: see `divergence_terms.Kind`."""

    @property
    def name(self) -> str:
        """One of kl, reverse_kl, jsd and tvd."""

    @property
    def beta(self) -> float:
        """The weight of p in the mixture of jsd."""


class TopTracker(Protocol):
    """A tracker that keeps the largest logits: see `exact_decisions.TopK`."""

    values: Tensor
    ids: Tensor
    sizes: Tensor

    def update(self, lo: int, z: Tensor) -> None:
        """Update with a tile."""


class RankTracker(Protocol):
    """A tracker that counts logits above given ones: see `exact_decisions.Rank`."""

    score: Tensor
    slack: Tensor
    per_norm: Tensor
    counts: Tensor

    def norms(self, lo: int, hi: int) -> Tensor:
        """Return |w| of a tile's tokens."""

    def update(self, lo: int, z: Tensor) -> None:
        """Update with a tile."""

    def compare_exact(self, which: Tensor, token: Tensor, row: Tensor) -> None:
        """Compare single logits in float64."""


def update_answers_(
    z: Tensor,
    lo: int,
    bias: Tensor | None,
    pointwise: Pointwise,
    running: Softmax,
    scratch: tuple[Tensor, Tensor],
    top: TopTracker | None,
    rank: RankTracker | None,
) -> None:
    """Turn a tile of the linear layer into logits in place; update the softmax and the trackers."""
    core = for_tile(z, bias)
    if core is None:
        finish_(z, bias, pointwise)
        update_softmax_(z, running, scratch)
        for tracker in (top, rank):
            if tracker is not None:
                tracker.update(lo, z)
        return
    close = core.softmax(
        z,
        None if bias is None else bias.reshape(-1).detach().contiguous(),
        map_tuple(pointwise),
        *running,
        lo,
        *((None,) * 3 if top is None else (top.values, top.ids, top.sizes)),
        *((None,) * 3 if rank is None else (rank.score, rank.slack, rank.per_norm)),
        *((None,) * 2 if rank is None else (rank.norms(lo, lo + z.shape[0]), rank.counts)),
        threads(),
    )
    if close and rank is not None:
        which, token, row = torch.tensor(close).unbind(1)
        rank.compare_exact(which, token + lo, row)


def pair_products(
    hidden: Tensor, weight: Tensor, rows: Tensor, ids: Tensor, max_bytes: int
) -> Tensor:
    """Return hidden[rows[i]] · weight[ids[i]] in float64, each sum in the same order: (M,)."""
    out = torch.empty(rows.shape, dtype=torch.float64, device=hidden.device)
    core = for_pairs(hidden, weight)
    if core is not None:
        rows, ids = rows.contiguous(), ids.contiguous()
        core.pairs(hidden.detach(), weight.detach(), rows, ids, out, threads())
        return out
    block = max(1, max_bytes // (32 * weight.shape[1]))
    for i in range(0, len(rows), block):
        block_of_pairs = slice(i, i + block)
        out[block_of_pairs] = (
            weight[ids[block_of_pairs]].double().mul_(hidden[rows[block_of_pairs]].double()).sum(-1)
        )
    return out


def row_norms(weight: Tensor) -> Tensor:
    """Return |w| of each row (M, D), in float64: (M,)."""
    if for_pairs(weight, weight) is None:
        norms: Tensor = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float64)
        return norms
    rows = torch.arange(len(weight), device=weight.device)
    return pair_products(weight, weight, rows, rows, 0).sqrt_()


def finish_(
    z: Tensor, bias: Tensor | None, pointwise: Pointwise, row_scale: Tensor | None = None
) -> Tensor:
    """Turn the linear layer into logits in place: bias, map and a factor per row."""
    if bias is not None:
        z.add_(bias)
    pointwise.apply_(z)
    return z if row_scale is None else z.mul_(row_scale)


def update_doubled_(z: Tensor, running: Softmax, scratch: tuple[Tensor, Tensor]) -> None:
    """Update the running softmax of 2 z, whose lse gives log Σ p² = lse(2 z) - 2 lse(z)."""
    doubled = torch.mul(z, 2.0, out=scratch[0])
    update_answers_(doubled, 0, None, Pointwise(), running, (scratch[1],) * 2, None, None)


def update_softmax_(z: Tensor, running: Softmax, scratch: tuple[Tensor, Tensor]) -> Tensor:
    """Update the running softmax with a tile; return exp(z - m) in scratch."""
    new_m = torch.maximum(running.m, z.amax(0))
    shift, decay = _rebase(running.m, new_m)
    work = torch.sub(z, shift, out=scratch[0])
    if running.t is not None:
        centred = torch.clamp(work, min=FLOOR, out=scratch[1])
        # t counts from the old maximum; moving the origin by d adds d · s.
        moved = torch.where(running.s > 0, running.t + running.s * finite(running.m - shift), 0.0)
        running.t.copy_(moved).mul_(decay)
        work.exp_()
        running.t.add_(centred.mul_(work).sum(0))
    else:
        work.exp_()
    running.s.mul_(decay).add_(work.sum(0))
    running.m.copy_(new_m)
    return work


def _rebase(old_m: Tensor, new_m: Tensor) -> tuple[Tensor, Tensor]:
    """Return the new origin, and the factor exp(old - new) for sums from the old one."""
    shift = torch.where(new_m == -math.inf, 0.0, new_m)
    return shift, (old_m - shift).exp()


BLOCK = cache_bytes(2) // 16
"""Entries per step of torch operations on two tiles: four tensors of them fit into the cache."""


def add_divergence_(
    z_p: Tensor,
    z_q: Tensor,
    lse_p: Tensor,
    lse_q: Tensor,
    kind: DivergenceKind,
    sums: Tensor,
    store: int | None = None,
    parts: Tensor | None = None,
) -> None:
    """Add the sums A_p and A_q of two tiles over their tokens to sums (2, rows), in float64.

    lse_p and lse_q come from `Softmax.lse_parts`; for A see `divergence_terms`. With `store`, 0
    for p and 1 for q, the tile of that side is replaced by its softmax, and the other one by its A:
    see `stored_gradient_`.
    """
    for blocks in _blocks(z_p, z_q):
        copies = (blocks[0].clone(), blocks[1].clone())
        p, q, a_p, a_q = _divergence_terms(*copies, lse_p, lse_q, kind, parts)
        sums[0] += a_p.sum(0)
        sums[1] += a_q.sum(0)
        if store is not None:
            blocks[store].copy_((p, q)[store])
            blocks[1 - store].copy_((a_p, a_q)[store])


def stored_gradient_(softmax: Tensor, a: Tensor, total: Tensor, upstream: Tensor) -> Tensor:
    """Replace a tile that `add_divergence_` stored by upstream · (A - S · softmax)."""
    total, upstream = total.to(a.dtype), upstream.to(a.dtype)
    for block, a_block in _blocks(softmax, a):
        block.mul_(total).neg_().add_(a_block).mul_(upstream)
    return softmax


def divergence_gradient_(
    z_p: Tensor,
    z_q: Tensor,
    lse_p: Tensor,
    lse_q: Tensor,
    kind: DivergenceKind,
    sums: Tensor,
    upstream: Tensor,
    wanted: tuple[bool, bool],
    parts: Tensor | None = None,
) -> None:
    """Replace the logits of two tiles by upstream · (A - S · softmax), where wanted."""
    sum_p, sum_q, factor = (t.to(z_p.dtype) for t in (*sums, upstream))
    for p_block, q_block in _blocks(z_p, z_q):
        copies = (p_block.clone(), q_block.clone())
        p, q, a_p, a_q = _divergence_terms(*copies, lse_p, lse_q, kind, parts)
        if wanted[0]:
            torch.mul(a_p.sub_(p.mul_(sum_p)), factor, out=p_block)
        if wanted[1]:
            torch.mul(a_q.sub_(q.mul_(sum_q)), factor, out=q_block)


def _divergence_terms(
    z_p: Tensor,
    z_q: Tensor,
    lse_p: Tensor,
    lse_q: Tensor,
    kind: DivergenceKind,
    parts: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return p, q, A_p, A_q of two blocks, which are overwritten.

    With `parts` (2, rows), those of parts[0] · S_p + parts[1] · S_q of "jsd", instead of S_p + S_q.
    """
    log_p, log_q = subtract_(z_p, *lse_p), subtract_(z_q, *lse_q)
    p, q = log_p.exp(), log_q.exp()
    if kind.name == "kl":
        return p, q, log_p.sub_(log_q).mul_(p).masked_fill_(p == 0, 0.0), -p
    if kind.name == "reverse_kl":
        return p, q, -q, log_q.sub_(log_p).mul_(q).masked_fill_(q == 0, 0.0)
    if kind.name == "tvd":
        sign = torch.sub(p, q, out=log_p).sign_().mul_(0.5)
        return p, q, p * sign, torch.mul(q, sign, out=log_q).neg_()
    m = torch.mul(p, kind.beta, out=log_p).add_(q, alpha=1 - kind.beta)
    m.clamp_(min=torch.finfo(m.dtype).tiny)
    a_p = torch.xlogy(p, p / m).mul_(kind.beta)
    a_q = torch.xlogy(q, q / m).mul_(1 - kind.beta)
    if parts is not None:
        # With r = β p / m: d/dp is β (a log(p/m) + (a - b)(1 - r)), d/dq likewise.
        a, b = parts.to(p.dtype)
        share = (p * kind.beta).div_(m)
        a_p.mul_(a).addcmul_(p * (a - b), share.neg().add_(1.0), value=kind.beta)
        a_q.mul_(b).addcmul_(q * (b - a), share, value=1 - kind.beta)
    return p, q, a_p, a_q


def _blocks(*tiles: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same few tokens of each tile."""
    tokens, rows = tiles[0].shape
    step = max(1, BLOCK // max(1, rows))
    for lo in range(0, tokens, step):
        yield tuple(t[lo : lo + step] for t in tiles)


def softmax_gradient_(
    z: Tensor,
    lse: Tensor,
    a: Tensor,
    pointwise: Pointwise,
    columns: Tensor,
    rows: Tensor,
    scratch: tuple[Tensor, Tensor],
) -> Tensor:
    """Replace z by p · a times the slope of the map.

    Sets `columns` to its sums over rows and adds its sums over tokens to `rows`.
    """
    core = for_tile(z)
    if core is None:
        grad = gradient_(z, lse, Coefficients(a), pointwise, scratch=scratch)
        columns.copy_(grad.sum(1))
        rows.add_(grad.sum(0))
        return grad
    no_args = (None,) * 3
    map_args = map_tuple(pointwise)
    core.gradient(
        z, *split(lse, z.dtype), a, *no_args, map_args, *no_args, columns, rows, threads()
    )
    return z


def tail_threshold(mass: Tensor, share: float) -> float:
    """Return the largest t such that entries below t sum to at most `share` of the total.

    By selection, without a sort.
    """
    limit = share * float(mass.double().sum())
    if core is not None and mass.dtype == torch.float32 and readable(mass):
        return float(core.tail_threshold(mass, limit))
    low, high = 0.0, float(mass.max())
    for _ in range(50):  # bisection; few entries remain between low and high
        middle = (low + high) / 2
        fits = float(torch.where(mass < middle, mass, 0.0).double().sum()) <= limit
        low, high = (middle, high) if fits else (low, middle)
    return low


def scatter_add_(into: Tensor, ids: Tensor, rows: Tensor) -> None:
    """Compute into[ids] += rows, for distinct ids."""
    if core is not None and into.dtype == torch.float32 and readable(into, rows):
        core.scatter_add(into, ids, rows, threads())
    else:
        into.index_add_(0, ids, rows)


def subtract_(z: Tensor, row: Tensor, rest: Tensor | None = None) -> Tensor:
    """Compute z - row in place, for a float64 row, in two parts: small differences are exact.

    For float64 logits the second part is `rest`: see `Softmax.lse_parts`.
    """
    high, low = split(row, z.dtype)
    z.sub_(high)
    if z.dtype == row.dtype:
        return z if rest is None else z.sub_(rest)
    return z.sub_(low)


def split(row: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a float64 row as the sum of two of another type."""
    high = row.to(dtype)
    # An infinite row has no second part, and the difference of infinities is a NaN.
    return high, (row - high).to(dtype).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def finite(x: Tensor) -> Tensor:
    """Return x with 0 in place of -inf: the origin of a row with only masked tokens so far."""
    return torch.where(x == -math.inf, 0.0, x)


class Coefficients(NamedTuple):
    """dL/dz_v = p_v (a + b log p_v + c log q_v) + mix_v · mixed + weight_v soft_v · softened.

    a, b, c, mixed, softened: one number per row, or None for 0.
    """

    a: Tensor | None = None
    b: Tensor | None = None
    c: Tensor | None = None
    mixed: Tensor | None = None
    softened: Tensor | None = None


class Squares(NamedTuple):
    """One more term of dL/dz_v: factor · p_v² / Σ p²; (rows,) each."""

    factor: Tensor
    log_sum_sq: Tensor


def gradient_(
    z: Tensor,
    lse: Tensor,
    k: Coefficients,
    pointwise: Pointwise,
    *,
    scratch: tuple[Tensor, Tensor],
    log_q: Tensor | None = None,
    mix: Tensor | None = None,
    soft: Tensor | None = None,
    picks: tuple[Tensor, Tensor, Tensor] | None = None,
    squares: Squares | None = None,
    row_scale: Tensor | None = None,
) -> Tensor:
    """Replace the logits of a tile by the gradient with respect to the linear layer.

    Args:
        z: (tokens, rows), overwritten.
        lse: (rows,) in float64.
        k: the coefficients of the gradient, from `chunk.coefficients`.
        pointwise: its slope is the last factor.
        log_q: (tokens, rows), the other distribution, for `k.c`.
        mix: (tokens,), 0 for masked tokens, for `k.mixed`.
        soft: (tokens, rows), already times the class weight, for `k.softened`.
        picks: token, row, value: single entries to add.
        squares: the term of log Σ p².
        row_scale: (rows,), the last factor of the logits: see `Source`.
        scratch: two tiles.
    """
    if row_scale is not None:
        k = Coefficients(*(None if x is None else x * row_scale for x in k))
        if picks is not None:
            picks = (*picks[:2], picks[2] * row_scale[picks[1]])
        if squares is not None:
            squares = squares._replace(factor=squares.factor * row_scale)
    if squares is not None or (row_scale is not None and pointwise.bounded):
        # Rare cases: first the gradient of the mapped logits, then times the slope of the map.
        map_slope = pointwise.scale * torch.ones_like(lse, dtype=z.dtype)
        if pointwise.bounded:
            map_slope = z.clone() if row_scale is None else z / row_scale
            pointwise.slope(map_slope, out=map_slope)
        squared_term = None
        if squares is not None:
            squared_term = subtract_(z.clone(), lse + squares.log_sum_sq / 2).mul_(2.0).exp_()
            squared_term.mul_(squares.factor.to(z.dtype))
        plain = {"log_q": log_q, "mix": mix, "soft": soft, "picks": picks}
        gradient_(z, lse, k, Pointwise(), scratch=scratch, **plain)  # type: ignore[arg-type]
        return (z if squared_term is None else z.add_(squared_term)).mul_(map_slope)
    core = for_tile(z)
    if core is not None and log_q is None and soft is None and k.a is not None:
        high, low = split(lse, z.dtype)
        mixed = None if mix is None else k.mixed
        core.gradient(
            z,
            high,
            low,
            k.a.contiguous(),
            k.b,
            None if mixed is None else mix,
            mixed,
            map_tuple(pointwise),
            *((None,) * 3 if picks is None else picks),
            None,
            None,
            threads(),
        )
        return z
    slope = pointwise.slope(z, out=scratch[0]) if pointwise.bounded else None
    log_p = subtract_(z, lse)
    if k.b is not None or k.c is not None:
        factor = torch.clamp(log_p, min=FLOOR, out=scratch[1])
        factor.mul_(0.0 if k.b is None else k.b)
        if k.c is not None and log_q is not None:
            factor.addcmul_(log_q.clamp(min=FLOOR), k.c.expand_as(log_q))
        if k.a is not None:
            factor.add_(k.a)
        grad = log_p.exp_().mul_(factor)
    elif k.a is not None:
        grad = log_p.exp_().mul_(k.a)
    else:
        grad = log_p.zero_()
    if k.mixed is not None and mix is not None:
        grad.addr_(mix, k.mixed)
    if k.softened is not None and soft is not None:
        grad.addcmul_(soft, k.softened.expand_as(grad))
    if picks is not None:
        token, row, value = picks
        grad.index_put_((token, row), value, accumulate=True)
    if slope is not None:
        return grad.mul_(slope)
    return grad if pointwise.scale == 1.0 else grad.mul_(pointwise.scale)
