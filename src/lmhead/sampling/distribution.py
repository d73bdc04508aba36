"""Distributions between stages: all tokens at first, candidates after the first cut.

    FullDistribution  the logits of every token, (B, V), and a temperature to apply
    TopCandidates     the remaining tokens, best first, (B, K), rows padded with -inf

A stage takes one of them and returns one of them. `TopCandidates` is small, in float64, and
sorted, so that the definitions of the stages can be used directly.

The functions on full rows, in the compiled core or as torch operations, are the only ones that read
every logit. They select candidates, so that nothing else has the size of the vocabulary, and
nothing of that size is sorted. β = 1 / temperature; the mass of a token is exp(β (z - max z)).

Random numbers are a function of (seed, position, token id), from Philox 4x32-10. There is no
generator with a state: the same three numbers give the same noise in any batch, in any order,
whatever other tokens are sampled. `lmhead.reference.philox` is the definition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lmhead import checks
from lmhead.sweep import kernels
from lmhead.sweep.kernels import arrays

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

# Philox streams: independent numbers for each purpose.
FOR_TOKENS = 0
FOR_COINS = 1
FOR_FACTORS = 2  # clusters and tree branches, see `vocab`
FOR_NEGATIVES = 3  # negatives of sampled losses


def check_seed(seed: Any) -> int | list[int] | None:
    """Validate a seed, or one per row."""
    value = seed.tolist() if isinstance(seed, Tensor) else seed
    if value is None or type(value) is int:
        return value
    if isinstance(value, list | tuple) and all(type(s) is int for s in value):
        return list(value)
    raise TypeError(f"seed must be an integer, or one per row; got {seed!r}")


def row_keys(seed: int | list[int] | None, positions: Tensor, n: int) -> Tensor:
    """Return the keys of n rows, (n, 2); positions (1,) or (n,). None draws new seeds."""
    if seed is None:
        seeds: list[int] = torch.randint(-(2**63), 2**63 - 1, (n,)).tolist()
    else:
        seeds = [seed] * n if isinstance(seed, int) else seed
    for name, count, allowed in (("seed", len(seeds), (n,)), ("position", len(positions), (1, n))):
        if count not in allowed:
            raise ValueError(f"{name} must be a number or one per row, {n}; got {count} of them")
    return make_keys(seeds, positions.expand(n))


def position_tensor(position: Any) -> Tensor:
    """Validate positions, and return them as int64, (1,) or one per row."""
    if isinstance(position, Tensor):
        checks.check_id_type("position", position)
        return position.reshape(-1).long()
    positions = [position] if isinstance(position, int | float) else position
    if not isinstance(positions, list | tuple):
        raise TypeError(
            f"position must be an integer, or one per row; got {type(position).__name__}"
        )
    for number in positions:
        checks.check_integer("position", number, low=0, high=2**63 - 1)
    return torch.tensor(positions, dtype=torch.int64)


def make_keys(seeds: Sequence[int] | Tensor, positions: Tensor) -> Tensor:
    """Return (B, 2), int64: seeds modulo 2^64, as signed numbers, and positions."""
    signed = [((int(s) + 2**63) % 2**64) - 2**63 for s in seeds]
    first = torch.tensor(signed, dtype=torch.int64)
    return torch.stack([first, positions.to(first)], 1).contiguous()


def uniforms(keys: Tensor, ids: Tensor, stream: int = FOR_TOKENS) -> Tensor:
    """Return one number in (0, 1) per id, in float64: keys (B, 2), ids (B, K) give (B, K).

    >>> keys = make_keys([7], torch.tensor([3]))
    >>> both, alone = uniforms(keys, torch.tensor([[5, 9]])), uniforms(keys, torch.tensor([[9]]))
    >>> bool(both[0, 1] == alone[0, 0])
    True
    """
    if kernels.core is not None and kernels.readable(keys, ids):
        out = torch.empty(ids.shape, dtype=torch.float64)
        keys_, ids_, out_ = arrays(keys, ids, out)
        kernels.core.uniforms(keys_, stream, ids_, out_)
        return out
    high, low = _philox(keys.to(ids.device), ids, stream)
    bits = (high << 21) | (low >> 11)
    # Rounding the largest value would give 1.
    return ((bits.double() + 0.5) * 2.0**-53).clamp(max=1 - 2.0**-53)


def gumbel(keys: Tensor, ids: Tensor) -> Tensor:
    """Return the Gumbel noise -log(-log u) of each token: argmax(z + gumbel) samples softmax(z)."""
    return uniforms(keys, ids).log_().neg_().log_().neg_()


def _philox(keys: Tensor, ids: Tensor, stream: int) -> tuple[Tensor, Tensor]:
    """Return two random 32-bit numbers for each id."""
    seed, position = keys[:, :1], keys[:, 1:]
    c = [ids >> 1, position & _MASK, (position >> 32) & _MASK, torch.full_like(seed, stream)]
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(_ROUNDS):
        p0, p1 = c[0] * _MULTIPLIERS[0], c[2] * _MULTIPLIERS[1]
        c = [
            ((p1 >> 32) & _MASK) ^ c[1] ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c[3] ^ k1,
            p0 & _MASK,
        ]
        k0, k1 = (k0 + _STEPS[0]) & _MASK, (k1 + _STEPS[1]) & _MASK
    odd = (ids & 1).bool()
    return torch.where(odd, c[2], c[0]), torch.where(odd, c[3], c[1])


# Largest k for which a heap finds the k-th largest faster than a histogram.
_LARGEST_HEAP = 4096
# Bin width of the histogram of `mass_radius`, in units of β z.
_BIN_WIDTH = 1 / 64
# Initial capacity for the selected tokens of a row.
_CAPACITY = 512
_DOWN, _UP = torch.tensor(-math.inf), torch.tensor(math.inf)


def row_max(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logit and the number of unmasked tokens of each row: (B,) float64 each."""
    core = _core(z)
    if core is not None:
        largest, n = torch.empty(2, z.shape[0], dtype=torch.float64)
        core.row_max(*arrays(z, largest, n), kernels.threads())
        return largest, n
    return z.double().amax(1), (z > -math.inf).sum(1).double()


def softmax_sums(z: Tensor, betas: Tensor, largest: Tensor) -> Tensor:
    """Return Σ exp(x) and Σ x exp(x) with x = β (z - max): betas (M, B) give (2, M, B)."""
    core = _core(z)
    if core is not None:
        out = torch.empty(2, *betas.shape, dtype=torch.float64)
        core.row_softmax_sums(*arrays(z, betas, largest, out), kernels.threads())
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
        core.row_moments(*arrays(z, largest, shift, square), kernels.threads())
        return shift, square
    far = torch.where(z == -math.inf, 0.0, z.double() - largest[:, None])
    return far.sum(1), (far * far).sum(1)


def mass_radius(z: Tensor, beta: Tensor, largest: Tensor, centre: Tensor, limit: Tensor) -> Tensor:
    """Return the radius around `centre` within which the tokens have a mass of `limit`.

    (B,), in units of z, rounded up; inf if all tokens together have less mass.
    """
    core = _core(z)
    if core is not None:
        radius = torch.empty_like(beta)
        width = torch.full_like(beta, _BIN_WIDTH)
        given = arrays(z, beta, largest, centre, width, limit)
        core.row_mass_radius(*given, radius, kernels.threads())
        return radius
    z = z.double()
    distance = (z - centre[:, None]).abs().masked_fill(z == -math.inf, math.inf)
    nearest, order = distance.sort(1)
    weight = ((z - largest[:, None]) * beta[:, None]).exp().gather(1, order)
    index = (weight.cumsum(1) < limit[:, None]).sum(1, keepdim=True)
    radius = nearest.gather(1, index.clamp(max=z.shape[1] - 1))
    return torch.where(index < z.shape[1], radius * (1 + 1e-9), math.inf)[:, 0]


def gumbel_argmax(z: Tensor, beta: Tensor, keys: Tensor) -> Tensor:
    """Return the token with the largest β z + Gumbel noise, a sample of softmax(β z): (B,)."""
    core = _core(z)
    if core is not None:
        best = torch.empty(z.shape[0], dtype=torch.int64)
        core.row_gumbel_argmax(*arrays(z, beta, keys, best), kernels.threads())
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

    z (B, V) are the logits before any stage, lse (B,) is their log Σ exp; `logits` (B, K) are
    those of `ids` (B, K) after all stages. Returns the token, its log-probability among `ids` and
    in softmax(z), and the log of the mass of `ids` in softmax(z): (B,) each.
    """
    core = _core(z)
    if core is None:
        return None
    token = torch.empty(z.shape[0], dtype=torch.int64)
    log_prob, raw, mass = torch.empty(3, z.shape[0], dtype=torch.float64)
    core.row_draw(*arrays(z, lse, ids, logits, keys, token, log_prob, raw, mass), kernels.threads())
    return token, log_prob, raw, mass


def _selected(z: Tensor, fill: Callable[..., None]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens that the core selects in each row: counts (B,), ids and logits (B, K).

    `fill` gets these three as arrays, and the number of threads; it is called again if there
    are more tokens than expected.
    """
    counts = torch.empty(z.shape[0], dtype=torch.int64)
    capacity, width = min(_CAPACITY, z.shape[1]), 0
    while width < capacity:
        width = capacity
        ids = torch.zeros(z.shape[0], width, dtype=torch.int64)
        values = torch.full(ids.shape, -math.inf, dtype=torch.float64)
        fill(*arrays(counts, ids, values), kernels.threads())
        capacity = widest(counts)
    return counts, ids[:, :capacity], values[:, :capacity]


def widest(counts: Tensor) -> int:
    """Return the largest count, at least 1: a row has a largest entry even if it is -inf."""
    return max(1, int(counts.max())) if counts.numel() else 1


def _core(z: Tensor) -> ModuleType | None:
    fits = z.dtype == torch.float32 and kernels.readable(z) and z.is_contiguous()
    return kernels.core if fits and z.shape[1] > 0 else None


@dataclass(frozen=True)
class TopCandidates:
    """Tokens in descending order of their logits, lowest id first among equals."""

    ids: Tensor  # (B, K); meaningless where the logit is -inf
    z: Tensor  # (B, K) in float64, temperature applied

    @classmethod
    def sort(cls, ids: Tensor, z: Tensor) -> TopCandidates:
        """Sort tokens that are given in the order of their ids."""
        z, order = z.sort(dim=1, descending=True, stable=True)
        return cls(ids.gather(1, order), z)

    @property
    def top(self) -> Tensor:
        """The largest logit, (B,)."""
        return self.z[:, 0]

    @cached_property
    def n(self) -> Tensor:
        """Number of remaining tokens, (B,), float64."""
        return (self.z > -math.inf).sum(1).double()

    @cached_property
    def lse(self) -> Tensor:
        """Log Σ exp z, (B,)."""
        return self.z.logsumexp(1)

    @property
    def entropy(self) -> Tensor:
        """In nats, (B,)."""
        log_p = self.z - self.lse[:, None]
        return -torch.where(log_p > -math.inf, log_p.exp() * log_p, 0.0).sum(1)

    @property
    def deviation(self) -> Tensor:
        """The standard deviation of the logits, (B,)."""
        far = torch.where(self.z > -math.inf, self.z - self.top[:, None], 0.0)
        return _deviation(self.n, far.sum(1), (far * far).sum(1))

    def keep(self, mask: Tensor) -> TopCandidates:
        """Return the tokens of a mask (B, K), in the same order."""
        mask = mask & (self.z > -math.inf)
        counts = mask.sum(1)
        width = widest(counts)
        z = self.z.masked_fill(~mask, -math.inf)
        if _are_first(mask[:, :width], counts):
            return TopCandidates(self.ids[:, :width], z[:, :width])
        # Kept tokens come first, in their order: a stable sort of the mask.
        order = (~mask).to(torch.int8).argsort(dim=1, stable=True)[:, :width]
        return TopCandidates(self.ids.gather(1, order), z.gather(1, order))

    def scaled(self, beta: Tensor) -> TopCandidates:
        """Return this at another temperature; beta (B,) is its inverse."""
        return TopCandidates(self.ids, self.z * beta[:, None])

    def to_full(self, vocab: int) -> FullDistribution:
        """Return all tokens again, removed ones at -inf."""
        z = torch.full((len(self.z), vocab), -math.inf, dtype=torch.float64, device=self.z.device)
        real = self.z > -math.inf
        row = torch.arange(len(z), device=z.device)[:, None].expand_as(real)
        z[row[real], self.ids[real]] = self.z[real]
        return FullDistribution.of(z)


@dataclass(frozen=True)
class FullDistribution:
    """All tokens. Each property costs one pass over the vocabulary and is cached."""

    z: Tensor  # (B, V), float32 or float64
    beta: Tensor  # (B,), float64; the logits are beta · z
    max_and_count: tuple[Tensor, Tensor]  # largest z, and number of unmasked tokens, (B,) each
    is_raw: bool = False  # whether these are the model's logits, at temperature 1
    # The model's distribution, if this one is the same at another temperature: the masses of both
    # are computed in one pass.
    raw: FullDistribution | None = None

    @classmethod
    def of(cls, z: Tensor, *, is_raw: bool = False) -> FullDistribution:
        """Return the distribution of logits (B, V), at temperature 1."""
        beta = torch.ones(len(z), dtype=torch.float64, device=z.device)
        return cls(z, beta, row_max(z), is_raw)

    @property
    def largest(self) -> Tensor:
        """The largest z, (B,)."""
        return self.max_and_count[0]

    @property
    def top(self) -> Tensor:
        """The largest logit, (B,)."""
        return self.beta * self.largest

    @property
    def n(self) -> Tensor:
        """Number of unmasked tokens, (B,), float64."""
        return self.max_and_count[1]

    @cached_property
    def mass(self) -> tuple[Tensor, Tensor]:
        """Σ exp(x) and Σ x exp(x), x being the distance of a logit to the largest."""
        raw = self.raw
        if raw is None or "mass" in vars(raw):
            sums = softmax_sums(self.z, self.beta[None], self.largest)
            return sums[0, 0], sums[1, 0]
        both = softmax_sums(self.z, torch.stack([self.beta, raw.beta]), self.largest)
        vars(raw)["mass"] = both[0, 1], both[1, 1]
        return both[0, 0], both[1, 0]

    @cached_property
    def lse(self) -> Tensor:
        """Log Σ exp(beta · z), (B,)."""
        return self.top + self.mass[0].log()

    @property
    def entropy(self) -> Tensor:
        """In nats, (B,)."""
        total, weighted = self.mass
        return total.log() - weighted / total

    @cached_property
    def deviation(self) -> Tensor:
        """The standard deviation of the logits, (B,)."""
        return self.beta * _deviation(self.n, *moments(self.z, self.largest))

    def scaled(self, beta: Tensor) -> FullDistribution:
        """Return this at another temperature; beta (B,) is its inverse."""
        raw = self if self.is_raw else self.raw
        return FullDistribution(self.z, self.beta * beta, self.max_and_count, raw=raw)

    def to_full(self, vocab: int) -> FullDistribution:  # noqa: ARG002
        """Return this."""
        return self

    def scaled_logits(self) -> Tensor:
        """Return a copy of the logits with the temperature applied, (B, V)."""
        if bool((self.beta == 1).all()):
            return self.z.clone()
        return (self.z.double() * self.beta[:, None]).to(self.z.dtype)

    def within(self, lo: Tensor, hi: Tensor) -> TopCandidates:
        """Return the tokens with lo <= z <= hi, in units of z: (B,) each."""
        z, core = self.z, _core(self.z)
        if core is not None:
            # Rounded outwards, so that no token is missed.
            lo32 = torch.nextafter(lo.float(), _DOWN)
            hi32 = torch.nextafter(hi.float(), _UP)
            _, ids, values = _selected(z, lambda *out: core.row_range(*arrays(z, lo32, hi32), *out))
            return TopCandidates(ids, values * self.beta[:, None])
        inside = (z.double() >= lo[:, None]) & (z.double() <= hi[:, None]) & (z > -math.inf)
        counts = inside.sum(1)
        ids = torch.zeros(z.shape[0], widest(counts), dtype=torch.int64, device=z.device)
        values = torch.full(ids.shape, -math.inf, dtype=torch.float64, device=z.device)
        row, token = inside.nonzero(as_tuple=True)
        column = torch.arange(len(row), device=z.device) - (counts.cumsum(0) - counts)[row]
        ids[row, column] = token
        values[row, column] = z[row, token].double() * self.beta[row]
        return TopCandidates.sort(ids, values)

    def above(self, lo: Tensor) -> TopCandidates:
        """Return the tokens with z >= lo."""
        return self.within(lo, torch.full_like(lo, math.inf))

    def kth(self, k: Tensor) -> Tensor:
        """Return the k-th largest z: (B,) to (B,), -inf where there are fewer tokens."""
        core, most = _core(self.z), self.z.shape[1]
        if core is not None and bool((k <= _LARGEST_HEAP).all()):
            value = torch.empty(self.z.shape[0])
            core.row_kth_largest(*arrays(self.z, k.long(), value), kernels.threads())
            return value.double()
        widest = int(k.clamp(max=most).max()) if len(k) else 1
        values = self.z.topk(widest, dim=1).values.double()
        last = values.gather(1, (k.clamp(max=most).long() - 1)[:, None])[:, 0]
        return torch.where(k <= most, last, -math.inf)

    def nearest(self, centre: Tensor, share: Tensor, least: int) -> TopCandidates | None:
        """Return the tokens nearest to `centre` with a share of the mass.

        A token is kept if those nearer have less than the share, or are fewer than `least`. None
        without the core, or if a row needs distant tokens.
        """
        core = _core(self.z)
        if core is None:
            return None
        given = arrays(self.z, self.beta, self.largest, centre, self.mass[0] * share)
        counts, ids, z = _selected(self.z, lambda *out: core.row_nucleus(*given, least, *out))
        return None if 0 in counts.tolist() else TopCandidates(ids, z)

    def around(self, centre: Tensor, share: Tensor) -> TopCandidates:
        """Return the tokens nearest to `centre` that hold a share of the mass, and a few more.

        `centre` and `share` are (B,), the former in units of z.

        A narrow band is tried first: most of the mass is usually close to the centre.
        """
        # Include tokens that exceed the limit only by rounding.
        limit = self.mass[0] * (share + _ROUNDING)
        near = _NEAR / self.beta
        candidates = self.within(centre - near, centre + near)
        if bool(((candidates.z - self.top[:, None]).exp().sum(1) >= limit).all()):
            return candidates
        radius = mass_radius(self.z, self.beta, self.largest, centre, limit)
        radius += _ROUNDING * (1 + centre.abs())
        return self.within(centre - radius, centre + radius)


# Above the rounding error of a sum of probabilities.
_ROUNDING = 1e-9
# Half-width of the band that is tried first: tokens with e^-6 of the best probability.
_NEAR = 6.0


def _are_first(mask: Tensor, counts: Tensor) -> bool:
    """Return whether a mask (B, K) is True for the first counts[i] entries of each row i."""
    if len(mask) == 1:
        return bool(mask.all())
    return torch.equal(mask, torch.arange(mask.shape[1], device=mask.device) < counts[:, None])


def _deviation(n: Tensor, shift: Tensor, square: Tensor) -> Tensor:
    mean = shift / n
    return (square / n - mean * mean).clamp(min=0).sqrt()


Distribution = FullDistribution | TopCandidates
