"""How a model's numbers begin."""

from __future__ import annotations

import math

from torch import nn

from lmhead.nn.attention import Attention
from lmhead.nn.config import TransformerConfig
from lmhead.nn.embedding import PositionEmbedding
from lmhead.nn.feed_forward import FeedForward


def initialise(model: nn.Module, config: TransformerConfig) -> None:
    """Give every matrix and bias inside `model` its first value, as `config.init` says.

    With "normal", the matrices that end a sublayer are divided by √(number of sublayers): the sum
    that flows through a deep model then begins no larger than that of a shallow one.
    """
    if config.init == "torch":
        return
    sublayers = sum(isinstance(part, Attention | FeedForward) for part in model.modules())
    for part in model.modules():
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
        for part in model.modules():
            if isinstance(part, Attention | FeedForward):
                last = part.output if isinstance(part, Attention) else part.down
                nn.init.normal_(last.weight, std=config.init_std / math.sqrt(sublayers))
