"""`logit_lens`: what the head would say after each layer, at each position.

In:  a model, a prompt.
Out: `Lens`: a grid of layers x positions, in each cell the best words, where the target stands, and
     how far the layer still is from what the model says in the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lmhead import checks
from lmhead.analysis.reading import Text, prompt_ids
from lmhead.analysis.tokens import Piece, finite, piece_of, pieces_of
from lmhead.models import LanguageModel


@dataclass(frozen=True)
class Cell:
    """What the head says after one layer, at one position.

    Attributes:
        best: the most probable words with their probabilities, best first.
        entropy: of the distribution, in nats.
        target_p: the probability of the target.
        target_rank: how many words come before the target; 0 if it is the best one.
        kl: KL(this layer ‖ the last one) in nats; 0 in the last layer.
    """

    best: tuple[tuple[Piece, float], ...]
    entropy: float
    target_p: float
    target_rank: int
    kl: float

    def to_json(self) -> dict[str, Any]:
        """`best`, `entropy`, `target_p`, `target_rank`, `kl`."""
        return {
            "best": [{**piece.to_json(), "p": p} for piece, p in self.best],
            "entropy": finite(self.entropy),
            "target_p": self.target_p,
            "target_rank": self.target_rank,
            "kl": finite(self.kl),
        }


@dataclass(frozen=True)
class Lens:
    """The logit lens of a prompt.

    Attributes:
        prompt: its tokens, one per position.
        targets: for each position the word that is looked for: the next token of the prompt, and
            at the last position the model's own answer; or the one that was asked for.
        cells: one list per layer, with one cell per position; layer 0 is the embedding, the last
            one is the model's output.
    """

    prompt: tuple[Piece, ...]
    targets: tuple[Piece, ...]
    cells: tuple[tuple[Cell, ...], ...]

    def to_json(self) -> dict[str, Any]:
        """`prompt`, `targets`, and `layers`: per layer its number and a cell per position."""
        layers = [
            {"layer": number, "cells": [cell.to_json() for cell in row]}
            for number, row in enumerate(self.cells)
        ]
        return {
            "prompt": [piece.to_json() for piece in self.prompt],
            "targets": [piece.to_json() for piece in self.targets],
            "layers": layers,
        }


@torch.no_grad()
def logit_lens(
    model: LanguageModel,
    prompt: Text,
    *,
    top: int = 1,
    target: int | None = None,
    between: Callable[[], object] | None = None,
) -> Lens:
    """Read the hidden states of every layer with the head, as if each were the last.

    Equivalent to: [model.head(layer).softmax(-1).topk(top) for layer in model.layers(ids)]

    Args:
        model: a `LanguageModel` whose body has layers.
        prompt: text, or ids.
        top: how many words per cell.
        target: the id of the word whose rank is asked for everywhere; None for the next token of
            the prompt, and the model's own answer at the end.
        between: called before each layer is read with the head; what it raises ends the work.
    """
    checks.check_whole("top", top, low=1, high=model.head.vocab_size)
    if target is not None:
        checks.check_whole("target", target, low=0, high=model.head.vocab_size - 1)
    ids = prompt_ids(model, prompt)
    layers = model.layers(torch.tensor([ids]))
    if target is None:
        wanted = [*ids[1:], int(model.head(layers[-1][0, -1:]).double().argmax(-1))]
    else:
        wanted = [target] * len(ids)
    goal = torch.tensor(wanted)
    cells = []
    for layer in layers:
        if between is not None:
            between()
        cells.append(_cells(model, layer[0], layers[-1][0], ids, goal, top))
    return Lens(
        prompt=tuple(pieces_of(model, ids)),
        targets=tuple(piece_of(model, w, id) for w, id in zip(wanted, ids, strict=True)),
        cells=tuple(cells),
    )


def _cells(
    model: LanguageModel,
    hidden: Tensor,
    last: Tensor,
    ids: list[int],
    goal: Tensor,
    top: int,
) -> tuple[Cell, ...]:
    """A row of the grid: the head on one layer's states (T, D), and on those of the last layer."""
    final = model.head(last).double()
    answers = (
        model.head(hidden)
        .double()
        .ask(top_k=top, logsumexp=True, entropy=True, log_prob=goal, rank=goal, kl_to=final)
    )
    assert answers.top_k is not None
    assert answers.logsumexp is not None
    assert answers.entropy is not None
    assert answers.log_prob is not None
    assert answers.rank is not None
    assert answers.kl is not None
    p = (answers.top_k.values - answers.logsumexp[:, None]).exp().tolist()
    words = answers.top_k.indices.tolist()
    return tuple(
        Cell(
            best=tuple(
                (piece_of(model, word, ids[i]), share)
                for word, share in zip(words[i], p[i], strict=True)
            ),
            entropy=float(answers.entropy[i]),
            target_p=math.exp(float(answers.log_prob[i])),
            target_rank=int(answers.rank[i]),
            kl=max(0.0, float(answers.kl[i])),
        )
        for i in range(len(ids))
    )
