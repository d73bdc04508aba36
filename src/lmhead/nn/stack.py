"""What an encoder and a decoder share: embedding, blocks, final norm, and their initial values.

x = embedding(ids) · scale + position
x = block(x)                     for each layer
hidden = norm(x)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lmhead import checks
from lmhead.nn.block import Block, make_norm
from lmhead.nn.mlp import FeedForward
from lmhead.nn.multi_head_attention import Attention
from lmhead.nn.position_embedding import PositionEmbedding, RotaryAngles, rotary_angles
from lmhead.nn.transformer_config import TransformerConfig


class TransformerStack(nn.Module):
    """Embedding, blocks and norm; `Encoder` and `DecoderBody` define the forward pass.

    Args:
        config: the sizes.
        layers: the number of blocks.
        embedding: (V, D), to be shared; None for a new one.
        cross: whether the blocks have cross-attention.
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
    ) -> tuple[Tensor, RotaryAngles | None]:
        """Embed tokens with their positions.

        Args:
            ids: (B, T).
            before: the number of tokens before them, padding included.
            mask: (B, before + T) bool, False for padding; None for no padding.

        Returns:
            (B, T, D), and the angles if positions are rotary.
        """
        if mask is None:
            positions = torch.arange(before, before + ids.shape[1], device=ids.device)[None]
        else:  # padding is not counted
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, before:]
        x = self.embedding(ids)
        if self.sizes.embedding_scale != 1.0:
            x = x * self.sizes.embedding_scale
        x = self.dropout(self.position(x, positions))
        if self.sizes.position != "rotary":
            return x, None
        size, theta = self.sizes.head_size, self.sizes.rope_theta
        return x, rotary_angles(positions, size, theta, x.dtype, self.sizes.rope_factors)

    def check(self, ids: Tensor, before: int, mask: Tensor | None) -> Tensor | None:
        """Validate the inputs; return the mask, or None if it masks nothing."""
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
    """Validate a padding mask (B, S); return None if it masks nothing."""
    if mask is None:
        return None
    if mask.dtype != torch.bool or tuple(mask.shape) != shape:
        raise ValueError(
            f"{name} must be bool and of shape {shape}, one entry for each token so far; "
            f"got {mask.dtype} {tuple(mask.shape)}"
        )
    return None if bool(mask.all()) else mask


def initialise(stack: TransformerStack) -> None:
    """Set the initial value of every matrix and bias, as `config.init` says.

    With "normal", the last matrix of each sublayer is divided by √(number of sublayers), so that
    the residual sum of a deep model starts no larger than that of a shallow one.
    """
    config = stack.sizes
    if config.init == "torch":
        return
    for part in stack.modules():
        if isinstance(part, nn.Linear):
            if config.init == "normal":
                nn.init.normal_(part.weight, std=config.init_std)
            else:
                nn.init.xavier_uniform_(part.weight)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
        elif isinstance(part, nn.Embedding | PositionEmbedding) and part.weight is not None:
            nn.init.normal_(part.weight, std=config.init_std)
    if config.init == "normal":
        sublayers = [m for m in stack.modules() if isinstance(m, Attention | FeedForward)]
        for sublayer in sublayers:
            last = sublayer.output if isinstance(sublayer, Attention) else sublayer.down
            nn.init.normal_(last.weight, std=config.init_std / math.sqrt(len(sublayers)))
