"""Losses of few rows or few logits, and sums of few rows, by plain torch operations.

For few rows the product hidden @ weight.T is up to three times as fast as a sweep's, which has the
vocabulary first, and with few logits the bookkeeping of a sweep takes longer than the arithmetic.
No tensor is as large as the logits (of several rows), and a gradient takes three products.

For very few logits the overhead of operations dominates: the rows are computed in two halves.
Otherwise the vocabulary is cut into blocks, which are kept for a gradient, within `max_bytes`. A
block i holds e = exp(z - m_i), with m_i the largest logit of each row in it; then,
with m = max_i m_i,

    lse = m + log Σ_i exp(m_i - m) Σ_v e_v,    p_v = e_v exp(m_i - m) / Σ_i exp(m_i - m) Σ_v e_v

Whatever is not finite is left to the sweep.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lmhead.checks import is_plain
from lmhead.scores.row_loss import CrossEntropy, RowSums
from lmhead.sweep import gradient_sums
from lmhead.sweep.kernels import FLOOR, readable
from lmhead.sweep.questions import DEFAULT_MAX_BYTES
from lmhead.sweep.second_order import differentiated
from lmhead.sweep.source import Source

MAX_ROWS = 63
FEW_LOGITS = 2**18  # one megabyte: of a loss with any number of rows, and of a block of tokens
# Up to these numbers of logits, of a loss and of sums (in float64), the rows are computed in two
# halves, each with all tokens at once.
_FEW, _FEW_FOR_SUMS = 2**15, 2**12
_MAX_IDS = 1024


def supports(source: Source, max_bytes: int | None) -> bool:
    """Return whether the source has few rows or logits, of plain CPU tensors without a map."""
    if len(source.hiddens) != 1 or source.row_scale is not None:
        return False
    hidden, weight, bias = source.hiddens[0], source.weights[0], source.bias
    n, vocab = hidden.shape[0], weight.shape[0]
    few = 0 < n <= MAX_ROWS or 0 < n * vocab <= FEW_LOGITS
    if not few or vocab < 2 or not source.pointwise.is_identity:
        return False
    if hidden.dtype is not torch.float32 or weight.dtype is not torch.float32:
        return False
    if not (hidden.is_cpu and is_plain(hidden) and is_plain(weight)):
        return False
    if bias is not None and not (bias.dtype is torch.float32 and is_plain(bias)):
        return False
    if torch._C._are_functorch_transforms_active() or torch.is_autocast_enabled("cpu"):
        return False
    budget = DEFAULT_MAX_BYTES if max_bytes is None else max_bytes
    return 4 * (n * vocab + 2 * min(FEW_LOGITS, n * vocab) + n * hidden.shape[1]) <= budget


def quick_loss(
    hidden: Any, weight: Any, targets: Any, ignore_index: int, reduction: str
) -> Tensor | None:
    """Return the plain cross-entropy of very few logits; None for everything else.

    A caller that gets None validates the arguments.
    """
    if reduction not in ("mean", "sum") or type(ignore_index) is not int:
        return None
    if not -(2**63) <= ignore_index < 2**63 or not _quick(hidden, weight, targets):
        return None
    ids = targets.reshape(-1).tolist()
    if ignore_index in ids or targets.shape != hidden.shape[:-1] or not _inside(ids, len(weight)):
        return None
    rows = hidden if hidden.dim() == 2 else hidden.reshape(-1, hidden.shape[-1])
    factor = 1.0 if reduction == "sum" else 1.0 / len(ids)
    return _reduced(rows, weight, None, ids, factor, torch.float32)


def quick_log_prob(hidden: Any, weight: Any, ids: Any) -> Tensor | None:
    """Return log p of ids (N,) for hidden (N, D), of very few logits; None for everything else.

    A caller that gets None validates the arguments.
    """
    if not _quick(hidden, weight, ids) or hidden.dim() != 2 or ids.shape != hidden.shape[:1]:
        return None
    if not _inside(ids.tolist(), len(weight)):
        return None
    column, half = ids[:, None], (len(ids) + 1) // 2
    if half == len(ids):
        log_p = F.linear(hidden, weight).log_softmax(1).gather(1, column)
    else:
        rows, columns = torch.split(hidden, half), torch.split(column, half)
        log_p = torch.cat(
            [
                F.linear(rows[0], weight).log_softmax(1).gather(1, columns[0]),
                F.linear(rows[1], weight).log_softmax(1).gather(1, columns[1]),
            ]
        )
    return log_p[:, 0] if math.isfinite(log_p.sum().item()) else None


def _quick(hidden: Any, weight: Any, ids: Any) -> bool:
    """Return whether these are plain tensors of very few logits, and of at least one row."""
    if not (isinstance(hidden, Tensor) and isinstance(weight, Tensor) and isinstance(ids, Tensor)):
        return False
    try:
        if not readable(hidden, weight, ids) or weight.dim() != 2 or hidden.dim() == 0:
            return False
    except ValueError:  # without memory: the validation names the tensor
        return False
    if hidden.dtype is not torch.float32 or weight.dtype is not torch.float32:
        return False
    vocab, width = weight.shape
    n = ids.numel()
    return (
        ids.dtype is torch.int64
        and hidden.shape[-1] == width > 0
        and 0 < n <= MAX_ROWS
        and vocab > 1
        and n * vocab <= _FEW
        and not torch._C._are_functorch_transforms_active()
        and not torch.is_autocast_enabled("cpu")
    )


def _inside(ids: list[int], vocab: int) -> bool:
    return min(ids) >= 0 and max(ids) < vocab


def small_loss(source: Source, loss: CrossEntropy, max_bytes: int | None) -> Tensor | None:
    """Return a reduced cross-entropy in float64, with its gradients; None where it needs a sweep.

    Options other than the reduction, and rows that do not count, need one.
    """
    if loss.class_weight is not None or loss.label_smoothing or loss.z_loss:
        return None
    if loss.reduction == "none" or not supports(source, max_bytes) or loss.has_probabilities:
        return None
    ids = loss.targets.tolist()
    if loss.ignore_index in ids:
        return None
    factor = 1.0
    if loss.reduction == "mean":
        count = len(ids) if loss.num_items is None else loss.num_items
        if not isinstance(count, int) or count <= 0:
            return None
        factor = 1.0 / count
    (hidden,), (weight,), bias = source.hiddens, source.weights, source.bias
    return _reduced(hidden, weight, bias, ids, factor, torch.float64)


def _reduced(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: list[int],
    factor: float,
    dtype: torch.dtype,
) -> Tensor | None:
    """Return factor · Σ (lse - z[id]) with its gradients; None if it is not finite."""
    wanted = _wanted(hidden, weight, bias)
    value, gradients = _loss(hidden, weight, bias, ids, factor, wanted)
    if not math.isfinite(value):
        return None
    if not any(wanted):
        return torch.tensor(value, dtype=dtype)
    given = _Given(value, gradients, ids, factor, dtype)
    made: Tensor = _Loss.apply(given, hidden, weight, bias)  # type: ignore[no-untyped-call]
    return made


def small_sums(
    source: Source, ids: Tensor | None, *, entropy: bool, max_bytes: int | None
) -> RowSums | None:
    """Return log-sum-exp, entropy and the logits of ids (N, K); None where they need a sweep."""
    if (ids is not None and ids.numel() > _MAX_IDS) or not supports(source, max_bytes):
        return None
    (hidden,), (weight,), bias = source.hiddens, source.weights, source.bias
    if hidden.shape[0] * weight.shape[0] <= _FEW_FOR_SUMS:
        return _direct_sums(hidden, weight, bias, ids, entropy=entropy)
    wanted, memory = _wanted(hidden, weight, bias), None
    if any(wanted):
        memory = _KeptMemory.reserve(4 * hidden.shape[0] * weight.shape[0], max_bytes)
        if memory is None:
            return None
    kept = _sums(hidden, weight, bias, ids, entropy=entropy, memory=memory)
    if not math.isfinite(float(kept.sums[0].sum())):
        return None
    if not any(wanted):
        return _named(kept.sums, ids, entropy=entropy)
    apply: Any = _Sums.apply
    return _named(apply(kept, wanted, hidden, weight, bias, ids), ids, entropy=entropy)


def _direct_sums(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor | None, *, entropy: bool
) -> RowSums | None:
    """Return the sums, differentiable; None if a row has no finite log-sum-exp."""
    if len(hidden) == 1:
        made = _dense_sums(hidden, weight, bias, ids, entropy=entropy)
    else:
        half = (len(hidden) + 1) // 2
        some = (None, None) if ids is None else (ids[:half], ids[half:])
        parts = [
            _dense_sums(rows, weight, bias, given, entropy=entropy)
            for rows, given in zip(torch.split(hidden, half), some, strict=True)
        ]
        made = [torch.cat(pair) for pair in zip(*parts, strict=True)]
    if not math.isfinite(made[0].sum().item()):
        return None
    return _named(tuple(made), ids, entropy=entropy)


Flags = tuple[bool, bool, bool]
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Of hidden, weight and bias."""


class _Block(NamedTuple):
    """Tokens [lo, hi) of all rows."""

    lo: int
    hi: int
    z: Tensor  # (N, hi - lo): exp(z - m), or z - m where the entropy is asked for
    places: Tensor | None  # the entries of `z` that are picked, flat
    picks: list[int]  # which of the given ids these are


class _Given(NamedTuple):
    """A loss that was computed, and how to compute it again."""

    value: float
    gradients: list[Gradients]  # for the first backward pass
    ids: list[int]
    factor: float
    dtype: torch.dtype


class _KeptMemory:
    """Memory of blocks that are kept for a gradient, as long as this object exists.

    All of them together take at most a quarter of `max_bytes`: a loop may ask for the sums of many
    parts of the logits before one backward pass.
    """

    total = 0

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        _KeptMemory.total += nbytes

    def __del__(self) -> None:
        _KeptMemory.total -= self.nbytes

    @classmethod
    def reserve(cls, nbytes: int, max_bytes: int | None) -> _KeptMemory | None:
        """Return a reservation; None if there is no room."""
        budget = DEFAULT_MAX_BYTES if max_bytes is None else max_bytes
        return cls(nbytes) if cls.total + nbytes <= budget // 4 else None


class _Kept(NamedTuple):
    """Sums that were computed, and what their gradients need."""

    sums: tuple[Tensor, ...]
    blocks: list[_Block]
    largest: Tensor  # (N, blocks), float64: the largest logit of each block
    entropy: bool
    memory: _KeptMemory | None


def _wanted(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Flags:
    """Return which of the tensors need a gradient."""
    if not torch.is_grad_enabled():
        return False, False, False
    return (
        hidden.requires_grad,
        weight.requires_grad,
        bias is not None and bias.requires_grad,
    )


def _block_tokens(rows: int, vocab: int) -> int:
    """Return the number of tokens of a block: at most half of them."""
    return -(-vocab // max(2, -(-rows * vocab // FEW_LOGITS)))


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, lo: int, hi: int) -> Tensor:
    if bias is None:
        return torch.mm(hidden, weight[lo:hi].t())
    return torch.addmm(bias[lo:hi], hidden, weight[lo:hi].t())


def _loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: list[int],
    factor: float,
    wanted: Flags,
) -> tuple[float, list[Gradients]]:
    """Return factor · Σ (lse - z[id]), and its gradients for the wanted tensors."""
    hidden, weight = hidden.detach(), weight.detach()
    bias = None if bias is None else bias.detach()
    if len(ids) * weight.shape[0] <= _FEW or len(ids) > MAX_ROWS:
        return _loss_by_rows(hidden, weight, bias, ids, factor, wanted)
    (n, width), vocab, keep = hidden.shape, weight.shape[0], any(wanted)
    step = _block_tokens(n, vocab)
    blocks, maxima, masses, picked = [], [], [], 0.0
    for lo in range(0, vocab, step):
        hi = min(lo + step, vocab)
        z = _logits(hidden, weight, bias, lo, hi)
        places = [i * (hi - lo) + id - lo for i, id in enumerate(ids) if lo <= id < hi]
        index = torch.tensor(places) if places else None
        if index is not None:
            picked += math.fsum(z.take(index).tolist())
        m = z.amax(1, keepdim=True)
        maxima.append(m)
        if keep:
            masses.append(z.sub_(m).exp_().sum(1, keepdim=True, dtype=torch.float64))
            blocks.append(_Block(lo, hi, z, index, []))
        else:  # log p of the largest is -log of the mass
            largest = torch.log_softmax(z, 1).amax(1, keepdim=True)
            masses.append(largest.double().neg_().exp_())
    scale, mass, lse = _combined(torch.cat(maxima, 1).double(), torch.cat(masses, 1))
    value = factor * (float(lse.sum()) - picked)
    if not keep or not math.isfinite(value):
        return value, []
    shares = (scale * (factor / mass)).to(hidden.dtype)
    to_hidden = hidden.new_empty(n, width) if wanted[0] else None
    to_weight = weight.new_empty(vocab, width) if wanted[1] else None
    to_bias = weight.new_empty(vocab) if wanted[2] else None
    for number, (lo, hi, g, index, _) in enumerate(blocks):
        g.mul_(shares[:, number : number + 1])
        if index is not None:
            g.put_(index, g.new_full(index.shape, -factor), accumulate=True)
        _add(g, lo, hi, hidden, weight, (to_hidden, to_weight, to_bias))
    return value, [(to_hidden, to_weight, to_bias)]


def _loss_by_rows(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: list[int],
    factor: float,
    wanted: Flags,
) -> tuple[float, list[Gradients]]:
    """Return what `_loss` returns, from one half of the rows and then the other."""
    total, half = 0.0, (len(ids) + 1) // 2
    to_hidden = hidden.new_empty(hidden.shape) if wanted[0] else None
    to_weight = to_bias = None
    for start in range(0, len(ids), half):
        stop = start + half
        h, targets = hidden[start:stop], torch.tensor(ids[start:stop])[:, None]
        log_p = torch.log_softmax(F.linear(h, weight, bias), 1)
        total -= math.fsum(log_p.gather(1, targets)[:, 0].tolist())
        if not any(wanted):
            continue
        g = log_p.exp_().scatter_(1, targets, -1.0, reduce="add").mul_(factor)
        if to_hidden is not None:
            torch.mm(g, weight, out=to_hidden[start:stop])
        if wanted[1]:
            to_weight = torch.mm(g.t(), h) if to_weight is None else to_weight.addmm_(g.t(), h)
        if wanted[2]:
            to_bias = g.sum(0) if to_bias is None else to_bias.add_(g.sum(0))
    return factor * total, [(to_hidden, to_weight, to_bias)]


def _combined(maxima: Tensor, masses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return exp(m_i - m) (N, blocks), the sum of all exp(z - m), (N, 1), and lse (N, 1)."""
    m = maxima.amax(1, keepdim=True)
    scale = (maxima - m).exp_()
    mass = (scale * masses).sum(1, keepdim=True)
    return scale, mass, m + mass.log()


def _add(
    g: Tensor,
    lo: int,
    hi: int,
    hidden: Tensor,
    weight: Tensor,
    into: Gradients,
    *,
    held: bool = False,
) -> None:
    """Write or add what a block of dL/dz, (N, hi - lo), gives to the gradients.

    `held`: that of the weight holds a sum already.
    """
    to_hidden, to_weight, to_bias = into
    if to_hidden is not None:
        if lo == 0:
            torch.mm(g, weight[lo:hi], out=to_hidden)
        else:
            to_hidden.addmm_(g, weight[lo:hi])
    if to_weight is not None and held:
        to_weight[lo:hi].addmm_(g.t(), hidden)
    elif to_weight is not None:
        torch.mm(g.t(), hidden, out=to_weight[lo:hi])
    if to_bias is not None:
        torch.sum(g, 0, out=to_bias[lo:hi])


class _Loss(torch.autograd.Function):
    """A loss whose gradients are made already."""

    @staticmethod
    def forward(
        ctx: Any, given: _Given, hidden: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.given = given
        ctx.save_for_backward(hidden, weight, bias)
        return torch.tensor(given.value, dtype=given.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        hidden, weight, bias = ctx.saved_tensors
        _, gradients, ids, factor, _ = ctx.given
        if torch.is_grad_enabled():  # double backward
            sums = partial(_dense_sums, ids=torch.tensor(ids)[:, None])
            to_lse = (factor * grad.double()).expand(len(ids))
            to_sums = to_lse, -to_lse[:, None]
            return (None, *differentiated(sums, (hidden, weight, bias), to_sums))
        if not gradients:  # a second pass through the same graph
            _, gradients = _loss(hidden, weight, bias, ids, factor, ctx.needs_input_grad[1:])
        made = gradients.pop()
        if float(grad) != 1.0:
            for g in made:
                if g is not None:
                    g.mul_(grad.to(g.dtype))
        return (None, *made)


def _sums(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor | None,
    *,
    entropy: bool,
    memory: _KeptMemory | None,
) -> _Kept:
    """Return the sums of all rows, in float64; with `memory`, keep the blocks for a gradient."""
    hidden, weight = hidden.detach(), weight.detach()
    bias = None if bias is None else bias.detach()
    n, vocab = hidden.shape[0], weight.shape[0]
    step = _block_tokens(n, vocab)
    flat = [] if ids is None else ids.flatten().tolist()
    per_row = 1 if ids is None else ids.shape[1]
    picked = torch.empty(len(flat), dtype=torch.float64)
    blocks, maxima, masses, weighted = [], [], [], []
    for lo in range(0, vocab, step):
        hi = min(lo + step, vocab)
        z = _logits(hidden, weight, bias, lo, hi)
        picks = [k for k, id in enumerate(flat) if lo <= id < hi]
        index = None
        if picks:
            index = torch.tensor([k // per_row * (hi - lo) + flat[k] - lo for k in picks])
            values = z.take(index).double()
            if len(picks) == len(flat):
                picked = values
            else:
                picked[picks] = values
        m = z.amax(1, keepdim=True)
        z.sub_(m)
        e = z.exp() if entropy else z.exp_()
        masses.append(e.sum(1, keepdim=True, dtype=torch.float64))
        if entropy:  # 0 · -inf is 0 here
            weighted.append(e.mul_(z.clamp(min=FLOOR)).sum(1, keepdim=True, dtype=torch.float64))
        maxima.append(m)
        if memory is not None:
            blocks.append(_Block(lo, hi, z, index, picks))
    largest = torch.cat(maxima, 1).double()
    scale, mass, lse = _combined(largest, torch.cat(masses, 1))
    made = [lse[:, 0]]
    if entropy:
        # Σ p log p, with log p = (z - m_i) + (m_i - lse)
        below = torch.cat(weighted, 1) + torch.cat(masses, 1) * (largest - lse)
        made.append(-(scale * below).sum(1) / mass[:, 0])
    if ids is not None:
        made.append(picked.view(ids.shape))
    return _Kept(tuple(made), blocks, largest, entropy, memory)


def _named(sums: tuple[Tensor, ...], ids: Tensor | None, *, entropy: bool) -> RowSums:
    return RowSums(
        lse=sums[0],
        entropy=sums[1] if entropy else None,
        picked=None if ids is None else sums[-1],
    )


class _Sums(torch.autograd.Function):
    """Sums over the vocabulary that are computed already."""

    @staticmethod
    def forward(
        ctx: Any,
        kept: _Kept,
        wanted: Flags,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.kept, ctx.wanted = kept, wanted
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, ids)
        return tuple(s.detach() for s in kept.sums)  # `ctx` must not hold its own outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        hidden, weight, bias, ids = ctx.saved_tensors
        kept: _Kept = ctx.kept
        if torch.is_grad_enabled():  # double backward
            sums = partial(_dense_sums, ids=ids, entropy=kept.entropy)
            made: Any = differentiated(sums, (hidden, weight, bias), grads)
        else:
            made = _sums_gradients(kept, grads, hidden, weight, ids, ctx.wanted)
        return (None, None, *made, None)


def _sums_gradients(
    kept: _Kept,
    grads: tuple[Tensor | None, ...],
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor | None,
    wanted: Flags,
) -> Gradients:
    """Return the gradients, from those of the sums: see `chunk.coefficients`."""
    dtype, vocab = hidden.dtype, weight.shape[0]
    lse = kept.sums[0]
    a = torch.zeros_like(lse) if grads[0] is None else grads[0]
    to_entropy = grads[1] if kept.entropy else None
    if to_entropy is not None:
        a = a - to_entropy * kept.sums[1]
    to_picked = None if ids is None or grads[-1] is None else grads[-1].to(dtype).flatten()
    above = kept.largest - lse[:, None]  # m_i - lse
    share = above.exp()
    a_shares = (share * a[:, None]).to(dtype)
    to_hidden = torch.empty_like(hidden) if wanted[0] else None
    to_weight, held = gradient_sums.buffer(weight, dtype) if wanted[1] else (None, False)
    to_bias = weight.new_empty(vocab) if wanted[2] else None
    for number, (lo, hi, z, index, picks) in enumerate(kept.blocks):
        column = slice(number, number + 1)
        if kept.entropy:
            g = z.exp()
            if to_entropy is not None:
                log_p = z.clamp(min=FLOOR).add_(above[:, column].to(dtype))
                log_p.mul_((to_entropy[:, None] * share[:, column]).to(dtype))
                g.mul_(log_p.neg_().add_(a_shares[:, column]))
            else:
                g.mul_(a_shares[:, column])
        else:
            g = z * a_shares[:, column]
        if index is not None and to_picked is not None:
            some = to_picked if len(picks) == len(to_picked) else to_picked[picks]
            g.put_(index, some, accumulate=True)
        _add(g, lo, hi, hidden, weight, (to_hidden, to_weight, to_bias), held=held)
    return to_hidden, to_weight, to_bias


def _dense_sums(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor | None,
    *,
    entropy: bool = False,
) -> list[Tensor]:
    """Return the same sums by differentiable operations on all logits."""
    z = F.linear(hidden, weight, bias).double()
    lse = z.logsumexp(1)
    made = [lse]
    if entropy:
        masked = z == -math.inf
        log_p = z.masked_fill(masked, 0.0) - lse[:, None]
        made.append(-(log_p.exp().masked_fill(masked, 0.0) * log_p).sum(1))
    if ids is not None:
        made.append(z.gather(1, ids))
    return made
