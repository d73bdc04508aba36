"""Kernels on full rows of logits, (B, V): in the compiled core, or as torch operations.

Only these functions read every logit. They select candidates, so that nothing else has the size of
the vocabulary, and nothing of that size is sorted.

β = 1 / temperature; the mass of a token is exp(β (z - max z)), in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from lmhead.sampling.noise import gumbel
from lmhead.sweep import kernels
from lmhead.sweep.kernels import views

# Up to here a heap finds the k-th largest faster than a histogram.
_LARGEST_HEAP = 4096
# Of the histogram by which `mass_radius` finds its radius, in units of β z.
_STEP = 1 / 64
# Initial capacity for the selected tokens of a row.
_CAPACITY = 512
_DOWN, _UP = torch.tensor(-math.inf), torch.tensor(math.inf)


def row_max(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logit and the number of unmasked tokens of each row: (B,) float64 each."""
    core = _core(z)
    if core is not None:
        largest, n = torch.empty(2, z.shape[0], dtype=torch.float64)
        core.row_max(*views(z, largest, n), kernels.threads())
        return largest, n
    return z.double().amax(1), (z > -math.inf).sum(1).double()


def softmax_sums(z: Tensor, betas: Tensor, largest: Tensor) -> Tensor:
    """Return Σ exp(x) and Σ x exp(x) with x = β (z - max): betas (M, B) give (2, M, B)."""
    core = _core(z)
    if core is not None:
        out = torch.empty(2, *betas.shape, dtype=torch.float64)
        core.row_softmax_sums(*views(z, betas, largest, out), kernels.threads())
        return out
    far = z.double() - largest[:, None]
    sums = []
    for beta in betas:
        x = (far * beta[:, None]).clamp(min=-708.0)
        e = x.exp()
        sums.append(torch.stack([e.sum(1), (e * x).sum(1)]))
    return torch.stack(sums, 1)


def moments(z: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ (z - max) and Σ (z - max)² over the unmasked tokens, (B,) each."""
    core = _core(z)
    if core is not None:
        shift, square = torch.empty(2, z.shape[0], dtype=torch.float64)
        core.row_moments(*views(z, largest, shift, square), kernels.threads())
        return shift, square
    far = torch.where(z == -math.inf, 0.0, z.double() - largest[:, None])
    return far.sum(1), (far * far).sum(1)


def kth_largest(z: Tensor, k: Tensor) -> Tensor:
    """Return the k-th largest logit of each row, (B,) float64; -inf if there are fewer tokens."""
    core = _core(z)
    most = z.shape[1]
    if core is not None and bool((k <= _LARGEST_HEAP).all()):
        value = torch.empty(z.shape[0])
        core.row_kth_largest(*views(z, k.long(), value), kernels.threads())
        return value.double()
    widest = int(k.clamp(max=most).max()) if len(k) else 1
    values = z.topk(widest, dim=1).values.double()
    last = values.gather(1, (k.clamp(max=most).long() - 1)[:, None])[:, 0]
    return torch.where(k <= most, last, -math.inf)


def mass_radius(z: Tensor, beta: Tensor, largest: Tensor, centre: Tensor, limit: Tensor) -> Tensor:
    """Return the radius around `centre` within which the tokens have a mass of `limit`.

    A radius in units of z, (B,), a little too large rather than too small; inf where all tokens
    together have less.
    """
    core = _core(z)
    if core is not None:
        radius = torch.empty_like(beta)
        width = torch.full_like(beta, _STEP)
        given = views(z, beta, largest, centre, width, limit)
        core.row_mass_radius(*given, radius, kernels.threads())
        return radius
    z = z.double()
    distance = (z - centre[:, None]).abs().masked_fill(z == -math.inf, math.inf)
    nearest, order = distance.sort(1)
    weight = ((z - largest[:, None]) * beta[:, None]).exp().gather(1, order)
    place = (weight.cumsum(1) < limit[:, None]).sum(1, keepdim=True)
    found = nearest.gather(1, place.clamp(max=z.shape[1] - 1))
    return torch.where(place < z.shape[1], found * (1 + 1e-9), math.inf)[:, 0]


def tokens_in_range(z: Tensor, beta: Tensor, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens with lo <= z <= hi: ids (B, K) and β z (B, K) in float64.

    Best first, lowest id first among equals; rows with fewer than K are filled up with token 0 at
    -inf.
    """
    core = _core(z)
    if core is not None:
        # Rounded outwards: none may be lost.
        lo32 = torch.nextafter(lo.float(), _DOWN)
        hi32 = torch.nextafter(hi.float(), _UP)
        _, ids, values = _listed(z, lambda *out: core.row_range(*views(z, lo32, hi32), *out))
        return ids, values * beta[:, None]
    inside = (z.double() >= lo[:, None]) & (z.double() <= hi[:, None]) & (z > -math.inf)
    counts = inside.sum(1)
    ids = torch.zeros(z.shape[0], widest(counts), dtype=torch.int64, device=z.device)
    values = torch.full(ids.shape, -math.inf, dtype=torch.float64, device=z.device)
    row, token = inside.nonzero(as_tuple=True)
    place = torch.arange(len(row), device=z.device) - (counts.cumsum(0) - counts)[row]
    ids[row, place] = token
    values[row, place] = z[row, token].double() * beta[row]
    values, order = values.sort(dim=1, descending=True, stable=True)
    return ids.gather(1, order), values


def nucleus(
    z: Tensor, beta: Tensor, largest: Tensor, centre: Tensor, limit: Tensor, least: int
) -> tuple[Tensor, Tensor] | None:
    """Return the tokens nearest to `centre` until their masses reach `limit`; at least `least`.

    In the form of `tokens_in_range`. None without the core, or if some row needs distant tokens.
    """
    core = _core(z)
    if core is None:
        return None
    given = views(z, beta, largest, centre, limit)
    counts, ids, values = _listed(z, lambda *out: core.row_nucleus(*given, least, *out))
    return None if 0 in counts.tolist() else (ids, values)


def gumbel_argmax(z: Tensor, beta: Tensor, keys: Tensor) -> Tensor:
    """Return the token with the largest β z + Gumbel noise, a sample of softmax(β z): (B,)."""
    core = _core(z)
    if core is not None:
        best = torch.empty(z.shape[0], dtype=torch.int64)
        core.row_gumbel_argmax(*views(z, beta, keys, best), kernels.threads())
        return best
    best = torch.empty(z.shape[0], dtype=torch.int64, device=z.device)
    ids = torch.arange(z.shape[1], device=z.device)[None]
    for i in range(z.shape[0]):  # a row at a time: the noise is as long as the vocabulary
        score = z[i].double() * beta[i] + gumbel(keys[i : i + 1], ids)[0]
        best[i] = score.argmax()
    return best


def sample_candidates(
    z: Tensor, lse: Tensor, ids: Tensor, logits: Tensor, keys: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Sample one of few tokens per row by logit plus Gumbel noise; None without the compiled core.

    Args:
        z: (B, V), the logits of all tokens, before any stage.
        lse: (B,), log Σ exp z.
        ids: (B, K).
        logits: (B, K), the logits of these tokens after all stages; -inf for none.
        keys: (B, 2).

    Returns:
        Token, its log-probability among these tokens and among all by z, and the log of the mass
        that these tokens have among all: (B,) each.
    """
    core = _core(z)
    if core is None:
        return None
    token = torch.empty(z.shape[0], dtype=torch.int64)
    log_prob, raw, mass = torch.empty(3, z.shape[0], dtype=torch.float64)
    core.row_draw(*views(z, lse, ids, logits, keys, token, log_prob, raw, mass), kernels.threads())
    return token, log_prob, raw, mass


def gumbel_above(
    z: Tensor, beta: Tensor, keys: Tensor, least: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """Return the tokens with β z + noise >= least: their number per row, and the first `width`.

    (B,) and (B, width); in the order of ids, token 0 where there are fewer.
    """
    core = _core(z)
    ids = torch.zeros(z.shape[0], width, dtype=torch.int64, device=z.device)
    if core is not None:
        counts = torch.empty(z.shape[0], dtype=torch.int64)
        core.row_gumbel_above(*views(z, beta, keys, least, counts, ids), kernels.threads())
        return counts, ids
    counts = torch.zeros(z.shape[0], dtype=torch.int64, device=z.device)
    every = torch.arange(z.shape[1], device=z.device)[None]
    for i in range(z.shape[0]):
        score = z[i].double() * beta[i] + gumbel(keys[i : i + 1], every)[0]
        found = ((score >= least[i]) & (z[i] > -math.inf)).nonzero()[:, 0]
        counts[i] = len(found)
        ids[i, : len(found)] = found[:width]
    return counts, ids


def _listed(z: Tensor, fill: Callable[..., None]) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the core lists of each row: token counts (B,), ids and logits (B, K).

    `fill` gets these three as arrays, and the number of threads; it is called again where there
    are more tokens than expected.
    """
    counts = torch.empty(z.shape[0], dtype=torch.int64)
    capacity, width = min(_CAPACITY, z.shape[1]), 0
    while width < capacity:
        width = capacity
        ids = torch.zeros(z.shape[0], width, dtype=torch.int64)
        values = torch.full(ids.shape, -math.inf, dtype=torch.float64)
        fill(*views(counts, ids, values), kernels.threads())
        capacity = widest(counts)
    return counts, ids[:, :capacity], values[:, :capacity]


def widest(counts: Tensor) -> int:
    """Return the largest count, at least 1: a row has a largest entry even if it is -inf."""
    return max(1, int(counts.max())) if counts.numel() else 1


def _core(z: Tensor) -> ModuleType | None:
    fits = z.dtype == torch.float32 and kernels.readable(z) and z.is_contiguous()
    return kernels.core if fits and z.shape[1] > 0 else None
