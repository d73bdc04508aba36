"""Tiles of logits for the tests of the core: odd shapes, masked tokens, every map."""

from typing import NamedTuple

import torch
from torch import Tensor

from lmhead.sweep.exact_decisions import Rank, TopK
from lmhead.sweep.kernels import Pointwise, Softmax
from lmhead.sweep.source import Source

# (tokens, rows): around the widths of vectors, of a block of rows, of a share of rows.
SHAPES = [(1, 8), (31, 9), (33, 33), (257, 16), (40, 300), (1000, 11)]
MAPS = {
    "identity": Pointwise(),
    "affine": Pointwise(scale=1.7, shift=-0.3),
    "softcap": Pointwise.of(softcap=5.0, scale=0.5),
    "softcap, shifted": Pointwise.of(softcap=4.0, scale=-1.0).plus(0.7),
}


class Absorbed(NamedTuple):
    """What a sweep leaves: the last tile, the running softmax, the watchers' answers."""

    z: Tensor
    m: Tensor
    s: Tensor
    t: Tensor | None
    top_values: Tensor
    top_ids: Tensor
    ranks: Tensor


class Problem(NamedTuple):
    source: Source
    ids: Tensor  # (tokens, 2), to be ranked

    def watchers(self) -> tuple[TopK, Rank]:
        hiddens = self.source.take(slice(None))
        rows = torch.arange(self.source.rows)
        return (
            TopK(self.source, rows, hiddens, 2**20, min(5, self.source.vocab)),
            Rank(self.source, rows, hiddens, 2**20, self.ids),
        )

    def start(self, *, entropy: bool = True) -> Softmax:
        return Softmax.start(self.source.rows, entropy=entropy, like=self.source.hiddens[0])


def problem(
    words: int, tokens: int, pointwise: Pointwise, *, ties: bool = False, masked: bool = True
) -> Problem:
    """Random hidden states and weights, D = 12; a tenth of the tokens masked by the bias."""
    random = torch.Generator().manual_seed(words * 1000 + tokens)
    hidden = torch.randn(tokens, 12, generator=random)
    weight = torch.randn(words, 12, generator=random)
    bias = torch.randn(words, generator=random)
    if ties:  # small integers: many logits are equal
        hidden, weight, bias = hidden.round(), weight.round(), bias.round()
    if masked and pointwise.scale > 0:
        bias[9::10] = -torch.inf
    ids = torch.randint(words, (tokens, 2), generator=random)
    return Problem(Source((hidden,), (weight,), bias, pointwise), ids)
