"""The encoder: every token attends to all tokens of its text, before and after it."""

from __future__ import annotations

from torch import Tensor, nn

from lmhead.nn.multi_head_attention import AttentionMask
from lmhead.nn.stack import TransformerStack
from lmhead.nn.transformer_config import TransformerConfig


class Encoder(TransformerStack):
    """Token ids to hidden states with bidirectional attention.

    Args:
        config: the sizes.
        layers: the number of blocks.
        embedding: (V, D), to be shared; None for a new one.

    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> config = TransformerConfig(vocab_size=50, hidden_size=16, num_attention_heads=4)
    >>> encoder = Encoder(config, 2)
    >>> ids = torch.tensor([[3, 1, 4, 0, 0]])
    >>> states = encoder(ids, ids > 0)  # two tokens of padding, which are masked out
    >>> torch.allclose(states[:, :3], encoder(ids[:, :3]), atol=1e-6)
    True
    """

    def __init__(
        self, config: TransformerConfig, layers: int, *, embedding: nn.Embedding | None = None
    ) -> None:
        super().__init__(config, layers, embedding=embedding)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Encode whole texts.

        Args:
            ids: (B, S).
            mask: (B, S) bool, False for padding, on either side; None for no padding.

        Returns:
            (B, S, D) after the final norm, undefined at padding.
        """
        mask = self.check(ids, 0, mask)
        if mask is not None and not bool(mask.any(-1).all()):
            empty = int((~mask.any(-1)).nonzero()[0])
            raise ValueError(f"mask must leave a token in every row; row {empty} has none")
        x, rotary = self.embed(ids, 0, mask)
        attention_mask = AttentionMask(None if mask is None else mask[:, None, None], rotary=rotary)
        for block in self.blocks:
            x, _ = block(x, attention_mask)
        out: Tensor = self.norm(x)
        return out
