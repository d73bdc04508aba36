"""The encoder: every token of a text sees all the others, before and after it."""

from __future__ import annotations

from torch import Tensor, nn

from lmhead.nn.attention import Look
from lmhead.nn.config import TransformerConfig
from lmhead.nn.stack import Stack


class Encoder(Stack):
    """Token ids to states that know their neighbours on both sides.

    Args:
        config: the sizes.
        layers: how many blocks.
        embedding: (V, D), to be shared; None for a new one.

    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> config = TransformerConfig(vocab_size=50, hidden_size=16, num_attention_heads=4)
    >>> encoder = Encoder(config, 2)
    >>> ids = torch.tensor([[3, 1, 4, 0, 0]])
    >>> states = encoder(ids, ids > 0)  # two tokens of padding, which nobody sees
    >>> torch.allclose(states[:, :3], encoder(ids[:, :3]), atol=1e-6)
    True
    """

    def __init__(
        self, config: TransformerConfig, layers: int, *, embedding: nn.Embedding | None = None
    ) -> None:
        super().__init__(config, layers, embedding=embedding)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Read whole texts.

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
        x, turn = self.embed(ids, 0, mask)
        look = Look(None if mask is None else mask[:, None, None], turn=turn)
        for block in self.blocks:
            x, _ = block(x, look)
        out: Tensor = self.norm(x)
        return out
