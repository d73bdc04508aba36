"""Positions of tokens: vectors added to the embedding, or rotations of queries and keys.

    learned      a trained vector per position            x = embedding(id) + position[t]
    sinusoidal   sines and cosines of t at D/2 speeds     x = embedding(id) + sinusoidal(t)
    rotary       queries and keys are rotated by angles t · speed, so that their product depends
                 only on the distance of two tokens

Positions count the tokens of a row, not its padding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lmhead.nn.transformer_config import TransformerConfig

RotaryAngles = tuple[Tensor, Tensor]
"""Cosine and sine of the angles: (B or 1, T, 1, d/2) each."""


def angles(positions: Tensor, size: int, theta: float) -> Tensor:
    """Return position · theta^(-2i / size) for i in [0, size/2).

    In float64: float32 cannot tell neighbouring positions of a long text apart.

    >>> angles(torch.tensor([0, 1, 2]), 4, 100.0)
    tensor([[0.0000, 0.0000],
            [1.0000, 0.1000],
            [2.0000, 0.2000]], dtype=torch.float64)
    """
    steps = torch.arange(0, size, 2, dtype=torch.float64, device=positions.device)
    return positions[..., None] * theta ** (-steps / size)


def sinusoidal(positions: Tensor, size: int, theta: float = 10000.0) -> Tensor:
    """Return the position vectors of the Transformer of 2017: sin at even, cos at odd indices.

    Shapes: positions (...), result (..., size), float64.

    >>> sinusoidal(torch.tensor([0, 1]), 2)
    tensor([[0.0000, 1.0000],
            [0.8415, 0.5403]], dtype=torch.float64)
    """
    angle = angles(positions, size, theta)
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(-2)


def rotary_angles(
    positions: Tensor,
    size: int,
    theta: float,
    dtype: torch.dtype,
    factors: Sequence[float] | None = None,
) -> RotaryAngles:
    """Return cosine and sine for `rotate`: positions (B or 1, T) to (B or 1, T, 1, size/2) each.

    The angles are divided by `factors`, size/2 numbers, if given.
    """
    angle = angles(positions, size, theta)[..., None, :]
    if factors is not None:
        angle = angle / torch.tensor(factors, dtype=angle.dtype, device=angle.device)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, angles: RotaryAngles, rotary: str) -> Tensor:
    """Rotate every pair (a, b) of coordinates by its angle: (a cos - b sin, a sin + b cos).

    Args:
        x: (B, T, heads, d).
        angles: their cosine and sine, see `rotary_angles`.
        rotary: which coordinates are a pair, see `TransformerConfig`.
    """
    cos, sin = angles
    pairs = x.shape[-1] // 2
    shape, axis = ((2, pairs), -2) if rotary == "half" else ((pairs, 2), -1)
    a, b = x.view(*x.shape[:-1], *shape).unbind(axis)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), axis).flatten(-2)


class PositionEmbedding(nn.Module):
    """Add the vector of each position to the embedding; nothing for rotary positions.

    >>> config = TransformerConfig(vocab_size=9, hidden_size=4, num_attention_heads=1, max_length=8)
    >>> PositionEmbedding(config)(torch.zeros(2, 3, 4), torch.tensor([[0, 1, 2]])).shape
    torch.Size([2, 3, 4])
    """

    weight: Tensor | None

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.kind, self.theta = config.position, config.rope_theta
        self.register_parameter("weight", None)
        if self.kind == "learned":
            self.weight = nn.Parameter(torch.empty(config.max_length, config.hidden_size))
            nn.init.normal_(self.weight, std=config.init_std)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return x (B, T, D) plus the vectors of positions (B or 1, T)."""
        if self.weight is not None:
            return x + nn.functional.embedding(positions, self.weight)
        if self.kind == "sinusoidal":
            return x + sinusoidal(positions, x.shape[-1], self.theta).to(x.dtype)
        return x
