"""Markov chains as models: the next token depends on the last one only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lmhead import LMHead


class Chain:
    """A model whose next token depends on the last one only: logits[last token]."""

    tokenizer = None

    def __init__(self, logits: Tensor, eos: tuple[int, ...] = ()) -> None:
        self.logits, self.eos_token_ids = logits, eos

    def body(self, ids: Tensor, cache: Any, mask: Tensor) -> tuple[Tensor, Any]:  # noqa: ARG002
        return ids[..., None].double(), self

    def head(self, hidden: Tensor) -> Tensor:
        return self.logits[hidden[..., 0].long()]

    def select(self, rows: Tensor) -> Any:  # noqa: ARG002
        return self

    def everything(self, steps: int, penalty: float) -> list[tuple[float, list[int]]]:
        """All sequences that end or have `steps` tokens, best first."""
        log_p = self.logits.double().log_softmax(-1).tolist()
        open_, ended = [(0.0, [0])], []
        for _ in range(steps):
            grown = [
                (total + log_p[row[-1]][token], [*row, token])
                for total, row in open_
                for token in range(len(log_p))
            ]
            ended += [(t, row) for t, row in grown if row[-1] in self.eos_token_ids]
            open_ = [(t, row) for t, row in grown if row[-1] not in self.eos_token_ids]
        scored = [(t / (len(row) - 1) ** penalty, row[1:]) for t, row in ended + open_]
        return sorted(scored, key=lambda item: -item[0])


class LazyChain(Chain):
    """Tokens of equal logits, from our head."""

    def __init__(self, vocab: int) -> None:
        super().__init__(torch.zeros(1))
        self.module = LMHead(4, vocab)
        torch.nn.init.zeros_(self.module.weight)

    def head(self, hidden: Tensor) -> Any:
        return self.module(hidden.float().expand(*hidden.shape[:-1], 4))
