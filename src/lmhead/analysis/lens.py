"""`logit_lens`: what the head predicts after each layer, at each position."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lmhead import checks
from lmhead.analysis.token_text import Piece, Text, finite, piece_of, pieces_of, prompt_ids
from lmhead.models import LanguageModel
from lmhead.scores import Scores
from lmhead.sweep.stored_logits import stored


@dataclass(frozen=True)
class Cell:
    """What the head predicts after one layer, at one position."""

    # the most probable tokens with their probabilities, best first
    best: tuple[tuple[Piece, float], ...]
    entropy: float  # of the distribution, in nats
    target_p: float  # the probability of the target
    target_rank: int  # rank of the target, from 0 (the most probable token)
    kl: float  # KL(this layer ‖ the last one) in nats; 0 in the last layer

    def to_json(self) -> dict[str, Any]:
        """Return `best`, `entropy`, `target_p`, `target_rank`, `kl`."""
        best = [{**piece.to_json(), "p": p} for piece, p in self.best]
        return vars(self) | {"best": best, "entropy": finite(self.entropy), "kl": finite(self.kl)}


@dataclass(frozen=True)
class Lens:
    """The logit lens of a prompt."""

    prompt: tuple[Piece, ...]  # its tokens, one per position
    # for each position the token whose rank is given: the next token of the prompt, and at the last
    # position the model's own prediction; or the requested target
    targets: tuple[Piece, ...]
    # one tuple per layer, with one cell per position; layer 0 is the embedding, the last one is the
    # model's output
    cells: tuple[tuple[Cell, ...], ...]

    def to_json(self) -> dict[str, Any]:
        """Return `prompt`, `targets`, and `layers`: number and cells of each."""
        return {
            "prompt": [piece.to_json() for piece in self.prompt],
            "targets": [piece.to_json() for piece in self.targets],
            "layers": [
                {"layer": number, "cells": [cell.to_json() for cell in row]}
                for number, row in enumerate(self.cells)
            ],
        }


def logit_lens(
    model: LanguageModel, prompt: Text, *, top: int = 1, target: int | None = None
) -> Lens:
    """Apply the head to the hidden states of every layer, as if each were the last.

    Equivalent to: [model.head(layer).softmax(-1).topk(top) for layer in model.layers(ids)]

    `target` is the id of the token whose rank is given everywhere; None for the next token of the
    prompt, and the model's own prediction at the end.
    """
    return list(stream_lens(model, prompt, top=top, target=target))[-1][0]


@torch.no_grad()
def stream_lens(
    model: LanguageModel, prompt: Text, *, top: int = 1, target: int | None = None
) -> Iterator[tuple[Lens, int]]:
    """Yield the lens without rows, then `logit_lens` row by row; and the number of all rows."""
    checks.check_integer("top", top, low=1, high=model.head.vocab_size)
    if target is not None:
        checks.check_integer("target", target, low=0, high=model.head.vocab_size - 1)
    ids = prompt_ids(model, prompt)
    layers = model.layers(torch.tensor([ids]))
    if target is None:
        target_ids = [*ids[1:], int(model.head(layers[-1][0, -1:]).double().argmax(-1))]
    else:
        target_ids = [target] * len(ids)
    targets = torch.tensor(target_ids)
    lens = Lens(
        prompt=tuple(pieces_of(model, ids)),
        targets=tuple(piece_of(model, w, id) for w, id in zip(target_ids, ids, strict=True)),
        cells=(),
    )
    yield lens, len(layers)
    output = stored(model.head.scores(layers[-1][0]))  # all other layers are compared with it
    for number, layer in enumerate(layers):
        compared = None if number == len(layers) - 1 else output
        row = _cells(model, layer[0], compared, ids, targets, top)
        lens = replace(lens, cells=(*lens.cells, row))
        yield lens, len(layers)


def _cells(
    model: LanguageModel,
    hidden: Tensor,
    output: Scores | None,
    ids: list[int],
    targets: Tensor,
    top: int,
) -> tuple[Cell, ...]:
    """Return one row of the grid from a layer's states (T, D); `output` is None for the last."""
    targets = targets[:, None]
    answers: Any = model.head.scores(hidden).answer(
        top_k=top, logsumexp=True, entropy=True, picked=targets, rank=targets, kl_to=output
    )
    lse = answers.lse[:, None]
    p = (answers.top_values - lse).exp().tolist()
    target_p = (answers.picked - lse).exp()[:, 0].tolist()
    kl = [0.0] * len(ids) if output is None else answers.kl.clamp(min=0.0).tolist()
    best = answers.top_ids.tolist()
    return tuple(
        Cell(
            best=tuple(
                (piece_of(model, id, ids[i]), probability)
                for id, probability in zip(best[i], p[i], strict=True)
            ),
            entropy=float(answers.entropy[i]),
            target_p=target_p[i],
            target_rank=int(answers.ranks[i]),
            kl=kl[i],
        )
        for i in range(len(ids))
    )
