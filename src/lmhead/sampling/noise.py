"""Random numbers that are a function of (seed, position, token id), from Philox 4x32-10.

There is no generator with a state: the same three numbers give the same noise in any batch, in any
order, whatever other tokens are sampled. `lmhead.reference.philox` is the definition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lmhead import checks
from lmhead.sweep import kernels

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

# Streams: each use has its own numbers.
FOR_TOKENS = 0
FOR_COINS = 1
FOR_FACTORS = 2  # clusters, decisions on a path: see `vocab`
FOR_NEGATIVES = 3  # negatives of sampled losses


def position_tensor(position: Any) -> Tensor:
    """Validate positions, and return them as int64, (1,) or one per row."""
    if isinstance(position, Tensor):
        checks.check_id_type("position", position)
        return position.reshape(-1).long()
    given = [position] if isinstance(position, int | float) else position
    if not isinstance(given, list | tuple):
        raise TypeError(
            f"position must be an integer, or one per row; got {type(position).__name__}"
        )
    for each in given:
        checks.check_integer("position", each, low=0, high=2**63 - 1)
    return torch.tensor(given, dtype=torch.int64)


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
        keys_, ids_, out_ = kernels.views(keys, ids, out)
        kernels.core.uniforms(keys_, stream, ids_, out_)
        return out
    high, low = _philox(keys.to(ids.device), ids, stream)
    bits = (high << 21) | (low >> 11)
    # The largest would be rounded to 1.
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
