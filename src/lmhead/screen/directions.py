"""What is taken out of a weight before eight bits: its mean row, and a few leading directions.

A few directions carry most of the energy of hidden states, and much of the error would be along
them. The proof holds for any directions; better ones leave fewer tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def mean_row(weight: Tensor) -> Tensor:
    """Return the mean row (D,) in float64, which softmax ignores, of rows (V, D)."""
    total = torch.zeros(weight.shape[1], dtype=torch.float64)
    for lo in range(0, len(weight), 4096):
        total += weight[lo : lo + 4096].double().sum(0)
    return total / len(weight)


def leading_directions(rows: Tensor, k: int, *, most: int = 16384) -> Tensor:
    """Return K orthonormal directions that carry most of the energy of the rows: (K, D).

    Subspace iteration on a sample. The proof holds for any directions; better ones prune more.
    """
    size = rows.shape[-1]
    if k == 0:
        return torch.zeros(0, size, dtype=torch.float64)
    rows = rows.reshape(-1, size)
    rows = rows[:: max(1, len(rows) // most)].float()
    rows = rows / rows.abs().max().clamp(min=2.0**-120)
    gram = (rows.T @ rows).double()
    random = torch.Generator().manual_seed(0)
    span = torch.randn(size, min(size, k + 16), generator=random, dtype=torch.float64)
    for _ in range(16):
        span = torch.linalg.qr(gram @ torch.linalg.qr(span)[0] + 1e-12 * span)[0]
    _, vectors = torch.linalg.eigh(span.T @ gram @ span)  # by ascending eigenvalue
    directions: Tensor = (span @ vectors.flip(1)[:, :k]).T
    return directions.contiguous()
