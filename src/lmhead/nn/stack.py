"""What an encoder and a decoder share: the embedding at the bottom, blocks, the norm at the top.

x = embedding(ids) · scale + position
x = block(x)                     as often as there are layers
hidden = norm(x)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lmhead import checks
from lmhead.nn.block import Block, make_norm
from lmhead.nn.config import TransformerConfig
from lmhead.nn.embedding import PositionEmbedding, Turn, turn_of


class Stack(nn.Module):
    """Embedding, blocks and norm; what goes on between them is up to `Encoder` and `DecoderBody`.

    Args:
        config: the sizes.
        layers: how many blocks.
        embedding: (V, D), to be shared; None for a new one.
        cross: whether the blocks hear an encoder.
    """

    norm: nn.Module

    def __init__(
        self,
        config: TransformerConfig,
        layers: int,
        *,
        embedding: nn.Embedding | None = None,
        cross: bool = False,
    ) -> None:
        super().__init__()
        if embedding is None:
            embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        shape = (config.vocab_size, config.hidden_size)
        if tuple(embedding.weight.shape) != shape:
            raise ValueError(
                f"embedding must have a weight of shape {shape}; "
                f"got {tuple(embedding.weight.shape)}"
            )
        self.sizes = config
        self.embedding = embedding
        self.position = PositionEmbedding(config)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, cross=cross) for _ in range(layers))
        self.norm = make_norm(config) if config.norm_first else nn.Identity()

    def embed(
        self, ids: Tensor, before: int = 0, mask: Tensor | None = None
    ) -> tuple[Tensor, Turn | None]:
        """The bottom: tokens at their places.

        Args:
            ids: (B, T).
            before: how many tokens, padding included, came before them.
            mask: (B, before + T) bool, False for padding; None for no padding.

        Returns:
            (B, T, D), and the turn of the heads where positions are rotary.
        """
        if mask is None:
            positions = torch.arange(before, before + ids.shape[1], device=ids.device)[None]
        else:  # the place among the tokens that are no padding
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, before:]
        x = self.embedding(ids)
        if self.sizes.embedding_scale != 1.0:
            x = x * self.sizes.embedding_scale
        x = self.dropout(self.position(x, positions))
        if self.sizes.position != "rotary":
            return x, None
        size, theta, factors = (
            self.sizes.head_size,
            self.sizes.rope_theta,
            self.sizes.rope_factors,
        )
        return x, turn_of(positions, size, theta, x.dtype, factors)

    def check(self, ids: Tensor, before: int, mask: Tensor | None) -> Tensor | None:
        """The door; gives None for a mask that masks nothing, for attention is faster without."""
        checks.check_ids("ids", ids, self.sizes.vocab_size)
        if ids.dim() != 2:
            raise ValueError(f"ids must have shape (B, T); got {tuple(ids.shape)}")
        mask = check_mask("mask", mask, (ids.shape[0], before + ids.shape[1]))
        most = self.sizes.max_length
        if self.sizes.position == "learned" and before + ids.shape[1] > most:
            longest = before + ids.shape[1] if mask is None else int(mask.sum(-1).max())
            if longest > most:
                raise ValueError(
                    f"ids must be at most max_length, {most} tokens, with those in the cache, for "
                    f"there are no more learned positions; got {longest}"
                )
        return mask


def check_mask(name: str, mask: Tensor | None, shape: tuple[int, int]) -> Tensor | None:
    """A mask (B, S), or None for one that masks nothing."""
    if mask is None:
        return None
    if mask.dtype != torch.bool or tuple(mask.shape) != shape:
        raise ValueError(
            f"{name} must be bool and of shape {shape}, one entry for each token so far; "
            f"got {mask.dtype} {tuple(mask.shape)}"
        )
    return None if bool(mask.all()) else mask
